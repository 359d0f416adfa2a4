"""Refusals that name the true reason: frozen parts, swapped axes, single images, volumes, and inputs in a dict."""

import pytest
import torch
from torch import Tensor, nn

from tests.small import DATA, Custom, custom_model, jitter, photo
from vitflow import Explainer
from vitflow.errors import UnsupportedModelError
from vitflow.methods import TokenLayout

IMAGE, WIDTH = photo(40, 60), 24


def explained(model: nn.Module, method: str, **options: object) -> object:
    target = {} if method in ("rollout", "similarity") else {"target": 2}
    return Explainer(model, data_config=DATA, **options).explain(IMAGE, method=method, **target)


def _no_grad(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        features = model.vit(x)
    return model.head(features)


PROBES = {
    "no_grad": _no_grad,
    "inference mode": torch.inference_mode()(lambda m, x: m.vit(x)),
    "detach": lambda m, x: m.head(m.vit(x).detach()),
}


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.parametrize("method", ["gae", "gradcam", "input_gradient", "gradient_rollout"])
def test_parts_without_gradients_are_named(name, method):
    model = Custom(PROBES[name], vit=custom_model(num_classes=0), head=nn.Linear(WIDTH, 5)).eval()
    with pytest.raises(UnsupportedModelError, match=r"no_grad|inference"):
        explained(model, method)
    assert explained(model, "occlusion").grid.any()


def test_frozen_weights_have_maps():
    model = custom_model()
    model.requires_grad_(False)
    for method in ("gae", "gradcam", "input_gradient"):
        assert explained(model, method).grid.any()


def _of_encoder(batch_first: bool, swapped: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 3, 48, batch_first=batch_first)
    parts = {"embed": nn.Conv2d(3, WIDTH, 8, 8), "head": nn.Linear(WIDTH, 5)}

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        tokens = model.embed(x).flatten(2).transpose(1, 2)
        if swapped:
            return model.head(model.encoder(tokens.transpose(0, 1)).mean(0))
        return model.head(model.encoder(tokens).mean(1))

    return jitter(Custom(compute, encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), **parts))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_attention_over_the_images_of_a_batch_is_found(batch_first, count):
    explainer = Explainer(_of_encoder(batch_first, batch_first), data_config=DATA, layout=TokenLayout(0, 4, 4))
    with pytest.raises(UnsupportedModelError, match="batch_first"):
        explainer.explain_batch([IMAGE] * count, methods=["rollout"])
    right = Explainer(_of_encoder(batch_first, not batch_first), data_config=DATA, layout=TokenLayout(0, 4, 4))
    assert len(right.explain_batch([IMAGE] * count, methods=["rollout"])) == count


class _OfOneImage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.ModuleList([nn.Linear(WIDTH, 8) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.qk
        return torch.stack([torch.softmax(query(each) @ key(each).T, dim=-1) @ each for each in x])


def test_attention_of_one_image_at_a_time_is_named():
    parts = {"embed": nn.Conv2d(3, WIDTH, 8, 8), "head": nn.Linear(WIDTH, 5), "mixer": _OfOneImage()}
    model = Custom(lambda m, x: m.head(m.mixer(m.embed(x).flatten(2).transpose(1, 2)).mean(1)), **parts).eval()
    with pytest.raises(UnsupportedModelError, match="computes attention of one image at a time"):
        explained(model, "rollout", layout=TokenLayout(0, 4, 4))


class _Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Parameter(torch.randn(1, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, cells: Tensor) -> Tensor:
        return (self.query @ self.key(cells).mT).softmax(-1) @ cells


class _PoolOfLibrary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.attention = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.MultiheadAttention(WIDTH, 3)

    def forward(self, cells: Tensor) -> Tensor:
        cells = cells.transpose(0, 1)
        return self.attention(self.query.expand(1, cells.shape[1], -1), cells, cells)[0].transpose(0, 1)


@pytest.mark.filterwarnings("ignore:Value weighting requires")
@pytest.mark.parametrize("pool", [_Pool, _PoolOfLibrary])
def test_attention_pooling_over_the_cells_of_a_network_is_named(pool):
    def compute(model: nn.Module, x: Tensor) -> Tensor:
        return model.head(model.pool(model.cnn(x).flatten(2).transpose(1, 2))[:, 0])

    cnn = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.Conv2d(16, WIDTH, 2, 2))
    model = jitter(Custom(compute, cnn=cnn, pool=pool(), head=nn.Linear(WIDTH, 5)))
    for method in ("rollout", "gae"):
        with pytest.raises(UnsupportedModelError, match="pools"):
            explained(model, method)
    for method in ("gradcam", "sampling"):
        assert explained(model, method).grid.any()


class _Mixing(nn.Module):
    """Attention whose heads are mixed, and normalised across heads if `norm` is a norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix, self.norm = nn.Linear(3, 3, bias=False), norm

    def forward(self, x: Tensor, **_: object) -> Tensor:
        q, k, v = (each.unflatten(-1, (3, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        attention = self.mix((q @ k.mT).softmax(-1).permute(0, 2, 3, 1))
        return self.proj((self.norm(attention).permute(0, 3, 1, 2) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("norm", [nn.LayerNorm(3), nn.Sequential(nn.LayerNorm(3), nn.Tanh()), nn.Identity()])
def test_attention_that_is_normalised_across_heads_is_refused(norm):
    model = custom_model()
    for block in model.blocks:
        block.attn = _Mixing(norm)
    jitter(model, 0.5)
    if isinstance(norm, nn.Identity):  # rows keep their sums
        assert explained(model, "rollout").grid.any()
        return
    with pytest.raises(UnsupportedModelError, match="negative"):
        explained(model, "rollout")
    assert explained(model, "sampling").grid.any()


def test_volumes_are_refused_by_name():
    model = Custom(lambda m, x: m.embed(x).flatten(1), embed=nn.Conv3d(1, 5, 8, 8)).eval()
    for data in (DATA, DATA | {"input_size": (1, 32, 32), "mean": (0,), "std": (1,)}):
        with pytest.raises(UnsupportedModelError, match="volumes.*slice"):
            Explainer(model, data_config=data)
