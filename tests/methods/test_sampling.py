"""Sampling against literal loops: over masks, over the model run by hand on kept tokens, over blanked images."""

import itertools

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from tests import literal_vit, references
from tests.explaining.test_token_dropping import by_hand
from vitflow import Contrast, Explainer, load_model
from vitflow.demo import sample_images
from vitflow.errors import OptionError, VitflowError
from vitflow.explaining.applying import affinity_of
from vitflow.explaining.saliency import contrasted
from vitflow.methods.refinement import Affinity, co_attention, key_affinity, refine
from vitflow.methods.sampling import draw_masks, mean_differences, regress
from vitflow.methods.similarity import spearman
from vitflow.recording.recorder import record_attention

DATA = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.25,) * 3, "crop_pct": 1.0}
IMAGES = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)


def log_odds(logits: Tensor, target: int) -> float:
    """z_t − log Σ exp of the other logits."""
    others = [float(one) for number, one in enumerate(logits.tolist()) if number != target]
    return float(logits[target]) - float(np.log(np.sum(np.exp(others))))


def by_hand_on(model: nn.Module, pixels: Tensor, kept: Tensor, target: int, prefix: int = 1) -> list[float]:
    """The target's log-odds for each mask, [masks], the model run by hand on the kept tokens, one mask at a time."""
    with torch.no_grad():
        return [
            log_odds(by_hand(model, pixels, np.flatnonzero(mask).tolist(), prefix)[0], target) for mask in kept.tolist()
        ]


def test_the_estimator_equals_a_loop_over_masks():
    dice = np.random.default_rng(1)
    kept, scores = torch.from_numpy(dice.random((40, 12)) < 0.4), torch.from_numpy(dice.normal(size=(40, 3)))
    kept[:, 4], kept[:, 9] = True, False  # never compared
    actual = mean_differences(kept, scores)
    for target in range(3):
        expected = references.mean_differences(kept.tolist(), scores[:, target].tolist())
        np.testing.assert_allclose(actual[:, target], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(mean_differences(kept, scores[:, target]), actual[:, target], rtol=0, atol=1e-12)
    assert actual[4].abs().max() == actual[9].abs().max() == 0.0


@pytest.mark.parametrize(("rows", "cols"), [(2, 3), (1, 9), (9, 20)])
def test_masks_keep_exactly_so_many_patches_and_follow_from_the_seed(rows, cols):
    masks = draw_masks(rows, cols, masks=30, keep=0.3)
    assert masks.shape == (30, rows * cols) and (masks.sum(dim=1) == round(0.3 * rows * cols)).all()
    assert torch.equal(draw_masks(rows, cols, masks=12, keep=0.3), masks[:12])  # fewer are the first ones
    assert not torch.equal(draw_masks(rows, cols, masks=30, keep=0.3, seed=1), masks)
    assert len(masks.unique(dim=0)) > (15 if rows * cols > 6 else 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"masks": 1}, "masks of at least 2, got 1"),
        ({"masks": "many"}, "masks"),
    ],
)
def test_impossible_options_are_named(options, message):
    explainer = Explainer(literal_vit.timm_model(), data_config=DATA)
    with pytest.raises(OptionError, match=message):
        explainer.explain(IMAGES[0], method="sampling", **options)


@pytest.mark.parametrize("keep", [0.03, float("nan")])
def test_masks_keep_some_patches_and_not_all(keep):
    with pytest.raises(OptionError, match="4 × 4 patches"):
        draw_masks(4, 4, masks=8, keep=keep)


def test_the_reliability_and_the_hiding_are_facts():
    model = literal_vit.timm_model("class token and registers")
    explainer = Explainer(model, data_config=DATA)
    actual = explainer.explain(IMAGES[0], method="sampling", target=3, refine=0, masks=24, random_seed=5)
    trace = explainer.record(IMAGES[0], keys=True, head_fusion="mean")
    kept = draw_masks(4, 4, masks=24, seed=5, affinity=affinity_of(trace, "both", (4, 4)).matrix[0])
    scores = torch.tensor(by_hand_on(model, explainer.pixels(IMAGES[0]), kept, 3, prefix=4), dtype=torch.float64)
    reliability = spearman(*(mean_differences(kept[first::2], scores[first::2]).numpy() for first in (0, 1)))
    assert actual.facts == {"reliability": round(reliability, 3), "hidden": "tokens dropped"}


