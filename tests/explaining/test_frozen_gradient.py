"""The frozen gradient against a Vision Transformer written out by hand; models that it refuses; families."""

import copy

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from tests import literal_vit
from tests.explaining.test_gradcam_layers import encoder
from tests.models.test_libraries import NORMALISATION, built
from tests.recording.test_families import build, marked
from tests.small import DATA, custom_model, photo, since
from tests.small import Custom as Module
from vitflow import Explainer
from vitflow.errors import UnsupportedModelError
from vitflow.methods import TokenLayout
from vitflow.recording.frozen import attending_blocks, frozen_pass
from vitflow.recording.recorder import record_attention

CONFIG = {"input_size": (3, 32, 32), "crop_pct": 1.0, **NORMALISATION}
PLAIN = {"method": "frozen_gradient", "refine": 0}


@pytest.mark.parametrize("readout", literal_vit.READOUTS)
def test_it_is_the_gradient_times_tokens_with_frozen_nonlinearities(readout):
    model = literal_vit.timm_model(readout, depth=5)
    explainer, images, targets = Explainer(model, data_config=CONFIG), [photo(32, 32, 1), photo(32, 32, 2)], [3, 0]
    actual = explainer.explain_batch(images, methods=["frozen_gradient"], targets=np.array(targets), refine=0)
    for image, target, saliency in zip(images, targets, actual, strict=True):
        pixels, prefix = explainer.pixels(image)[0], literal_vit.READOUTS[readout][1]
        wanted = literal_vit.frozen_gradient(model, pixels, target, [1, 2], prefix).reshape(4, 4)
        assert saliency.grid == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def act(function) -> nn.Module:
    return Module(lambda _, x: function(x))


