"""Value weighting uses the linear map that the output projection computes, and leaves the model as it was."""

import copy
import warnings
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.models.test_libraries import built
from tests.small import Custom
from vitflow import Explainer, record_attention
from vitflow.errors import ValueNormsError, VitflowWarning
from vitflow.recording import projections

DATA = {"input_size": (3, 160, 160), "mean": (0.5,) * 3, "std": (0.5,) * 3}
WIDTH = 64
METHODS = ["gae", "rollout", ("attention", {"value_weighted": True})]


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = timm.create_model("test_vit", num_classes=5).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.proj.bias.normal_()
    return model


def pixels(count: int = 1) -> Tensor:
    return torch.rand(count, 3, 160, 160, generator=torch.Generator().manual_seed(3)) * 2 - 1


def matrices(seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(4, WIDTH, generator=random) / 6, torch.randn(WIDTH, 4, generator=random) / 6


def scales(index: int) -> Tensor:
    return matrices(index)[0].flatten()[:WIDTH] + 1


def around(base: nn.Module, before=lambda x: x, after=lambda x, given: x) -> nn.Module:
    """A projection with something before and after it, as in the wrapper of an adapter library."""
    return Custom(lambda self, x: after(self.base_layer(before(x)), x), base_layer=base)


def lora_wrapper(layer: nn.Linear, index: int) -> nn.Module:
    down, up = matrices(index)
    return around(layer, after=lambda output, given: output + given @ down.T @ up.T)


def hooked(layer: nn.Module, function) -> nn.Module:
    layer.register_forward_pre_hook(lambda module, args: (function(args[0]),))
    return layer


def lora_hook(layer: nn.Linear, index: int) -> nn.Module:
    down, up = matrices(index)
    layer.register_forward_hook(lambda module, args, output: output + args[0] @ down.T @ up.T)
    return layer


def lora_method(layer: nn.Linear, index: int) -> nn.Module:
    (down, up), forward = matrices(index), layer.forward
    layer.forward = lambda x: forward(x) + x @ down.T @ up.T
    return layer


def weight_decomposed(layer: nn.Linear, index: int) -> nn.Module:
    """DoRA: the rows of weight and update have lengths of their own."""
    down, up = matrices(index)
    weight = layer.weight.detach() + up @ down
    factor = 2 / weight.norm(dim=1)
    return around(layer, after=lambda out, given: (out - layer.bias + given @ down.T @ up.T) * factor + layer.bias)


def normed(layer: nn.Linear, index: int) -> nn.Module:
    """The norm's weight is changed after it was registered, as by `load_state_dict`."""
    nn.utils.weight_norm(layer)
    layer.weight_g.data *= 1 + index
    return layer


def merge(layer: nn.Linear, index: int, kind: str) -> None:
    """Change the weights as the adapter of a kind does."""
    down, up = matrices(index)
    if "LoRA" in kind:
        layer.weight += up @ down
    if "decomposed" in kind:
        layer.weight *= 2 / layer.weight.norm(dim=1, keepdim=True)
    elif kind == "weight norm by hook":
        layer.weight *= 1 + index
    elif "input" in kind:
        layer.weight *= scales(index)
    elif "layer scale" in kind:
        layer.weight *= scales(index)[:, None]
        layer.bias *= scales(index)
    elif "bias" in kind:
        layer.bias += scales(index)


ADAPTERS = {
    "LoRA by hook": lora_hook,
    "LoRA by a replaced method": lora_method,
    "LoRA by a wrapper": lora_wrapper,
    "weight-decomposed LoRA": weight_decomposed,
    "a hook that scales the input": lambda layer, index: hooked(layer, lambda x: x * scales(index)),
    "layer scale and dropout behind it": lambda layer, index: nn.Sequential(
        layer, around(nn.Dropout().eval(), after=lambda output, given: output * scales(index))
    ),
    "bias adapter": lambda layer, index: around(layer, after=lambda output, given: output + scales(index)),
    "weight norm by hook": normed,
    "weight norm by parametrization": lambda layer, index: parametrizations.weight_norm(layer),
}


def check_maps(adapted: nn.Module, merged: nn.Module, count: int) -> None:
    expected, actual = (
        Explainer(model, data_config=DATA).explain_batch(pixels(count), methods=METHODS, targets=3)
        for model in (merged, adapted)
    )
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.options["value_weighted"] == theirs.options["value_weighted"] != False  # noqa: E712
        np.testing.assert_allclose(ours.grid, theirs.grid, rtol=0, atol=1e-4 * theirs.grid.max())


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapted_and_merged_projections_have_equal_maps(kind):
    adapted, merged = model_of(), model_of()
    with torch.no_grad():
        for index, (one, other) in enumerate(zip(adapted.blocks, merged.blocks, strict=True)):
            merge(other.attn.proj, index, kind)
            one.attn.proj = ADAPTERS[kind](one.attn.proj, index)
        torch.testing.assert_close(adapted(pixels()), merged(pixels()), rtol=1e-4, atol=1e-5)
    check_maps(adapted, merged, 2)


def test_a_hook_that_only_watches_is_not_called_more_often():
    recorded = []
    for hooked, weighting in ((False, "output"), (True, False), (True, "output")):
        model, calls = model_of(), []
        for block in model.blocks if hooked else ():
            block.attn.proj.register_forward_hook(lambda module, args, output, calls=calls: calls.append(len(args[0])))
        for _ in range(2):  # the model is observed once
            calls.clear()
            with record_attention(model, head_fusion="mean", value_weighted=weighting) as trace, torch.no_grad():
                model(pixels())
        recorded.append((trace.attentions, calls))
    (expected, _), (_, unweighted), (actual, weighted) = recorded
    assert weighted == unweighted
    torch.testing.assert_close(actual, expected)


def count(self: nn.Module, x: Tensor) -> Tensor:
    """The forward pass of an adapter that draws random numbers, counts its calls and updates a buffer."""
    self.calls += 1
    self.shapes.append(tuple(x.shape))
    torch.rand(7)
    self.largest = torch.maximum(self.largest, x.detach().abs().max())
    return 3 * self.base_layer(x)


def test_measuring_a_projection_restores_its_counters_buffers_and_the_random_state():
    model, twin = model_of(), model_of()
    for each in (model, twin):
        for block in each.blocks:
            block.attn.proj = Custom(count, base_layer=block.attn.proj, calls=0, shapes=[])
            block.attn.proj.register_buffer("largest", torch.zeros(()))
    torch.manual_seed(5)
    with torch.no_grad():
        twin(pixels())
    after = torch.rand(1)
    torch.manual_seed(5)
    with record_attention(model, values=True) as trace, torch.no_grad():
        model(pixels())
    assert torch.equal(torch.rand(1), after)
    for block, other, layer in zip(model.blocks, twin.blocks, trace.layers, strict=True):
        ours, theirs = block.attn.proj, other.attn.proj
        assert (ours.calls, ours.shapes) == (1, theirs.shapes)
        torch.testing.assert_close(ours.largest, theirs.largest)
        torch.testing.assert_close(layer.values.projection, 3 * ours.base_layer.weight, rtol=1e-4, atol=1e-5)


def test_a_spectral_norm_is_read_without_another_iteration():
    model = model_of()
    for block in model.blocks:
        parametrizations.spectral_norm(block.attn.proj)
    twin = copy.deepcopy(model.eval())
    with torch.no_grad(), record_attention(model, values=True) as trace:
        model(pixels())
    assert all(torch.equal(one, other) for one, other in zip(model.buffers(), twin.buffers(), strict=True))
    for block, layer in zip(twin.blocks, trace.layers, strict=True):
        torch.testing.assert_close(layer.values.projection, block.attn.proj.weight.detach(), rtol=1e-4, atol=1e-5)


def test_an_int8_projection_is_weighted_by_its_rounded_weights():
    model = model_of()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    with record_attention(quantised, values=True) as trace, torch.no_grad():
        quantised(pixels())
    for block, layer in zip(quantised.blocks, trace.layers, strict=True):
        torch.testing.assert_close(layer.values.projection, block.attn.proj.weight().dequantize(), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda layer: around(layer, before=torch.relu),
        lambda layer: around(
            layer, after=lambda output, given: output + (given @ matrices(0)[0].T).relu() @ matrices(0)[1].T
        ),
        lambda layer: hooked(layer, torch.relu),
    ],
    ids=["before", "after", "hook"],
)
def test_a_nonlinear_projection_switches_the_weighting_off_until_it_is_removed(wrap):
    model, runs = model_of(), []
    model.blocks[0].register_forward_pre_hook(lambda *_: runs.append(len(runs)))
    model.blocks[2].attn.proj = wrap(model.blocks[2].attn.proj)
    explainer = Explainer(model, data_config=DATA)
    with pytest.warns(VitflowWarning, match=r"blocks\.2\.attn.*switched off"):
        actual = explainer.explain(pixels(), method="gae", target=1)
    assert actual.options["value_weighted"] is False
    runs.clear()
    expected = explainer.explain(pixels(), method="gae", target=1, value_weighted=False)
    explainer.explain(pixels(), method="gae", target=1)  # is not tried again
    assert len(runs) == 2
    np.testing.assert_array_equal(actual.grid, expected.grid)
    with pytest.raises(ValueNormsError):
        explainer.explain(pixels(), method="rollout", value_weighted=True)
    model.blocks[2].attn.proj = getattr(model.blocks[2].attn.proj, "base_layer", model.blocks[2].attn.proj)
    model.blocks[2].attn.proj._forward_pre_hooks.clear()
    assert explainer.explain(pixels(), method="gae", target=1).options["value_weighted"] == "output"


