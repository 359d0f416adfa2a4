"""Layouts that models declare in words other than timm's, tokens behind the patches, and layouts that do not fit."""

from functools import cache

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from tests.small import DATA, Custom, custom_model, jitter, photo
from vitflow import Explainer
from vitflow.errors import UnsupportedModelError
from vitflow.methods import TokenLayout

IMAGE = photo(40, 60)
WIDTH = 24


class Embedding(nn.Module):
    """A patch embedding that declares the size of its patches only."""

    def __init__(self, patch_size: object = (8, 8)) -> None:
        super().__init__()
        self.patch_size, self.proj = patch_size, nn.Conv2d(3, WIDTH, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Backbone(nn.Module):
    """A ViT by hand; `tokens` are parameters by name, of which those in `behind` follow the patches."""

    def __init__(self, tokens: dict[str, int], *, patch_size: object = (8, 8), behind: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.patch_embed = Embedding(patch_size)
        for name, count in tokens.items():
            setattr(self, name, nn.Parameter(torch.randn(1, count, WIDTH)))
        self.blocks = nn.ModuleList([Block(WIDTH, 3) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)
        self.pos, self.names, self.behind = nn.Parameter(torch.randn(1, 16, WIDTH)), [*tokens], behind

    def forward(self, x: Tensor) -> Tensor:
        extra = {name: getattr(self, name).expand(len(x), -1, -1) for name in self.names}
        first = [extra[name] for name in self.names if name not in self.behind]
        tokens = torch.cat([*first, self.patch_embed(x) + self.pos, *(extra[name] for name in self.behind)], dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        place = -sum(extra[name].shape[1] for name in self.behind) if "cls_token" in self.behind else 0
        return self.head(self.norm(tokens[:, place] if "cls_token" in extra else tokens.mean(1)))


def made(*given: object, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return jitter(Backbone(*given, **options))


def explained(model: nn.Module, method: str, layout: TokenLayout | None = None, **options: object) -> np.ndarray:
    target = {} if method in ("rollout", "similarity", "attention", "flow") else {"target": 2}
    return Explainer(model, data_config=DATA, layout=layout).explain(IMAGE, method=method, **target, **options).grid


@pytest.mark.parametrize(
    ("tokens", "patch_size"),
    [
        ({"cls_token": 1, "storage_tokens": 4}, (8, 8)),
        ({"cls_token": 1, "register_tokens": 2}, (8, 8)),
        ({"cls_token": 1}, 8),
        ({}, 8),
    ],
)
def test_backbones_by_hand_declare_their_tokens(tokens, patch_size):
    model = made(tokens, patch_size=patch_size)
    layout = TokenLayout(sum(tokens.values()), 4, 4)
    for method in ("rollout", "similarity", "gradcam", "sampling"):
        np.testing.assert_array_equal(explained(model, method), explained(model, method, layout))


@pytest.mark.parametrize("name", ["class_embedding", "cls", "class_token"])
@pytest.mark.parametrize("nested", [False, True])
def test_class_tokens_by_hand_have_many_names(name, nested):
    def compute(model: nn.Module, x: Tensor) -> Tensor:
        tokens = torch.cat([getattr(model, name).expand(len(x), -1, -1), model.stem(x).flatten(2).transpose(1, 2)], 1)
        return model.head(model.layers(tokens)[:, 0])

    torch.manual_seed(0)
    layers = nn.Sequential(*(Block(WIDTH, 3) for _ in range(2)))
    model = Custom(compute, stem=nn.Conv2d(3, WIDTH, 8, 8), layers=layers, head=nn.Linear(WIDTH, 5))
    setattr(model, name, nn.Parameter(torch.randn(1, 1, WIDTH)))
    model = Custom(lambda m, x: m.inside(x), inside=model) if nested else model
    np.testing.assert_array_equal(
        explained(jitter(model), "rollout"), explained(model, "rollout", TokenLayout(1, 4, 4))
    )


@cache
def _class_token_first() -> nn.Module:
    return made({"cls_token": 1, "register_tokens": 2})


@pytest.mark.parametrize(
    "method",
    ["rollout", "gae", "gradcam", "similarity", "sampling", "attention", "flow", "legrad", "frozen_gradient"],
)
def test_maps_do_not_depend_on_the_place_of_the_class_token(method):
    expected = explained(_class_token_first(), method)
    behind = made({"cls_token": 1, "register_tokens": 2}, behind=("cls_token", "register_tokens"))
    actual = explained(behind, method, TokenLayout(0, 4, 4, num_suffix_tokens=3))
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("tokens", "behind", "layout"),
    [
        ({"cls_token": 1, "table": 1}, ("table",), TokenLayout(1, 4, 4, 1)),
        ({"cls_token": 1}, ("cls_token",), TokenLayout(0, 4, 4, 1)),
        ({"cls_token": 1, "register_tokens": 2}, ("register_tokens",), TokenLayout(1, 4, 4, 2)),
        ({"any": 3}, (), TokenLayout(3, 4, 4)),
    ],
)
@pytest.mark.parametrize("method", ["rollout", "gae", "gradcam", "similarity"])
def test_tokens_that_are_equal_for_all_images_are_no_patches(tokens, behind, layout, method):
    model = made(tokens, behind=behind)
    np.testing.assert_array_equal(explained(model, method), explained(model, method, layout))


def test_the_grid_of_patches_is_not_guessed_if_they_are_not_in_a_row():
    model = made({"one": 1, "two": 1})
    between = model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0].roll(5, 1),))
    with between, pytest.raises(UnsupportedModelError, match="layout=TokenLayout"):
        explained(model, "rollout")


@pytest.mark.parametrize("method", ["similarity", "gradcam"])
@pytest.mark.parametrize("layout", [TokenLayout(0, 4, 4, num_suffix_tokens=1), TokenLayout(1, 2, 8)])
@pytest.mark.parametrize("norm_first", [True, False])
def test_features_refuse_a_layout_of_another_model(method, layout, norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 3, 48, norm_first=norm_first, batch_first=True)
    parts = {"embed": nn.Conv2d(3, WIDTH, 8, 8), "head": nn.Linear(WIDTH, 5), "token": nn.Embedding(1, WIDTH)}

    def compute(m: nn.Module, x: Tensor) -> Tensor:
        patches = m.embed(x).flatten(2).transpose(1, 2)
        return m.head(m.encoder(torch.cat([m.token.weight.expand(len(x), 1, -1), patches], dim=1))[:, 0])

    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = jitter(Custom(compute, encoder=encoder, **parts))
    assert explained(model, method, TokenLayout(1, 4, 4)).any()
    with pytest.raises(UnsupportedModelError, match="no patch grid.*layout"):
        explained(model, method, layout)


@pytest.mark.parametrize("move", [lambda x: x.flip(1), lambda x: torch.roll(x, 3, 1)])
def test_moved_tokens_have_no_affinity(move):
    model = custom_model(class_token=False, global_pool="avg")
    model.blocks[0].register_forward_hook(lambda module, given, output: move(output))
    explainer = Explainer(model, data_config=DATA)
    saliency = explainer.explain(IMAGE, method="sampling", target=2, masks=8)
    assert saliency.options["refine"] == 0
    assert saliency.significant is None
    with pytest.raises(UnsupportedModelError):
        explainer.explain(IMAGE, method="sampling", target=2, affinity="both")
    with pytest.raises(UnsupportedModelError):
        explainer.explain(IMAGE, method="input_gradient", target=2, refine=1)
