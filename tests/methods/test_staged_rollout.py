"""Rollout through windows and stages, held against dense matrices between all tokens, built window by window."""

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from tests import references
from tests.methods.test_gradients import with_targets
from vitflow import Explainer, record_attention
from vitflow.errors import UnsupportedModelError
from vitflow.explaining import maps
from vitflow.explaining.maps import TargetedTrace
from vitflow.methods import TokenLayout
from vitflow.methods.staged_rollout import LayerTokens, carry, staged_rollout
from vitflow.models.info import read_model_info
from vitflow.models.outputs import Binding
from vitflow.registry.method_table import get_method

SIDE = 64  # of the image; patches of 4 pixels make 16 × 16 tokens, merged to 8 × 8 for the second stage


def swin(version: int) -> nn.Module:
    """A small Swin with two stages of two blocks, the second of each shifted, with random weights in float64."""
    torch.manual_seed(version)
    model = {1: timm.models.swin_transformer.SwinTransformer, 2: timm.models.swin_transformer_v2.SwinTransformerV2}[
        version
    ](img_size=SIDE, window_size=4, embed_dim=12, depths=(2, 2), num_heads=(2, 3), num_classes=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model.double().eval()


def literal_layers(model: nn.Module, pixels: Tensor) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Per layer: probabilities [windows, heads, n, n] of one image, each window's tokens, and the grid's side."""
    actual, hooks, seen = [], [], {}
    for name, module in model.named_modules():
        if type(module).__name__ == "WindowAttention":
            module.fused_attn = False
            hooks.append(
                module.attn_drop.register_forward_hook(lambda _m, args, _o, name=name: seen.update({name: args[0]}))
            )
    with torch.no_grad():
        model(pixels)
    for hook in hooks:
        hook.remove()
    for stage_number, stage in enumerate(model.layers):
        side = SIDE // 4 // 2**stage_number
        for number, block in enumerate(stage.blocks):
            size, shift = block.window_size[0], block.shift_size[0]
            corners = [(top, left) for top in range(0, side, size) for left in range(0, side, size)]
            # The image is rolled up and to the left by the shift, so that a window begins `shift` further.
            tokens = [
                [(top + i + shift) % side * side + (left + j + shift) % side for i in range(size) for j in range(size)]
                for top, left in corners
            ]
            probabilities = seen[f"layers.{stage_number}.blocks.{number}.attn"].numpy()
            actual.append((probabilities, np.array(tokens), side))
    return actual


def dense_rollout(
    layers: list[tuple[np.ndarray, np.ndarray, int]],
    readout: np.ndarray,
    how: str,
    ratio: float,
    alpha: float,
    start: int,
) -> np.ndarray:
    """qᵀ Â_L ⋯ Â_s with explicit N × N matrices, and explicit matrices for the merges between stages."""
    row = readout
    for number in range(len(layers), start - 1, -1):
        probabilities, tokens, side = layers[number - 1]
        if len(row) < side * side:  # a merge: each of the four children has an equal share of its parent
            small = side // 2
            merge = np.zeros((small * small, side * side))
            for i in range(side):
                for j in range(side):
                    merge[i // 2 * small + j // 2, i * side + j] = 0.25
            row = row @ merge
        matrix = np.zeros((side * side, side * side))
        fused = np.stack([references.fuse(window, how) for window in probabilities])
        kept = fused.ravel().copy()
        kept[np.argsort(kept, kind="stable")[: int(np.floor(ratio * kept.size))]] = 0.0
        for window, places in zip(kept.reshape(fused.shape), tokens, strict=True):
            for i, query in enumerate(places):
                for j, key in enumerate(places):
                    matrix[query, key] += window[i, j]
        row = row @ references.residual(matrix, alpha)
    return row


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("how", "ratio", "alpha", "start"),
    [("mean", 0.0, 0.5, 1), ("max", 0.9, 0.5, 1), ("min", 0.3, 0.2, 2), ("mean", 0.0, 0.5, 3)],
)
def test_rollout_through_swin_is_the_dense_product(version, how, ratio, alpha, start):
    model, pixels = swin(version), torch.randn(3, 3, SIDE, SIDE, dtype=torch.float64)
    with torch.no_grad(), record_attention(model) as trace:
        model(pixels)
    options = {"head_fusion": how, "discard_ratio": ratio, "residual": alpha, "start_layer": start}
    actual = maps.rollout(with_targets(trace), value_weighted=False, patch=None, **options).grids
    side = 16 if start < 3 else 8
    assert actual.shape == (3, side, side)
    for image in range(3):
        layers = literal_layers(model, pixels[image : image + 1])
        expected = dense_rollout(layers, np.full(64, 1 / 64), how, ratio, alpha, start)
        np.testing.assert_allclose(actual[image].numpy().ravel(), expected, rtol=0, atol=1e-6 * expected.max())
        assert expected.max() > 1.05 * expected.min()  # the maps say something


def test_windows_fused_while_the_model_runs_are_those_fused_afterwards():
    model, pixels = swin(1), torch.randn(2, 3, SIDE, SIDE, dtype=torch.float64)
    with torch.no_grad(), record_attention(model) as whole:
        model(pixels)
    with torch.no_grad(), record_attention(model, head_fusion="max", value_weighted=True) as streamed:
        model(pixels)
    with torch.no_grad(), record_attention(model, values=True) as valued:
        model(pixels)
    assert [layer.tokens.windows for layer in whole.layers] == [16, 16, 4, 4]
    for kept, expected in zip(
        streamed.fused("max", value_weighted=True), valued.fused("max", value_weighted=True), strict=True
    ):
        torch.testing.assert_close(kept, expected)


def test_a_marked_window_lies_on_the_right_pixels_of_the_photograph():
    model = swin(1).float()
    explainer = Explainer(
        model, data_config={"input_size": (3, SIDE, SIDE), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
    )
    image = torch.randint(0, 256, (128, 128, 3), generator=torch.Generator().manual_seed(0)).byte().numpy()
    saliency = explainer.explain(
        image, method="rollout", start_layer=3, patch=(1, 6), preset="paper", residual=0.0
    )  # the second stage alone: 8 × 8 tokens in windows of 4 × 4, both blocks unshifted or shifted by 2
    assert saliency.grid.shape == (8, 8)
    heatmap = saliency.heatmap
    assert heatmap.shape == (128, 128)
    brightest = np.unravel_index(np.argmax(saliency.grid), (8, 8))
    row, col = (int(np.argmax(heatmap) // 128), int(np.argmax(heatmap) % 128))
    assert (row // 16, col // 16) == brightest


@pytest.mark.parametrize("method", ["gradient_rollout", "gae", "attention"])
def test_class_specific_methods_go_through_windows(method):
    model, pixels = swin(1), torch.randn(2, 3, SIDE, SIDE, dtype=torch.float64)
    with record_attention(model, gradients=True, values=True) as trace:
        model(pixels)
    config = {"input_size": (3, SIDE, SIDE), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    info = read_model_info(Binding(model, data_config=config))
    trace = TargetedTrace.of(trace, torch.tensor([1, 3]), run=model, model_info=info)
    options = get_method(method).function_options(get_method(method).complete({"preset": "paper"}))
    actual = getattr(maps, method)(trace, **options).grids
    attentions = [heads.detach() for heads in trace.heads()]
    gradients = trace.backward(torch.tensor([1, 3])).attentions if method != "attention" else attentions
    for image in range(2):
        layers = literal_layers(model, pixels[image : image + 1])
        row = np.full(64, 1 / 64)
        for number in (4, 3, 2, 1):
            probabilities, tokens, side = layers[number - 1]
            windows = len(tokens)
            entry = gradients[number - 1].reshape(2, windows, *gradients[number - 1].shape[1:])[image].numpy()
            product = (
                np.maximum(probabilities * entry, 0.0).mean(axis=1)
                if method != "attention"
                else probabilities.mean(axis=1)
            )
            matrix = np.zeros((side * side, side * side))
            for window, places in zip(product, tokens, strict=True):
                matrix[np.ix_(places, places)] += window
            if len(row) < side * side:
                row = np.kron(row.reshape(side // 2, -1), np.full((2, 2), 0.25)).ravel()
            if method == "attention":
                row = row @ matrix
                break
            row = row @ (np.eye(side * side) + matrix) if method == "gae" else row @ references.residual(matrix, 0.5)
        np.testing.assert_allclose(actual[image].numpy().ravel(), row, rtol=0, atol=1e-6 * row.max())


FINE, COARSE, TWO, THREE, CLASS = (TokenLayout(*one) for one in ((0, 2, 2), (0, 1, 1), (0, 1, 2), (0, 1, 3), (1, 1, 2)))
OVERLAP, PADDED = torch.tensor([[0, 1], [1, 2]]), torch.tensor([[0, 1, -1]])


@pytest.mark.parametrize(
    ("entry", "weights", "readout", "expected"),
    [
        (  # windows {0, 1} and {1, 2}: token 1 attends through both, and its row is their sum
            LayerTokens(THREE, THREE, OVERLAP, OVERLAP),
            [[[0.9, 0.1], [0.4, 0.6]], [[0.3, 0.7], [0.2, 0.8]]],
            [0.2, 0.5, 0.3],
            np.array([0.2, 0.5, 0.3])
            @ references.residual(np.array([[0.9, 0.1, 0], [0.4, 0.9, 0.7], [0, 0.2, 0.8]]), 0.5),
        ),
        (  # padding passes nothing on
            LayerTokens(TWO, TWO, PADDED, PADDED),
            [[[0.5, 0.1, 0.4], [0.2, 0.2, 0.6], [0.0, 0.0, 1.0]]],
            [1.0, 0.0],
            references.residual(np.array([[0.5, 0.1], [0.2, 0.2]]), 0.5)[0],
        ),
        (  # class attention: the class token alone attends, and the patches pass unchanged
            LayerTokens(CLASS, CLASS, torch.tensor([[0]]), torch.tensor([[0, 1, 2]])),
            [[[0.2, 0.3, 0.5]]],
            [0.5, 0.25, 0.25],
            [0.5 * 0.6, 0.25 + 0.5 * 0.15, 0.25 + 0.5 * 0.25],
        ),
        # four tokens attend to one key that stands for all of them
        (LayerTokens(FINE, COARSE), [[[1.0]] * 4], [1.0, 0, 0, 0], [0.5 + 0.125, 0.125, 0.125, 0.125]),
        # a pooled query hands its row to the finer keys
        (LayerTokens(COARSE, FINE), [[[0.1, 0.2, 0.3, 0.4]]], [1.0], [0.175, 0.225, 0.275, 0.325]),
    ],
    ids=["overlap", "padding", "class attention", "pooled keys", "pooled queries"],
)
def test_a_layer_equals_its_matrix_written_out(entry, weights, readout, expected):
    weights, readout = (torch.tensor(one, dtype=torch.float64) for one in (weights, readout))
    actual, layout = staged_rollout([weights[None]], [entry], readout=readout[None])
    assert layout == (FINE if FINE in (entry.queries, entry.keys) else entry.keys)
    np.testing.assert_allclose(actual[0], expected, atol=1e-12)


@pytest.mark.parametrize(
    ("source", "target"), [((1, 3, 5), (1, 6, 10)), ((0, 4, 4), (0, 3, 3)), ((2, 27, 27), (2, 14, 14))]
)
def test_carrying_keeps_the_sum_and_the_places(source, target):
    source, target = TokenLayout(*source), TokenLayout(*target)
    row = torch.rand(2, source.num_tokens, dtype=torch.float64)
    actual = carry(row, source, target)
    torch.testing.assert_close(actual.sum(dim=1), row.sum(dim=1))
    fine = 4 * source.rows * target.rows // 2, 4 * source.cols * target.cols // 2

    def drawn(values: Tensor, layout: TokenLayout) -> np.ndarray:
        grid = layout.to_grid(values)[0].numpy() / (fine[0] // layout.rows * (fine[1] // layout.cols))
        return np.repeat(np.repeat(grid, fine[0] // layout.rows, axis=0), fine[1] // layout.cols, axis=1)

    image = drawn(row, source)
    expected = image.reshape(target.rows, fine[0] // target.rows, target.cols, fine[1] // target.cols).sum(axis=(1, 3))
    np.testing.assert_allclose(target.to_grid(actual)[0], expected, atol=1e-12)


def test_a_class_token_that_joins_late_takes_its_share_with_it():
    actual = carry(torch.tensor([[0.4, 0.6]]), TokenLayout(1, 1, 1), TokenLayout(0, 1, 1))
    torch.testing.assert_close(actual, torch.tensor([[0.6]]))


def test_another_number_of_prefix_tokens_is_refused_because_the_one_that_stays_is_unknown():
    for counts in ((4, 1), (1, 4)):
        source, target = (TokenLayout(count, 1, 1) for count in counts)
        with pytest.raises(UnsupportedModelError, match=f"from {counts[1]} to {counts[0]}"):
            carry(torch.rand(1, source.num_tokens), source, target)
    # A class token among tokens that the layer below does not locate, such as registers that are dropped above it.
    top, below, index = TokenLayout(1, 1, 1), TokenLayout(0, 1, 1), torch.tensor([[-1, -1, 0]])
    layers = [LayerTokens(below, below, index, index), LayerTokens(top, top)]
    matrices = [torch.full((1, 1, count, count), 1 / count) for count in (3, 2)]
    with pytest.raises(UnsupportedModelError, match="from 0 to 1"):
        staged_rollout(matrices, layers, readout=torch.tensor([[1.0, 0.0]]))
