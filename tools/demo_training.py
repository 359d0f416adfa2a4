"""Common code of the two scripts that train image–text models: options, schedules, saving, and the image tower.

The tower learns first what each of its patches shows: the colour and the shape of the thing there, or ground. The pair
of images and sentences, and the captioner, both start from it.
"""

import argparse
import math
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import PreTrainedTokenizerFast, SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

from tools.demo_scenes import GRID, PATCH, SIZE, Batch, Scenes, kind_of
from tools.scenes import COLOURS, SHAPES, SIDES
from vitflow.demo import FIRST_TRAINING_SEED

FRESH_IMAGES = 2000  # of the seeds 0, 1, …, all below FIRST_TRAINING_SEED
SEEN_PATCHES = 24  # of all: while it learns what patches show, the tower leaves out much of the ground
WHOLE_SHARE = 0.15  # of the time, at the end, whole images are seen
BATCH = 16
TOWER_SHARE = 0.6  # of the learning rate, once the tower learns with the rest
PATCHES_SHARE = 0.3  # of the loss of what patches show, beside what is learned then

# All versions of transformers know a captioner's tower by its model's name; since 5.6 it is written without.
OLD_TOWER_NAME = re.compile(r"^(vision_tower\.)(?!vision_model\.)")

TOWER: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "image_size": SIZE,
    "patch_size": PATCH,
}
WORDS = ("a", "an", "something", *COLOURS, *SHAPES, *" ".join(SIDES).replace("of", "").split(), "of", "and")


def parser_of(
    description: str | None, images: int, minutes: float, workers: int, output: Path
) -> argparse.ArgumentParser:
    """The options that both scripts have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=images, help="how many images to draw and to learn from")
    parser.add_argument("--minutes", type=float, default=minutes, help="how long to learn")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the images")
    parser.add_argument("--workers", type=int, default=workers, help="how many processes learn at once, a thread each")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--fresh-images", type=int, default=FRESH_IMAGES, help="how many images to measure on")
    parser.add_argument("--kept", type=Path, help="a folder that keeps drawn images and the tower for the next run")
    parser.add_argument("--start", type=Path, help="a folder with an earlier such model, to go on from its weights")
    parser.add_argument("--only-measure", action="store_true", help="measure what lies in the output folder")
    parser.add_argument("--output", type=Path, default=output)
    return parser


# --- Learning -------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """A step of training: its number, its batch, and the patches that it sees, [batch, seen], or None for all."""

    worker: int
    number: int
    seconds: float
    batch: Batch
    seen: Tensor | None

    def report_to(self, what: str, loss: Tensor, how_good: str) -> None:
        """Now and then a line about how it goes, of the first worker."""
        if self.worker == 0 and self.number % 100 == 0:
            seen = f"{self.number * BATCH:>7} images a worker"
            print(f"{what:8} {seen}  loss {loss.item():.4f}  {how_good}  {self.seconds:.0f} s", flush=True)


def together(learn: Callable[[int], None], shared: Sequence[Module], workers: int) -> None:
    """Let so many processes learn at once on the same weights, each on batches of its own; none waits for another."""
    if workers == 1:
        return learn(0)
    for module in shared:
        module.share_memory()
    context = torch.multiprocessing.get_context("fork")
    processes = [context.Process(target=learn, args=(worker,)) for worker in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("A worker ended early: see above.")
    return None


def turns(
    count_of: int, size: int, minutes: float, options: argparse.Namespace, worker: int, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[int, float, NDArray[np.int64]]]:
    """The numbers of `size` of so many images, turn by turn until the time is over; sets the learning rate.

    Yields:
        The number of the turn, the seconds since the first, and the images.
    """
    torch.manual_seed(1000 * options.seed + worker)
    random = np.random.default_rng((options.seed, worker))
    started, order = time.monotonic(), np.zeros(0, dtype=np.int64)
    for number in count():
        seconds = time.monotonic() - started
        progress = seconds / (60.0 * minutes)
        if progress >= 1.0:
            return
        if len(order) < size:
            order = random.permutation(count_of)
        chosen, order = order[:size], order[size:]
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * group["share"] * learning_rate_share(number, progress)
        yield number, seconds, chosen


def steps(
    scenes: Scenes, minutes: float, options: argparse.Namespace, worker: int, optimizer: torch.optim.Optimizer
) -> Iterator[Step]:
    """Batches until the time is over, half of each mirrored; sets the learning rate."""
    for number, seconds, chosen in turns(len(scenes), BATCH, minutes, options, worker, optimizer):
        batch = scenes.batch(chosen, mirrored=BATCH // 2)
        whole = seconds >= 60.0 * minutes * (1.0 - WHOLE_SHARE)
        yield Step(worker, number, seconds, batch, None if whole else choose_seen(batch.patches))


def learning_rate_share(step: int, progress: float, warmup: int = 100) -> float:
    """Rise over the first steps, then fall along a cosine to 1 %."""
    return min(1.0, (step + 1) / warmup) * (0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0))))


def adam(parts: Sequence[tuple[Module, float]], decay: float = 0.05) -> torch.optim.Optimizer:
    """AdamW over modules, each with its share of the learning rate; biases and norms do not decay."""
    groups = []
    for module, share in parts:
        for matrices in (True, False):
            values = [value for value in module.parameters() if (value.ndim > 1) == matrices]
            groups.append({"params": values, "weight_decay": decay if matrices else 0.0, "share": share})
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98))


def step_down(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step along the gradient, whose norm is held to 1."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_([value for group in optimizer.param_groups for value in group["params"]], 1.0)
    optimizer.step()


def seen_tokens(tower: Module, step: Step) -> Tensor:
    """Return the output of the tower's last block for the visible patches, [batch, seen, channels]."""
    tokens = tower.embeddings(step.batch.pixels)
    if step.seen is not None:
        tokens = tokens.gather(1, step.seen[..., None].expand(-1, -1, tokens.shape[-1]))
    return tower.encoder(inputs_embeds=tokens).last_hidden_state


