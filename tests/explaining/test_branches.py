"""Grad-CAM of models that compute their output in several branches: their sum, or a refusal."""

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from vitflow import Explainer, Saliency
from vitflow.errors import UnsupportedModelError
from vitflow.explaining.captions import notes_of

DATA = {"input_size": (3, 160, 160), "mean": (0.5,) * 3, "std": (0.5,) * 3}


def vit(seed: int, **options: object) -> nn.Module:
    torch.manual_seed(seed)
    return timm.create_model("test_vit", num_classes=5, **options).eval()


def pixels(count: int = 2, size: int = 160) -> Tensor:
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(3)) * 2 - 1


def explained(model: nn.Module, method: str = "gradcam", size: int = 160, **options: object) -> list[Saliency]:
    explainer = Explainer(model.eval(), data_config={**DATA, "input_size": (3, size, size)})
    return explainer.explain_batch(pixels(size=size), methods=[method], targets=2, **options)


class Ensemble(nn.Module):
    def __init__(self, *members: nn.Module) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, images: Tensor) -> Tensor:
        return sum(weight * member(images) for weight, member in enumerate(self.members, start=1))


class Fused(nn.Module):
    """Two streams whose class tokens are classified together."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.head = first, second, nn.Linear(2 * 64, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = [stream.forward_features(images)[:, 0] for stream in (self.first, self.second)]
        return self.head(torch.cat(tokens, dim=1))


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


@pytest.mark.parametrize("kind", ["ensemble", "after a module", "fused"])
@pytest.mark.parametrize("layer", [-1, 3])
def test_the_maps_of_branches_with_one_grid_are_added(kind, layer):
    members = vit(1), vit(2)
    model = Fused(*members) if kind == "fused" else Ensemble(*members)
    model = nn.Sequential(nn.Identity(), model) if kind == "after a module" else model
    norms = [member.blocks[layer if layer < 0 else layer - 1].norm1 for member in members]
    actual = explained(model, layer=layer)
    assert_equal(actual, sum(cam(model, norm) for norm in norms))
    assert all("cam_share" not in saliency.facts for saliency in actual)


class Doubling(nn.Module):
    """Test-time augmentation in one batch, or in two passes."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        self.vit, self.together = vit(1), together

    def forward(self, images: Tensor) -> Tensor:
        if not self.together:
            return self.vit(images) + self.vit(images.flip(-1))
        return self.vit(torch.cat([images, images.flip(-1)])).unflatten(0, (2, -1)).mean(dim=0)


class WithConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vit = vit(1)
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 16, 16), nn.ReLU(), nn.Flatten(), nn.Linear(800, 5))

    def forward(self, images: Tensor) -> Tensor:
        return 0.1 * self.vit(images) + self.conv(images)


REFUSED = {
    "another grid": lambda: Ensemble(vit(1), vit(2, patch_size=32)),
    "a convolutional branch": WithConvolutions,
    "a doubled batch": lambda: Doubling(together=True),
    "two passes": lambda: Doubling(together=False),
    "CrossViT": lambda: timm.create_model("crossvit_tiny_240", num_classes=5),
}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("kind", REFUSED)
def test_branches_that_cannot_be_added_are_refused(kind):
    torch.manual_seed(4)
    model, size = REFUSED[kind](), 240 if kind == "CrossViT" else 160
    with pytest.raises(UnsupportedModelError, match="input_gradient"):
        explained(model, size=size)
    assert explained(model, "input_gradient", size)[0].grid.max() > 0
    try:
        explained(model, "rollout", size)
    except UnsupportedModelError as error:  # its remedy does not lead back here
        assert "gradcam" not in str(error)


class ReadsTwo(nn.Module):
    """A head that reads the tokens of two blocks of one stack."""

    def __init__(self) -> None:
        super().__init__()
        self.vit, self.head = vit(1), nn.Linear(2 * 64, 5)

    def forward(self, images: Tensor, lower: bool = True) -> Tensor:
        tokens, read = self.vit._pos_embed(self.vit.patch_embed(images)), []
        for index, block in enumerate(self.vit.blocks):
            tokens = block(tokens)
            if index in (2, 5):
                read.append(tokens.mean(dim=1))
        return self.head(torch.cat([read[0] if lower else read[0].detach(), read[1]], dim=1))


