"""Gradient methods against a hand-written Vision Transformer, and their properties."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests import literal_vit
from vitflow import record_attention
from vitflow.errors import OptionError, ShapeError, UnsupportedModelError
from vitflow.explaining.maps import TargetedTrace
from vitflow.methods import cells
from vitflow.methods.rollout import attention_rollout, gradient_weighted_attention, relevance
from vitflow.models.blocks import block_norm
from vitflow.models.info import read_model_info
from vitflow.models.outputs import Binding
from vitflow.recording.trace import Trace
from vitflow.registry.method_table import get_method

BATCH, TARGETS = 3, [4, 0, 2]
CONFIG = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}


def photos(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=dtype)


def with_targets(trace: Trace, targets: list[int] | None = None) -> TargetedTrace:
    return TargetedTrace.of(
        trace,
        None if targets is None else torch.tensor(targets),
        run=trace.model,
        model_info=read_model_info(Binding(trace.model, data_config=CONFIG)),
    )


def recorded(model: nn.Module, pixels: Tensor, targets: list[int] | None = None, layer: int = -1) -> TargetedTrace:
    features = [block_norm(model, layer)]
    with record_attention(model, gradients=True, values=True, features=features) as trace:
        model(pixels)
    return with_targets(trace, targets or TARGETS)


def grid(trace: Trace, method: str, **options) -> np.ndarray:
    chosen = get_method(method)
    function = chosen.load()
    return function(trace, **chosen.function_options(chosen.complete(options))).grids.numpy()


def assert_equal(actual: np.ndarray, expected: np.ndarray, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("readout", literal_vit.READOUTS)
def test_the_hand_written_model_is_the_same_model(readout):
    model, pixels = literal_vit.timm_model(readout), photos()
    with torch.no_grad():
        expected = model(pixels)
        actual = torch.stack([literal_vit.run(model, image).logits for image in pixels])
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("readout", literal_vit.READOUTS)
def test_every_gradient_method_equals_the_literal_reference(readout):
    """A batch in which each image has its own target, in float64, to 1e-6 of the map's maximum."""
    model, pixels = literal_vit.timm_model(readout), photos()
    trace = recorded(model, pixels)
    first = recorded(model, pixels, layer=1)
    for index, target in enumerate(TARGETS):
        actual = literal_vit.differentiate(model, pixels[index], target, readout)
        for layer, gradient in enumerate(trace.backward().attentions):
            assert_equal(gradient[index].numpy(), actual.gradients[layer], 1e-9)
        for how, fusion in itertools.product((False, True, "output"), ("mean", "max")):
            options = {"value_weighted": how, "head_fusion": fusion}
            assert_equal(grid(trace, "gae", **options)[index].ravel(), literal_vit.gae(actual, how, fusion))
            expected = literal_vit.gradient_rollout(actual, how, fusion, ratio=0.5, alpha=0.3, start=2)
            rolled = grid(trace, "gradient_rollout", **options, discard_ratio=0.5, residual=0.3, start_layer=2)
            assert_equal(rolled[index].ravel(), expected)
        assert_equal(grid(trace, "gae", preset="paper", start_layer=3)[index].ravel(), literal_vit.gae(actual, start=3))
        assert_equal(
            grid(trace, "gradient_rollout", preset="paper")[index].ravel(), literal_vit.gradient_rollout(actual)
        )
        assert_equal(grid(trace, "gradcam")[index].ravel(), literal_vit.grad_cam(actual))
        assert_equal(grid(first, "gradcam", layer=1)[index].ravel(), literal_vit.grad_cam(actual, 0))
        pixels_of_patches = np.abs(actual.pixel_gradients).reshape(3, 4, 8, 4, 8).sum((0, 2, 4))
        assert_equal(grid(trace, "input_gradient")[index], pixels_of_patches)


def test_from_a_patch_instead_of_the_answer():
    model, pixels = literal_vit.timm_model(), photos()
    trace = recorded(model, pixels)
    actual = literal_vit.differentiate(model, pixels[0], TARGETS[0], "class token")
    actual.readout = np.eye(17)[1 + 2 * 4 + 3]
    assert_equal(grid(trace, "gae", preset="paper", patch=(2, 3))[0].ravel(), literal_vit.gae(actual))
    rolled = grid(trace, "gradient_rollout", preset="paper", patch=(2, 3))[0].ravel()
    assert_equal(rolled, literal_vit.gradient_rollout(actual))