def choose_seen(patches: NDArray[np.int64]) -> Tensor:
    """The numbers of the patches to see, [batch, SEEN_PATCHES]: those that show a thing, then any."""
    score = torch.from_numpy((patches > 0).astype(np.float32)) + torch.rand(patches.shape)
    return score.topk(SEEN_PATCHES, dim=1).indices.sort(dim=1).values


def wave(length: int, channels: int, shortest: float) -> Tensor:
    """Places in a row as waves of that length and up to 32, [length, channels].

    Places are learned further, but small random ones take long to be told apart.
    """
    lengths = shortest * (32.0 / shortest) ** torch.linspace(0.0, 1.0, channels // 2)
    angles = 2.0 * math.pi * torch.arange(length)[:, None] / lengths
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def waves(channels: int) -> Tensor:
    """Return the position encoding of the patches, [GRID · GRID, channels], as waves along x and along y."""
    along = wave(GRID, channels // 2, 3.0)
    columns, rows = along.repeat(GRID, 1), along.repeat_interleave(GRID, dim=0)
    return 0.7 * torch.cat([columns, rows], dim=1)


def tower_of(options: argparse.Namespace, scenes: Scenes) -> tuple[SiglipVisionModel, Linear]:
    """An image tower that knows what each patch shows, and what reads it; from the kept folder where they lie there.

    The second block is also asked which pixels of its patches show a thing: edges come before shapes.
    """
    path = options.kept / f"tower-{options.seed}-{options.tower_minutes:g}.pt" if options.kept else None
    tower = SiglipVisionModel(SiglipVisionConfig(**TOWER))
    outline, reading = (Linear(TOWER["hidden_size"], count) for count in (PATCH**2, 18))
    if path is not None and path.exists():
        for module, state in zip((tower, reading), torch.load(path), strict=True):
            module.load_state_dict(state)
        return tower, reading
    tower.embeddings.position_embedding.weight.data.copy_(waves(TOWER["hidden_size"]))

    def learn(worker: int) -> None:
        optimizer = adam([(tower.embeddings, 1.0), (tower.encoder, 1.0), (reading, 1.0), (outline, 1.0)])
        early: list[Tensor] = []  # what the second block gives
        tower.encoder.layers[1].register_forward_hook(lambda *given: early.append(given[2]))
        exact = 0.5
        for step in steps(scenes, options.tower_minutes, options, worker, optimizer):
            loss, right = patch_loss(reading(seen_tokens(tower, step)), step)
            covered = step.batch.covered
            if step.seen is not None:
                covered = covered.gather(1, step.seen[..., None].expand(-1, -1, PATCH**2))
            pixels = outline(early.pop())
            step_down(optimizer, loss + 2.0 * binary_cross_entropy_with_logits(pixels, covered))
            exact += 0.02 * (((pixels > 0) == (covered > 0)).float().mean().item() - exact)
            step.report_to("tower", loss, f"{right}, pixels {exact:.3f}")

    together(learn, [tower, reading, outline], options.workers)
    if path is not None:
        torch.save((tower.state_dict(), reading.state_dict()), path)
    return tower, reading


def patch_loss(answers: Tensor, step: Step) -> tuple[Tensor, str]:
    """Return the loss of colours and shapes read from patches, and the accuracy on those of objects.

    Args:
        answers: [batch, seen, 18], what is read from the patches: nine colours and nine shapes, the first is none.
        step: whose images they are of.
    """
    kinds = np.zeros((len(step.batch.things), 4), dtype=np.int64)
    for row, things in enumerate(step.batch.things):
        kinds[row, 1 : 1 + len(things)] = [9 + 9 * (kind_of(thing) // 8) + kind_of(thing) % 8 + 1 for thing in things]
    shown = torch.from_numpy(np.take_along_axis(kinds, step.batch.patches, axis=1))  # [batch, patches]
    shown = (shown if step.seen is None else shown.gather(1, step.seen)).flatten()
    loss, right = torch.zeros(()), []
    for said, true in zip(answers.flatten(0, 1).split(9, dim=1), (shown // 9, shown % 9), strict=True):
        loss = loss + cross_entropy(said, true)
        right.append(f"{(said.argmax(1) == true)[shown > 0].float().mean():.3f}")
    return loss, f"patches' colours and shapes right {' '.join(right)}"


# --- Writing --------------------------------------------------------------------------------------------------------


def word_tokenizer(
    words: Sequence[str], special: dict[str, str], template: str, **options: Any
) -> PreTrainedTokenizerFast:
    """A tokenizer that gives each word a number.

    Args:
        words: all that it knows, lower case; those in angle brackets are special ones.
        special: by what transformers calls them: "pad_token", "unk_token", "eos_token", ….
        template: what stands around a text, such as "$A </s>".
        options: transformers' own.
    """
    vocabulary = {word: number for number, word in enumerate([*special.values(), *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([word for word in vocabulary if word.startswith("<")])
    tokenizer.add_special_tokens(list(special.values()))
    named = [(word, number) for word, number in vocabulary.items() if word in template.split()]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **options)


def image_processor() -> SiglipImageProcessor:
    return SiglipImageProcessor(
        size={"height": SIZE, "width": SIZE}, resample=3, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )


def write(model: Any, processor: Any, reported: dict[str, str], output: Path) -> None:
    """Write the model in float16, its processor, and what is told of them in the header of its weights.

    All is written beside the target, which is exchanged at the end, so that it is always whole.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        model.half().save_pretrained(part)
        processor.save_pretrained(part)
        processor.image_processor.save_pretrained(part)  # in a file of its own, as before 5.0
        weights = part / "model.safetensors"
        named = {OLD_TOWER_NAME.sub(r"\1vision_model.", name): value for name, value in load_file(weights).items()}
        save_file(named, weights, metadata={"format": "pt", "license": "MIT", **reported})
        for name, old, new in (
            ("config.json", '"float16"', '"float32"'),  # kept in half precision, computed in single
            ("tokenizer_config.json", '"TokenizersBackend"', '"PreTrainedTokenizerFast"'),  # its name before 5.0, too
        ):
            path = part / name
            path.write_text(path.read_text().replace(old, new))
        for path in (part, *part.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        if output.exists():
            shutil.rmtree(output)
        part.replace(output)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def first_seed(options: argparse.Namespace) -> int:
    """A million seeds for each training seed, so that no two trainings and no evaluation share an image."""
    return FIRST_TRAINING_SEED * (1 + options.seed)


def train_and_measure(
    options: argparse.Namespace,
    script: str,
    train: Callable[[argparse.Namespace], tuple[Any, Any]],
    measure: Callable[[argparse.Namespace], dict[str, float]],
    **reported: str,
) -> None:
    """Train, write, measure what was written as it is read again, and write that in the header, too."""
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    if options.only_measure:
        print(*(f"{name}: {value:.4f}" for name, value in measure(options).items()), sep="\n")
        return
    words = [f"python -m tools.{script}", f"--images {options.images}", f"--seed {options.seed}"]
    spent = {name: getattr(options, name.replace("-", "_"), None) for name in ("workers", "tower-minutes", "minutes")}
    words += [f"--{name} {value:g}" for name, value in spent.items() if value is not None]
    reported["trained_by"] = " ".join([*words, f"--learning-rate {options.learning_rate:g}"])
    if options.start:
        with safe_open(options.start / "model.safetensors", framework="pt") as file:
            reported["trained_by"] = f"{file.metadata()['trained_by']}, then {reported['trained_by']} --start"
    model, processor = train(options)
    write(model, processor, reported, options.output)
    actual = measure(options)
    reported["measured_on"] = f"{options.fresh_images} fresh images"
    write(model, processor, reported | {name: f"{value:.5f}" for name, value in actual.items()}, options.output)
    print(*(f"{name}: {value:.4f}" for name, value in actual.items()), options.output, sep="\n")


def begin(model: Any, options: argparse.Namespace) -> None:
    """Give a model the weights of an earlier one, where one is named."""
    if options.start:
        model.load_state_dict(type(model).from_pretrained(options.start, dtype=torch.float32).state_dict())
