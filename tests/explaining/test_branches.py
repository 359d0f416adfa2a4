"""Grad-CAM of models that compute their output in several branches is refused; lower blocks have a note."""

from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from tests.small import Custom
from vitflow import Explainer, Saliency
from vitflow.errors import UnsupportedModelError
from vitflow.explaining.captions import notes_of

DATA = {"input_size": (3, 160, 160), "mean": (0.5,) * 3, "std": (0.5,) * 3}


def vit(seed: int, **options: object) -> nn.Module:
    torch.manual_seed(seed)
    return timm.create_model("test_vit", num_classes=5, **options).eval()


def pixels(count: int = 2) -> Tensor:
    return torch.rand(count, 3, 160, 160, generator=torch.Generator().manual_seed(3)) * 2 - 1


def explained(model: nn.Module, method: str = "gradcam", **options: object) -> list[Saliency]:
    return Explainer(model.eval(), data_config=DATA).explain_batch(pixels(), methods=[method], targets=2, **options)


def ensemble(*members: nn.Module) -> nn.Module:
    weighted = lambda self, x: sum(weight * part(x) for weight, part in enumerate(self.members, start=1))  # noqa: E731
    return Custom(weighted, members=nn.ModuleList(members))


def with_convolutions() -> nn.Module:
    conv = nn.Sequential(nn.Conv2d(3, 8, 16, 16), nn.ReLU(), nn.Flatten(), nn.Linear(800, 5))
    return Custom(lambda self, images: 0.1 * self.vit(images) + self.conv(images), vit=vit(1), conv=conv)


def cam(model: nn.Module, norm: nn.Module) -> Tensor:
    """ReLU of the features times their mean gradient over the patches, [batch, 10, 10]."""
    kept: dict[str, Tensor] = {}
    handle = norm.register_forward_hook(lambda module, args, output: kept.update(tokens=output))
    score = model(pixels())[:, 2].sum()
    handle.remove()
    [gradient] = torch.autograd.grad(score, kept["tokens"])
    weights = gradient[:, 1:].mean(dim=1, keepdim=True)
    return (weights * kept["tokens"])[:, 1:].sum(dim=2).clamp_min(0).detach().unflatten(1, (10, 10))


def assert_equal(actual: list[Saliency], expected: Tensor) -> None:
    for saliency, grid in zip(actual, expected.numpy(), strict=True):
        np.testing.assert_allclose(saliency.grid, grid, rtol=1e-4, atol=1e-6 * grid.max())


def doubled(self: nn.Module, images: Tensor) -> Tensor:
    """Test-time augmentation in one batch."""
    return self.vit(torch.cat([images, images.flip(-1)])).unflatten(0, (2, -1)).mean(dim=0)


REFUSED = {
    "an ensemble": lambda: nn.Sequential(nn.Identity(), ensemble(vit(1), vit(2))),
    "another grid": lambda: ensemble(vit(1), vit(2, patch_size=32)),
    "a convolutional branch": with_convolutions,
    "a doubled batch": lambda: Custom(doubled, vit=vit(1)),
    "two passes": lambda: Custom(lambda self, images: self.vit(images) + self.vit(images.flip(-1)), vit=vit(1)),
}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("kind", REFUSED)
def test_branches_are_refused(kind):
    torch.manual_seed(4)
    model = REFUSED[kind]()
    with pytest.raises(UnsupportedModelError, match="input_gradient"):
        explained(model)
    if kind == "a convolutional branch":
        pytest.importorskip("pytorch_grad_cam")
        with pytest.raises(UnsupportedModelError, match="branches"):
            explained(model, "cam:GradCAM")
    assert explained(model, "input_gradient")[0].grid.max() > 0
    try:
        explained(model, "rollout")
    except UnsupportedModelError as error:  # its remedy does not lead back here
        assert "gradcam" not in str(error)


