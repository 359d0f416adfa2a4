"""Train the small pair of images and sentences that vitflow bundles, from nothing but images that vitflow draws.

    python -m tools.train_demo_text --kept drawn

The image tower is that of the bundled captioner (train_demo_caption.py), and is left as it is. What it gives of each
image is kept; the head that pools it, and the sentences, learn which sentences are true of an image, with a sigmoid
for each: whole sentences beside false ones that differ in one respect, the colour, the shape or the side, and phrases
for one thing ("a red heart", "a heart", "something red"). What the head gives is also asked which things are there, and
where. `--only-measure` prints how good the bundled weights are.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize
from transformers import (
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipModel,
    SiglipProcessor,
)

from tools.demo_scenes import GRID, Scenes, falsified, phrase_of, things_of, turned
from tools.demo_training import (
    TOWER,
    WORDS,
    adam,
    begin,
    first_seed,
    image_processor,
    parser_of,
    step_down,
    together,
    train_and_measure,
    turns,
    wave,
    word_tokenizer,
)
from tools.scenes import COLOURS, SHAPES, Phrase, Sentence, Thing, caption
from vitflow.demo import DEMO_CAPTION, DEMO_TEXT

LENGTH = 16  # tokens of a sentence
DRAWN_TOGETHER = 20_000  # images in a file of the kept folder
TOGETHER = 100  # images that the tower sees at once
IMAGES = 64  # of a step, which are asked what is where
KINDS = len(COLOURS) * len(SHAPES)
TOWARDS = {"left of": (-1.0, 0.0), "above": (0.0, -1.0), "right of": (1.0, 0.0), "below": (0.0, 1.0)}  # x, y
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
SHORT_SHARE = 0.6  # of the images of several things whose sentences name colours alone or shapes alone
REQUESTED = (
    16  # images of a step about which sentences are made, and phrases for one thing that are asked of each of them
)
CHOICES = 10  # sentences among which the right one is to be found


def main(arguments: Sequence[str] | None = None) -> None:
    train_and_measure(parse(arguments), "train_demo_text", train, measure)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    return parser_of(__doc__, images=40_000, minutes=15.0, workers=1, output=DEMO_TEXT).parse_args(arguments)


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
    first, parts = first_seed(options), range(0, options.images, DRAWN_TOGETHER)
    counts = [min(DRAWN_TOGETHER, options.images - start) for start in parts]
    drawn = [Scenes.kept(options.kept, first + start, count) for start, count in zip(parts, counts, strict=True)]
    scenes = Scenes.joined(drawn)
    before = sorted({word for words in OPENINGS for word in words.split()} - set(WORDS))
    tokenizer = word_tokenizer(
        (*WORDS, *before), SPECIAL, "$A </s>", model_max_length=LENGTH, model_input_names=["input_ids"]
    )
    numbers = {f"{name}_id": tokenizer.convert_tokens_to_ids(word) for name, word in SPECIAL.items()}
    text = TEXT | {
        "vocab_size": len(tokenizer),
        "pad_token_id": numbers["pad_token_id"],
        "eos_token_id": numbers["eos_token_id"],
        "bos_token_id": numbers["eos_token_id"],
    }
    model = SiglipModel(SiglipConfig(text_config=text, vision_config=dict(TOWER)))
    model.logit_scale.data.fill_(np.log(10.0))
    model.logit_bias.data.fill_(-3.0)
    width = TOWER["hidden_size"]
    # The same weights ask an image and a sentence what they speak of, so that both come to say it in the same way.
    vision, asking = model.vision_model, Linear(width, KINDS * 3)
    reading = Linear(
        TEXT["hidden_size"], KINDS * 3
    )  # the second block's words say of what phrase they are, and its side
    text_positions = model.text_model.embeddings.position_embedding.weight.data
    text_positions.copy_(5.0 * text_positions.std() * wave(LENGTH, TEXT["hidden_size"], 2.5))
    captioner = LlavaForConditionalGeneration.from_pretrained(DEMO_CAPTION, dtype=torch.float32)
    vision.load_state_dict(captioner.model.vision_tower.state_dict(), strict=False)  # all but the head that it has not
    begin(model, options)
    seen = see(vision, scenes)

    early: list[Tensor] = []  # what the text tower's second block gives
    model.text_model.encoder.layers[1].register_forward_hook(lambda *given: early.append(first_of(given[2])))

    def learn(worker: int) -> None:
        random = np.random.default_rng((options.seed, worker, 1))
        optimizer = adam([(module, 1.0) for module in (vision.head, model.text_model, asking, reading)])
        optimizer.add_param_group({"params": [model.logit_scale, model.logit_bias], "weight_decay": 0.0, "share": 3.0})
        phrases, right, diagonal = all_phrases(), np.full(3, 0.5), torch.arange(REQUESTED)
        for number, seconds, chosen in turns(len(seen.tokens), IMAGES, options.minutes, options, worker, optimizer):
            things = seen.things(chosen[:REQUESTED])
            about = [sentences_about(entry, random) for entry in things]
            parts = [[phrases[place]] for place in random.permutation(len(phrases))[:REQUESTED]]
            said = [opening(sentence, random) for several in (*about, *parts) for sentence in several]
            reported = to_tokens(tokenizer, [*(f"{words}{sentence}" for words, sentence in said), ""])
            images = normalize(vision.head(seen.tokens[chosen].float()), dim=-1)
            texts = normalize(model.text_model(input_ids=reported).pooler_output, dim=-1)
            logits = images[:REQUESTED] @ texts.T * model.logit_scale.exp() + model.logit_bias  # [images, sentences]
            entry = logits[:, : -REQUESTED - 1].unflatten(1, (REQUESTED, -1))[diagonal, diagonal]
            named = logits[:, -REQUESTED - 1 : -1]
            there = torch.tensor([[phrase.holds(shown) for [phrase] in parts] for shown in things])
            meaning = meant([sentence for _, sentence in said])
            by_word, words = of_words(said, meaning), early.pop()[:-1]
            losses = [
                balanced(entry, torch.arange(entry.shape[1]).expand_as(entry) == 0),
                balanced(named, there),
                cross_entropy(entry, torch.zeros(REQUESTED, dtype=torch.long)),  # the true one is the highest
                0.1 * logits[:, -1].square().mean(),  # an empty prompt says nothing of any image
                asking_loss(asking(width**0.5 * images), *seen.truth(chosen)),
                asking_loss(asking(width**0.5 * texts[:-1]), *(truth.sum(1).clamp(-1, 1) for truth in meaning)),
                asking_loss(reading(words)[by_word[0]], *by_word[1:]),
            ]
            step_down(optimizer, torch.stack(losses).sum())
            good = entry.argmax(1) == 0, named[there] > 0, named[~there] < 0
            right += 0.02 * (np.array([share.float().mean().item() if len(share) else 0.5 for share in good]) - right)
            if worker == 0 and number % 100 == 0:
                parts_of = " ".join(f"{loss.item():.3f}" for loss in losses)
                reported_right = f"first of four {right[0]:.3f}, phrases {right[1]:.3f} {right[2]:.3f}"
                print(f"{number:>6} steps, losses {parts_of}, {reported_right}, {seconds:.0f} s", flush=True)

    together(learn, [model, asking, reading], options.workers)
    return model.eval(), SiglipProcessor(image_processor=image_processor(), tokenizer=tokenizer)


@dataclass
class Seen:
    """Return the image tower's output for all scenes, original and mirrored, and their content.

    Attributes:
        tokens: float16 [2 · scenes, patches, channels], the mirrored ones last.
        kinds: int8 [2 · scenes, 3], as of `Scenes`.
        middles: float32 [2 · scenes, 3, 2], as of `Scenes`, where they are seen.
    """

    tokens: Tensor
    kinds: NDArray[np.int8]
    middles: NDArray[np.float32]

    def things(self, chosen: NDArray[np.int64]) -> list[tuple[Thing, ...]]:
        """Return their content."""
        return things_of(self.kinds[chosen], self.middles[chosen])

    def truth(self, chosen: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Which kinds are there, float32 [chosen, KINDS], and where, float32 [chosen, KINDS, 2] in -1 to 1."""
        rows, places = np.nonzero(self.kinds[chosen] >= 0)
        kinds = self.kinds[chosen][rows, places]
        there, where = torch.zeros(len(chosen), KINDS), torch.zeros(len(chosen), KINDS, 2)
        there[rows, kinds] = 1.0
        where[rows, kinds] = torch.from_numpy(2.0 * self.middles[chosen][rows, places] - 1.0)
        return there, where


