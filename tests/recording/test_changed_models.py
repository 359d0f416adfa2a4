"""Cached properties of a model between two recordings, also if the model changes in between."""

import functools
import gc
import weakref

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from tests.small import Custom
from vitflow import record_attention
from vitflow.errors import UnsupportedModelError, VitflowError
from vitflow.models.parts import ModelState

SIZE = {"img_size": 32, "patch_size": 16, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 4}


def model_of(**options):
    torch.manual_seed(0)
    return timm.models.VisionTransformer(**SIZE, **options).eval()


def recorded(model, size=32):
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with record_attention(model) as trace, torch.no_grad():
        logits = model(pixels)
    return trace, logits


class Eager(Custom):
    """Attention of one head by a product, a softmax and a product."""

    def __init__(self):
        super().__init__(lambda _, tokens, **options: (tokens @ tokens.mT).softmax(-1) @ tokens)


def attending(self, tokens, **_):
    """A block inside another module, which attends by itself."""
    tokens = self.block(tokens).unsqueeze(1)
    return F.scaled_dot_product_attention(tokens, tokens, tokens).squeeze(1)


def test_another_attention_module_is_noticed():
    model = model_of()
    assert recorded(model)[0].attentions[1].shape == (2, 3, 5, 5)
    model.blocks[1].attn = Eager()
    trace, _ = recorded(model)
    assert [one.shape[1] for one in trace.attentions] == [3, 1]
    model.blocks[1].attn = model.blocks[0].attn
    assert [layer.name for layer in recorded(model)[0].layers] == ["blocks.0.attn"] * 2


def test_modules_that_change_while_a_recording_is_open_are_refused():
    model, pixels = model_of(), torch.randn(1, 3, 32, 32)
    with record_attention(model) as trace, torch.no_grad():
        model(pixels)
        assert [one.shape[1] for one in trace.attentions] == [3, 3]
        model.blocks[1].attn = Eager()
        with pytest.raises(VitflowError, match="changed"):
            model(pixels)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_module_around_a_block_is_noticed():
    model = model_of()
    recorded(model)
    model.blocks[0] = Custom(attending, block=model.blocks[0])
    assert [layer.name for layer in recorded(model)[0].layers] == ["blocks.0.block.attn", "blocks.0", "blocks.1.attn"]


def test_a_model_lives_no_longer_for_what_is_kept():
    model = model_of()
    model.blocks[0].owner = [model]  # a part that knows the whole
    model.forward = functools.partial(type(model).forward, model)  # and a method that does
    recorded(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_the_cache_is_emptied_when_modules_change():
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 3))
    ModelState(model).cache["key"] = "value"
    assert ModelState(model).cache == {"key": "value"}
    for change in (
        lambda: model.append(nn.ReLU()),
        lambda: model.__setitem__(0, nn.ReLU()),
        lambda: model.__delitem__(2),
        lambda: setattr(model[1], "forward", lambda features: features),
        lambda: model[0].compile(),
    ):
        change()
        assert ModelState(model).cache == {}
        ModelState(model).cache["key"] = "value"


def flipped(tokens):
    return torch.cat([tokens[:, :1], tokens[:, 1:].flip(1)], dim=1)


def flip_in_a_class(model):
    kind = type(model.blocks[1].attn)
    forward, kind.forward = kind.forward, lambda self, tokens, **more: forward(self, flipped(tokens), **more)
    return kind, forward


FLIPS = {
    "hook": lambda model: model.blocks[1].attn.register_forward_pre_hook(lambda _, args: (flipped(args[0]),)),
    "global hook": lambda model: nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: (flipped(args[0]),) if module is model.blocks[1].attn else None
    ),
    "method": lambda model: setattr(
        model.blocks[1], "attend", lambda tokens: model.blocks[1].attn(flipped(model.blocks[1].norm1(tokens)))
    ),
    "setting": lambda model: model.blocks[1].order.reverse(),
    "class": flip_in_a_class,
}


class Block(nn.Module):
    """Attention with a residual, over tokens in an order that is a setting."""

    def __init__(self, block):
        super().__init__()
        self.norm1, self.attn, self.order = block.norm1, block.attn, [0, 1, 2, 3]
        self.attend = lambda tokens: self.attn(self.norm1(tokens)[:, [0, *(1 + place for place in self.order)]])

    def forward(self, tokens, **_):
        return tokens + self.attend(tokens)


@pytest.mark.parametrize("flip", FLIPS.values(), ids=FLIPS.keys())
def test_attention_whose_tokens_are_reordered_after_a_first_pass_is_refused(flip, monkeypatch):
    model = model_of()
    kind = type(model.blocks[1].attn)
    monkeypatch.setattr(kind, "forward", kind.forward)  # restored afterwards
    model.blocks[1] = Block(model.blocks[1])
    assert recorded(model)[0].readout.shape == (2, 5)
    handle = flip(model)
    try:
        with pytest.raises(UnsupportedModelError, match="reorders"):
            recorded(model)[0].readout_of(None)
    finally:
        if isinstance(handle, torch.utils.hooks.RemovableHandle):
            handle.remove()


def merged(model):
    model.fc1.weight.data += 0.1 * torch.ones(3, 1) @ torch.ones(1, 2)  # as peft merges an adapter


def step(model):
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


WEIGHT_CHANGES = {
    "load_state_dict": lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
    "optimiser step": step,
    "merged adapter": merged,
    "exchanged data": lambda model: setattr(model.fc1.weight, "data", model.fc1.weight.detach() + 1),
    "buffer": lambda model: model.scale.fill_(2),
    "index that is an attribute": lambda model: model.order.copy_(torch.tensor([1, 0])),
    "half precision": lambda model: model.half(),
}


@pytest.mark.parametrize("change", WEIGHT_CHANGES.values(), ids=WEIGHT_CHANGES.keys())
def test_the_cache_is_emptied_when_weights_change(change):
    compute = lambda self, features: self.fc1(features[:, self.order]) * self.scale  # noqa: E731
    model = Custom(compute, fc1=nn.Linear(2, 3), order=torch.tensor([0, 1]))
    model.register_buffer("scale", torch.ones(()))
    ModelState(model).cache["key"] = "value"
    model(torch.ones(1, 2)).sum().backward()
    assert ModelState(model).cache == {"key": "value"}
    change(model)
    assert ModelState(model).cache == {}
