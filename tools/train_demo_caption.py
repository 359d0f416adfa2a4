"""Train the small captioner that vitflow bundles, from nothing but images that vitflow draws.

The bundled weights come from this command, on one busy CPU core:

    python -m tools.train_demo_caption --kept drawn

The image tower first learns what each patch shows (the pair of images and sentences takes that tower). Then a
small decoder, in whose sequence the patches stand before the words, learns to write the one caption of each image.
`--only-measure` prints how good the bundled weights are.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)

from tools.demo_scenes import GRID, PATCH, Scenes
from tools.demo_training import (
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
from tools.scenes import caption
from vitflow.demo import DEMO_CAPTION

DECODER = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,  # about 1 / sqrt(hidden_size): with smaller first weights it looks at nothing for long
}
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
IMAGE = "<image>"
PROMPT = f"{IMAGE} here is"
LONGEST = 16  # words of a caption and the end
IGNORED = -100


def main(arguments: Sequence[str] | None = None) -> None:
    train_and_measure(parse(arguments), "train_demo_caption", train, measure, prompt=PROMPT)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, images=20_000, minutes=40.0, workers=3, output=DEMO_CAPTION)
    parser.add_argument("--tower-minutes", type=float, default=18.0, help="how long the image tower learns before")
    return parser.parse_args(arguments)


def build() -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """The captioner with random weights, and its processor."""
    tokenizer = word_tokenizer(
        (IMAGE, "here", "is", *WORDS),
        SPECIAL,
        "<s> $A",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )
    numbers = {f"{name}_id": tokenizer.convert_tokens_to_ids(word) for name, word in SPECIAL.items()}
    numbers.pop("unk_token_id")
    config = LlavaConfig(
        vision_config=SiglipVisionConfig(**TOWER, vision_use_head=False),
        text_config=LlamaConfig(**DECODER, **numbers, vocab_size=len(tokenizer), tie_word_embeddings=False),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=GRID * GRID,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**numbers, max_new_tokens=LONGEST, do_sample=False)
    processor = LlavaProcessor(
        image_processor=image_processor(),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
    )
    return model, processor


# --- Learning -------------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    scenes = Scenes.kept(options.kept, first_seed(options), options.images)
    model, processor = build()
    tower, projector, decoder = model.model.vision_tower, model.model.multi_modal_projector, model.model.language_model
    learned, reading = tower_of(options, scenes)
    tower.load_state_dict(learned.state_dict(), strict=False)  # all but the head that it has not
    begin(model, options)

    def learn(worker: int) -> None:
        optimizer = adam(
            [
                *((module, TOWER_SHARE) for module in (tower.embeddings, tower.encoder, reading)),
                *((module, 1.0) for module in (projector, decoder, model.lm_head)),
            ]
        )
        right = 0.0
        for step in steps(scenes, options.minutes, options, worker, optimizer):
            written = to_tokens(processor.tokenizer, [str(caption(things)) for things in step.batch.things])
            tokens = seen_tokens(tower, step)
            read, reported = patch_loss(reading(tokens), step)
            patches = projector(tokens)
            places = torch.arange(GRID * GRID).expand(len(patches), -1) if step.seen is None else step.seen
            answers = model.lm_head(decode(decoder, patches, places, written))[:, patches.shape[1] : -1]
            targets = written[:, 1:].masked_fill(written[:, 1:] == processor.tokenizer.pad_token_id, IGNORED)
            targets[:, : PROMPT.count(" ")] = IGNORED
            loss = cross_entropy(answers.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
            step_down(optimizer, loss + PATCHES_SHARE * read)
            whole = ((answers.argmax(-1) == targets) | (targets == IGNORED)).all(dim=1)
            right += 0.02 * (whole.float().mean().item() - right)
            step.report_to("caption", loss, f"captions right {right:.3f}, {reported}")

    together(learn, [model, reading], options.workers)
    return model.eval(), processor


def to_tokens(tokenizer: PreTrainedTokenizerFast, captions: Sequence[str]) -> Tensor:
    """The prompt's words, the caption and the end, [captions, tokens], filled up at the right."""
    written = [f"{PROMPT.removeprefix(IMAGE)} {said} {SPECIAL['eos_token']}" for said in captions]
    ids = [torch.tensor(one) for one in tokenizer(written).input_ids]
    return pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)


def decode(decoder: Module, patches: Tensor, places: Tensor, written: Tensor) -> Tensor:
    """The decoder's last states over the first token, the patches at their places, and the other words."""
    words = decoder.embed_tokens(written)
    after = torch.arange(written.shape[1] - 1).expand(len(written), -1) + 1 + GRID * GRID
    positions = torch.cat([torch.zeros_like(after[:, :1]), 1 + places, after], dim=1)
    embedded = torch.cat([words[:, :1], patches, words[:, 1:]], dim=1)
    seen = torch.ones_like(positions)  # without it transformers takes each gap between places for another text's begin
    return decoder(
        inputs_embeds=embedded, position_ids=positions, attention_mask=seen, use_cache=False
    ).last_hidden_state


# --- Measuring ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, float]:
    """The share of captions that are right in every word, of all images and by the number of things."""
    scenes = Scenes.kept(options.kept, 0, options.fresh_images)
    model = LlavaForConditionalGeneration.from_pretrained(options.output, dtype=torch.float32).eval()
    processor = LlavaProcessor.from_pretrained(options.output)
    right = []
    for start in range(0, len(scenes), 50):
        numbers = np.arange(start, min(start + 50, len(scenes)))
        said = write_captions(model, processor, list(scenes.images[numbers]))
        batch = scenes.batch(numbers)
        right += [(len(things), one == str(caption(things))) for things, one in zip(batch.things, said, strict=True)]
    actual = {"captions_right": float(np.mean([one for _, one in right]))}
    for count, words in ((1, "one_thing"), (2, "two_things"), (3, "three_things")):
        chosen = [one for number, one in right if number == count]
        actual |= {f"captions_right_of_{words}": float(np.mean(chosen))} if chosen else {}
    return actual


def write_captions(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, images: Sequence[NDArray[np.uint8]]
) -> list[str]:
    """Caption images, each RGB uint8 [height, width, 3]."""
    inputs = processor(text=[PROMPT] * len(images), images=list(images), return_tensors="pt")
    written = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
    return processor.batch_decode(written, skip_special_tokens=True)


if __name__ == "__main__":
    main()
