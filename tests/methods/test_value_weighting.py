"""Value weighting: attention by what it passes on, against loops over heads and tokens."""

import inspect
import itertools

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from tests import literal_vit, references
from tests.methods.test_gradients import with_targets
from tests.small import Custom
from vitflow import Explainer, Trace, record_attention
from vitflow.errors import OptionError, UnsupportedModelError, ValueNormsError, VitflowWarning
from vitflow.explaining import maps
from vitflow.methods.gradients import Values, check_value_weighting, fuse_weighted, join_values
from vitflow.registry.method_table import get_method

DATA = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.25,) * 3, "crop_pct": 1.0}
IMAGE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
BLOCKS = timm.models.vision_transformer


def photos() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def record(model: nn.Module, **options):
    with torch.no_grad(), record_attention(model, **options) as trace:
        model(photos())
    return trace


def norms_of(trace: Trace) -> list[Tensor]:
    return [layer.values.norms() for layer in trace.layers]


@pytest.mark.parametrize("readout", literal_vit.READOUTS)
def test_value_norms_equal_a_loop_over_heads(readout):
    model = literal_vit.timm_model(readout)
    norms = norms_of(record(model, values=True))
    for index, image in enumerate(photos()):
        actual = literal_vit.differentiate(model, image, 0, readout)
        for layer in range(3):
            expected = literal_vit.value_norms(actual.values[layer], actual.projections[layer])
            np.testing.assert_allclose(norms[layer][index].numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
@pytest.mark.parametrize("how", [True, "output"])
def test_weighted_attention_equals_the_literal_definition(how, fusion):
    """Fused while the model runs, fused from kept heads, and in float32."""
    model = literal_vit.timm_model("class token and registers")
    streamed = record(model, head_fusion=fusion, value_weighted=how).attentions
    kept = record(model, values=True).fused(fusion, value_weighted=how)
    for index, image in enumerate(photos()):
        actual = literal_vit.differentiate(model, image, 0, "class token and registers")
        for layer, expected in enumerate(literal_vit.fused_values(actual, how, fusion)):
            np.testing.assert_allclose(streamed[layer][index].numpy(), expected, rtol=0, atol=1e-12)
            np.testing.assert_allclose(kept[layer][index].numpy(), expected, rtol=0, atol=1e-12)
    single = literal_vit.timm_model("class token and registers").float()
    with torch.no_grad(), record_attention(single, head_fusion=fusion, value_weighted=how) as trace:
        single(photos().float())
    for ours, exact in zip(trace.attentions, streamed, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", [False, True, "output"])
def test_rollout_and_attention_use_the_weighted_heads(how):
    model = literal_vit.timm_model()
    trace = with_targets(record(model, values=True))
    actual = literal_vit.differentiate(model, photos()[1], 0, "class token")
    options = {"value_weighted": how, "head_fusion": "max"}
    rollout, attention = get_method("rollout"), get_method("attention")
    fused = literal_vit.fused_values(actual, how, "max")
    if how is False:
        fused = [references.fuse(heads, "max") for heads in actual.attention]
    grids = maps.rollout(trace, **rollout.function_options(rollout.complete({**options, "discard_ratio": 0.5}))).grids
    layers = [layer[None] for layer in fused]
    expected = references.rollout(layers, ratio=0.5)[0, 1:]
    np.testing.assert_allclose(grids[1].flatten().numpy(), expected, rtol=0, atol=1e-12)
    grids = maps.attention(trace, **attention.function_options(attention.complete({**options, "layer": 2}))).grids
    np.testing.assert_allclose(grids[1].flatten().numpy(), fused[1][0, 1:], rtol=0, atol=1e-12)
    one = maps.attention(
        trace, **attention.function_options(attention.complete({"value_weighted": how, "head": 2}))
    ).grids
    expected = actual.weighted(how)[-1][1]
    expected = expected / expected.sum(1, keepdims=True)
    np.testing.assert_allclose(one[1].flatten().numpy(), expected[0, 1:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("weighting", [False, True, "output"])
def test_fused_while_running_equals_fused_afterwards(weighting):
    """With more tokens than channels, W_Oᵀ W_O is computed once; with fewer, it is not."""
    fusions = ["mean", "max", "min"]
    for images in (1, 8):
        model = timm.models.VisionTransformer(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2).eval()
        pixels = torch.randn(images, 3, 32, 32)
        with torch.no_grad():
            with record_attention(model, fusions=[(each, weighting) for each in fusions]) as fused:
                model(pixels)
            with record_attention(model, values=True) as heads:
                model(pixels)
        for during, layer in zip(fused.layers, heads.layers, strict=True):
            for fusion in fusions:
                after = fuse_weighted(layer.heads, fusion, weighting, layer.values)
                atol = 2e-5 if fusion == "min" else 3e-6
                torch.testing.assert_close(during.fused[fusion, weighting], after, rtol=0, atol=atol)


@pytest.mark.parametrize("bad", [float("nan")])
def test_values_that_are_not_finite_are_not_hidden(bad):
    attention = (3 * torch.randn(2, 3, 6, 6)).softmax(-1)
    values = Values(torch.randn(2, 3, 6, 4), torch.randn(9, 12))
    attention[1, 0, 2, 3] = bad
    assert not torch.isfinite(fuse_weighted(attention, "max", "output", values)[1, 2]).all()
    values.vectors[0, 1, 4] = bad
    assert not torch.isfinite(fuse_weighted(attention, "max", "output", values)[0]).all()


@pytest.mark.parametrize("how", [True, "output"])
def test_modules_side_by_side_are_one_layer_with_all_their_heads(how):
    torch.manual_seed(0)
    model = BLOCKS.VisionTransformer(**literal_vit.TINY, block_fn=BLOCKS.ParallelThingsBlock).double().eval()
    trace = record(model, values=True)
    parts = [block.attn for block in model.blocks[0].attns]
    values, entry = trace.layers[0].values, []
    with torch.no_grad():
        tokens = model._pos_embed(model.patch_embed(photos()))
        for part, block in zip(parts, model.blocks[0].attns, strict=True):
            vectors = part.qkv(block.norm(tokens)).reshape(2, 17, 3, 3, 8)[:, :, 2].transpose(1, 2)
            entry.append(Values(vectors, part.proj.weight.detach()))
    torch.testing.assert_close(values.norms(), torch.cat([part.norms() for part in entry], dim=1))
    joined = join_values(entry)
    heads = trace.heads()[0]
    torch.testing.assert_close(trace.heads(value_weighted=how)[0], joined.weigh(heads, how))
    fused = record(model, fusions=[("max", how)]).attentions[0]
    torch.testing.assert_close(fused, trace.fused("max", value_weighted=how)[0])


def test_autocast_does_not_blur_the_weights():
    model = literal_vit.timm_model().float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), record_attention(model, values=True) as trace:
        model(photos().float())
        inside = trace.fused("max", value_weighted="output"), norms_of(trace)
    for ours, theirs in zip(inside[0], trace.fused("max", value_weighted="output"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    layer = trace.layers[0].values
    exact = Values(layer.vectors.double(), layer.projection.double()).norms()
    torch.testing.assert_close(inside[1][0].double(), exact, rtol=1e-5, atol=1e-6)


def odd_models() -> dict[str, nn.Module]:
    options = dict(literal_vit.TINY)

    def attend(self: nn.Module, x: Tensor, **_: object) -> Tensor:  # without an output projection
        query, key, value = self.qkv(x).reshape(*x.shape[:2], 3, 3, 8).permute(2, 0, 3, 1, 4)
        heads = (query @ key.transpose(-2, -1) / 8**0.5).softmax(-1) @ value
        return heads.transpose(1, 2).reshape(x.shape)

    entry = BLOCKS.VisionTransformer(**options)
    for block in entry.blocks:
        block.attn = Custom(attend, qkv=nn.Linear(24, 72))
    models = {"attention of one's own": entry}
    if "scale_attn_norm" in inspect.signature(BLOCKS.VisionTransformer).parameters:  # older releases of timm have none
        models["a norm between heads and projection"] = BLOCKS.VisionTransformer(**options, scale_attn_norm=True)
    return models


@pytest.mark.parametrize("which", odd_models())
def test_the_default_weighting_is_left_out_where_it_does_not_apply_and_that_is_said_once(which, recwarn):
    explainer = Explainer(odd_models()[which].eval(), data_config=DATA)
    methods = ["rollout", "attention", "gae", "gradient_rollout"]
    with pytest.warns(VitflowWarning, match="Value weighting is switched off"):
        actual = explainer.explain_batch([IMAGE], methods=methods)
    assert [saliency.options["value_weighted"] for saliency in actual] == [False] * 4
    again = explainer.explain_batch([IMAGE], methods=methods)  # warnings are errors here: no second one
    for ours, theirs in zip(again, actual, strict=True):
        np.testing.assert_array_equal(ours.grid, theirs.grid)
    for method, how in itertools.product(("rollout", "gae"), (True, "output")):
        with pytest.raises(ValueNormsError, match="value_weighted=False"):
            explainer.explain(IMAGE, method=method, value_weighted=how)
    assert issubclass(ValueNormsError, UnsupportedModelError)


def test_wrong_weightings_are_named():
    for wrong in ("norm", 2, None):
        with pytest.raises(OptionError, match="False, True or 'output', got"):
            check_value_weighting(wrong)
    with pytest.raises(OptionError, match="record with values=True"):
        record(literal_vit.timm_model()).heads(value_weighted=True)
    with pytest.raises(OptionError, match="Attention fused by max and value weighted by output was not recorded"):
        record(literal_vit.timm_model()).fused("max", value_weighted="output")