class _Counted:
    """Count the runs of a model, and the tokens of each."""

    def __init__(self, model: nn.Module) -> None:
        self.passes: list[int] = []
        model.blocks[-1].register_forward_pre_hook(lambda module, args: self.passes.append(args[0].shape[:2].numel()))


def test_ten_classes_and_contrasts_come_of_the_same_passes():
    model = literal_vit.timm_model(num_classes=10)
    explainer = Explainer(model, data_config=DATA)
    options = {"methods": ["sampling", "consensus"], "masks": 16}
    counted = _Counted(model)
    one = {saliency.method: saliency for saliency in explainer.explain_batch(IMAGES[:1], targets=7, **options)}
    counted.passes.clear()
    explainer.explain_batch(IMAGES[:1], targets=7, **options)
    alone = list(counted.passes)
    counted.passes.clear()
    every = explainer.explain_batch(IMAGES[:1], targets="top10", **options)
    assert counted.passes == alone and len(every) == 20
    for saliency in every:
        if saliency.target == 7:
            np.testing.assert_array_equal(saliency.grid, one[saliency.method].grid)
    counted.passes.clear()
    [contrast] = explainer.explain_batch(IMAGES[:1], methods=["sampling"], targets=[Contrast(7, against=2)], masks=16)
    assert sum(counted.passes) < sum(alone) + 17
    by_class = {saliency.target: saliency for saliency in every if saliency.method == "sampling"}
    expected = contrasted(by_class[7], by_class[2])
    np.testing.assert_allclose(contrast.grid, expected.grid, rtol=0, atol=1e-6)


