"""The compiled steps against the plain formulas and the literal reference; where they are used, and where not."""

import gc

import numpy as np
import pytest
import timm
import torch
from torch import Tensor

from tests import references
from tests.recording.test_recorder import tiny
from vitflow import attention_rollout, record_attention
from vitflow.errors import OptionError
from vitflow.methods import onepass
from vitflow.methods import values as value_weighting
from vitflow.methods.fusion import HEAD_FUSIONS, add_residual, discard_low, fuse_heads, normalize_rows
from vitflow.methods.values import Values, fuse_weighted, gram_matrix


@pytest.fixture(params=["compiled", "before numba is loaded"], autouse=True)
def ways(request, monkeypatch):
    """Both ways in which a processor takes the steps."""
    monkeypatch.setattr(onepass, "worth_compiling", lambda numbers: request.param == "compiled")


@pytest.mark.parametrize("ratio", [0.0, 0.9])
@pytest.mark.parametrize("fusion", HEAD_FUSIONS)
def test_numba_changes_nothing_but_the_time(fusion, ratio, monkeypatch):
    lengths, attention = torch.randn(2, 3, 197, 197), torch.stack(stochastic(3, 2, 197), dim=1)
    row = torch.rand(2, 197)
    found = []
    for worth in (True, False):
        monkeypatch.setattr(onepass, "worth_compiling", lambda numbers, worth=worth: worth)
        fused = onepass.fuse_products(lengths, attention, fusion)
        found.append((fused, carry(row, [fused, fused], ratio)))
    for compiled, plain in zip(*found, strict=True):
        assert (compiled != plain).sum() <= 2  # numbers on the border between two of float32


def carry(row: Tensor, layers: list[Tensor], ratio: float, alpha: float = 0.5, prefix: int = 1) -> Tensor:
    return onepass.carry_rows(row, layers, discard_ratio=ratio, residual=alpha, num_prefix_tokens=prefix)


def literal_row(row: Tensor, layers: list[Tensor], ratio: float, alpha: float, prefix: int) -> np.ndarray:
    found = []
    for index, start in enumerate(row.double().numpy()):
        heads = [layer[index : index + 1].double().numpy() for layer in layers]
        found.append(start @ references.rollout(heads, ratio=ratio, alpha=alpha, prefix=prefix))
    return np.stack(found)


def stochastic(layers: int, batch: int, tokens: int, sharpness: float = 3.0) -> list[Tensor]:
    return list((sharpness * torch.randn(layers, batch, tokens, tokens)).softmax(-1))


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.9, 0.99])
def test_the_row_equals_the_literal_definition(ratio, alpha, prefix):
    layers, row = stochastic(3, 3, 13), torch.rand(3, 13)
    row[1] = 0.0
    row[1, 4] = 1.0  # most rows of the top layer count nothing
    np.testing.assert_allclose(
        carry(row, layers, ratio, alpha, prefix), literal_row(row, layers, ratio, alpha, prefix), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("kind", ["real", "half zeros", "rounded", "constant", "negative zeros"])
@pytest.mark.parametrize("count", [1, 5, 700, 1000, 1023, 1024])
def test_the_limit_of_what_is_discarded_is_that_of_sorting(kind, count):
    values = torch.softmax(3 * torch.randn(32, 35), -1).numpy()
    if kind == "half zeros":
        values[values < np.median(values)] = 0.0
    elif kind == "rounded":
        values = np.round(values, 2)
    elif kind == "constant":
        values[:] = 0.1
    elif kind == "negative zeros":
        values[values < np.median(values)] = -0.0
    bits, stay = onepass._select(values.view(np.int32), 3, count)
    ordered = np.sort(values[:, 3:], axis=None)
    limit = np.int32(bits).view(np.float32)
    assert limit == ordered[count - 1]
    assert stay == np.count_nonzero(ordered[count:] == limit)


@pytest.mark.parametrize("values", [[0.5], [0.0, 0.5], [0.25, 0.5, 0.75], [0.0, 1e-45, 3e-45]])
@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.9])
def test_ties_go_by_position(values, ratio):
    """Matrices of few different values, so that the limit falls among equals."""
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        choice = torch.randint(len(values), (1, 9, 9), generator=generator)
        layer = torch.tensor(values)[choice]
        for token in range(9):
            row = torch.eye(9)[token : token + 1]
            expected = row.double() @ add_residual(discard_low(layer.double(), ratio, 1), 0.0)[0]
            np.testing.assert_allclose(carry(row, [layer], ratio, 0.0), expected, rtol=2e-6, atol=0)


def test_the_attention_itself_is_left_alone():
    layer = torch.full((1, 4, 4), 0.25)
    carry(torch.ones(1, 4), [layer], 0.5)
    assert (layer == 0.25).all()