@pytest.mark.parametrize("method", ["rollout", "gae"])
@pytest.mark.parametrize("scale", [torch.Tensor.mul, torch.Tensor.mul_])
def test_a_hook_that_changes_the_output_of_attention_switches_the_weighting_off(scale, method):
    model = model_of()
    explainer, attention = Explainer(model, data_config=DATA), model.blocks[2].attn
    attention.register_forward_hook(lambda *_: None)
    assert explainer.explain(pixels(), method=method, target=1).options["value_weighted"] == "output"
    with attention.register_forward_hook(lambda module, args, output: scale(output, scales(0))):
        with pytest.warns(VitflowWarning, match=r"blocks\.2\.attn.*switched off"):
            assert explainer.explain(pixels(), method=method, target=1).options["value_weighted"] is False
    assert explainer.explain(pixels(), method=method, target=1).options["value_weighted"] == "output"


def scaled(attention: nn.Module, kind: str) -> None:
    """Change what an attention module computes after its projection, or (in another order) nothing."""
    forward, factors = attention.forward, scales(0)

    class Other(type(attention)):
        def forward(self, *args: Tensor, **more: object) -> Tensor:
            return super().forward(*args, **more) @ (torch.eye(WIDTH) + torch.eye(WIDTH).roll(1, 0))

    if kind == "subclass":
        attention.__class__ = Other
    else:
        attention.forward = {
            "method": lambda *args, **more: forward(*args, **more) * factors,
            "method of several calls": lambda *args, **more: forward(*args, **more) + forward(*args, **more),
            "same": lambda *args, **more: forward(*args, **more).mT.contiguous().mT,
        }[kind]


