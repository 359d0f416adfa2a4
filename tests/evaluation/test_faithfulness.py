"""Faithfulness curves against loops in float64, grad-cam's removal metrics, and maps that are known to be right."""

from dataclasses import replace as changed

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from tests import literal_vit
from tests.small import Custom
from vitflow import Explainer
from vitflow.analysis.removal import patch_order, removed_counts
from vitflow.errors import ModelError, OptionError, ShapeError, UnsupportedModelError
from vitflow.evaluation.measures.faithfulness import Curves, faithfulness_curves
from vitflow.evaluation.measures.sanity import class_sensitivity
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targets import Score
from vitflow.explaining.token_dropping import run_on_patches

DATA = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.25,) * 3, "crop_pct": 1.0}
IMAGE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def maps_of(explainer: Explainer, *grids: np.ndarray, target: int | None = None) -> list[Saliency]:
    saliency = explainer.explain(IMAGE, method="centre", target=target)
    return [changed(saliency, grid=np.asarray(grid, dtype=np.float32)) for grid in grids]


def random_grids(count: int, rows: int = 4, cols: int = 4) -> list[np.ndarray]:
    return list(np.random.default_rng(1).normal(size=(count, rows, cols)))


def literal_removed(grid: np.ndarray, points: int, point: int, most: bool) -> list[tuple[int, int]]:
    """The (row, col) of the patches that are gone at one point."""
    rows, cols = grid.shape
    patches = sorted((-grid[r, c], r, c) for r in range(rows) for c in range(cols))
    patches = patches if most else patches[::-1]
    return [(r, c) for _, r, c in patches[: removed_counts(rows * cols, points)[point]]]


def literal_logits(model: nn.Module, pixels: Tensor, gone: list[tuple[int, int]], shape, how: str, prefix: int):
    rows, cols = shape
    if how == "drop" and 0 < len(gone) < rows * cols:
        kept = [r * cols + c for r in range(rows) for c in range(cols) if (r, c) not in gone]
        x = model._pos_embed(model.patch_embed(pixels))
        x = model.blocks(torch.cat([x[:, :prefix], x[:, [prefix + patch for patch in kept]]], dim=1))
        return model.forward_head(model.norm(x))[0]
    image = pixels[0].clone()
    height, width = image.shape[1] // rows, image.shape[2] // cols
    filler = torch.stack([torch.full_like(plane, float(plane.mean())) for plane in image])
    for r, c in gone:
        where = (slice(None), slice(r * height, (r + 1) * height), slice(c * width, (c + 1) * width))
        image[where] = filler[where]
    return model(image[None])[0]


def literal_curves(model, pixels, grid, target, how, points, prefix, activation):
    actual = {name: [] for name in ("deletion", "least_first", "insertion")}
    every = [(r, c) for r in range(grid.shape[0]) for c in range(grid.shape[1])]

    def ask(gone, curve):
        with torch.no_grad():
            logits = literal_logits(model, pixels, gone, grid.shape, how, prefix)
        actual[curve].append(float(activation(logits)[target]))

    for point in range(points):
        ask(literal_removed(grid, points, point, most=True), "deletion")
        ask(literal_removed(grid, points, point, most=False), "least_first")
        # Inserted are as many as are not removed at the mirrored point: the most relevant ones, into an empty image.
        count = len(every) - removed_counts(len(every), points)[points - 1 - point]
        inserted = literal_removed(grid, len(every) + 1, count, most=True)
        ask([patch for patch in every if patch not in inserted], "insertion")
    return {name: np.array(values) for name, values in actual.items()}


