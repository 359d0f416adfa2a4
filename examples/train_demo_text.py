"""Train a small pair of pictures and sentences from nothing but pictures that vitflow draws.

    python examples/train_demo_text.py --kept drawn --output pair

The picture tower first learns what each patch shows. Then tower and sentences learn which sentences are true of a
picture, with a sigmoid for each: whole sentences beside false ones that differ in one respect, the colour, the shape or
the side, and phrases for one thing ("a red heart", "a heart", "something red"). What the whole picture gives is also
asked where each colour and each shape lies. `--only-measure` prints how good the weights in the output folder are.

No weights are bundled yet: the longest training so far finds one thing among ten, and does not tell sides apart.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from demo_scenes import Batch, Scenes
from demo_training import (
    BATCH,
    PATCHES_SHARE,
    TOWER,
    TOWER_SHARE,
    WORDS,
    adam,
    begin,
    first_seed,
    image_processor,
    parser_of,
    patch_loss,
    seen_tokens,
    step_down,
    steps,
    together,
    tower_of,
    train_and_measure,
    word_tokenizer,
)
from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize
from transformers import PreTrainedTokenizerFast, SiglipConfig, SiglipModel, SiglipProcessor

from vitflow.demo import COLOURS, SHAPES, Phrase, Sentence, Thing, caption, falsified, turned

LENGTH = 16  # tokens of a sentence
TEXT = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": LENGTH,
    "projection_size": TOWER["hidden_size"],
}
SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
OPENINGS = ("a picture of", "a photo of", "a drawing of")
OPENED_SHARE = 0.15  # of the sentences
WRONG = ("side", "colour", "shape")
SHORT_SHARE = 0.6  # of the pictures of several things whose sentences name colours alone or shapes alone
ASKED = 32  # phrases for one thing that a step asks of each of its pictures
CHOICES = 10  # sentences among which the right one is to be found


def main(arguments: Sequence[str] | None = None) -> None:
    train_and_measure(parse(arguments), "train_demo_text", train, measure)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    return parser_of(__doc__, minutes=40.0, output=Path("demo_text")).parse_args(arguments)


# --- Sentences ------------------------------------------------------------------------------------------------------


def sentences_about(things: tuple[Thing, ...], random: np.random.Generator) -> list[Sentence]:
    """A sentence that is true and three that are nearly so, two of them by the side where there is one.

    Often all phrases of the four name colours alone or shapes alone: which side is which is learned from these first.
    """
    named = [name for name in WRONG[1:] if len({getattr(thing.phrase, name) for thing in things}) == len(things)]
    if len(things) > 1 and named and random.random() < SHORT_SHARE:
        words = [str(random.choice(named))]
        things = tuple(replace(thing, phrase=Phrase(**{words[0]: getattr(thing.phrase, words[0])})) for thing in things)
    else:
        words = list(WRONG[1:])
    right = true_sentence(things, random)
    sentences = [right]
    for wrong in ("side", "side", str(random.choice(words))):
        word = str(random.choice(words))
        other = falsified(right, wrong, things, random) or falsified(right, word, things, random)
        assert other is not None
        sentences.append(other)
    return sentences


def true_sentence(things: tuple[Thing, ...], random: np.random.Generator) -> Sentence:
    """The caption, or what else says on which side two things lie."""
    if len(things) == 1 or random.random() < 0.5:
        sentence = caption(things)
        assert sentence is not None
        return turned(sentence) if random.random() < 0.5 else sentence
    first, second = (things[number] for number in random.permutation(len(things))[:2])
    relation = "and" if random.random() < 0.1 else first.side_of(second)
    return Sentence((first.phrase, second.phrase), relation)


def all_phrases() -> list[Sentence]:
    """All that a prompt names one thing by: each colour with each shape, each colour, each shape."""
    pairs = [Phrase(colour, shape) for colour in COLOURS for shape in SHAPES]
    alone = [Phrase(colour=colour) for colour in COLOURS] + [Phrase(shape=shape) for shape in SHAPES]
    return [Sentence((phrase,)) for phrase in pairs + alone]


# --- Learning -------------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> tuple[SiglipModel, SiglipProcessor]:
    scenes = Scenes.kept(options.kept, first_seed(options), options.pictures)
    opening = sorted({word for words in OPENINGS for word in words.split()} - set(WORDS))
    tokenizer = word_tokenizer(
        (*WORDS, *opening), SPECIAL, "$A </s>", model_max_length=LENGTH, model_input_names=["input_ids"]
    )
    numbers = {f"{name}_id": tokenizer.convert_tokens_to_ids(word) for name, word in SPECIAL.items()}
    text = TEXT | {
        "vocab_size": len(tokenizer),
        "pad_token_id": numbers["pad_token_id"],
        "eos_token_id": numbers["eos_token_id"],
        "bos_token_id": numbers["eos_token_id"],
    }
    model = SiglipModel(SiglipConfig(text_config=text, vision_config=dict(TOWER)))
    tower, reading = tower_of(options, scenes)
    model.vision_model.load_state_dict(tower.state_dict())
    model.logit_scale.data.fill_(np.log(10.0))
    model.logit_bias.data.fill_(-3.0)
    begin(model, options)
    vision, placing = model.vision_model, Linear(TOWER["hidden_size"], 2 * len(COLOURS + SHAPES))

    def learn(worker: int) -> None:
        random = np.random.default_rng((options.seed, worker, 1))
        optimizer = adam(
            [
                *((module, TOWER_SHARE) for module in (vision.embeddings, vision.encoder, reading)),
                *((module, 1.0) for module in (vision.post_layernorm, vision.head, model.text_model, placing)),
            ]
        )
        optimizer.add_param_group({"params": [model.logit_scale, model.logit_bias], "weight_decay": 0.0, "share": 3.0})
        phrases, right = all_phrases(), np.full(3, 0.5)
        for step in steps(scenes, options.minutes, options, worker, optimizer):
            about = [sentences_about(things, random) for things in step.batch.things]
            asked = [phrases[number] for number in random.permutation(len(phrases))[:ASKED]]
            said = [opened(str(one), random) for several in about for one in several]
            told = to_tokens(tokenizer, [*said, *(opened(str(one), random) for one in asked), ""])
            tokens = seen_tokens(vision, step)
            read, shown = patch_loss(reading(tokens), step)
            pictures = normalize(vision.head(vision.post_layernorm(tokens)), dim=-1)
            texts = normalize(model.text_model(input_ids=told).pooler_output, dim=-1)
            logits = pictures @ texts.T * model.logit_scale.exp() + model.logit_bias  # [pictures, sentences]
            own = logits[:, : len(said)].unflatten(1, (BATCH, -1))[torch.arange(BATCH), torch.arange(BATCH)]
            parts = logits[:, len(said) : -1]
            there = torch.tensor([[one.holds(things) for one in asked] for things in step.batch.things])
            loss = (
                balanced(own, torch.arange(own.shape[1]).expand_as(own) == 0)
                + balanced(parts, there)
                + cross_entropy(own, torch.zeros(BATCH, dtype=torch.long))  # the true one is the highest
                + 4.0 * (apart := place_loss(placing(TOWER["hidden_size"] ** 0.5 * pictures), step.batch))
                + 0.1 * logits[:, -1].square().mean()  # an empty prompt says nothing of any picture
            )
            step_down(optimizer, loss + PATCHES_SHARE * read)
            good = own.argmax(1) == 0, parts[there] > 0, parts[~there] < 0
            right += 0.02 * (np.array([share.float().mean().item() for share in good]) - right)
            good_so_far = f"first of four {right[0]:.3f}, phrases right {right[1]:.3f} {right[2]:.3f}"
            step.tell("text", loss, f"{good_so_far}, places {apart.item():.3f}, {shown}")

    together(learn, [model, reading, placing], options.workers)
    return model.eval(), SiglipProcessor(image_processor=image_processor(), tokenizer=tokenizer)


def balanced(logits: Tensor, truth: Tensor) -> Tensor:
    """The loss of a sigmoid each, in which all that is true counts as much as all that is not."""
    losses = binary_cross_entropy_with_logits(logits, truth.float(), reduction="none")
    return 0.5 * (losses[truth].mean() + losses[~truth].mean())


def opened(sentence: str, random: np.random.Generator) -> str:
    return f"{random.choice(OPENINGS)} {sentence}" if random.random() < OPENED_SHARE else sentence


def to_tokens(tokenizer: PreTrainedTokenizerFast, sentences: list[str]) -> Tensor:
    return tokenizer(sentences, padding="max_length", return_tensors="pt").input_ids


def place_loss(told: Tensor, batch: Batch) -> Tensor:
    """How far from the truth it is told where each colour and each shape lies, of those that one thing alone has.

    Args:
        told: [pictures, 32], x and y for each word, from -1 to 1.
        batch: the pictures.
    """
    true = torch.full((len(told), len(COLOURS + SHAPES), 2), torch.nan)
    for row, things in enumerate(batch.things):
        words = [word for thing in things for word in (thing.phrase.colour, thing.phrase.shape)]
        for number, word in enumerate(words):
            if words.count(word) == 1:
                true[row, (COLOURS + SHAPES).index(word)] = 2.0 * torch.tensor(things[number // 2].middle) - 1.0
    known = ~true.isnan()
    return (told.view_as(true) - true)[known].square().mean()


# --- Measuring ------------------------------------------------------------------------------------------------------


def choices(things: tuple[Thing, ...], random: np.random.Generator) -> list[str]:
    """The right sentence, and nine that differ from it in one respect, in turn the side, the colour and the shape."""
    said = caption(things)
    assert said is not None
    right = turned(said) if random.random() < 0.5 else said
    found, number = [str(right)], 0
    while len(found) < CHOICES:
        wrong = falsified(right, WRONG[number % 3], things, random)
        number += 1
        if wrong is not None and str(wrong) not in found:
            found.append(str(wrong))
    return found


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, float]:
    """How often the right one of ten sentences is found, and how true and false prompts for one thing are read."""
    scenes = Scenes.kept(options.kept, 0, options.fresh_pictures)
    model = SiglipModel.from_pretrained(options.output, dtype=torch.float32).eval()
    processor = SiglipProcessor.from_pretrained(options.output)
    random = np.random.default_rng((options.seed, 2))
    retrieved, by_count, high, low = [], [], [], []
    for start in range(0, len(scenes), 50):
        numbers = np.arange(start, min(start + 50, len(scenes)))
        batch = scenes.batch(numbers)
        asked = []
        for things in batch.things:
            parts = [Sentence((thing.phrase,)) for thing in things]
            absent = [falsified(part, wrong, things, random) for part in parts for wrong in WRONG[1:]]
            asked.append((choices(things, random), list(map(str, parts)), list(map(str, absent))))
        images = list(scenes.images[numbers])
        texts = [text for groups in asked for group in groups for text in group]
        inputs = processor(text=texts, images=images, padding="max_length", return_tensors="pt")
        logits = model(**inputs).logits_per_image
        place = 0
        for row, (several, parts, absent) in enumerate(asked):
            own = logits[row, place : place + len(several) + len(parts) + len(absent)]
            place += len(own)
            retrieved.append(bool(own[: len(several)].argmax() == 0))
            by_count.append(len(parts))
            high += (own[len(several) : len(several) + len(parts)] > 0).tolist()
            low += (own[len(several) + len(parts) :] < 0).tolist()
    found = {"retrieval_among_ten": float(np.mean(retrieved))}
    for count, words in ((1, "one_thing"), (2, "two_things"), (3, "three_things")):
        chosen = [one for one, number in zip(retrieved, by_count, strict=True) if number == count]
        found |= {f"retrieval_with_{words}": float(np.mean(chosen))} if chosen else {}
    found["prompts_of_things_there_above_half"] = float(np.mean(high))
    found["prompts_of_things_not_there_below_half"] = float(np.mean(low))
    return found


if __name__ == "__main__":
    main()