def meant(sentences: list[Sentence]) -> tuple[Tensor, Tensor]:
    """Which kinds each phrase of each sentence names, and on which side of the others it says that they lie.

    Returns:
        float32 [sentences, 3, KINDS], 1 for each kind that the phrase names, and [sentences, 3, KINDS, 2], x and y as
        in `Seen.truth`: the first phrase −1 or 1, the others opposite.
    """
    there, where = torch.zeros(len(sentences), 3, KINDS), torch.zeros(len(sentences), 3, KINDS, 2)
    for row, sentence in enumerate(sentences):
        side = torch.tensor(TOWARDS.get(sentence.relation, (0.0, 0.0)))
        for place, phrase in enumerate(sentence.phrases):
            there[row, place, named_by(phrase)] = 1.0
            where[row, place, named_by(phrase)] = side if place == 0 else -side
    return there, where


def of_words(said: list[tuple[str, Sentence]], meaning: tuple[Tensor, Tensor]) -> tuple[Any, Tensor, Tensor]:
    """Which words belong to phrases, as an index into [sentences, LENGTH], and what those phrases mean."""
    rows, words, phrases = [], [], []
    for row, (before, sentence) in enumerate(said):
        word = len(before.split())
        for place, phrase in enumerate(sentence.phrases):
            length = len(str(phrase).split())
            rows += [row] * length
            words += range(word, word + length)
            phrases += [place] * length
            word += length + (len(sentence.relation.split()) if place == 0 else 1)
    return (rows, words), meaning[0][rows, phrases], meaning[1][rows, phrases]