@pytest.mark.parametrize("readout", ["class token and registers", "average", "attention pooling"])
@pytest.mark.parametrize("how", ["drop", "blank"])
def test_curves_equal_a_loop(readout, how):
    model, prefix = literal_vit.timm_model(readout), literal_vit.READOUTS[readout][1]
    explainer = Explainer(model, data_config=DATA)
    grids, points = random_grids(2), 6
    maps = maps_of(explainer, grids[0])
    maps += maps_of(explainer, grids[1], target=(maps[0].target + 1) % 5)
    pixels = explainer.pixels(IMAGE)
    if how == "drop" and prefix:
        with torch.no_grad():  # everything removed: the prefix tokens alone
            alone = model._pos_embed(model.patch_embed(pixels))[:, :prefix]
            empty = model.forward_head(model.norm(model.blocks(alone)))[0]
    for saliency, actual in zip(maps, faithfulness_curves(explainer, maps, replace=how, points=points), strict=True):
        expected = literal_curves(
            model, pixels, saliency.grid, saliency.target, how, points, prefix, lambda logits: logits.softmax(-1)
        )
        if how == "drop" and prefix:
            for name, end in (("deletion", -1), ("least_first", -1), ("insertion", 0)):
                expected[name][end] = float(empty.softmax(-1)[saliency.target])
        assert expected["deletion"].std() > 1e-3
        np.testing.assert_allclose(actual.fractions, [0, 0.2, 0.4, 0.6, 0.8, 1.0], atol=1e-12)
        for name, values in expected.items():
            np.testing.assert_allclose(getattr(actual, name), values, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("how", ["drop", "blank"])
@pytest.mark.parametrize("with_original", [False, True])
def test_maps_of_a_tensor_remove_its_patches(how, with_original):
    model = literal_vit.timm_model()
    explainer = Explainer(model, data_config={**DATA, "crop_pct": 0.5}, fit="crop")
    pixels = 2.0 * explainer.pixels(IMAGE)[0]  # a crop, with values that no image has
    options = {"method": "centre"} | ({"original": IMAGE} if with_original else {})
    saliency = explainer.explain(pixels, **options)
    saliency = changed(saliency, grid=random_grids(1)[0].astype(np.float32))
    (actual,) = faithfulness_curves(explainer, [saliency], replace=how, points=6)
    expected = literal_curves(
        model, pixels[None], saliency.grid, saliency.target, how, 6, 1, lambda logits: logits.softmax(-1)
    )
    np.testing.assert_allclose(actual.deletion[:5], expected["deletion"][:5], rtol=0, atol=1e-12)
    assert actual.deletion[0] == pytest.approx(saliency.probability, abs=1e-7)


def test_the_whole_image_has_the_probability_of_the_map():
    model = literal_vit.timm_model().float()
    explainer = Explainer(model, data_config=DATA)
    image = np.random.default_rng(3).integers(0, 256, (50, 90, 3), dtype=np.uint8)
    saliency = explainer.explain(image, method="centre")
    others = [
        explainer.with_model(literal_vit.timm_model(seed=1).float()),
        Explainer(model, data_config={**DATA, "mean": (0.1,) * 3}),
        Explainer(model, data_config=DATA, activation="sigmoid"),
    ]
    for other in others:
        with pytest.raises(OptionError, match="whole image"):
            faithfulness_curves(other, [saliency])
    half = Explainer(literal_vit.timm_model().to(torch.bfloat16), data_config=DATA)
    assert faithfulness_curves(half, [half.explain(image, method="centre")])
    squashed = Explainer(model, data_config=DATA, fit="squash")  # the placement travels with the map
    assert faithfulness_curves(squashed, [saliency])[0].deletion[0] == pytest.approx(saliency.probability, abs=1e-6)


def test_without_patches_a_model_that_pools_them_gets_the_blank_image():
    """By the readout of the image, whatever the model declares: here the class token."""

    def average(self: nn.Module, x: Tensor) -> Tensor:
        return self.vit.head(self.vit.forward_features(x)[:, self.first :].mean(dim=1))

    pools = {"average", "average beside a class token", "attention pooling", "refining pooling"}
    models = {name: literal_vit.timm_model(name) for name in literal_vit.READOUTS}
    for first, name in ((1, "own average"), (0, "all tokens")):
        models[name] = Custom(average, vit=literal_vit.timm_model(), first=first)
    for name, model in models.items():
        explainer = Explainer(model, data_config=DATA)
        (saliency,) = maps_of(explainer, random_grids(1)[0])
        (actual,) = faithfulness_curves(explainer, [saliency], points=3)
        pixels = explainer.pixels(IMAGE)
        with torch.no_grad():
            if name in pools | {"own average"}:
                logits = model(torch.full_like(pixels, 1.0) * pixels.mean(dim=(2, 3), keepdim=True))
            else:
                nothing = torch.zeros(1, 0, dtype=torch.long)
                logits = run_on_patches(model, pixels, nothing, layout=explainer.model_info.layout)
        assert actual.deletion[-1] == pytest.approx(float(logits[0].softmax(-1)[saliency.target]), abs=1e-12), name


def test_numbers_of_removed_patches():
    assert removed_counts(196, 11) == [0, 20, 39, 59, 78, 98, 118, 137, 157, 176, 196]
    for patches in (1, 2, 5, 7, 49, 144, 197):
        for points in (2, 3, 6, 11, 21):
            counts = removed_counts(patches, points)
            assert len(counts) == points and counts[0] == 0 and counts[-1] == patches
            assert counts == sorted(counts)
            for point, count in enumerate(counts):
                assert abs(count - patches * point / (points - 1)) <= 0.5
                if 2 * point != points - 1:
                    assert counts[points - 1 - point] == patches - count


def test_equal_values_are_ranked_by_position():
    assert patch_order(np.array([[1.0, 2.0, 1.0], [2.0, 0.0, 2.0]])).tolist() == [1, 3, 5, 0, 2, 4]
    assert patch_order(np.zeros((2, 3), np.float32)).tolist() == [0, 1, 2, 3, 4, 5]


def test_areas_are_those_of_trapezoids():
    actual = Curves(np.linspace(0, 1, 3), np.array([1.0, 0.4, 0.0]), np.array([1.0, 0.8, 0.2]))
    assert actual.deletion_auc == pytest.approx(0.5 * (1.4 / 2 + 0.4 / 2))
    assert actual.insertion_auc == pytest.approx(0.5 * (1.8 / 2 + 1.0 / 2))
    assert actual.gap == pytest.approx(0.7 - 0.45)


@pytest.mark.parametrize("how", ["drop", "blank"])
def test_maps_and_batch_sizes_do_not_influence_each_other(how):
    explainer = Explainer(literal_vit.timm_model("distilled"), data_config=DATA)
    maps = maps_of(explainer, *random_grids(3))
    together = faithfulness_curves(explainer, maps, replace=how)
    for size in (1, 7):
        for saliency, expected in zip(maps, together, strict=True):
            (actual,) = faithfulness_curves(explainer, [saliency], replace=how, batch_size=size)
            np.testing.assert_allclose(actual.deletion, expected.deletion, rtol=0, atol=1e-12)
            np.testing.assert_allclose(actual.least_first, expected.least_first, rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", ["drop", "blank"])
def test_the_ends_are_requested_once_for_all_maps(how):
    model, requested = literal_vit.timm_model(), []
    explainer = Explainer(model, data_config=DATA)
    maps = maps_of(explainer, *random_grids(4))
    model.norm.register_forward_pre_hook(lambda module, args: requested.append(tuple(args[0].shape[:2])))
    faithfulness_curves(explainer, maps, replace=how)  # whether the model can drop tokens is now known
    requested.clear()
    faithfulness_curves(explainer, maps, replace=how, points=5, batch_size=100)
    if how == "drop":  # 4, 8 and 12 patches removed; choices of one length run together
        assert sorted(requested) == [(1, 1), (1, 17), (8, 5), (8, 9), (8, 13)]
    else:
        assert requested == [(26, 17)]


def test_maps_of_other_grids_hide_their_cells():
    explainer = Explainer(literal_vit.timm_model(), data_config=DATA, activation="sigmoid")
    coarse, fine = random_grids(1, 2, 4)[0], random_grids(1)[0]
    maps = maps_of(explainer, coarse, fine)
    actual = faithfulness_curves(explainer, maps, replace="blank", points=5)
    pixels, model = explainer.pixels(IMAGE), explainer.model
    for saliency, one in zip(maps, actual, strict=True):
        expected = literal_curves(model, pixels, saliency.grid, saliency.target, "blank", 5, 1, torch.sigmoid)
        np.testing.assert_allclose(one.deletion, expected["deletion"], rtol=0, atol=1e-12)
    with pytest.raises(ShapeError, match="model's 4 × 4 patches, got 2 × 4"):
        faithfulness_curves(explainer, maps)


def test_grids_of_one_image_may_cover_different_pixels():
    explainer = Explainer(literal_vit.timm_model(img_size=35), data_config={**DATA, "input_size": (3, 35, 35)})
    maps = explainer.explain_batch([IMAGE], methods=["gae", ("input_gradient", {"patch_size": 7})])
    assert maps[0].placement != maps[1].placement  # patches cover 32 of 35 pixels
    assert all(curve.deletion.std() > 0 for curve in faithfulness_curves(explainer, maps, replace="blank", points=4))
    assert len(class_sensitivity(explainer, maps)) == 2


def test_models_without_tokens_are_requested_in_images():
    torch.manual_seed(0)
    explainer = Explainer(timm.create_model("test_convnext", num_classes=5).eval(), data_config=DATA)
    maps = [explainer.explain(IMAGE, method="occlusion")]
    (actual,) = faithfulness_curves(explainer, maps, replace="blank")
    assert actual.deletion.std() > 0
    with pytest.raises(UnsupportedModelError, match='cannot drop patches.*replace="blank"'):
        faithfulness_curves(explainer, maps)


def test_training_mode_comes_back_also_after_an_exception():
    model = literal_vit.timm_model("class token", proj_drop_rate=0.5).train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    explainer = Explainer(model, data_config=DATA)
    maps = maps_of(explainer, random_grids(1)[0])
    for how in ("drop", "blank"):
        first, second = (faithfulness_curves(explainer, maps, replace=how)[0] for _ in range(2))
        np.testing.assert_array_equal(first.deletion, second.deletion)  # no dropout
        failed = RuntimeError, UnsupportedModelError
        with pytest.raises(failed, match="in the middle"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.norm, "forward", lambda x: (_ for _ in ()).throw(RuntimeError("in the middle")))
            faithfulness_curves(explainer, maps, replace=how)
        assert [module.training for module in model.modules()] == modes
        assert not any(module._forward_pre_hooks for module in model.modules())


def test_infinite_logits_are_an_error():
    model = literal_vit.timm_model()
    explainer = Explainer(model, data_config=DATA)
    maps = maps_of(explainer, random_grids(1)[0])
    with torch.no_grad():
        model.head.bias[0] = float("nan")
    with pytest.raises(ModelError, match="NaN or infinite logits"):
        faithfulness_curves(explainer, maps, replace="blank")


def test_faults_are_named():
    explainer = Explainer(literal_vit.timm_model(), data_config=DATA)
    maps = maps_of(explainer, random_grids(1)[0])
    other = changed(maps[0], image=IMAGE[::-1])
    faults = [
        ("Unknown replacement 'dropp'. Did you mean 'drop'", maps, {"replace": "dropp"}),
        ("points of at least 2", maps, {"points": 1}),
        ("batch_size of at least 1", maps, {"batch_size": 0}),
        ("at least one map, got none", [], {}),
        ("Expected maps of one image", [*maps, other], {}),
        ("no target class", [changed(maps[0], score=Score())], {}),
    ]
    for message, given, options in faults:
        with pytest.raises(OptionError, match=message):
            faithfulness_curves(explainer, given, **options)
    with pytest.raises(ShapeError, match="finite"):
        faithfulness_curves(explainer, [changed(maps[0], grid=maps[0].grid + np.inf)])
    larger = Explainer(literal_vit.timm_model(img_size=40), data_config={**DATA, "input_size": (3, 40, 40)})
    with pytest.raises(OptionError, match=r"\(40, 40\) pixels.*got \(32, 32\)"):
        faithfulness_curves(larger, maps)
