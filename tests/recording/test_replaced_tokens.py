"""Tokens that are replaced, zeroed or moved between blocks: rollout, GAE, and features above and below them."""

from contextlib import nullcontext

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from tests.small import Custom, jitter
from vitflow import Explainer, record_attention
from vitflow.errors import UnsupportedModelError
from vitflow.methods import TokenLayout

CONFIG = {"input_size": (3, 64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
DEPTH, PREFIX, PATCHES = 7, 3, 16


class Between(nn.Module):
    """A ViT with two registers and a function of the tokens before each block; it keeps which tokens are replaced."""

    def __init__(self, function, dtype: torch.dtype = torch.float32, *, blocks: int = DEPTH) -> None:
        """With fewer blocks than DEPTH, they run several times."""
        super().__init__()
        torch.manual_seed(0)
        options = {"img_size": 64, "embed_dim": 48, "num_heads": 3, "depth": blocks, "num_classes": 5}
        vit = timm.create_model("vit_tiny_patch16_224", **options, reg_tokens=PREFIX - 1)
        self.vit = jitter(vit, 0.1, by_width=False)
        self.function, self.replaced = function, [None] * DEPTH
        self.prompts = nn.Parameter(torch.randn(DEPTH, PREFIX - 1, 48))
        self.to(dtype).eval()

    def forward(self, images: Tensor) -> Tensor:
        x = self.vit._pos_embed(self.vit.patch_embed(images))
        for index in range(DEPTH):
            if index:
                x = self.function(self, x, index)
            x = self.vit.blocks[index % len(self.vit.blocks)](x)
        return self.vit.head(self.vit.norm(x)[:, 0])


def prompts(model: Between, x: Tensor, index: int) -> Tensor:
    model.replaced[index] = torch.zeros(len(x), PREFIX + PATCHES, dtype=torch.bool)
    model.replaced[index][:, 1:PREFIX] = True
    return torch.cat([x[:, :1], model.prompts[index].expand(len(x), -1, -1), x[:, PREFIX:]], 1)


def pruned_once(model: Between, x: Tensor, index: int) -> Tensor:
    if index != 4:
        return x
    model.replaced[index] = torch.arange(PREFIX + PATCHES).expand(len(x), -1) % 5 == 4
    return torch.where(
        model.replaced[index][..., None], torch.randn(48, generator=torch.Generator().manual_seed(1)).to(x), x
    )


def zeroed_in_place(model: Between, x: Tensor, index: int) -> Tensor:
    model.replaced[index] = torch.arange(PREFIX + PATCHES).expand(len(x), -1) % 7 == index
    x[model.replaced[index]] = 0
    return x


def zeroed_without_autograd(model: Between, x: Tensor, index: int) -> Tensor:
    with torch.no_grad():
        return zeroed_in_place(model, x, index)


def literal(model: Between, trace, backward=None) -> Tensor:
    """Return the row of the class token in the product of layers whose columns of replaced tokens are 0."""
    layers = list(zip(trace.attentions, model.replaced, strict=True))
    row = torch.eye(PREFIX + PATCHES, dtype=torch.float64)[:1].expand(len(trace.logits), -1)
    for index in reversed(range(DEPTH)):
        attention, replaced = layers[index]
        if backward is None:
            matrix = attention.double().mean(1) / 2 + torch.eye(PREFIX + PATCHES) / 2
        else:
            matrix = torch.eye(PREFIX + PATCHES) + (attention * backward[index]).double().clamp_min(0).mean(1)
        if replaced is not None:
            matrix = matrix.masked_fill(replaced[:, None], 0.0)
        row = (row[:, None] @ matrix)[:, 0]
    return row[:, PREFIX:].unflatten(1, (4, 4)).detach()


def images(count: int = 2) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 256, (count, 64, 64, 3), np.uint8))


@pytest.mark.parametrize(
    ("function", "count", "blocks"),
    [
        (prompts, 2, DEPTH),
        (pruned_once, 2, DEPTH),
        (zeroed_in_place, 2, DEPTH),
        (zeroed_without_autograd, 2, DEPTH),
        (pruned_once, PREFIX + PATCHES, DEPTH),  # as many images as tokens
        (pruned_once, 2, 1),
        (prompts, 2, 2),
    ],
)
def test_columns_of_tokens_that_are_replaced_or_zeroed_are_0(function, count, blocks):
    model, targets = Between(function, blocks=blocks), torch.arange(count) % 5
    explainer = Explainer(model, data_config=CONFIG, layout=TokenLayout(PREFIX, 4, 4))
    for _ in range(2):  # the blocks are known in the second pass
        maps = explainer.explain_batch(images(count), methods=["rollout", "gae"], preset="paper", targets=targets)
        pixels = torch.cat([explainer.pixels(image) for image in images(count)])
        with record_attention(model, gradients=True, layout=TokenLayout(PREFIX, 4, 4)) as trace:
            model(pixels)
        expected = literal(model, trace)
        assert np.abs(np.stack([each.grid for each in maps[::2]]) - expected.numpy()).max() < 1e-6
        expected = literal(model, trace, trace.backward(targets).attentions).float()
        actual = torch.stack([torch.from_numpy(each.grid) for each in maps[1::2]])
        assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()
    with pytest.raises(UnsupportedModelError, match="replaces or zeroes some"):
        explainer.explain(images()[0], method="flow")