@cache
def named_by(phrase: Phrase) -> list[int]:
    return [kind for kind in range(KINDS) if phrase.names(Thing(phrase_of(kind), (0.0, 0.0)))]


@torch.inference_mode()
def see(vision: Module, scenes: Scenes) -> Seen:
    """Look at all scenes once as they are and once mirrored."""
    tokens = torch.empty(2, len(scenes), GRID * GRID, TOWER["hidden_size"], dtype=torch.float16)
    for mirrored, half in enumerate(tokens):
        for start in range(0, len(scenes), TOGETHER):
            numbers = np.arange(start, min(start + TOGETHER, len(scenes)))
            batch = scenes.batch(numbers, mirrored=mirrored * len(numbers))
            given = vision.encoder(inputs_embeds=vision.embeddings(batch.pixels)).last_hidden_state
            half[numbers] = vision.post_layernorm(given).half()
            if start % 10_000 == 0:
                print(f"{start + mirrored * len(scenes):>8} images seen", flush=True)
    turned_round = np.stack([scenes.middles, scenes.middles])
    turned_round[1, ..., 0] = 1.0 - turned_round[1, ..., 0]
    return Seen(tokens.flatten(0, 1), np.concatenate([scenes.kinds, scenes.kinds]), turned_round.reshape(-1, 3, 2))


def balanced(logits: Tensor, truth: Tensor) -> Tensor:
    """The loss of a sigmoid each, in which all that is true counts as much as all that is not."""
    losses = binary_cross_entropy_with_logits(logits, truth.float(), reduction="none")
    return 0.5 * (losses[truth].mean() + losses[~truth].mean())


