"""The recorder's promises: the attention that the model used, and a model that is exactly as it was."""

import copy
import gc
import inspect
import pickle
import random
import warnings
import weakref
from typing import get_args

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.small import CUSTOM as TINY
from tests.small import Custom, jitter
from vitflow import Explainer, attention_rollout, record_attention
from vitflow.errors import OptionError, UnsupportedModelError, VitflowError
from vitflow.methods import TokenLayout
from vitflow.recording import attending

# What releases of timm have added since the oldest that will do.
KNOWN = inspect.signature(timm.models.vision_transformer.VisionTransformer).parameters
POOLS = (None, *get_args(KNOWN["global_pool"].annotation))


def tiny(**options) -> nn.Module:
    """A small Vision Transformer with random weights whose attention is far from uniform."""
    newer = options.keys() - KNOWN.keys()
    if newer or options.get("global_pool") not in POOLS:
        pytest.skip(f"this release of timm does not know {options}")
    torch.manual_seed(0)
    return jitter(timm.models.vision_transformer.VisionTransformer(**{**TINY, **options}))


def literal_attention(model: nn.Module, pixels: Tensor) -> list[Tensor]:
    """The probabilities as the un-fused code path computes them, seen by hooks on attn_drop."""
    model, seen = copy.deepcopy(model), []
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
        if hasattr(module, "attn_drop"):
            module.attn_drop.register_forward_hook(lambda _m, args, _o: seen.append(args[0]))
    with torch.no_grad():
        model(pixels)
    return seen


