"""Refinement against loops that follow the definition, and what it promises of any map."""

import numpy as np
import pytest
import torch

from tests import references
from vitflow.errors import ShapeError
from vitflow.methods import refinement
from vitflow.methods.refinement import Affinity, balance, co_attention, key_affinity, refine


def attention(layers: int = 3, batch: int = 2, tokens: int = 13, sharpness: float = 2.0) -> list[torch.Tensor]:
    return list((sharpness * torch.randn(layers, batch, tokens, tokens, dtype=torch.float64)).softmax(-1))


def test_co_attention_equals_the_literal_definition():
    layers = attention()
    actual = co_attention([layer[:, -12:, -12:] for layer in layers]).matrix
    for image in range(2):
        expected = references.co_attention([layer[image, 1:, 1:].numpy() for layer in layers])
        np.testing.assert_allclose(actual[image], expected, rtol=0, atol=1e-9)


def test_the_affinity_of_keys_equals_the_literal_definition():
    keys = [torch.randn(2, 9, 6, dtype=torch.float64) for _ in range(3)]  # with cosines below 0
    actual = key_affinity(keys).matrix
    for image in range(2):
        expected = references.key_affinity([layer[image].numpy() for layer in keys])
        # Some pairs of patches are hardly similar: their numbers are 1000 times as uncertain as the sums of rows.
        np.testing.assert_allclose(actual[image], expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("kind", ["attention", "keys", "both"])
def test_a_refined_map_is_the_power_of_the_affinity_times_the_map(kind, steps):
    affinity = affinity_of(kind)
    grids = torch.randn(2, 3, 4, dtype=torch.float64)
    expected = torch.linalg.matrix_power(affinity.matrix, steps) @ grids.flatten(1).unsqueeze(-1)
    np.testing.assert_allclose(refine(grids, affinity, steps).flatten(1), expected.squeeze(-1), rtol=0, atol=1e-12)


def affinity_of(kind: str) -> Affinity:
    attended = co_attention(attention(tokens=12)).attention if kind != "keys" else ()
    keys = key_affinity([torch.rand(2, 12, 8, dtype=torch.float64)]).keys if kind != "attention" else None
    return Affinity(attended, keys)


@pytest.mark.parametrize("kind", ["attention", "keys", "both"])
def test_a_constant_map_stays_constant_and_every_sum_is_kept(kind):
    affinity = affinity_of(kind)
    constant = torch.full((2, 3, 4), 0.7)
    np.testing.assert_allclose(refine(constant, affinity, 2), constant, rtol=0, atol=1e-7)
    grids = torch.rand(2, 3, 4, dtype=torch.float64)
    refined = refine(grids, affinity, 2)
    np.testing.assert_allclose(refined.sum(dim=(1, 2)), grids.sum(dim=(1, 2)), rtol=0, atol=1e-7)


def test_the_co_attention_has_no_negative_eigenvalue_where_its_root_has():
    swap = torch.tensor([[[0.01, 0.99], [0.99, 0.01]]], dtype=torch.float64)  # each attends to the other
    assert torch.linalg.eigvalsh(balance([swap])[0].matrix).min() < -0.9
    assert torch.linalg.eigvalsh(co_attention([swap]).matrix).min() > -1e-9
    # So an object that attends to the ground keeps its map, which one step of the root would turn inside out.
    assert refine(torch.tensor([[[1.0, 0.0]]]), co_attention([swap]), 1)[0, 0, 0] > 0.9
    eigenvalues = torch.linalg.eigvalsh(co_attention(attention(sharpness=4.0)).matrix)
    assert eigenvalues.min() >= -1e-9


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_map_depends_neither_on_the_batch_nor_on_layers_balanced_together(dtype, monkeypatch):
    sharp, other = attention(layers=2, batch=3, sharpness=4.0), attention(layers=2, batch=3, tokens=15)
    layers = [layer.to(dtype) for layer in (*attention(batch=3), *sharp, *other, sharp[0])]
    grids = torch.rand(3, 3, 4, dtype=torch.float64)
    together = co_attention([layer[:, -12:, -12:] for layer in layers])
    assert len(together.attention) == 1
    monkeypatch.setattr(refinement, "_TOGETHER", 1)
    for image in range(3):
        one = slice(image, image + 1)
        alone = co_attention([layer[one, -12:, -12:] for layer in layers])
        assert len(alone.attention) == len(layers)
        assert torch.equal(refine(grids, together, 1)[one], refine(grids[one], alone, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sharpness", [0.1, 2.0, 4.0])
def test_balancing_stops_at_its_tolerance_and_leaves_the_matrix_alone(sharpness, dtype):
    layer = attention(layers=1, tokens=40, sharpness=sharpness)[0].to(dtype)
    before, tolerance = layer.clone(), refinement.TOLERANCE[dtype]
    [actual] = balance([layer])
    assert torch.equal(layer, before)
    np.testing.assert_allclose(actual.matrix.sum(dim=-1), 1.0, rtol=0, atol=1.1 * tolerance)
    np.testing.assert_allclose(actual.matrix.sum(dim=-2), 1.0, rtol=0, atol=tolerance / 10)
    expected = references.balanced(layer[1].double().numpy())
    np.testing.assert_allclose(actual.matrix[0, 1], expected, rtol=20 * tolerance, atol=0)


@pytest.mark.parametrize(("size", "kinds"), [(2, 2), (4, 4), (6, 6), (49, 3), (196, 4)])
@pytest.mark.parametrize("dtype", refinement.TOLERANCE)
def test_few_patches_and_few_kinds_of_patches_are_balanced(size, kinds, dtype):
    """Patches of a kind are equal, as in a drawing with plain colours, so that there are few directions."""
    kind = torch.arange(size) % kinds
    layer = attention(layers=1, batch=40, tokens=kinds)[0].to(dtype)[:, kind][:, :, kind]
    [actual] = balance([layer])
    np.testing.assert_allclose(actual.matrix.sum(dim=-1), 1.0, rtol=0, atol=1.1 * refinement.TOLERANCE[dtype])
    expected = np.stack([references.balanced(each) for each in layer[:4].double().numpy()])
    np.testing.assert_allclose(actual.matrix[0, :4], expected, rtol=20 * refinement.TOLERANCE[dtype], atol=0)


def test_sums_that_float32_cannot_hold_are_balanced():
    layers = [layer.float() for layer in attention()]
    layers[1][0, :, 3] *= 1e-40
    actual = torch.cat([group.matrix for group in balance(layers)])
    [expected] = balance([layers[1].double()])
    np.testing.assert_allclose(actual[1:2, :1], expected.matrix[:, :1], rtol=1e-9, atol=0)
    np.testing.assert_allclose(actual[:, 1:], balance([layer[1:] for layer in layers])[0].matrix, rtol=1e-4, atol=0)
    np.testing.assert_allclose(actual[::2], balance(layers[::2])[0].matrix, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_layer_whose_patches_attend_to_nothing_is_left_out_of_the_mean_of_its_image_alone(dtype):
    layers = [layer.to(dtype) for layer in attention(tokens=4)]
    layers[1][1, 2] = 0.0
    both, values = co_attention(layers), torch.rand(2, 4, dtype=dtype)
    alone = [co_attention([layer[:1] for layer in layers]), co_attention([layer[1:] for layer in layers[::2]])]
    rounding = 1e-9 if dtype is torch.float64 else 1e-6
    np.testing.assert_allclose(both.matrix, torch.cat([each.matrix for each in alone]), rtol=rounding, atol=0)
    expected = torch.cat([each.spread(values[[image]]) for image, each in enumerate(alone)])
    torch.testing.assert_close(both.spread(values).to(expected), expected, rtol=rounding, atol=0)
    uniform = torch.full((2, 4, 4), 0.25)
    uniform[1, 2] = 0.0  # only counted for the other image
    assert co_attention([uniform, *layers[:1]]).nearly_uniform.tolist() == [False, False]
    assert co_attention([uniform, 2 * uniform]).nearly_uniform[0]


def test_images_without_a_balanced_layer_are_known_and_others_refined():
    layers, keys = attention(tokens=4), torch.rand(2, 4, 6, dtype=torch.float64)
    affinity, similar = co_attention(layers), key_affinity([keys])
    for layer in layers:
        layer[1, 2] = 0.0
    assert co_attention(layers).undefined.tolist() == [False, True]
    np.testing.assert_allclose(co_attention(layers).matrix[0], affinity.matrix[0], rtol=1e-9)
    keys[0, 1] = 0.0
    assert key_affinity([keys]).undefined.tolist() == [True, False]
    np.testing.assert_allclose(key_affinity([keys]).matrix[1], similar.matrix[1], rtol=1e-9)
    assert Affinity(co_attention(layers).attention, key_affinity([keys]).keys).undefined.all()
    with pytest.raises(ShapeError, match="at least one layer, got 1 layers"):
        co_attention([layers[0][1:]])
    with pytest.raises(ShapeError, match="nonzero keys"):
        key_affinity([keys[:1]])


def test_a_uniform_affinity_is_known_for_one():
    uniform = [torch.full((2, 5, 5), 0.2) + 0.001 * torch.rand(2, 5, 5)]
    assert co_attention(uniform).nearly_uniform.tolist() == [True, True]
    assert not co_attention(attention()).nearly_uniform.any()
    assert key_affinity([torch.ones(1, 6, 3)]).nearly_uniform.all()


def test_sums_are_kept_where_balancing_does_not_come_to_an_end(monkeypatch):
    matrix = torch.rand(1, 8, 8, dtype=torch.float64)
    matrix[:, :4, 4:] *= 1e-5
    matrix[:, 4:, :4] *= 1e-5
    monkeypatch.setattr(refinement, "ROUNDS", 1)
    [actual] = balance([matrix])
    assert (actual.matrix.sum(dim=-1) - 1).abs().max() > 1e-4
    ones = torch.ones(1, 8, dtype=torch.float64)
    np.testing.assert_allclose(actual.spread(ones)[0], ones, rtol=0, atol=1e-14)
    np.testing.assert_allclose(actual.symmetric[0].sum(dim=-2), ones, rtol=0, atol=1e-14)
    values = torch.rand(1, 8, dtype=torch.float64)
    expected = (actual.symmetric[0] @ values.unsqueeze(-1)).squeeze(-1)
    np.testing.assert_allclose(actual.spread(values)[0], expected, rtol=0, atol=1e-14)
