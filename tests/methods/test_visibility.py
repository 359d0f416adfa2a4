"""Attention among visible keys: causal, windowed, padded; and relative to what uniform attention among these gives."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import references
from vitflow import attention_flow, attention_rollout

TOKENS, LAYERS = 9, 4


def causal(tokens: int = TOKENS) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def sliding(window: int = 3) -> Tensor:
    return causal() & ~torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(-window)


def prefix(length: int = 4) -> Tensor:
    seen = causal()
    seen[:length, :length] = True
    return seen


def left_padded(padding: int = 2) -> Tensor:
    seen = causal()
    seen[:, :padding] = False
    return seen


SEEN = {"causal": causal(), "sliding window": sliding(), "left padding": left_padded(), "prefix": prefix()}


def attention(seen: Tensor, *, layers: int = LAYERS, heads: int = 2) -> list[Tensor]:
    """Random attention [1, heads, tokens, tokens] among visible keys; queries that see nothing have zeros."""
    scores = torch.randn(layers, 1, heads, *seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    return list(scores.softmax(dim=-1).nan_to_num(0.0))


def uniform(seen: Tensor) -> Tensor:
    return (seen.double() / seen.sum(dim=-1, keepdim=True).clamp_min(1))[None, None]


def reachable(seen: Tensor, layers: int = LAYERS) -> Tensor:
    """Which tokens each token draws on, itself left out."""
    step = (seen | torch.eye(len(seen), dtype=torch.bool)).double()
    reached = torch.linalg.matrix_power(step, layers) > 0
    return reached & ~torch.eye(len(seen), dtype=torch.bool)


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize("method", ["rollout", "flow"])
def test_uniform_attention_gives_a_uniform_row_relative_to_the_receptive_field(name, method):
    layers = [uniform(SEEN[name])] * LAYERS
    if method == "rollout":
        rows = attention_rollout(layers, causal="receptive_field")[0]
    else:
        flows = [attention_flow(layers, source=token, causal="receptive_field") for token in range(TOKENS)]
        rows = torch.cat([flow.normalized for flow in flows])
    assert rows.dtype == torch.float64
    expected = reachable(SEEN[name]).double()
    expected /= expected.sum(dim=-1, keepdim=True).clamp_min(1)
    assert (rows - expected).abs().max() <= 1e-12


def test_uniform_attention_stays_uniform_deep_and_long():
    layers = [uniform(causal(200))] * 32
    row = attention_rollout(layers, causal="receptive_field")[0, -1]
    assert (row[:-1] * 199 - 1).abs().max() <= 1e-12 * 199
    assert attention_rollout(layers, causal="raw")[0, -1, -1] < 1e-9  # its own share, which would drown the rest


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize("ratio", [0.0, 0.4])
def test_both_equal_the_literal_quotient_of_two_products(name, ratio):
    layers = attention(SEEN[name])
    literal = references.among_visible([layer[0].numpy() for layer in layers], SEEN[name].numpy(), ratio)
    even = references.among_visible([uniform(SEEN[name])[0].numpy()] * LAYERS, SEEN[name].numpy(), 0.0)
    raw = attention_rollout(layers, causal="raw", discard_ratio=ratio, num_prefix_tokens=0)
    np.testing.assert_allclose(raw[0].numpy(), literal, atol=1e-14)
    actual = attention_rollout(layers, causal="receptive_field", discard_ratio=ratio, num_prefix_tokens=0)
    np.testing.assert_allclose(actual[0].numpy(), references.relative(literal, even), atol=1e-13)
    for token in (3, TOKENS - 1):
        readout = torch.eye(TOKENS)[token]
        row = attention_rollout(
            layers, causal="receptive_field", discard_ratio=ratio, num_prefix_tokens=0, readout=readout
        )
        torch.testing.assert_close(row[0], actual[0, token], atol=1e-14, rtol=0)


def test_flow_relative_to_the_receptive_field_is_the_quotient_of_two_flows():
    seen, layers = SEEN["prefix"], attention(SEEN["prefix"], layers=2)
    top, bottom = (references.residual(layer[0].mean(dim=0).numpy(), 0.5) for layer in reversed(layers))
    even = references.residual(uniform(seen)[0, 0].numpy(), 0.5)
    token = TOKENS - 1
    literal, reference = np.minimum(top[token, :, None], bottom).sum(0), np.minimum(even[token, :, None], even).sum(0)
    result = attention_flow(layers, source=token, causal="receptive_field")
    np.testing.assert_allclose(result.values[0].numpy(), literal, atol=1e-12)
    expected = references.relative(literal[None], reference[None], entry=[token])[0]
    np.testing.assert_allclose(result.normalized[0].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("how", [None, "raw", "receptive_field"])
def test_padding_changes_nothing(side, how):
    """Padding attends as it likes, as where masks leave its rows alone."""
    seen = causal(6) if how else torch.ones(6, 6, dtype=torch.bool)
    layers = attention(seen)
    at = slice(3, 9) if side == "left" else slice(0, 6)
    mask = torch.zeros(1, TOKENS, dtype=torch.long)
    mask[0, at] = 1
    padded = []
    for layer in layers:
        wide = torch.rand(1, 2, TOKENS, TOKENS, dtype=torch.float64)
        wide[..., at, :] = 0
        wide[..., at, at] = layer
        padded.append(wide)
    options = {"discard_ratio": 0.3, "num_prefix_tokens": 0, "causal": how}
    everything = torch.ones(1, 6)
    expected = attention_rollout(layers, attention_mask=everything, **options)
    actual = attention_rollout(padded, attention_mask=mask, **options)
    torch.testing.assert_close(actual[:, at, at], expected, atol=1e-14, rtol=0)
    assert actual[:, at].sum() == pytest.approx(expected.sum())
    source = 5 + at.start
    alone = attention_flow(layers, source=5, attention_mask=everything, **options)
    flow = attention_flow(padded, source=source, attention_mask=mask, **options)
    torch.testing.assert_close(flow.values[:, at], alone.values, atol=1e-12, rtol=0)
    torch.testing.assert_close(flow.normalized[:, at], alone.normalized, atol=1e-12, rtol=0)
    torch.testing.assert_close(flow.cuts[:, at], alone.cuts, atol=1e-12, rtol=0)


def test_what_may_be_seen_can_be_reported_where_attention_does_not_show_it():
    layers = attention(causal())
    for layer in layers:
        layer[..., 5, 2] = 0  # underflown, or cut off by value weighting
    reported = attention_rollout(layers, causal="receptive_field", visible=causal()[None])
    guessed = attention_rollout(layers, causal="receptive_field")
    assert not torch.allclose(reported, guessed)
    each = attention_rollout(layers, causal="receptive_field", visible=[causal()[None]] * LAYERS)
    assert torch.equal(reported, each)