UNCHANGED = {
    "a clone": lambda model, x, index: x.clone(),
    "a view": lambda model, x, index: x.view(x.shape),
    "positions added": lambda model, x, index: x + model.vit.pos_embed[:, :1],
    "positions added in place": lambda model, x, index: x.add_(model.prompts[index, :1]),
    "a norm": lambda model, x, index: model.vit.norm(x),
}


@pytest.mark.parametrize("function", UNCHANGED.values(), ids=UNCHANGED)
def test_changes_of_each_token_alone_are_no_replacements(function):
    model = Between(function)
    explainer = Explainer(model, data_config=CONFIG, layout=TokenLayout(PREFIX, 4, 4))
    saliency = explainer.explain(images()[0], method="rollout", preset="paper")
    with record_attention(model, layout=TokenLayout(PREFIX, 4, 4)) as trace, torch.no_grad():
        model(explainer.pixels(images()[0]))
    assert trace.refusal is None and not trace.replaces_tokens
    assert np.abs(saliency.grid - literal(model, trace)[0].numpy()).max() < 1e-6


def at_block_5(function):
    return lambda model, x, index: function(x) if index == 5 else x


def patches(function):
    return lambda x: torch.cat([x[:, :PREFIX], function(x[:, PREFIX:])], 1)


def sorted_by_size(tokens: Tensor) -> Tensor:
    order = tokens.norm(dim=-1).argsort(1)
    return tokens.gather(1, order[..., None].expand_as(tokens))


def frozen(model: Between, x: Tensor, index: int) -> Tensor:
    """Large tokens stay as they were before the block below."""
    before, model.before = getattr(model, "before", None), x
    if index == 1:
        return x
    return torch.where((x.norm(dim=-1) > x.norm(dim=-1).median())[..., None], before, x)


def flipped_by_data(x: Tensor) -> Tensor:
    x.data = x.data.flip(1)
    return x


def halves_merged(tokens: Tensor) -> Tensor:
    means = (tokens[:, :8] + tokens[:, 8:]) / 2
    return torch.cat([means, means], 1)


ORDER = torch.randperm(PATCHES, generator=torch.Generator().manual_seed(1))
permuted = at_block_5(patches(lambda tokens: tokens[:, ORDER]))
REFUSED = {  # with the clause of the contract, and True if the features above are refused, too
    "permuted": (permuted, "clause 2", True),
    "flipped in place": (at_block_5(lambda x: x.copy_(x.flip(1))), "clause 2", True),
    "flipped by .data": (at_block_5(flipped_by_data), "clause 2", True),
    "merged": (at_block_5(patches(halves_merged)), "clause 2", False),
    "copied": (at_block_5(patches(lambda tokens: torch.cat([tokens[:, :15], tokens[:, 3:4]], 1))), "clause 2", True),
    "frozen": (frozen, "clause 1", True),
}


@pytest.mark.parametrize(("function", "reason", "moves"), REFUSED.values(), ids=REFUSED)
def test_tokens_that_are_reordered_or_come_from_elsewhere_are_refused(function, reason, moves):
    explainer = Explainer(Between(function), data_config=CONFIG, layout=TokenLayout(PREFIX, 4, 4))
    for method in ("rollout", "gae", *(["gradcam", "similarity"] if moves else [])):
        with pytest.raises(UnsupportedModelError, match=reason):
            explainer.explain(images()[0], method=method, **({"target": 1} if method in ("gae", "gradcam") else {}))
    if not moves:
        assert explainer.explain(images()[0], method="gradcam", target=1).grid.shape == (4, 4)


def test_features_below_reordered_tokens_are_at_their_places():
    model, kept = Between(permuted), []
    explainer = Explainer(model, data_config=CONFIG, layout=TokenLayout(PREFIX, 4, 4))
    actual = explainer.explain_batch(images(), method="gradcam", layer=4, target=1)
    pixels = torch.cat([explainer.pixels(image) for image in images()])
    model.vit.blocks[3].norm1.register_forward_hook(lambda module, args, output: kept.append(output))
    [gradient] = torch.autograd.grad(model(pixels)[:, 1].sum(), kept)
    channels = gradient[:, PREFIX:].mean(dim=1, keepdim=True)
    expected = (kept[0][:, PREFIX:] * channels).sum(dim=-1).relu().unflatten(1, (4, 4)).detach()
    np.testing.assert_allclose(np.stack([each.grid for each in actual]), expected, rtol=1e-4, atol=1e-6)