REFUSED = {
    "a sine": torch.sin,
    "a sigmoid that is added": lambda x: x + x.sigmoid(),
    "tokens without gradient that are added": lambda x: x + 2 * x.detach(),
    "a product of two linear paths": lambda x: x * x.roll(1, dims=-1),
    "an exponential": torch.exp,
    "a sine for one image": lambda x: torch.where(x.abs().mean((1, 2), keepdim=True) > 0.77, torch.sin(x), x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_contributions_do_not_add_up_is_refused(name):
    model = custom_model(depth=4)
    model.blocks[2].mlp.act = act(REFUSED[name])
    images = [np.zeros((32, 32, 3), np.uint8), photo(32, 32)]
    with pytest.raises(UnsupportedModelError, match="add up"):
        Explainer(model, data_config=DATA).explain_batch(images, methods=["frozen_gradient"], targets=2)


def test_a_path_around_the_blocks_and_errors_that_cancel_are_refused():
    def around(self: nn.Module, pixels: Tensor) -> Tensor:
        return self.vit(pixels) + self.vit.head(self.vit.patch_embed(pixels).mean(dim=1))

    with pytest.raises(UnsupportedModelError, match="around this block"):
        Explainer(Module(around, vit=custom_model(depth=4)).eval(), data_config=DATA).explain(photo(32, 32), **PLAIN)
    model = custom_model(depth=4, num_classes=2)
    model.blocks[2].mlp.act = act(torch.sin)
    with pytest.raises(UnsupportedModelError, match="add up"):
        Explainer(model, data_config=DATA).explain_batch(
            [photo(32, 32)] * 2, methods=["frozen_gradient"], targets=np.array([0, 1])
        )


class Custom(torch.autograd.Function):
    """An activation that no function mode sees."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sigmoid() * x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        [x] = ctx.saved_tensors
        return gradient * x.sigmoid()


@pytest.mark.parametrize("images", [1, 17])
def test_tokens_on_the_first_axis_are_refused_also_if_there_are_as_many_images(images):
    batch = {"images": [photo(32, 32)] * images, "methods": ["frozen_gradient"], "targets": 2, "refine": 0}
    first, second = (
        Explainer(encoder(batch_first=each), data_config=DATA, layout=TokenLayout(1, 4, 4)) for each in (True, False)
    )
    assert first.explain_batch(**batch)[0].grid.any()  # the given layout is used
    with pytest.raises(UnsupportedModelError, match="layers.0"):
        second.explain_batch(**batch)


UNSEEN = {
    "a custom function": Custom.apply,
    "arrays": lambda x: x + torch.from_numpy(np.sin(x.detach().numpy())),
    "numbers": lambda x: x + x.mean().item(),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_the_function_mode_does_not_see_is_refused(name):
    model = custom_model(depth=4)
    model.blocks[2].mlp.act = act(UNSEEN[name])
    with pytest.raises(UnsupportedModelError, match="add up|on what it computes"):
        Explainer(model, data_config=DATA).explain(photo(32, 32), **PLAIN)


def squared_sums(x: Tensor) -> Tensor:
    return (x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()) * 0.5 + 1.0


ACTIVATIONS = {
    "gelu by tanh": lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3))),
    "gelu by erf": lambda x: x * 0.5 * (1.0 + torch.erf(x / 2**0.5)),
    "swish": lambda x: x * x.sigmoid(),
    "swish in place": lambda x: x.mul_(x.sigmoid()),
    "hard swish": lambda x: x * nn.functional.relu6(x + 3, inplace=True) / 6,
    "mish": nn.functional.mish,
    "relu squared": lambda x: nn.functional.relu(x, inplace=True).square(),
    "gated": lambda x: torch.cat([nn.functional.silu(x[..., :48]) * x[..., 48:], x[..., 48:]], dim=-1),
    "a norm by hand": squared_sums,
    "group norm": lambda x: nn.functional.group_norm(x.mT, 4, eps=1e-3).mT,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_norms_written_by_hand_are_frozen(name):
    model = custom_model(depth=4)
    model.blocks[2].mlp.act = act(ACTIVATIONS[name])
    assert Explainer(model, data_config=DATA).explain(photo(32, 32), **PLAIN).grid.any()


def explain_blocks(model: nn.Module, pixels: Tensor) -> list[Tensor]:
    """The contributions of tokens to the first output, which are refused if they do not add up."""
    with torch.no_grad(), record_attention(model, attention=False) as trace:
        model(pixels)
    blocks = attending_blocks(trace)
    chosen = [blocks[max(1, len(blocks) // part) - 1] for part in (4, 2)]
    frozen = frozen_pass(trace, list(dict.fromkeys(chosen)))
    return frozen.contributions(torch.eye(frozen.outputs.shape[1])[:1].expand(len(pixels), -1).double())


SHRUNK = {"depth": 4, "embed_dim": 96, "num_heads": 4}
FAMILIES = [
    ("test_vit", {}, 160),
    ("vit_small_patch14_reg4_dinov2", {**SHRUNK, "img_size": 224}, 224),
    ("deit_tiny_distilled_patch16_224", SHRUNK, 224),
    ("vit_base_patch16_siglip_224", SHRUNK, 224),
    ("vit_relpos_small_patch16_224", SHRUNK, 224),
    ("eva02_tiny_patch14_224", {"depth": 4}, 224),
    ("beit_base_patch16_224", SHRUNK, 224),
    ("cait_xxs24_224", {"depth": 4}, 224),
    ("convit_tiny", {"depth": 4}, 224),
    ("samvit_base_patch16_224", {**SHRUNK, "window_size": 8, "global_attn_indexes": (1,)}, 224),
    ("swin_tiny_patch4_window7_224", {"depths": (1, 1, 2, 1)}, 224),
    ("swinv2_tiny_window8_256", {"depths": (1, 1, 2, 1)}, 256),
    ("test_maxvit", {}, 160),
    *((name, {}, 224) for name in ("mvitv2_tiny", "levit_128s", "tiny_vit_5m_224", "pvt_v2_b0")),
    *((name, {}, 224) for name in ("coatnet_0_rw_224", "caformer_s18", "volo_d1_224", "pit_ti_224")),
    *((name, {}, 224) for name in ("xcit_nano_12_p16_224", "davit_tiny", "twins_svt_small", "mixer_s32_224")),
]


@pytest.mark.parametrize(("name", "options", "side"), marked(FAMILIES, ("test_vit", "test_maxvit", "levit_128s")))
def test_contributions_of_a_family_add_up(name, options, side):
    model = build(name, **options)
    before, flags = copy.deepcopy(model.state_dict()), [each.requires_grad for each in model.parameters()]
    assert all(each.any() for each in explain_blocks(model, torch.randn(2, 3, side, side)))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert flags == [each.requires_grad for each in model.parameters()]
    assert not any(module._forward_hooks for module in model.modules())


LIBRARIES = ("ViTForImageClassification", "Dinov2WithRegistersForImageClassification", "SiglipForImageClassification")


@pytest.mark.parametrize("name", [*LIBRARIES, "CLIPForImageClassification", "BeitForImageClassification"])
def test_contributions_of_a_model_of_transformers_add_up(name):
    assert all(each.any() for each in explain_blocks(built(name), torch.randn(2, 3, 32, 32)))


NEST = {"num_levels": 3, "embed_dims": (8, 8, 8), "num_heads": (1, 1, 1), "depths": (2, 2, 2), "num_classes": 5}
SHUFFLED = {
    "Nest": lambda: timm.models.nest.Nest(img_size=64, **NEST),
    "Hiera": lambda: timm.models.hiera.Hiera((64, 64), embed_dim=8, num_heads=1, stages=(1, 1, 2, 1), num_classes=5),
}


@pytest.mark.parametrize("name", SHUFFLED)
def test_tokens_that_are_not_in_raster_order_are_refused(name):
    """Nest's are [batch, windows, tokens, channels], of which the last two could be a grid; Hiera's are shuffled."""
    with pytest.raises(UnsupportedModelError, match="no patch grid"):
        explainer_of(SHUFFLED[name]().eval(), 64).explain(photo(64, 64), **PLAIN, target=1)


def explainer_of(model: nn.Module, side: int) -> Explainer:
    return Explainer(model, data_config={**CONFIG, "input_size": (3, side, side)})


@since("timm", "1.0.31")  # the model
def test_a_grid_whose_channels_fit_as_a_side_is_that_of_the_tokens():
    """MaxViT's first tokens are [batch, 40, 40, 32 channels], which could be 40 × 32 patches of 40 channels."""
    explainer = explainer_of(build("test_maxvit"), 160)
    image = photo(160, 160)
    trace = explainer.record(image)
    frozen = frozen_pass(trace, attending_blocks(trace)[:1])
    [tokens], one_hot = frozen.tokens, torch.eye(trace.logits.shape[1])[1:2]
    [gradient] = torch.autograd.grad(frozen.outputs[0, 1], [tokens], retain_graph=True)
    assert tokens.shape[1:3] == (40, 40)
    wanted = (tokens.detach().double() * gradient.double()).sum(dim=-1).flatten(1)
    torch.testing.assert_close(frozen.contributions(one_hot)[0], wanted)
    assert explainer.explain(image, **PLAIN, target=1).grid.shape == (40, 40)