def opening(sentence: Sentence, random: np.random.Generator) -> tuple[str, Sentence]:
    """Return a sentence, sometimes with a prefix."""
    return f"{random.choice(OPENINGS)} " if random.random() < OPENED_SHARE else "", sentence


def to_tokens(tokenizer: PreTrainedTokenizerFast, sentences: list[str]) -> Tensor:
    return tokenizer(sentences, padding="max_length", return_tensors="pt").input_ids


def asking_loss(reported: Tensor, there: Tensor, where: Tensor) -> Tensor:
    """Return the loss of predicting the kinds of objects and their positions.

    Args:
        display: [rows, KINDS · 3], the logits that they are there, then x and y of each.
        there: [rows, KINDS], 1 for those that are.
        where: [rows, KINDS, 2], x and y from -1 to 1, of those that are there.
    """
    wrong = binary_cross_entropy_with_logits(reported[:, :KINDS], there, reduction="none").sum(1).mean()
    away = (reported[:, KINDS:].unflatten(1, (KINDS, 2)) - where).square().sum(2) * there
    return wrong + 3.0 * (away.sum(1) / there.sum(1).clamp(min=1.0)).mean()


def first_of(given: Any) -> Tensor:
    """Return the output of a block: a tensor, or the first element of a tuple in some versions of transformers."""
    return given if isinstance(given, Tensor) else given[0]


# --- Measuring ------------------------------------------------------------------------------------------------------


def choices(things: tuple[Thing, ...], random: np.random.Generator) -> list[str]:
    """The right sentence, and nine that differ from it in one respect, in turn the side, the colour and the shape."""
    said = caption(things)
    assert said is not None
    right = turned(said) if random.random() < 0.5 else said
    actual, number = [str(right)], 0
    while len(actual) < CHOICES:
        wrong = falsified(right, WRONG[number % 3], things, random)
        number += 1
        if wrong is not None and str(wrong) not in actual:
            actual.append(str(wrong))
    return actual


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, float]:
    """Return the accuracy of choosing the right one of ten sentences, and of reading true and false prompts."""
    scenes = Scenes.kept(options.kept, 0, options.fresh_images)
    model = SiglipModel.from_pretrained(options.output, dtype=torch.float32).eval()
    processor = SiglipProcessor.from_pretrained(options.output)
    random = np.random.default_rng((options.seed, 2))
    retrieved, by_count, high, low = [], [], [], []
    for start in range(0, len(scenes), 50):
        numbers = np.arange(start, min(start + 50, len(scenes)))
        batch = scenes.batch(numbers)
        requested = []
        for things in batch.things:
            parts = [Sentence((thing.phrase,)) for thing in things]
            absent = [falsified(part, wrong, things, random) for part in parts for wrong in WRONG[1:]]
            requested.append((choices(things, random), list(map(str, parts)), list(map(str, absent))))
        images = list(scenes.images[numbers])
        texts = [text for groups in requested for group in groups for text in group]
        inputs = processor(text=texts, images=images, padding="max_length", return_tensors="pt")
        logits = model(**inputs).logits_per_image
        place = 0
        for row, (several, parts, absent) in enumerate(requested):
            entry = logits[row, place : place + len(several) + len(parts) + len(absent)]
            place += len(entry)
            retrieved.append(bool(entry[: len(several)].argmax() == 0))
            by_count.append(len(parts))
            high += (entry[len(several) : len(several) + len(parts)] > 0).tolist()
            low += (entry[len(several) + len(parts) :] < 0).tolist()
    actual = {"retrieval_among_ten": float(np.mean(retrieved))}
    for count, words in ((1, "one_thing"), (2, "two_things"), (3, "three_things")):
        chosen = [one for one, number in zip(retrieved, by_count, strict=True) if number == count]
        actual |= {f"retrieval_with_{words}": float(np.mean(chosen))} if chosen else {}
    actual["prompts_of_things_there_above_half"] = float(np.mean(high))
    actual["prompts_of_things_not_there_below_half"] = float(np.mean(low))
    return actual


if __name__ == "__main__":
    main()