@pytest.mark.parametrize("method", ["rollout", "gae"])
@pytest.mark.parametrize("kind", ["subclass", "method", "method of several calls", "same"])
def test_a_method_that_changes_the_output_of_the_projection_switches_the_weighting_off(kind, method):
    model = model_of()
    scaled(model.blocks[2].attn, kind)
    explainer = Explainer(model, data_config=DATA)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saliency = explainer.explain(pixels(), method=method, target=1)
    assert saliency.options["value_weighted"] == ("output" if kind == "same" else False)
    assert any("switched off" in str(each.message) for each in caught) == (kind != "same")


def in_another_order(self: nn.Module, x: Tensor, **_: object) -> Tensor:
    """Heads are the last axis of the channels that are projected."""
    query, key, value = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    return self.proj((((query @ key.mT).softmax(-1) @ value).permute(0, 2, 3, 1)).flatten(2))


def by_another(self: nn.Module, x: Tensor, **_: object) -> Tensor:
    query, key, value = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    return self.other(((query @ key.mT).softmax(-1) @ value).transpose(1, 2).flatten(2))


def scaled_after(self: nn.Module, x: Tensor, **_: object) -> Tensor:
    query, key, value = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    return 3 * self.proj(((query @ key.mT).softmax(-1) @ value).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("attend", [in_another_order, by_another, scaled_after])
def test_a_users_module_that_computes_something_else_is_not_weighted(attend):
    model = model_of()
    for block in model.blocks:
        parts = {"qkv": block.attn.qkv, "proj": block.attn.proj, "other": nn.Linear(WIDTH, WIDTH)}
        block.attn = Custom(attend, **parts)
    with pytest.raises(ValueNormsError, match=r"blocks\.0\.attn"), torch.no_grad():
        with record_attention(model.eval(), values=True):
            model(pixels())


def test_a_projection_that_does_not_run_has_its_weight_used():
    def attend(self: nn.Module, x: Tensor, **_: object) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]

    model = model_of()
    for block in model.blocks:
        block.attn = Custom(attend, inner=nn.MultiheadAttention(WIDTH, 2, batch_first=True))
        block.attn.inner.out_proj.register_forward_hook(Mock(side_effect=AssertionError("uses the weight itself")))
    with record_attention(model, values=True) as trace, torch.no_grad():
        model(pixels())
    for block, layer in zip(model.blocks, trace.layers, strict=True):
        assert torch.equal(layer.values.projection, block.attn.inner.out_proj.weight)


