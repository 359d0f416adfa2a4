"""Tensors as images: the batch of a DataLoader gives the maps that its images give."""

import numpy as np
import pytest
import timm
import torch
import torchvision
import transformers

import vitflow
from vitflow import Explainer
from vitflow.errors import ModelError, OptionError, ShapeError, VitflowWarning

DATA = {"input_size": (3, 32, 32), "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.25, 0.3), "crop_pct": 1.0}
IMAGES = [np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8) for seed in range(3)]


def model_of(library: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if library == "timm":
        return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=5).eval()
    if library == "torchvision":
        model = torchvision.models.VisionTransformer(32, 8, 2, 2, 24, 48, num_classes=5).eval()
        torch.nn.init.normal_(model.heads.head.weight)  # which torchvision sets to 0
        return model
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=5, attn_implementation="eager")
    return transformers.ViTForImageClassification(config).eval()


def normalised(images: list[np.ndarray]) -> torch.Tensor:
    pixels = torch.stack([torch.from_numpy(image).permute(2, 0, 1) / 255 for image in images])
    return (pixels - torch.tensor(DATA["mean"]).view(3, 1, 1)) / torch.tensor(DATA["std"]).view(3, 1, 1)


@pytest.mark.parametrize("library", ["timm", "transformers", "torchvision"])
def test_the_batch_of_a_dataloader_is_explained_in_three_lines(library):
    model, batch = model_of(library), normalised(IMAGES)
    kept = batch.clone()

    explainer = Explainer(model, data_config=DATA)
    maps = explainer.explain_batch(batch, methods=["gae", "rollout"], targets=np.array([1, 2, 3]))
    overlays = [one.overlay() for one in maps]

    expected = explainer.explain_batch(IMAGES, methods=["gae", "rollout"], targets=np.array([1, 2, 3]))
    assert [one.target for one in maps] == [one.target for one in expected]
    for one, other, overlay in zip(maps, expected, overlays, strict=True):
        np.testing.assert_allclose(one.grid, other.grid, rtol=0, atol=1e-5 * np.abs(other.grid).max())
        np.testing.assert_array_equal(one.image, other.image)  # the normalisation is undone
        assert overlay.shape == (32, 32, 3)
    assert torch.equal(batch, kept) and not batch.requires_grad


def test_the_original_of_a_tensor_is_what_the_map_lies_on():
    explainer = Explainer(model_of("timm"), data_config=DATA | {"crop_pct": 0.8})
    original = np.random.default_rng(9).integers(0, 256, (50, 90, 3), dtype=np.uint8)
    pixels = explainer.pixels(original)
    actual, expected = explainer.explain(pixels, original=original), explainer.explain(original)
    np.testing.assert_allclose(actual.grid, expected.grid, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(actual.image, original)
    assert actual.placement == expected.placement != explainer.explain(pixels).placement
    with pytest.raises(ShapeError, match="tensor of .* for this original"):
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, dynamic_img_size=True)
        Explainer(model, data_config=DATA, fit="squash").explain(pixels[..., :16], original=original)


def test_layers_features_and_pages_take_tensors():
    explainer, batch = Explainer(model_of("timm"), data_config=DATA | {"crop_pct": 0.5}), normalised(IMAGES)
    exact = Explainer(model_of("timm"), data_config=DATA)
    for actual, expected in zip(
        vitflow.layer_maps(batch[0], model=explainer).saliencies,
        vitflow.layer_maps(IMAGES[0], model=exact).saliencies,
        strict=True,
    ):
        np.testing.assert_allclose(actual.grid, expected.grid, rtol=0, atol=1e-5)
    actual, expected = vitflow.feature_maps(batch, model=explainer), vitflow.feature_maps(IMAGES, model=exact)
    np.testing.assert_allclose(actual.components, expected.components, rtol=0, atol=1e-3)
    assert len(vitflow.compare(batch, model=explainer, methods=["rollout", "centre"]).saliencies) == 6
    assert "image 2" in vitflow.explore(batch[:2], model=explainer).html


RAW = torch.from_numpy(IMAGES[0]).permute(2, 0, 1) / 255


@pytest.mark.parametrize(("values", "half"), [(RAW, False), (RAW * 255, True), (0.2 + 0.7 * RAW, True)])
def test_each_tensor_that_does_not_look_normalised_is_mentioned(values, half):
    data = DATA | ({"mean": (0.5,) * 3, "std": (0.5,) * 3} if half else {})
    explainer = Explainer(model_of("timm"), data_config=data)
    with pytest.warns(VitflowWarning, match="image [13]: .*does not look normalised") as reported:
        explainer.explain_batch(torch.stack([values, explainer.pixels(IMAGES[1])[0], values]), methods=["rollout"])
    assert [str(each.message)[:7] for each in reported] == ["image 1", "image 3"]
    Explainer(model_of("timm"), data_config=DATA | {"mean": (0.0,) * 3, "std": (1.0,) * 3}).explain(RAW)  # as it reads