def test_the_batch_size_changes_no_map_and_bounds_the_tokens_of_a_pass():
    model = literal_vit.timm_model()
    explainer, counted = Explainer(model, data_config=DATA), _Counted(model)
    explainer.explain(IMAGES[0], method="sampling", target=1, masks=2)  # the experiments of a first pass
    grids = []
    for size in (1, 4, 100):
        counted.passes.clear()
        options = {"masks": 20, "occlusion_batch": size, "refine": 0}
        grids.append(explainer.explain(IMAGES[0], method="sampling", target=1, **options).grid)
        assert max(counted.passes[1:]) <= max(size * 20, 17)  # 5 patches and the class token stand for 17 tokens
    np.testing.assert_allclose(grids[1], grids[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(grids[2], grids[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("affinity", ["both", "keys"])
def test_the_regression_has_the_affinity_as_its_prior(affinity):
    explainer = Explainer(load_model("demo"))
    image = sample_images()[0]
    options = {"masks": 40, "affinity": affinity, "target": 6}
    unrefined = explainer.explain(image, method="sampling", refine=0, **options)
    with record_attention(explainer.model, fusions=[("mean", False)], keys=True) as trace, torch.no_grad():
        explainer.model(pixels := explainer.pixels(image))
    keys = key_affinity([layer.keys[:, -144:] for layer in trace.layers]).keys
    layers = (
        co_attention([layer[:, -144:, -144:] for layer in trace.fused("mean")]).attention if affinity == "both" else ()
    )
    prior = Affinity(layers, keys)
    kept = draw_masks(12, 12, masks=40, affinity=prior.matrix[0])
    with torch.no_grad():  # of a sigmoid, the log-odds are the logit
        scores = [by_hand(explainer.model, pixels, np.flatnonzero(mask).tolist(), 1)[0, 6] for mask in kept.numpy()]
    posterior = regress(kept, torch.stack(scores).double(), prior.matrix[0])
    expected = regress(kept, torch.stack(scores).double(), prior.matrix[0], noise=6.0).mean.reshape(12, 12)
    np.testing.assert_allclose(unrefined.grid, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    refined = explainer.explain(image, method="sampling", refine=1, **options)
    spread = refine(expected.clamp_min(0)[None], prior, 1)[0]
    np.testing.assert_allclose(refined.grid, spread, rtol=0, atol=1e-4 * float(spread.max()))
    above = (posterior.mean / posterior.std).reshape(12, 12).numpy()
    clear = np.abs(above - 1.96) > 1e-2  # of a patch on the edge, rounding decides
    for saliency in (unrefined, refined):
        np.testing.assert_array_equal(saliency.significant[clear], above[clear] > 1.96)
    assert any("significant at 95 %" in note for note in refined._notes())


def test_models_without_an_affinity_have_the_difference_of_means():
    explainer = Explainer(timm.create_model("test_resnet", num_classes=5).eval(), data_config=DATA)
    for requested in ({"refine": 1}, {"affinity": "keys"}):
        with pytest.raises(VitflowError, match="atten"):
            explainer.explain(IMAGES[0], method="sampling", masks=8, **requested)
    options = explainer.explain(IMAGES[0], method="sampling", masks=4).options
    assert options | {"refine": 0, "masks": 4} == options
    assert explainer.explain(IMAGES[0], method="sampling").options["masks"] == 256


def test_where_tokens_cannot_be_dropped_patches_are_blanked_and_the_map_says_so():
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=5).eval()
    explainer = Explainer(model, data_config={**DATA, "input_size": (3, 64, 64)})
    saliency = explainer.explain(IMAGES[0], method="sampling", target=3, masks=12)
    assert saliency.facts["hidden"].startswith("patches blanked, because tokens cannot be dropped: ")
    rows, cols = saliency.grid.shape
    pixels, kept = explainer.pixels(IMAGES[0])[0], draw_masks(rows, cols, masks=12, keep=0.3)
    edges = [round(number * 64 / rows) for number in range(rows + 1)]
    scores = []
    for mask in kept.reshape(-1, rows, cols):
        blanked = pixels.clone()
        for row, col in itertools.product(range(rows), range(cols)):
            if not mask[row, col]:
                for channel in range(3):
                    mean = pixels[channel].mean()
                    blanked[channel, edges[row] : edges[row + 1], edges[col] : edges[col + 1]] = mean
        with torch.no_grad():
            scores.append(log_odds(model(blanked[None])[0].double(), 3))
    expected = np.reshape(references.mean_differences(kept.tolist(), scores), (rows, cols))
    np.testing.assert_allclose(saliency.grid, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_masks_of_similar_patches_equal_a_literal_loop():
    matrix = torch.from_numpy(np.random.default_rng(2).random((12, 5)))
    actual = draw_masks(3, 4, masks=6, keep=0.4, cells=2, seed=9, affinity=matrix)
    dice = np.random.default_rng(9)
    units = torch.eye(4).double().reshape(4, 1, 2, 2)
    basis = torch.nn.functional.interpolate(units, size=(3, 4), mode="bicubic", align_corners=False).reshape(4, 12)
    for mask in actual:
        spatial, similar = dice.standard_normal(4), dice.standard_normal(5)
        field = [
            0.5 * float(basis[:, patch].numpy() @ spatial) / float(basis[:, patch].norm())
            + 0.75**0.5 * float(matrix[patch].numpy() @ similar) / float(matrix[patch].norm())
            for patch in range(12)
        ]
        assert set(np.argsort(field)[-5:].tolist()) == set(mask.nonzero()[:, 0].tolist())
    assert torch.equal(draw_masks(3, 4, masks=3, keep=0.4, cells=2, seed=9, affinity=matrix), actual[:3])
    equal = draw_masks(3, 4, masks=200, keep=0.5, cells=2, affinity=torch.ones(12, 2))
    together = (equal[:, :1] == equal).double().mean(dim=0)  # neighbours decide if all patches are equally similar
    assert float(together[1]) > 0.7 > 0.5 > float(together[-1])
