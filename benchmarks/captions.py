"""Measure if the map of a generated word is on the object that it names, and compare default methods for captions.

    python -m benchmarks.captions [--choosing 200] [--telling 500]

The bundled captioner writes one sentence about each drawn scene. Of each caption that is right in every word, each
colour and each shape belongs to one thing, whose pixels are known. A map of such a word is asked for its maximum over
the pixels (is it on the thing?) and for the share of its mass there, as `vitflow.evaluation` measures both. The words
of a scene are averaged, then the scenes; intervals are for 95 % over scenes.

The rule for the default, written down before anything was measured:

1. The scenes of 200 seeds are chosen on, those of 500 others tell. Neither was trained on, nor looked at before.
2. The score of a map is its pointing plus its energy. Candidates are all maps.
3. The candidate with the highest score on the choosing scenes is the best. Of those whose score is within 0.02 of it,
   the cheapest is chosen: without the tower before with it, and then in the order of the table. A map that takes a
   backward pass for each word (GAE) is chosen only if it is more than 0.1 above all others.
4. It becomes the default if on the telling scenes its score is not below that of the default until then (rollout,
   relative to the receptive field, not weighted by values, not through the tower), by the interval of the paired
   difference. Else that stays.

What came of it: GAE on the tokens was chosen (1.495 on the choosing scenes), holds (0.314 above rollout on the others),
and is the default since.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

import vitflow
from tools.scenes import COLOURS, SHAPES, Scene, draw_scene
from vitflow.demo import DEMO_CAPTION
from vitflow.evaluation.measures.localisation import localise
from vitflow.evaluation.statistics import Estimate, estimate_means
from vitflow.methods.cells import centre_prior
from vitflow.models.parts import decoder_path
from vitflow.recording.recorder import record_attention
from vitflow.text import Generation, explain_generation
from vitflow.text.languages import load_language_model, load_processor
from vitflow.text.method_table import for_kind, text_method
from vitflow.text.rows import TextTrace, array_of, explain_rows
from vitflow.text.words import text_of

PROMPT = "<image> here is"
FIRST_CHOOSING, FIRST_TELLING = 600_000, 700_000
WEIGHTED = (("", {"value_weighted": False}), (", weighted", {"value_weighted": "output"}))
SEEN = ((", receptive field", {"causal": "receptive_field"}), (", raw", {"causal": "raw"}))
#: Each row of the table: a method and its options; "mean" takes the mean over the layers, "less" what earlier words
#: explain. The cheapest stand first.
ROWS: dict[str, tuple[str, dict]] = {
    **{f"attention, last layer{w}": ("attention", one) for w, one in WEIGHTED},
    **{f"attention, mean of layers{w}": ("attention", one) for w, one in WEIGHTED},
    **{f"rollout{s}{w}": ("rollout", seen | one) for s, seen in SEEN for w, one in WEIGHTED},
    "logit lens": ("logit_lens", {}),
    "logit lens, less earlier words": ("logit_lens", {}),
    **{
        f"flow, {words}{s}{w}": ("flow", {"layers": layers} | seen | one)
        for layers, words in ((1, "last layer"), (2, "last 2 layers"), ("all", "all 3 layers"))
        for s, seen in SEEN
        for w, one in WEIGHTED
    },
    **{f"GAE{w}": ("gae", one) for w, one in WEIGHTED},
}
TODAY = "rollout, receptive field"
#: How each row is shown: on the tokens, and through the tower.
WAYS = ("", "tower")
CONTROLS = ("random", "centre")
LABELS = [(row, way) for way in WAYS for row in ROWS] + [(row, "") for row in CONTROLS]


def rows_of(
    model: torch.nn.Module, actual: Generation, inputs: dict, requested: set[int]
) -> Iterator[tuple[str, Generation]]:
    """Return one generation, with the rows of each line of the table, from one pass over the finished text.

    Flow and GAE, which take most of the time, give the rows of the asked tokens alone, and the first one's.
    """
    made: dict[str, Generation] = {}
    m, n = actual.prompt_tokens.length, actual.generated_tokens.length
    ids = torch.tensor([(actual.prompt_tokens + actual.generated_tokens).ids[:-1]])
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": inputs["pixel_values"]}
    readout = torch.eye(m + n - 1)[m - 1 :]
    targets = list(enumerate(actual.generated_tokens.ids, start=m - 1))
    few, within = sorted({0} | requested), decoder_path(model)
    fusions = [("mean", False), ("mean", "output")]
    with torch.no_grad(), record_attention(model, visible=True, fusions=fusions, within=within) as trace:
        hidden = model(**text, output_hidden_states=True).hidden_states[1:]
    visible = [layer.visible[0] for layer in trace.layers]
    for label, (name, entry) in ROWS.items():
        key = f"{name}{entry}"
        if key not in made:
            method, options = text_method(name, entry)
            options = for_kind(options, decoder=True)
            numbers = few if name in ("flow", "gae") else list(range(n))
            mine = [targets[number] for number in numbers]
            if name == "gae":
                rows = explain_rows(model, text, readout[numbers], method, options, targets=mine, within=within).rows
            else:
                rows, _ = method.load()(TextTrace(trace, visible, readout[numbers], mine, hidden), **options)
            whole = np.zeros((n, m + n - 1, len(rows)), np.float32)
            whole[numbers] = array_of(rows.permute(1, 2, 0))
            made[key] = replace(
                actual,
                values=whole[:, :m],
                among_generated=np.pad(whole[:, m:], ((0, 0), (0, 1), (0, 0))),
                method=name,
                options=options,
            )
        one = made[key]
        if "mean of layers" in label:
            means = {part: getattr(one, part).mean(axis=-1, keepdims=True) for part in ("values", "among_generated")}
            one = replace(one, **means)
        yield label, one


def without_earlier(actual: Generation, places: Sequence[int]) -> Generation:
    """Subtract from the rows of a word what the rows of earlier words explain, after Li et al., ICCV 2025."""
    values, start = actual.values.copy(), places[0]
    rows = values[:, :, -1].astype(float)
    row, common = (
        rows[list(places)].mean(axis=0),
        actual.among_generated[start, :start, -1].astype(float) @ rows[:start],
    )
    square = float(common @ common)
    values[list(places), :, -1] = np.clip(row - (float(row @ common) / square if square else 0.0) * common, 0.0, None)
    return replace(actual, values=values)


def scene_values(
    model: torch.nn.Module, processor: object, scene: Scene, random: np.random.Generator
) -> np.ndarray | None:
    """[words, maps, pointing and energy]; None where the caption is wrong."""
    write = partial(explain_generation, model, PROMPT, image=scene.image, processor=processor)
    actual = write(method="attention", through_tower=True, max_new_tokens=30, do_sample=False)
    words = {word: places for word, places in actual.words(())[0].items() if word.split()[0] in (*COLOURS, *SHAPES)}
    if text_of(actual.generated_tokens).removesuffix("</s>").strip() != scene.caption:
        return None
    # The sentence names colour and shape of each thing in turn.
    phrases = [(word.split()[0], places) for word, places in words.items()]
    named = [(thing.phrase.colour, thing.phrase.shape) for thing in scene.things]
    regions = []
    for number, (word, places) in enumerate(phrases):
        pair = tuple(one for one, _ in phrases[number - number % 2 :][:2])
        assert word in pair
        regions.append((places, scene.masks[named.index(pair)]))
    given = dict(processor(images=[scene.image], text=PROMPT, return_tensors="pt"))
    values = np.full((len(regions), len(LABELS), 2), np.nan)

    def measure(index: int, label: tuple[str, str], saliency: vitflow.Saliency, mask: np.ndarray) -> None:
        heatmap = saliency.heatmap
        scores = localise(heatmap, mask)
        values[index, LABELS.index(label)] = scores.pointing_game, scores.energy

    requested = {place for places, _ in regions for place in places}
    for label, one in rows_of(model, actual, given, requested):
        less = "less earlier" in label
        for index, (places, mask) in enumerate(regions):
            for way in WAYS:
                shown = without_earlier(one, places) if less else one
                shown = shown if way else replace(shown, images=replace(shown.images, tower=None))
                measure(index, (label, way), shown.image(places), mask)
    for index, (places, mask) in enumerate(regions):
        plain = replace(actual, images=replace(actual.images, tower=None)).image(places)
        grids = {"random": random.random(plain.grid.shape), "centre": centre_prior(*plain.grid.shape)}
        for name, grid in grids.items():
            measure(index, (name, ""), replace(plain, grid=np.asarray(grid, np.float32)), mask)
    return values


def measured(model: torch.nn.Module, processor: object, first: int, count: int, name: str) -> np.ndarray:
    """[scenes whose caption is right, maps, pointing and energy]."""
    actual, words, started = [], 0, time.perf_counter()
    random = np.random.default_rng(first)
    for number in range(count):
        values = scene_values(model, processor, draw_scene(first + number), random)
        if values is not None:
            words += len(values)
            actual.append(values.mean(axis=0))
        took = (time.perf_counter() - started) / (number + 1)
        print(f"\r{name}: {number + 1} of {count}, {took:.2f} s each", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"{name}: {len(actual)} right captions of {count}, with {words} colours and shapes.\n", flush=True)
    return np.stack(actual)


def score(values: np.ndarray, label: tuple[str, str]) -> np.ndarray:
    """Pointing plus energy of each scene."""
    return values[:, LABELS.index(label)].sum(axis=-1)


def choose(choosing: np.ndarray, telling: np.ndarray) -> None:
    """Apply the rule, and print what it finds."""
    candidates = [(row, way) for way in WAYS for row in ROWS]
    scores = {label: float(score(choosing, label).mean()) for label in candidates}
    plain = [label for label in candidates if not label[0].startswith("GAE")]
    best = max(plain, key=scores.__getitem__)
    chosen = next(label for label in plain if scores[label] >= scores[best] - 0.02)
    by_gradients = max((label for label in candidates if label not in plain), key=scores.__getitem__)
    if scores[by_gradients] > scores[best] + 0.1:
        best = chosen = by_gradients
    gain = estimate_means((score(telling, chosen) - score(telling, (TODAY, "")))[:, None])[0]
    print(f"best on the choosing scenes: {best}, score {scores[best]:.3f}; chosen: {chosen}, {scores[chosen]:.3f}")
    print(
        f"over today's on the telling scenes: {reported(gain, '+.3f')}: "
        f"{'it holds' if gain.high >= 0 else 'today stays'}"
    )


def reported(one: Estimate, form: str = ".3f") -> str:
    return f"{one.mean:{form}} [{one.low:{form}}, {one.high:{form}}]"


def table(values: np.ndarray) -> None:
    """Pointing and energy of each row, in each way."""
    for number, name in enumerate(("pointing", "energy")):
        estimates = dict(zip(LABELS, estimate_means(values[:, :, number]), strict=True))
        print(f"| {name} | on the tokens | through the tower |")
        print("|---" * (len(WAYS) + 1) + "|")
        for row in (*ROWS, *CONTROLS):
            cells = (reported(estimates[row, way]) if (row, way) in estimates else "" for way in WAYS)
            print(f"| {row} | {' | '.join(cells)} |")
        print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--choosing", type=int, default=200, help="scenes to choose on")
    parser.add_argument("--telling", type=int, default=500, help="other scenes to tell")
    given = parser.parse_args()
    model, _ = load_language_model(DEMO_CAPTION)
    processor = load_processor(DEMO_CAPTION)
    choosing = measured(model, processor, FIRST_CHOOSING, given.choosing, "chosen on")
    choose(choosing, choosing)
    telling = measured(model, processor, FIRST_TELLING, given.telling, "told")
    table(telling)
    choose(choosing, telling)


if __name__ == "__main__":
    main()
