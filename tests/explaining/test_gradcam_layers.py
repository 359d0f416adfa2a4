"""Grad-CAM reads the last layer whose patches the output depends on; features may be [tokens, batch, channels]."""

import numpy as np
import pytest
import timm
import torch
from timm.models.vision_transformer import ResPostBlock
from torch import nn

from tests.small import DATA, Custom, custom_model, jitter, photo
from vitflow import Explainer
from vitflow.errors import UnsupportedModelError
from vitflow.methods import TokenLayout

IMAGES = [photo(40, 60, seed) for seed in range(3)]


def encoder(*, first: bool = False, batch_first: bool = True) -> nn.Module:
    """Return a ViT around nn.TransformerEncoder with a class token, [batch, tokens, …] or [tokens, batch, …]."""

    def compute(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        tokens = model.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([model.token.weight.expand(len(x), 1, -1), tokens], dim=1)
        tokens = model.encoder(tokens if batch_first else tokens.transpose(0, 1))
        return model.head(tokens[:, 0] if batch_first else tokens[0])

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 3, 48, norm_first=first, batch_first=batch_first)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    parts = {"embed": nn.Conv2d(3, 24, 8, 8), "encoder": encoder, "head": nn.Linear(24, 5)}
    return jitter(Custom(compute, token=nn.Embedding(1, 24), **parts))


def _intermediate(compute) -> nn.Module:
    return Custom(lambda m, x: m.vit.head(compute(m.vit, x)), vit=custom_model()).eval()


MODELS = {
    "norms after attention": (lambda: encoder(), "encoder.layers.1"),
    "timm's norms after attention": (lambda: custom_model(block_fn=ResPostBlock), "blocks.1"),
    "last block but one": (
        lambda: _intermediate(lambda vit, x: vit.get_intermediate_layers(x, n=[1])[0].mean(1)),
        "vit.blocks.1",
    ),
    "class token of the last block but one": (
        lambda: _intermediate(
            lambda vit, x: vit.forward_intermediates(x, indices=[1], return_prefix_tokens=True)[1][0][1][:, 0]
        ),
        "vit.blocks.1.norm1",
    ),
    "last block not run": (
        lambda: _intermediate(lambda vit, x: vit.blocks[:2](vit._pos_embed(vit.patch_embed(x)))[:, 1:].mean(1)),
        "vit.blocks.1",
    ),
}


def explainer_of(model: nn.Module) -> Explainer:
    return Explainer(model, data_config=DATA, layout=TokenLayout(1, 4, 4))


@pytest.mark.parametrize("name", MODELS)
def test_the_layer_is_the_last_one_with_a_gradient_at_the_patches(name):
    make, path = MODELS[name]
    model = make()
    saliency = explainer_of(model).explain(IMAGES[0], method="gradcam", target=2)
    assert saliency.facts["cam_layer"] == path
    assert path in "".join(saliency._notes())
    kept = {}
    hook = model.get_submodule(path).register_forward_hook(lambda *given: kept.update(tokens=given[-1]))
    with hook:
        output = model(explainer_of(model).pixels(IMAGES[0]).requires_grad_())
    tokens = kept["tokens"]
    weights = torch.autograd.grad(output[0, 2], tokens)[0][0, 1:].mean(0)
    expected = (tokens[0, 1:] @ weights).clamp_min(0).view(4, 4).detach()
    np.testing.assert_allclose(saliency.grid, expected, rtol=1e-4, atol=1e-6)
    assert saliency.grid.any()


def test_a_given_layer_without_a_gradient_has_a_note():
    model = MODELS["last block but one"][0]()
    saliency = explainer_of(model).explain(IMAGES[0], method="gradcam", target=2, layer=3)
    assert "0 everywhere" in saliency.facts["note"]


def test_ensembles_of_such_models_are_not_read_in_part():
    members = nn.ModuleList([custom_model(block_fn=ResPostBlock), custom_model(block_fn=ResPostBlock)])
    model = Custom(lambda m, x: m.members[0](x) + m.members[1](-x), members=members).eval()
    with pytest.raises(UnsupportedModelError, match="several branches"):
        explainer_of(model).explain(IMAGES[0], method="gradcam", target=2)


@pytest.mark.parametrize("method", ["gradcam", "similarity", "rollout", "gae"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("first", [True, False])
def test_tokens_first_and_images_second_make_the_same_maps(method, count, first):
    maps = [
        explainer_of(encoder(first=first, batch_first=batch_first)).explain_batch(IMAGES[:count], methods=[method])
        for batch_first in (True, False)
    ]
    for expected, actual in zip(*maps, strict=True):
        np.testing.assert_allclose(actual.grid, expected.grid, rtol=1e-4, atol=1e-6)


def test_other_models_keep_their_layer():
    saliency = Explainer(timm.create_model("test_vit", num_classes=5).eval()).explain(IMAGES[0], method="gradcam")
    assert "cam_layer" not in saliency.facts


class _Renamed(nn.Module):
    """A block of a lesson, with norms of other names than a library's."""

    def __init__(self, block: nn.Module, *names: str) -> None:
        super().__init__()
        self.names, self.attend, self.mix = names, block.attn, block.mlp
        for name, norm in zip(names, (block.norm1, block.norm2), strict=True):
            setattr(self, name, norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, after = (getattr(self, name) for name in self.names)
        x = x + self.attend(before(x))
        return x + self.mix(after(x))


@pytest.mark.parametrize("names", [("layer_norm_1", "layer_norm_2"), ("attention_norm", "ffn_norm"), ("pre", "post")])
@pytest.mark.parametrize("holder", [nn.Sequential, nn.ModuleList])
def test_norms_with_other_names_are_read_as_those_of_libraries(names, holder):
    vit = custom_model(global_pool="avg")

    def compute(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = model.vit._pos_embed(model.vit.patch_embed(x))
        for layer in model.encoder:
            x = layer(x)
        return model.vit.forward_head(model.vit.norm(x))

    blocks = [_Renamed(block, *names) for block in vit.blocks]
    layers = nn.Sequential(*blocks) if holder is nn.Sequential else nn.ModuleList(blocks)
    expected = explainer_of(vit).explain(IMAGES[0], method="gradcam", target=2)
    parts = nn.Module()
    for name in ("patch_embed", "_pos_embed", "norm", "forward_head"):
        setattr(parts, name, getattr(vit, name))
    actual = explainer_of(Custom(compute, vit=parts, encoder=layers).eval()).explain(
        IMAGES[0], method="gradcam", target=2
    )
    np.testing.assert_allclose(actual.grid, expected.grid, rtol=1e-4, atol=1e-6)
    assert actual.grid.any()