def content(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def generators() -> tuple:
    """The state of every random generator that a model may draw from."""
    of_numpy = repr(np.random.get_state())  # noqa: NPY002 - the generator that some models draw from
    return content(torch.get_rng_state()), of_numpy, random.getstate()


def state_of(model: nn.Module) -> dict:
    """Everything of every module that recording could have changed."""
    return {
        name: (
            module.training,
            module.__dict__.get("forward"),
            type(module).forward,
            getattr(module, "fused_attn", None),
            dict(module._forward_hooks),
            dict(module._forward_pre_hooks),
            dict(module._forward_hooks_always_called),
            dict(module._forward_hooks_with_kwargs),
            dict(module._forward_pre_hooks_with_kwargs),
            dict(module._backward_hooks),
            [(p.requires_grad, p.grad, p.data_ptr(), p._version) for p in module.parameters(recurse=False)],
            {buffer: content(tensor) for buffer, tensor in module.named_buffers(recurse=False)},
            sorted(module.__dict__),
        )
        for name, module in model.named_modules()
    }


FAMILY = {
    "plain": {},
    "registers": {"reg_tokens": 4},
    "no class token, average": {"class_token": False, "global_pool": "avg"},
    "registers, no class token": {"class_token": False, "reg_tokens": 2, "global_pool": "avg"},
    "class token, average": {"global_pool": "avg"},
    "class token, average over all tokens": {"global_pool": "avg", "pool_include_prefix": True},
    "maximum": {"global_pool": "max"},
    "attention pooling": {"class_token": False, "global_pool": "map"},
    "attention pooling of patches beside a class token": {"global_pool": "map"},
    "not square": {"img_size": (32, 48)},
    "dynamic": {"dynamic_img_size": True},
    "no position embedding for the class token": {"no_embed_class": True},
    "q and k norms": {"qk_norm": True},
    "norm of the heads": {"scale_attn_norm": True},
    "post-norm": {"block_fn": timm.models.vision_transformer.ResPostBlock},
    "parallel attention and MLP": {"block_fn": timm.models.vision_transformer.ParallelScalingBlock},
    "two attentions side by side": {"block_fn": timm.models.vision_transformer.ParallelThingsBlock},
    "no classes": {"num_classes": 0},
}
if hasattr(timm.layers, "AttentionPoolPrr"):  # later than the oldest timm
    FAMILY["refining attention pooling"] = {"global_pool": "prr"}


@pytest.mark.parametrize("options", FAMILY.values(), ids=FAMILY.keys())
def test_the_whole_family_is_recorded_as_it_ran(options):
    model = tiny(**options)
    pixels = torch.randn(5, 3, *(options.get("img_size") or (32, 32)))
    with torch.no_grad():
        plain = model(pixels)
    with torch.set_grad_enabled(options.get("global_pool") == "max"), record_attention(model) as trace:
        logits = model(pixels)  # a maximum is read by its gradient
    torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-5 * plain.abs().max().item())
    assert len(trace.attentions) == 3
    assert trace.layout.rows * trace.layout.cols == 16 * (pixels.shape[-1] // 8) // 4
    assert trace.layout.num_prefix_tokens == model.num_prefix_tokens
    seen = literal_attention(model, pixels)
    parallel = len(seen) // 3
    for index, attention in enumerate(trace.attentions):
        expected = torch.cat(seen[index * parallel : (index + 1) * parallel], dim=1)
        torch.testing.assert_close(attention, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(trace.readout.sum(-1), torch.ones(5))
    rollout = attention_rollout(
        trace.attentions, readout=trace.readout, num_prefix_tokens=trace.layout.num_prefix_tokens
    )
    assert trace.layout.to_grid(rollout).shape == (5, trace.layout.rows, trace.layout.cols)


def test_a_distilled_model_is_read_out_by_both_of_its_tokens():
    model = jitter(timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=2))
    with record_attention(model) as trace, torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
    assert trace.layout == TokenLayout(2, 2, 2)
    assert trace.pooling == "class and distillation token"
    rows = [head.weight[trace.logits[0].argmax()].norm() for head in (model.head, model.head_dist)]
    both = torch.stack(rows) / sum(rows)  # the gradient at each token after the final norm is a row of its head
    torch.testing.assert_close(trace.readout[0], nn.functional.pad(both, (0, 4)))


def test_the_readout_of_an_attention_pooling_head_is_the_gradient_at_its_tokens():
    model, pixels = tiny(class_token=False, global_pool="map"), torch.randn(3, 3, 32, 32)
    with record_attention(model) as trace, torch.no_grad():
        model(pixels)
        tokens = model.forward_features(pixels)  # a part of the model by itself adds no layers
    assert trace.pooling == "attention pooling" and len(trace.layers) == 3
    tokens.requires_grad_()
    model.forward_head(tokens).amax(dim=1).sum().backward()
    norms = tokens.grad.norm(dim=-1)
    torch.testing.assert_close(trace.readout, norms / norms.sum(dim=1, keepdim=True), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("fusion", "block"), [("mean", "ParallelThingsBlock"), ("max", "Block"), ("min", "Block")])
def test_fusing_while_the_model_runs_equals_fusing_afterwards(fusion, block):
    model = tiny(block_fn=getattr(timm.models.vision_transformer, block))
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        with record_attention(model) as trace:
            model(pixels)
        with record_attention(model, head_fusion=fusion) as fused:
            model(pixels)
    assert fused.attentions[0].shape == (2, 17, 17)
    assert all(layer.heads is None for layer in fused.layers)
    for layer, expected in zip(fused.attentions, trace.fused(fusion), strict=True):
        torch.testing.assert_close(layer, expected)
    with pytest.raises(OptionError, match="Only fused attention was recorded"):
        fused.heads()


def test_unfused_attention_is_recorded_too():
    model = tiny()
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad(), record_attention(model) as fused:
        model(pixels)
    for block in model.blocks:
        block.attn.fused_attn = False
    before = state_of(model)
    with torch.no_grad(), record_attention(model, values=True) as unfused:
        model(pixels)
    assert state_of(model) == before
    for ours, theirs in zip(fused.attentions, unfused.attentions, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len([layer.values.norms() for layer in unfused.layers]) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_keep_their_logits(dtype):
    model, pixels = tiny().to(dtype), torch.randn(2, 3, 32, 32, dtype=dtype)
    with torch.inference_mode():
        plain = model(pixels)
        with record_attention(model) as trace:
            logits = model(pixels)
    if dtype == torch.float64:
        torch.testing.assert_close(logits, plain)
    else:
        assert torch.equal(logits, plain)
    rows = trace.attentions[0].sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=1e-6)


def test_autocast_keeps_its_logits():
    model, pixels = tiny(), torch.randn(2, 3, 32, 32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(pixels)
        with record_attention(model) as trace:
            logits = model(pixels)
    assert torch.equal(logits, plain)
    assert trace.attentions[0].dtype == torch.float32


def test_dynamic_sizes_give_the_grid_of_this_very_pass():
    model = tiny(dynamic_img_size=True)
    with torch.no_grad(), record_attention(model) as trace:
        model(torch.randn(1, 3, 48, 80))
        assert trace.layout == TokenLayout(1, 6, 10)
        model(torch.randn(1, 3, 16, 32))
    assert trace.layout == TokenLayout(1, 2, 4)
    assert len(trace.attentions) == 3


def test_keys_and_values_that_all_images_share():
    def share(module: nn.Module, pixels: Tensor) -> Tensor:
        tokens = pixels.flatten(2).unsqueeze(1)  # [batch, 1 head, tokens, 4]
        return F.scaled_dot_product_attention(tokens, module.key(tokens[:1]), tokens[:1]).sum(dim=(1, 2))

    model, pixels = nn.Sequential(Custom(share, key=nn.Linear(4, 4))), torch.randn(3, 6, 2, 2)
    with torch.no_grad(), record_attention(model, head_fusion="mean") as trace:
        torch.testing.assert_close(model(pixels), model[0](pixels))
    assert trace.attentions[0].shape == (3, 6, 6)


@pytest.mark.parametrize("room", [500, 4000, 2**19])  # rows of one image, one image, all three at once
@pytest.mark.parametrize("silent", [False, True])
def test_parts_that_fit_the_cache_make_the_same_matrices(monkeypatch, room, silent):
    monkeypatch.setattr(attending, "_CACHED_PROBABILITIES", room)
    model, pixels = tiny(img_size=80), torch.randn(3, 3, 80, 80)
    if silent:  # values that pass nothing on leave empty rows, which become the identity's
        torch.nn.init.zeros_(model.blocks[1].attn.proj.weight)
    keys = [("mean", False), ("max", "output"), ("min", True)]
    with torch.no_grad():
        plain = model(pixels)
        with record_attention(model, values=True) as whole:
            model(pixels)
        with record_attention(model, fusions=keys) as parts:
            logits = model(pixels)
    torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-5)
    for fusion, weighting in keys:
        for actual, expected in zip(
            parts.fused(fusion, value_weighted=weighting), whole.fused(fusion, value_weighted=weighting), strict=True
        ):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_the_model_is_exactly_as_it_was():
    model = tiny()
    model.blocks[1].train()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.blocks[2].attn.fused_attn = False
    model.register_forward_hook(lambda *_: None)
    pixels = torch.randn(2, 3, 32, 32)
    before = state_of(model), generators()
    with record_attention(model, gradients=True) as trace:
        model(pixels)
        trace.backward(torch.tensor([1, 2]))
    assert (state_of(model), generators()) == before


class Stop(Exception):
    pass


@pytest.mark.parametrize("where", ["blocks.1", "blocks.1.attn", "head"])
def test_the_model_is_exactly_as_it_was_after_an_exception(where):
    model = tiny()
    original = model.get_submodule(where).forward

    def fail(*_args, **_kwargs):
        raise Stop

    with pytest.raises(Stop):
        model.get_submodule(where).forward = fail
        try:
            with record_attention(model, values=True):
                model(torch.randn(1, 3, 32, 32))
        finally:
            del model.get_submodule(where).forward
    assert model.get_submodule(where).forward == original
    fresh = tiny()
    for name, state in state_of(model).items():
        assert state[4:10] == ({},) * 6, name
        assert state[3] == state_of(fresh)[name][3]
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    with torch.no_grad(), record_attention(model) as trace:  # and it records again
        model(torch.randn(1, 3, 32, 32))
    assert len(trace.attentions) == 3


def test_an_exception_inside_the_block_is_not_swallowed():
    model = tiny()
    before = state_of(model)
    with pytest.raises(Stop), record_attention(model):
        raise Stop
    assert state_of(model) == before


def test_gradients_are_of_the_probabilities_and_touch_no_parameter():
    model = tiny().double()
    pixels, targets = torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.tensor([3, 0])
    with record_attention(model, gradients=True) as trace:
        model(pixels)
    gradients = trace.backward(targets).attentions
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not pixels.requires_grad

    # A small change of one probability changes the logit by the gradient.
    step, (layer, image, head, row, col) = 1e-6, (1, 1, 2, 0, 5)

    def logit(change: float) -> float:
        calls = []

        def attend(query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
            attention = (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1)
            if len(calls) == layer:
                attention[image, head, row, col] += change
            calls.append(None)
            return attention @ value

        real, F.scaled_dot_product_attention = F.scaled_dot_product_attention, attend
        try:
            with torch.no_grad():
                return model(pixels)[image, targets[image]].item()
        finally:
            F.scaled_dot_product_attention = real

    measured = (logit(step) - logit(-step)) / (2 * step)
    assert gradients[layer][image, head, row, col].item() == pytest.approx(measured, rel=1e-6, abs=1e-10)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_gradients_without_autograd_are_refused(context):
    model = tiny()
    with (
        context(),
        pytest.raises(OptionError, match="requires a forward pass with gradients"),
        record_attention(model, gradients=True),
    ):
        model(torch.randn(1, 3, 32, 32))


def test_dropout_is_left_to_the_model_and_attention_is_recorded_before_it():
    model = tiny(attn_drop_rate=0.5).train()
    pixels = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        torch.manual_seed(7)
        plain = model(pixels)
        torch.manual_seed(7)
        with record_attention(model) as trace:
            logits = model(pixels)
    assert torch.equal(logits, plain)
    torch.testing.assert_close(trace.attentions[0].sum(-1), torch.ones(1, 3, 17))


def test_wrappers_are_looked_through():
    model = tiny()
    wrapped = nn.DataParallel(model)
    with torch.no_grad(), record_attention(wrapped) as trace:
        wrapped(torch.randn(1, 3, 32, 32))
    assert len(trace.attentions) == 3
    outer = Custom(lambda self, pixels: self.backbone(pixels)[:, :2], backbone=model)
    with torch.no_grad(), record_attention(outer) as trace:
        outer(torch.randn(1, 3, 32, 32))
    assert trace.layout == TokenLayout(1, 4, 4)
    assert trace.layers[0].name == "backbone.blocks.0.attn"


def test_leaving_without_a_forward_pass_is_no_error_but_reading_is():
    with record_attention(tiny()) as trace:
        pass
    for read in (lambda: trace.attentions, lambda: trace.layout, lambda: trace.readout, lambda: trace.fused()):
        with pytest.raises(VitflowError, match="Nothing has been recorded"):
            read()


def test_scripted_models_are_refused():
    with pytest.raises(UnsupportedModelError, match="scripted, traced or exported"):
        record_attention(torch.fx.symbolic_trace(nn.Linear(2, 2)))
    model = tiny()
    with warnings.catch_warnings(action="ignore"):
        model.blocks[0].attn.qkv = torch.jit.script(model.blocks[0].attn.qkv)
    for refused in (lambda: Explainer(model), record_attention(model).__enter__):
        with pytest.raises(UnsupportedModelError, match="contains a scripted"):
            refused()


def checkpointed(reentrant: bool) -> nn.Module:
    """A model that checkpoints its blocks itself."""

    def compute(self: nn.Module, images: Tensor) -> Tensor:
        tokens = self.vit._pos_embed(self.vit.patch_embed(images))
        for block in self.vit.blocks:
            tokens = checkpoint(block, tokens, use_reentrant=reentrant)
        return self.vit.forward_head(self.vit.norm(tokens))

    return Custom(compute, vit=tiny())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("kind", ["timm", "reentrant", "not reentrant"])
def test_gradient_checkpointing_is_refused_with_the_remedy(kind):
    model = tiny() if kind == "timm" else checkpointed(kind == "reentrant")
    expected = r"model\.set_grad_checkpointing\(False\)" if kind == "timm" else "without torch.utils.checkpoint"
    images = torch.randn(1, 3, 32, 32)
    with torch.enable_grad():
        model(images.requires_grad_())[0, 0].backward()
    if kind == "timm":
        model.set_grad_checkpointing()
    with pytest.raises(UnsupportedModelError, match=expected), record_attention(model, gradients=True):
        model(images)
    with record_attention(model, head_fusion="mean") as trace, torch.no_grad():
        model(images)
    assert len(trace.attentions) == len(tiny().blocks)
    with record_attention(model, gradients=True, attention=False) as trace:
        model(images)
    if kind == "reentrant":
        with pytest.raises(UnsupportedModelError, match=expected):
            trace.backward(torch.tensor([0]))
    else:
        torch.testing.assert_close(trace.backward(torch.tensor([0])).pixels, images.grad, rtol=1e-4, atol=1e-6)


def undeclared(prefix: int) -> nn.Module:
    """A user's model that declares nothing."""

    def compute(self: nn.Module, pixels: Tensor) -> Tensor:
        patches = self.embed(pixels).flatten(2).transpose(1, 2)
        return self.attend(torch.cat([self.prefix.expand(len(pixels), -1, -1), patches], dim=1)).mean(1)

    attend = timm.models.vision_transformer.Attention(24, num_heads=2)
    prefix = nn.Parameter(torch.randn(1, prefix, 24))
    return Custom(compute, embed=nn.Conv2d(3, 24, 8, 8), attend=attend, prefix=prefix).eval()


@pytest.mark.parametrize("prefix", [0, 3])
def test_the_layout_of_a_model_that_declares_none_is_measured(prefix):
    with torch.no_grad(), record_attention(undeclared(prefix)) as trace:
        trace.model(torch.randn(1, 3, 32, 40))
    assert trace.layout == TokenLayout(prefix, 4, 5)


def test_an_unknown_module_for_features_is_named():
    with pytest.raises(OptionError, match="has no module 'blocks.9.norm1'"):
        record_attention(tiny(), features=["blocks.9.norm1"])


@pytest.mark.gpu
def test_recording_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model, pixels = tiny().cuda(), torch.randn(2, 3, 32, 32, device="cuda")
    with torch.no_grad():
        plain = model(pixels)
        with record_attention(model, head_fusion="mean") as trace:
            logits = model(pixels)
    torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-5)
    assert trace.attentions[0].is_cuda


def test_a_trace_that_nobody_holds_is_freed_at_once_although_a_copy_was_made_meanwhile():
    model, pixels = tiny(), torch.randn(1, 3, 32, 32)
    gc.disable()
    try:
        with torch.no_grad(), record_attention(model, head_fusion="mean") as trace:
            model(pixels)
            twin = copy.deepcopy(model)
        kept = weakref.ref(trace.attentions[0])
        del trace
        assert kept() is None
        assert len(twin.blocks[0].attn._forward_hooks) == 1  # which does nothing
    finally:
        gc.enable()


@pytest.mark.parametrize("copied", ["deepcopy", "copy", "pickle"])
def test_a_copy_made_while_a_model_is_recorded_works_and_is_not_recorded(copied):
    model, pixels = tiny(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(pixels)
        with record_attention(model, features=["blocks.1"], gradients=False) as trace:
            model(pixels)
            twin = pickle.loads(pickle.dumps(model)) if copied == "pickle" else getattr(copy, copied)(model)
            if copied == "copy":  # whose modules are the model's own, but for the outermost
                seen = trace.pixels
                twin(torch.zeros(1, 3, 32, 32))
                assert trace.pixels is seen
            else:
                torch.testing.assert_close(twin(torch.zeros(2, 3, 32, 32)), model(torch.zeros(2, 3, 32, 32)))
                assert len(trace.attentions) == 3
        torch.testing.assert_close(twin(pixels), expected)
        with record_attention(twin) as again:
            twin(pixels)
    assert len(again.attentions) == 3
    torch.testing.assert_close(copy.deepcopy(twin)(pixels), expected, check_device=False)


@pytest.mark.parametrize("compiled", ["block", "attention", "block in place", "forward"])
def test_a_model_with_compiled_parts_is_recorded_as_it_would_be_without(compiled):
    torch.compiler.reset()
    model, plain, pixels = tiny(), tiny(), torch.randn(2, 3, 32, 32)
    block, ran = model.blocks[1], compiled == "block"
    if compiled == "block":
        model.blocks[1] = torch.compile(block, backend="eager")
    elif compiled == "attention":
        block.attn = torch.compile(block.attn, backend="eager")
    elif compiled == "forward":
        block.attn.forward = torch.compile(block.attn.forward, backend="eager")
    else:
        block.compile(backend="eager")
    with torch.no_grad():
        expected = model(pixels) if ran else plain(pixels)
    before = state_of(model)
    actual = []
    for entry in (model, plain):
        with record_attention(entry, gradients=True, features=["blocks.1.norm1"]) as trace:
            torch.testing.assert_close(entry(pixels), expected)
        actual.append(trace)
    assert state_of(model) == before
    ours, theirs = actual
    assert [layer.name for layer in ours.layers] == [layer.name for layer in theirs.layers]
    targets = torch.tensor([1, 3])
    for mine, other in zip(ours.attentions, theirs.attentions, strict=True):
        assert torch.equal(mine, other)
    for mine, other in zip(ours.backward(targets).attentions, theirs.backward(targets).attentions, strict=True):
        torch.testing.assert_close(mine, other)
    if ran:
        with torch.no_grad():
            torch.testing.assert_close(model(pixels), expected)
    assert torch._dynamo.eval_frame._stance.stance == "default"
