"""Head fusion, discard, residual and rollout against a literal reference, and their properties."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import references
from vitflow import attention_rollout
from vitflow.methods.fusion import add_residual, discard_low, raw_attention
from vitflow.methods.gradients import Values, fuse_weighted

FUSIONS = ["mean", "max", "min"]


def random_attention(layers: int, batch: int, heads: int, tokens: int, sharpness: float = 2.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(layers, batch, heads, tokens, tokens, generator=generator, dtype=torch.float64)
    return (sharpness * logits).softmax(-1)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("discard", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_rollout_equals_the_literal_definition(fusion, discard, batch):
    attention = random_attention(4, batch, 3, 11)
    for start in (1, 2, 4):
        actual = attention_rollout(attention, head_fusion=fusion, discard_ratio=discard, start_layer=start)
        for index in range(batch):
            layers = [layer[index].numpy() for layer in attention]
            expected = references.rollout(layers, how=fusion, ratio=discard, start=start)
            np.testing.assert_allclose(actual[index].numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_rollout_with_other_residuals_and_prefix_tokens(alpha, prefix):
    attention = random_attention(3, 1, 2, 9)
    actual = attention_rollout(attention, residual=alpha, discard_ratio=0.8, num_prefix_tokens=prefix)
    expected = references.rollout([a[0].numpy() for a in attention], alpha=alpha, ratio=0.8, prefix=prefix)
    np.testing.assert_allclose(actual[0].numpy(), expected, rtol=0, atol=1e-12)


def test_rollout_in_float32_agrees_to_1e_6():
    attention = random_attention(6, 2, 3, 17)
    actual = attention_rollout(attention.float(), head_fusion="max", discard_ratio=0.5)
    assert actual.dtype == torch.float32
    for index in range(2):
        expected = references.rollout([a[index].float().double().numpy() for a in attention], how="max", ratio=0.5)
        np.testing.assert_allclose(actual[index].numpy(), expected, rtol=0, atol=1e-6)


def test_the_row_product_from_the_top_is_the_row_of_the_full_product():
    attention = random_attention(5, 3, 2, 8)
    readout = torch.rand(3, 8, dtype=torch.float64)
    readout /= readout.sum(-1, keepdim=True)
    full = attention_rollout(attention, start_layer=2)
    row = attention_rollout(attention, start_layer=2, readout=readout)
    torch.testing.assert_close(row, torch.einsum("bi,bij->bj", readout, full), rtol=0, atol=1e-14)
    shared = attention_rollout(attention, readout=readout[0])
    torch.testing.assert_close(shared[0], attention_rollout(attention, readout=readout)[0])


attentions = st.builds(
    random_attention,
    layers=st.integers(1, 5),
    batch=st.integers(1, 3),
    heads=st.integers(1, 4),
    tokens=st.integers(2, 12),
    sharpness=st.sampled_from([0.0, 1.0, 5.0, 500.0]),
    seed=st.integers(0, 2**31),
)


@settings(max_examples=10, deadline=None)
@given(attentions, st.sampled_from(FUSIONS), st.floats(0, 1, exclude_max=True), st.integers(0, 2))
def test_rows_sum_to_one_and_nothing_is_nan(attention, fusion, discard, prefix):
    prefix = min(prefix, attention.shape[-1] - 1)
    actual = attention_rollout(attention, head_fusion=fusion, discard_ratio=discard, num_prefix_tokens=prefix)
    assert torch.isfinite(actual).all()
    assert (actual >= 0).all()
    torch.testing.assert_close(actual.sum(-1), torch.ones_like(actual.sum(-1)), rtol=0, atol=1e-9)


def test_discard_takes_exactly_the_smallest_of_the_patch_columns():
    fused = torch.rand(2, 8, 8, dtype=torch.float64)
    for ratio in (0.1, 0.5, 0.9, 0.99):
        kept = discard_low(fused, ratio, num_prefix_tokens=2)
        assert (kept[..., :2] == fused[..., :2]).all()
        count = int(ratio * 8 * 6)
        for image in range(2):
            assert int((kept[image, :, 2:] == 0).sum()) == count
            remaining = kept[image, :, 2:][kept[image, :, 2:] > 0]
            assert remaining.min() >= fused[image, :, 2:].flatten().sort().values[count - 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("values", [[0.5], [0.0, 0.5], [0.25, 0.5, 0.75], [-0.0, 0.0, 2.0**-120]])
@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.9])
def test_discard_among_equal_values_is_that_of_sorting(values, ratio, dtype):
    for seed in range(4):
        choice = torch.randint(len(values), (2, 9, 9), generator=torch.Generator().manual_seed(seed))
        layer = torch.tensor(values)[choice]
        for kept, single in zip(discard_low(layer.to(dtype), ratio, 1), layer.double().numpy(), strict=True):
            np.testing.assert_array_equal(kept.double(), references.discard(single, ratio, 1))


@pytest.mark.parametrize("scale", [1e-44, 1e-20, 1e30])
@pytest.mark.parametrize("residual", [0.0, 0.5])
def test_rows_of_any_size_are_normalised(scale, residual):
    layer = torch.tensor([[[2.0, 6.0], [1.0, 1.0]]]) * scale
    actual = attention_rollout([layer], residual=residual, readout=torch.tensor([1.0, 0.0]))
    expected = references.residual(layer[0].double().numpy(), residual)[:1]
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-12)


def test_a_row_that_was_discarded_whole_becomes_the_identity_row():
    fused = torch.tensor([[[0.0, 0.0], [0.5, 0.5]]])
    assert add_residual(fused, 0.0)[0].tolist() == [[1.0, 0.0], [0.5, 0.5]]


def test_value_weighting_multiplies_before_the_fusion_and_normalises_after_it():
    attention, norms = random_attention(1, 2, 3, 6)[0], torch.rand(2, 3, 6, dtype=torch.float64)
    values = Values(norms.unsqueeze(-1), torch.eye(3, dtype=torch.float64))
    for fusion in FUSIONS:
        actual = fuse_weighted(attention, fusion, True, values)
        for image in range(2):
            heads = np.stack([attention[image, h].numpy() * norms[image, h].numpy() for h in range(3)])
            expected = references.fuse(heads, fusion)
            expected /= expected.sum(-1, keepdims=True)
            np.testing.assert_allclose(actual[image].numpy(), expected, atol=1e-14)


def test_raw_attention_is_the_readout_row_of_one_layer():
    attention = random_attention(3, 2, 4, 7)
    readout = torch.full((7,), 1 / 7, dtype=torch.float64)
    torch.testing.assert_close(raw_attention(attention[1].amax(1), readout=readout), attention[1].amax(1).mean(1))
    one_token = raw_attention(attention[2][:, 2], readout=torch.eye(7, dtype=torch.float64)[3])
    torch.testing.assert_close(one_token, attention[2][:, 2, 3])
