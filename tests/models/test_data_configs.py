"""Transforms of torchvision as a data config: the input that they make, or a refusal that names the step."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torchvision import transforms
from torchvision.transforms import InterpolationMode, v2

from vitflow.errors import OptionError
from vitflow.images.preprocessing import Preprocessing
from vitflow.models.info import read_input_spec

MODEL = timm.create_model("test_vit", num_classes=3)
CROP, TENSOR = transforms.CenterCrop(64), transforms.ToTensor()
NORMALIZE = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def to_rgb(image):
    return image.convert("RGB")


READ = {
    "crop": transforms.Compose([transforms.Resize(73), CROP, TENSOR, NORMALIZE]),
    "a side that rounding would miss": transforms.Compose([transforms.Resize(93), transforms.CenterCrop(16), TENSOR]),
    "squash": transforms.Compose([to_rgb, transforms.Resize((64, 96)), TENSOR, NORMALIZE]),
    "squash and crop": transforms.Compose(
        [transforms.Resize((72, 144), InterpolationMode.BICUBIC), transforms.CenterCrop((64, 128)), TENSOR]
    ),
    "lambda": transforms.Compose(
        [transforms.Lambda(lambda image: image.convert("RGB")), transforms.Resize(64), CROP, TENSOR]
    ),
    "timm": timm.data.create_transform((3, 64, 64), crop_pct=0.9, interpolation="bicubic"),
    "second version": v2.Compose(
        [v2.Resize(73), v2.CenterCrop(64), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), NORMALIZE]
    ),
    "modules": nn.Sequential(v2.Resize((64, 64)), v2.ToImage(), transforms.ConvertImageDtype(torch.float32), NORMALIZE),
}


@pytest.mark.parametrize("name", READ)
def test_the_steps_of_a_transform_are_read(name):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (101, 163, 3), dtype=np.uint8))
    preprocessing = Preprocessing(read_input_spec(MODEL, READ[name]))
    prepared = preprocessing.prepare(np.array(image), preprocessing.place((101, 163)))
    np.testing.assert_allclose(prepared, READ[name](image).numpy(), atol=1e-6)


def test_grey_images_and_transforms_that_keep_the_size():
    grey = timm.create_model("test_vit", in_chans=1)
    steps = [transforms.Grayscale(), transforms.Resize(64), CROP, TENSOR, transforms.Normalize([0.4], [0.2])]
    assert read_input_spec(grey, transforms.Compose(steps)).mean == (0.4,) * 3
    spec = read_input_spec(MODEL, transforms.Compose([TENSOR, NORMALIZE]))
    assert (spec.size, spec.mean[0], spec.crop_pct) == ((160, 160), 0.485, 1.0)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([transforms.RandomResizedCrop(64), TENSOR], "RandomResizedCrop"),
        ([transforms.Resize(73), CROP, transforms.RandomHorizontalFlip(), TENSOR], "RandomHorizontalFlip"),
        ([transforms.Resize(73), CROP, TENSOR, transforms.Lambda(lambda values: 2 * values - 1)], "Lambda"),
        ([transforms.Grayscale(3), transforms.Resize(73), CROP, TENSOR], "Grayscale"),
        ([transforms.Resize(73, max_size=90), CROP, TENSOR], "max_size=90"),
        ([TENSOR, transforms.Resize(73, antialias=False), CROP], "antialias=False"),
        ([transforms.Resize(73), CROP, TENSOR, NORMALIZE, NORMALIZE], "once each, got Normalize"),
        ([transforms.Resize(73), TENSOR], "square CenterCrop"),
        ([transforms.Resize(73), transforms.CenterCrop((64, 32)), TENSOR], "square CenterCrop"),
        ([CROP, TENSOR], "square CenterCrop"),
        ([transforms.Resize(73), CROP, NORMALIZE], "ToTensor"),
        ([CROP, transforms.Resize(73), TENSOR], "in order"),
    ],
)
def test_other_steps_are_refused_by_name(steps, words):
    with pytest.raises(OptionError, match=words):
        read_input_spec(MODEL, transforms.Compose(steps))


@pytest.mark.parametrize("holder", [nn.ModuleList, lambda stems: nn.ModuleDict(dict(zip("ab", stems, strict=True)))])
def test_patch_embeddings_of_groups_of_channels_do_not_declare_the_channels_of_the_input(holder):
    model = nn.Module()
    model.patch_embed = holder([nn.Conv2d(4, 8, 8, 8), nn.Conv2d(6, 8, 8, 8)])
    given = {"input_size": (10, 32, 32), "mean": (0.5,) * 10, "std": (0.5,) * 10}
    assert read_input_spec(model, given).channels == 10