def test_a_head_that_reads_lower_blocks_too_has_a_note():
    def read_two(self: nn.Module, images: Tensor) -> Tensor:
        tokens, read = self.vit._pos_embed(self.vit.patch_embed(images)), []
        for index, block in enumerate(self.vit.blocks):
            tokens = block(tokens)
            if index in (2, 5):
                read.append(tokens.mean(dim=1))
        return self.head(torch.cat(read, dim=1))

    torch.manual_seed(5)
    model = Custom(read_two, vit=vit(1), head=nn.Linear(2 * 64, 5))
    actual = explained(model)
    assert_equal(actual, cam(model, model.vit.blocks[5].norm1))
    for saliency in actual:
        assert saliency.facts["cam_partial"]
        assert any("other layers" in note for note in notes_of(saliency.facts))
    assert "cam_partial" not in explained(model, layer=3)[0].facts  # everything passes a block below both


@pytest.mark.parametrize("name", ["cait_xxs24_224", "twins_svt_small", "pit_ti_224"])
def test_a_class_token_that_is_read_alone_and_stages_have_no_note(name):
    model = timm.create_model(name, num_classes=5, pretrained=False).eval()
    [saliency] = Explainer(model).explain_batch(torch.randn(1, 3, 224, 224).clamp(-2, 2), method="gradcam", target=1)
    assert "cam_partial" not in saliency.facts


def test_a_model_of_one_stack_needs_no_further_backward_pass(monkeypatch):
    counted, explainer = Mock(wraps=torch.autograd.grad), Explainer(vit(1), data_config=DATA)
    explainer.explain(pixels(1), method="gradcam", target=2)
    monkeypatch.setattr(torch.autograd, "grad", counted)
    explainer.explain(pixels(1), method="gradcam", target=2)
    assert counted.call_count == 1


@pytest.mark.parametrize("method", ["gae", "rollout", "occlusion"])
def test_a_model_that_is_random_in_eval_mode_is_mentioned(method):
    def drop(self: nn.Module, images: Tensor) -> Tensor:  # also in eval mode
        features = self.vit.forward_head(self.vit.forward_features(images), pre_logits=True)
        return self.vit.head(nn.functional.dropout(features, self.rate, training=self.rate > 0))

    random, usual = (explained(Custom(drop, vit=vit(1), rate=rate), method)[0] for rate in (0.3, 0.0))
    assert any("random" in note for note in notes_of(random.facts))
    assert not any("random" in note for note in notes_of(usual.facts))


def test_a_model_that_fails_on_the_kept_number_of_patches_has_them_blanked():
    def reshaping(self: nn.Module, tokens: Tensor, **options: object) -> Tensor:
        tokens[:, 1:].unflatten(1, (25, -1))  # a multiple of 25 tokens besides the class token
        return self.block(tokens, **options)

    model = vit(1)
    model.blocks[2] = Custom(reshaping, block=model.blocks[2])
    actual = explained(model, "sampling", masks=8)[0]
    assert "fails on 30% of its patches" in actual.facts["hidden"]
    assert explained(vit(1), "sampling", masks=8)[0].facts["hidden"] == "tokens dropped"


def test_blocks_that_also_return_tokens_within_patches_have_a_map():
    model = timm.create_model("tnt_s_patch16_224", num_classes=5, depth=2).eval()
    explainer, image = Explainer(model), np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    actual = explainer.explain(image, method="gradcam", target=1, layer=2)
    pixels = explainer.pixels(image)
    kept = []
    handle = model.blocks[1].norm_out.register_forward_hook(lambda _, args, output: kept.append(output))
    logit = model(pixels)[0, 1]
    handle.remove()
    [gradient] = torch.autograd.grad(logit, kept)
    expected = (gradient[0, 1:].mean(0) * kept[0][0, 1:]).sum(-1).clamp_min(0).detach().reshape(14, 14)
    np.testing.assert_allclose(actual.grid, expected.numpy(), rtol=1e-4, atol=1e-7)