@pytest.mark.parametrize("fused", [True, False])
def test_a_projection_outside_of_the_attention_module_is_observed(fused):
    """transformers' ViT of this form projects in the module around the attention."""
    adapted, merged = built("DeiTForImageClassification"), built("DeiTForImageClassification")
    paths = [path for path, module in merged.named_modules() if path.endswith(("attention.output.dense", "o_proj"))]
    assert paths
    with torch.no_grad():
        for path in paths:
            layer = merged.get_submodule(path)
            factors = 0.1 + torch.rand(len(layer.weight))
            layer.weight *= factors[:, None]
            layer.bias *= factors
            adapted.get_submodule(path).register_forward_hook(lambda module, args, output, by=factors: output * by)
    options = {"head_fusion": "mean", "value_weighted": "output"} if fused else {"values": True}
    traces = []
    for model in (merged, adapted):
        shape = (1, 3, model.config.image_size, model.config.image_size)
        given = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        with record_attention(model, **options) as trace, torch.no_grad():
            model(given)
        traces.append(trace.fused("mean", value_weighted="output"))
    for ours, theirs in zip(*traces, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_an_adapter_of_peft_is_explained_as_if_merged():
    peft = pytest.importorskip("peft")
    options = {"r": 4, "target_modules": ["proj"], "init_lora_weights": False, "lora_dropout": 0.1}
    adapted = peft.get_peft_model(model_of(), peft.LoraConfig(**options)).eval()
    check_maps(adapted, copy.deepcopy(adapted).merge_and_unload(), 1)


def test_gated_attention_is_not_weighted_by_its_values():
    """The gate is no part of the weight of the projection, so that weighting is switched off, with a note."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=64, depth=2).eval()
    for block in model.blocks:
        block.attn.gate = nn.Linear(192, 192)
    image = pixels()[..., :64, :64]
    explainer = Explainer(model, data_config=DATA | {"input_size": (3, 64, 64)})
    with pytest.warns(VitflowWarning, match="gate"):
        actual = explainer.explain_batch(image, method="gae", target=1)
    plain = explainer.explain_batch(image, method="gae", target=1, value_weighted=False)
    np.testing.assert_array_equal(actual[0].grid, plain[0].grid)
    with pytest.raises(ValueNormsError, match="gate"):
        explainer.explain_batch(image, method="gae", target=1, value_weighted=True)


def test_projections_are_checked_once_per_state_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sums, agree = model_of(), Mock(wraps=projections._sums), Mock(wraps=projections._agree)
    monkeypatch.setattr(projections, "_sums", sums)
    monkeypatch.setattr(projections, "_agree", agree)

    def record() -> tuple[int, int]:
        sums.reset_mock()
        agree.reset_mock()
        with record_attention(model, fusions=[("mean", True)]), torch.no_grad():
            model(pixels(3))
        return sums.call_count, agree.call_count

    (first, measured), *later = record(), record()
    assert (first >= 2 * len(model.blocks), measured, later) == (True, 0, [(0, 0)])  # results, and what projections get
    model.blocks[0].attn.proj.register_forward_hook(lambda module, given, output: output)
    assert [record()[1], record()] == [1, (0, 0)]


CHANGES = {
    "nothing": lambda x: x,
    "what is added": lambda x: x + scales(1),
    "a scale": lambda x: x * scales(1),
    "a norm": lambda x: nn.functional.layer_norm(x, x.shape[-1:]),
    "an activation": nn.functional.gelu,
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_changes_results_between_attention_and_projection_switches_the_weighting_off(kind):
    def attend(self: nn.Module, x: Tensor, **_: object) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        result = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return self.proj(CHANGES[kind](result))

    model = model_of()
    for block in model.blocks:
        block.attn = Custom(attend, qkv=block.attn.qkv, proj=block.attn.proj)
    if kind == "nothing":
        with record_attention(model, values=True) as trace, torch.no_grad():
            model(pixels())
        assert torch.equal(trace.layers[0].values.projection, model.blocks[0].attn.proj.weight)
        return
    with pytest.raises(ValueNormsError, match=r"blocks\.0\.attn.*gated"), torch.no_grad():
        with record_attention(model, values=True):
            model(pixels())