def test_features_of_a_stem_are_at_their_places_although_tokens_move_between_layers_above():
    def attend(self: nn.Module, x: Tensor) -> Tensor:
        return x + nn.functional.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).mT
        for number, layer in enumerate(self.layers):
            x = layer(self.sort(x) if number == self.moves else x)
        return self.head(x[:, 3])

    class Attention(Custom):
        pass

    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 24, 8, 8), nn.ReLU(), nn.Conv2d(24, 24, 2, 2))
    layers = nn.ModuleList([Attention(attend, qkv=nn.Linear(24, 72)) for _ in range(3)])
    sort = Custom(lambda self, tokens: sorted_by_size(tokens))
    model = Custom(forward, stem=stem, layers=layers, sort=sort, head=nn.Linear(24, 5)).eval()
    model.moves = 1
    explainer, kept = Explainer(model, data_config=CONFIG), []
    stem[0].register_forward_hook(lambda module, args, output: kept.append(output))
    actual = explainer.explain(images()[0], method="gradcam", layer=1, target=1)
    kept.clear()
    logits = model(explainer.pixels(images()[0]))
    [features] = kept
    [gradient] = torch.autograd.grad(logits[0, 1], kept)
    expected = (features * gradient.mean((2, 3), keepdim=True)).sum(1).relu()[0].detach()
    np.testing.assert_allclose(actual.grid, expected, rtol=1e-4, atol=1e-7)
    for path in ("sort", "layers.1", "layers.0"):
        with record_attention(model, features=[path], attention=False) as trace, torch.no_grad():
            model(explainer.pixels(images()[0]))
        refused = nullcontext() if path == "layers.0" else pytest.raises(UnsupportedModelError, match="at their places")
        with refused:
            trace.check_places(path)


@pytest.mark.parametrize("listed", [True, False])
def test_blocks_without_anything_called_attention_are_compared_before_any_rollout(listed):
    def block(self: nn.Module, x: Tensor) -> Tensor:
        return x + nn.functional.scaled_dot_product_attention(*self.qkv(self.norm1(x)).chunk(3, -1))

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).mT
        parts = self.parts if listed else [self.a, self.b, self.c]
        return self.head(parts[2](sorted_by_size(parts[1](parts[0](x)))).mean(1))

    torch.manual_seed(0)
    parts = [Custom(block, norm1=nn.LayerNorm(24), qkv=nn.Linear(24, 72)) for _ in range(3)]
    named = {"parts": nn.ModuleList(parts)} if listed else dict(zip("abc", parts, strict=True))
    model = Custom(forward, stem=nn.Conv2d(3, 24, 16, 16), head=nn.Linear(24, 5), **named).eval()
    explainer = Explainer(model, data_config=CONFIG)
    with pytest.raises(UnsupportedModelError, match="clause 1"):
        explainer.explain(images()[0], method="similarity")
    assert explainer.explain(images()[0], method="similarity", layer=1).grid.shape == (4, 4)


def test_tokens_are_compared_if_blocks_return_them_with_an_axis_of_windows():
    model = Between(lambda model, x, index: permuted(model, x, index).unflatten(1, (1, -1)))
    for index in range(1, DEPTH):
        model.vit.blocks[index] = Custom(lambda self, x: self.block(x.flatten(1, 2)), block=model.vit.blocks[index])
    explainer = Explainer(model, data_config=CONFIG, layout=TokenLayout(PREFIX, 4, 4))
    with pytest.raises(UnsupportedModelError, match="reorders"):
        explainer.explain(images()[0], method="rollout")


def test_tokens_that_a_hook_of_the_user_replaces_after_a_block_are_replaced():
    model = Between(lambda model, x, index: x)
    for index in range(1, DEPTH):
        model.vit.blocks[index - 1].register_forward_hook(lambda _, args, x, index=index: prompts(model, x, index))
    saliency = Explainer(model, data_config=CONFIG).explain(images()[0], method="rollout", preset="paper")
    with record_attention(model) as trace, torch.no_grad():
        model(torch.from_numpy(images()[0]).movedim(-1, 0)[None] / 127.5 - 1)
    assert np.abs(saliency.grid - literal(model, trace)[0].numpy()).max() < 1e-6


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (lambda x: x[..., 0].argsort(1), "clause"),
        (lambda x: torch.arange(19).flip(0).expand(len(x), -1), r"blocks.2.attn.*reorders.*clause 3"),
    ],
)
def test_attention_in_another_order_than_the_tokens_of_its_block_is_refused(order, reason):
    def reordered(self: nn.Module, x: Tensor, **_) -> Tensor:  # which is undone after it
        index = order(x)
        y = self.attn(x.gather(1, index[..., None].expand_as(x)))
        return y.gather(1, index.argsort(1)[..., None].expand_as(y))

    model = Between(lambda model, x, index: x)
    model.vit.blocks[2].attn = Custom(reordered, attn=model.vit.blocks[2].attn)
    with pytest.raises(UnsupportedModelError, match=reason):
        Explainer(model, data_config=CONFIG).explain(images()[0], method="rollout")