def test_a_head_that_reads_lower_blocks_too_has_the_share_in_its_caption():
    torch.manual_seed(5)
    model = ReadsTwo()
    actual, images = explained(model), pixels().requires_grad_()
    assert_equal(actual, cam(model, model.vit.blocks[5].norm1))
    whole, upper = (torch.autograd.grad(model(images, lower)[:, 2].sum(), images)[0] for lower in (True, False))
    shares = 1 - (whole - upper).flatten(1).norm(dim=1) / whole.flatten(1).norm(dim=1)
    for saliency, share in zip(actual, shares.tolist(), strict=True):
        assert 0.05 < share < 0.95
        assert saliency.facts["cam_share"] == pytest.approx(share, abs=2e-3)
        assert any(f"{share:.0%}" in note for note in notes_of(saliency.facts))
    assert "cam_share" not in explained(model, layer=2)[0].facts  # everything passes a block below both


def test_a_model_of_one_stack_needs_no_further_backward_pass(monkeypatch):
    calls, differentiate, explainer = [], torch.autograd.grad, Explainer(vit(1), data_config=DATA)

    def counted(*args: object, **options: object) -> object:
        calls.append(args)
        return differentiate(*args, **options)

    explainer.explain(pixels(1), method="gradcam", target=2)
    monkeypatch.setattr(torch.autograd, "grad", counted)
    explainer.explain(pixels(1), method="gradcam", target=2)
    assert len(calls) == 1


def test_class_activation_maps_of_other_packages_use_the_same_layers():
    pytest.importorskip("pytorch_grad_cam")
    pytest.importorskip("captum")
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    members = vit(1), vit(2)
    model = Ensemble(*members)
    layers = [member.blocks[-1].norm1 for member in members]
    reshape = lambda tokens: tokens[:, 1:].transpose(1, 2).unflatten(2, (10, 10))  # noqa: E731
    with GradCAM(model=model, target_layers=layers, reshape_transform=reshape) as package:
        expected = package(pixels(1), [ClassifierOutputTarget(2)])[0]
    np.testing.assert_allclose(explained(model, "cam:GradCAM")[0].pixels, expected, atol=1e-5)
    with pytest.raises(UnsupportedModelError, match="branches"):
        explained(WithConvolutions(), "cam:GradCAM")
    with pytest.raises(UnsupportedModelError, match="several branches"):
        explained(model, "captum:LayerGradCam")


class MonteCarlo(nn.Module):
    """Dropout that stays on in eval mode."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.vit, self.rate = vit(1), rate

    def forward(self, images: Tensor) -> Tensor:
        features = self.vit.forward_head(self.vit.forward_features(images), pre_logits=True)
        return self.vit.head(nn.functional.dropout(features, self.rate, training=self.rate > 0))


@pytest.mark.parametrize("method", ["gae", "rollout", "occlusion"])
def test_a_model_that_is_random_in_eval_mode_is_mentioned(method):
    random, usual = (explained(MonteCarlo(rate), method)[0] for rate in (0.3, 0.0))
    assert any("random" in note for note in notes_of(random.facts))
    assert not any("random" in note for note in notes_of(usual.facts))


class Reshaping(nn.Module):
    """A block that needs a multiple of 5 tokens besides the class token."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, tokens: Tensor, **options: object) -> Tensor:
        tokens[:, 1:].unflatten(1, (5, -1))
        return self.block(tokens, **options)


def test_a_model_that_fails_on_the_kept_number_of_patches_has_them_blanked():
    model = vit(1)
    model.blocks[2] = Reshaping(model.blocks[2])
    actual = explained(model, "sampling", masks=8, keep=0.33)[0]
    assert "fails on 33 of its patches" in actual.facts["hidden"]
    assert explained(model, "sampling", masks=8, keep=0.3)[0].facts["hidden"] == "tokens dropped"


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