def test_a_row_that_was_discarded_whole_is_the_identitys():
    layer = torch.tensor([[[0.0, 0.1, 0.1], [0.0, 0.2, 0.2], [0.0, 0.9, 0.9]]])
    for alpha in (0.0, 0.5):
        assert carry(torch.tensor([[0.0, 1.0, 0.0]]), [layer], 0.7, alpha).tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-20, 1e20, 1e30])
def test_rows_of_any_size_are_normalised(scale):
    layer = torch.tensor([[[2.0, 6.0], [1.0, 1.0]]]) * scale
    found = carry(torch.tensor([[1.0, 0.0]]), [layer], 0.0, 0.0)
    np.testing.assert_allclose(found, [[0.25, 0.75]], rtol=0.2 if scale == 1e-44 else 1e-6)


def test_threads_change_nothing():
    layers, row = stochastic(4, 7, 31), torch.rand(7, 31)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = carry(row, layers, 0.9)
        torch.set_num_threads(3)
        together = carry(row, layers, 0.9)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, together)


def test_rollout_takes_the_short_way_only_where_it_may(monkeypatch):
    calls = []
    original = onepass.carry_rows
    monkeypatch.setattr(onepass, "carry_rows", lambda *a, **k: calls.append(1) or original(*a, **k))
    attention, readout = torch.stack(stochastic(2, 2, 9)).unsqueeze(2), torch.full((9,), 1 / 9)
    short = attention_rollout(attention, discard_ratio=0.5, readout=readout)
    assert len(calls) == 1
    exact = attention_rollout(attention.double(), discard_ratio=0.5, readout=readout.double())
    asked = attention.clone().requires_grad_()
    differentiable = attention_rollout(asked, discard_ratio=0.5, readout=readout)
    assert len(calls) == 1
    differentiable.sum().backward()
    assert torch.isfinite(asked.grad).all()
    torch.testing.assert_close(short.double(), exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(short, differentiable.detach(), rtol=0, atol=1e-6)
    with torch.no_grad():
        attention_rollout(asked, readout=readout)
    assert len(calls) == 2


@pytest.mark.parametrize("option", [{"discard_ratio": 1.0}, {"residual": -0.5}, {"residual": float("nan")}])
def test_options_are_checked_on_the_short_way_too(option):
    with pytest.raises(OptionError, match=next(iter(option))):
        attention_rollout([torch.full((1, 3, 3), 1 / 3)], readout=torch.ones(3), **option)


# --- Fusing along the output ---


def a_layer(batch: int, heads: int, queries: int, keys: int, width: int = 4, out: int = 9):
    attention = (3 * torch.randn(batch, heads, queries, keys)).softmax(-1)
    # Value vectors as a model has them: slices of one tensor.
    vectors = torch.randn(batch, keys, 3, heads, width).permute(2, 0, 3, 1, 4)[2]
    return attention, Values(vectors, torch.randn(out, heads * width))


def plain(attention: Tensor, values: Values, fusion: str) -> Tensor:
    exact = Values(values.vectors.double(), values.projection.double())
    return normalize_rows(fuse_heads(exact.weigh(attention.double(), "output"), fusion))


@pytest.mark.parametrize("fusion", HEAD_FUSIONS)
@pytest.mark.parametrize("heads", [1, 2, 3, 6])
@pytest.mark.parametrize(("queries", "keys"), [(11, 11), (5, 12)])
def test_fused_along_the_output_equals_the_plain_formula(heads, queries, keys, fusion):
    attention, values = a_layer(3, heads, queries, keys)
    expected = plain(attention, values, fusion)
    for mixed in (None, attention @ values.vectors):
        found = fuse_weighted(attention, fusion, "output", values, mixed=mixed)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5 if fusion == "min" else 3e-6)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_fused_products_equal_the_plain_formula(heads):
    lengths, attention = torch.randn(2, heads, 7, 7), torch.rand(2, heads, 7, 7)
    lengths[0, :, 3] = -1.0  # nothing is left of this row
    for fusion in HEAD_FUSIONS:
        expected = normalize_rows(fuse_heads(lengths.clamp_min(0) * attention, fusion))
        torch.testing.assert_close(onepass.fuse_products(lengths, attention, fusion), expected, rtol=1e-6, atol=0)
    assert onepass.fuse_products(lengths[:, :, :3], attention[:, :, :3], "max").shape == (2, 3, 7)
    assert (onepass.fuse_products(-lengths[:1, :, 3:4].abs(), attention[:1, :, 3:4], "max") == 0).all()