@pytest.mark.parametrize(("fused", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_half_precision_gradients_are_near_those_of_float64(dtype, fused):
    model, pixels = literal_vit.timm_model(), photos()
    expected = {name: grid(recorded(model, pixels), name, preset="paper") for name in ("gae", "gradient_rollout")}
    half = model.to(dtype)
    for block in half.blocks:
        block.attn.fused_attn = fused
    with record_attention(half, gradients=True) as trace:
        half(pixels.to(dtype))
    trace = with_targets(trace, TARGETS)
    for name, exact in expected.items():
        actual = grid(trace, name, preset="paper")
        for ours, theirs in zip(actual, exact, strict=True):
            assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > (0.99 if dtype == torch.float16 else 0.95)


def test_small_gradients_survive_float16():
    """Gradients of about 1e-7 lie below what float16 tells from 0, unless they are scaled on the way."""
    model, pixels = literal_vit.timm_model(), photos()
    with torch.no_grad():
        model.head.weight.mul_(2e-6)
    expected = recorded(model, pixels).backward().attentions[0]
    half = model.to(torch.float16)
    with record_attention(half, gradients=True) as trace:
        half(pixels.half())
    actual = trace.backward(torch.tensor(TARGETS)).attentions[0].double()
    assert expected.abs().median() < 6e-8
    assert torch.corrcoef(torch.stack([actual.flatten(), expected.flatten()]))[0, 1] > 0.9


def random_pair(layers: int = 4, heads: int = 2, tokens: int = 7) -> tuple[Tensor, Tensor]:
    shape = (layers, 2, heads, tokens, tokens)
    return torch.randn(shape, dtype=torch.float64).softmax(-1), torch.randn(shape, dtype=torch.float64)


def gae(attention: Tensor, gradients: Tensor, head_fusion: Any = "mean", **options: Any) -> Tensor:
    return relevance(gradient_weighted_attention(attention, gradients, head_fusion), **options)


def gradient_rollout(attention: Tensor, gradients: Tensor, head_fusion: Any = "mean", **options: Any) -> Tensor:
    return attention_rollout(gradient_weighted_attention(attention, gradients, head_fusion), **options)


@pytest.mark.parametrize("function", [gae, gradient_rollout])
def test_the_row_from_the_top_is_the_row_of_the_whole_matrix(function):
    attention, gradients = random_pair()
    readout = torch.rand(2, 7, dtype=torch.float64)
    whole = function(attention, gradients, start_layer=2)
    row = function(attention, gradients, start_layer=2, readout=readout)
    assert whole.shape == (2, 7, 7)
    torch.testing.assert_close(row, torch.einsum("bi,bij->bj", readout, whole), rtol=0, atol=1e-12)


def test_without_positive_gradients_the_map_is_the_readout():
    attention, gradients = random_pair()
    for function in (gae, gradient_rollout):
        actual = function(attention, -gradients.abs())
        torch.testing.assert_close(actual, torch.eye(7, dtype=torch.float64).expand(2, -1, -1))


def test_gradients_that_are_hardly_there_leave_gae_finite_and_ordered():
    attention, gradients = random_pair()
    tiny = gae(attention, gradients * 1e-30, readout=torch.eye(7, dtype=torch.float64)[0])[:, 1:]
    first_order = sum((a * g * 1e-30).clamp_min(0).mean(1)[:, 0, 1:] for a, g in zip(attention, gradients, strict=True))
    torch.testing.assert_close(tiny, first_order, rtol=1e-9, atol=0)


@pytest.mark.parametrize("function", [gae, gradient_rollout])
def test_wrong_layers_are_named(function):
    attention, gradients = random_pair()
    with pytest.raises(ShapeError, match="finite"):
        function(attention, gradients * float("nan"))
    with pytest.raises(OptionError, match="start_layer from 1 to 4"):
        function(attention, gradients, start_layer=5)


@pytest.mark.parametrize(("length", "count"), [(10, 4), (7, 7), (225, 14)])
def test_cells_share_the_pixels_out_evenly(length, count):
    edges = cells.cell_edges(length, count)
    sizes = np.diff(edges)
    assert (edges[0], edges[-1], len(sizes)) == (0, length, count)
    assert sizes.max() - sizes.min() <= 1


def test_sums_over_cells_equal_a_loop():
    values = torch.rand(2, 11, 9, dtype=torch.float64)
    actual = cells.sum_cells(values, 4, 3)
    down, across = cells.cell_edges(11, 4), cells.cell_edges(9, 3)
    for row, col in itertools.product(range(4), range(3)):
        part = values[:, down[row] : down[row + 1], across[col] : across[col + 1]].sum((1, 2))
        torch.testing.assert_close(actual[:, row, col], part)


def test_cells_without_a_patch_size_are_a_fourteenth():
    assert cells.cell_grid(224, 224, None) == (14, 14)
    assert cells.cell_grid(300, 200, None) == (21, 14)
    assert cells.cell_grid(9, 30, None) == (9, 30)
    assert cells.cell_grid(256, 192, 32) == (8, 6)
    for wrong in (0, 193):
        with pytest.raises(OptionError, match=f"patch_size from 1 to 192 pixels, got {wrong}"):
            cells.cell_grid(256, 192, wrong)


def test_attention_without_a_part_in_the_logits_is_an_error_and_no_zero_map():
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit = literal_vit.timm_model()

        def forward(self, pixels: Tensor) -> Tensor:
            with torch.no_grad():
                self.vit.blocks[0](torch.randn(len(pixels), 17, 24, dtype=pixels.dtype))
            return self.vit(pixels)

    model = Detached()
    with pytest.raises(UnsupportedModelError, match="Detached runs .* without gradients"):
        recorded(model, photos()).backward()