def test_a_crop_that_sees_little_of_an_image_is_mentioned():
    explainer = Explainer(model_of("timm"), data_config=DATA)
    wide = np.random.default_rng(0).integers(0, 256, (32, 400, 3), dtype=np.uint8)
    with pytest.warns(VitflowWarning, match=r"8\.0% of the image: fit='pad'"):  # 32 of 400 columns
        saliency = explainer.explain(wide, method="rollout")
    assert "The model sees 8.0% of the image: fit='pad' or fit='squash' shows it the whole image." in saliency._notes()
    Explainer(model_of("timm"), data_config=DATA, fit="squash").explain(wide, method="rollout")
    explainer.explain(wide[:, :300], method="rollout")


def test_a_model_of_other_channels_explains_tensors():
    torch.manual_seed(0)
    model = timm.create_model("test_vit", in_chans=5, num_classes=4, img_size=64).eval()
    explainer = Explainer(model)
    pixels = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 64, 64))).float()
    photograph = np.random.default_rng(1).integers(0, 256, (100, 128, 3), dtype=np.uint8)
    for method in ("rollout", "gae"):
        shown = explainer.explain(pixels, method=method, target=1, original=photograph)
        np.testing.assert_array_equal(shown.image, photograph)
        np.testing.assert_array_equal(shown.grid, explainer.explain(pixels, method=method, target=1).grid)
    grey = explainer.explain(pixels, method="rollout").image  # the mean of the channels
    mean = pixels.mean(dim=0).numpy()
    np.testing.assert_allclose(grey[..., 1], 255 * (mean - mean.min()) / (mean.max() - mean.min()), atol=0.51)
    with pytest.raises(OptionError, match=r"tensor \[5, 64, 64\].*original="):
        explainer.explain(photograph)
    with pytest.raises(OptionError, match="leave it out"):
        Explainer("demo").explain(photograph, original=photograph)


@pytest.mark.parametrize(
    ("pixels", "reported"),
    [
        (torch.zeros(3, 16, 16), r"float tensor \[3, 32, 32\].*got torch.float32 \[3, 16, 16\].*resized"),
        (torch.zeros(32, 32, 3), r"movedim\(-1, -3\)"),
        (torch.zeros(1, 32, 32, 3), r"movedim\(-1, -3\)"),
        (torch.zeros(1, 2, 3, 32, 32), "explain_batch"),
        (torch.zeros(3, 32, 32, dtype=torch.uint8), "got torch.uint8.*as a path"),
        (torch.zeros(32, 32, 3, dtype=torch.uint8), "as a path"),
        (torch.full((3, 32, 32), torch.nan), "for image 1: it has NaN"),
        (torch.full((3, 32, 32), torch.inf), "infinite"),
    ],
)
def test_a_tensor_that_is_no_input_of_the_model_is_refused(pixels, reported):
    with pytest.raises(ShapeError, match=reported):
        Explainer(model_of("timm"), data_config=DATA).explain(pixels)


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_a_tensor_with_part_of_a_patch_is_refused(library):
    if library == "timm":
        options = {"img_size": 32, "patch_size": 8, "depth": 2, "dynamic_img_size": True, "dynamic_img_pad": True}
        model = timm.create_model("vit_tiny_patch16_224", **options)
    else:
        model = model_of(library)
    explainer = Explainer(model, data_config=DATA)
    assert explainer.explain(torch.full((3, 40, 32), -0.5)).grid.shape == (5, 4)
    with pytest.raises(ShapeError, match=r"multiples of the patches of .*, 8 × 8 pixels, got 36 × 32"):
        explainer.explain(torch.full((3, 36, 32), -0.5))


class OtherInputs(torch.nn.Module):
    """A model that takes a dict, a pair, or a second input by name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.vit, self.kind = model_of("timm"), kind
        if kind == "by name":
            self.forward = self.with_table

    def forward(self, batch) -> torch.Tensor:
        images = batch["image"] if self.kind == "dict" else batch.image
        if self.kind == "pair":
            images, _ = batch
        return self.vit(images)

    def with_table(self, images: torch.Tensor, *, table: torch.Tensor) -> torch.Tensor:
        return self.vit(images) + table


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("kind", ["dict", "attribute", "pair", "by name"])
def test_a_model_with_other_inputs_than_one_tensor_is_refused_with_the_remedy(kind):
    model = OtherInputs(kind).eval()
    for wrapped, method in ((model, "gae"), (torch.nn.Sequential(model), "occlusion")):
        with pytest.raises(ModelError, match=r"one tensor \(1, 3, 32, 32\).*forward\(pixels\)"):
            Explainer(wrapped, data_config=DATA).explain(IMAGES[0], method=method)