def test_attention_that_was_mixed_may_be_negative():
    lengths, attention = torch.randn(2, 3, 7, 7), torch.rand(2, 3, 7, 7) - 0.2
    attention[1, :, 2] = -1.0
    for fusion in HEAD_FUSIONS:
        expected = normalize_rows(fuse_heads(lengths.clamp_min(0) * attention, fusion))
        found = onepass.fuse_products(lengths, attention, fusion)
        if fusion != "min":  # whose sums nearly cancel out
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(found[1, 2], torch.eye(7)[2])  # nothing above zero
    assert torch.isnan(onepass.fuse_products(torch.ones(1, 1, 1, 2), torch.tensor([[[[1.0, -1.0]]]]), "max")).all()


def test_rows_of_the_smallest_numbers_are_normalised():
    tiny = torch.full((1, 2, 2, 2), 1e-42)
    torch.testing.assert_close(onepass.fuse_products(torch.ones_like(tiny), tiny, "max"), torch.full((1, 2, 2), 0.5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(bad):
    attention, values = a_layer(2, 3, 6, 6)
    attention[1, 0, 2, 3] = bad
    assert not torch.isfinite(fuse_weighted(attention, "max", "output", values)[1, 2]).all()
    attention, values = a_layer(2, 3, 6, 6)
    values.vectors[0, 1, 4] = bad
    assert not torch.isfinite(fuse_weighted(attention, "max", "output", values)[0]).all()


def test_gradients_still_pass():
    attention, values = a_layer(1, 2, 5, 5)
    asked = attention.clone().requires_grad_()
    fused = fuse_weighted(asked, "max", "output", values)
    fused[..., 0].sum().backward()
    assert (asked.grad != 0).any()
    torch.testing.assert_close(fused.detach(), fuse_weighted(attention, "max", "output", values), rtol=0, atol=1e-6)


def test_under_inference_mode_and_outside():
    with torch.inference_mode():
        attention, values = a_layer(2, 3, 8, 8, out=12)
        inside = fuse_weighted(attention, "max", "output", values)
        attention_rollout([inside], readout=torch.full((8,), 1 / 8))
    outside = Values(values.vectors.clone(), values.projection.clone())
    assert torch.equal(fuse_weighted(attention.clone(), "max", "output", outside), inside)


# --- The matrix that is kept ---


def test_the_gram_matrix_is_made_once():
    weights, owner = torch.randn(6, 8), torch.nn.Identity()
    first = gram_matrix(weights, owner)
    torch.testing.assert_close(first, weights.T @ weights)
    assert gram_matrix(weights, owner) is first
    half = torch.nn.Identity()
    assert gram_matrix(weights.half().float().clone(), half) is gram_matrix(weights.half().float(), half)


@pytest.mark.parametrize("change", ["in place", "behind autograd's back", "one weight", "rows swapped", "none"])
def test_changed_weights_are_noticed(change):
    weights, owner = torch.nn.Parameter(torch.randn(6, 8)), torch.nn.Identity()
    gram_matrix(weights, owner)
    with torch.no_grad():
        if change == "in place":
            weights.mul_(1.001)
        elif change == "behind autograd's back":
            weights.data.add_(torch.randn(6, 8))
        elif change == "one weight":
            weights.data[3, 5] += 0.01
        elif change == "rows swapped":
            weights.data[:, [1, 4]] = weights.data[:, [4, 1]]
    torch.testing.assert_close(gram_matrix(weights, owner), (weights.T @ weights).detach())


@pytest.mark.parametrize("block", ["Block", "ParallelThingsBlock"])
def test_what_is_kept_lives_as_long_as_the_model(block, monkeypatch):
    monkeypatch.setattr(value_weighting, "_kept", type(value_weighting._kept)())
    model, pixels = tiny(block_fn=getattr(timm.models.vision_transformer, block)), torch.randn(2, 3, 32, 32)
    for _ in range(3):
        with torch.no_grad(), record_attention(model, head_fusion="max", value_weighted="output"):
            model(pixels)
    assert len(value_weighting._kept) == 3  # one a layer
    kept = sum(matrix.nbytes for _, matrix in value_weighting._kept.values())
    assert kept <= sum(parameter.nbytes for parameter in model.parameters()) / 6
    model = None
    gc.collect()
    assert len(value_weighting._kept) == 0


def test_too_many_channels_go_without(monkeypatch):
    attention, values = a_layer(2, 3, 7, 7)
    with_it = fuse_weighted(attention, "max", "output", values)
    monkeypatch.setattr(value_weighting, "MAX_CHANNELS", 8)
    assert gram_matrix(values.projection, torch.nn.Identity()) is None
    torch.testing.assert_close(fuse_weighted(attention, "max", "output", values), with_it, rtol=0, atol=3e-6)
