"""Attention in every way that a model may compute it: recorded as it is, or refused in one sentence, never left out."""

import copy
import functools
import math
import warnings

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import small
from tests.recording.test_recorder import generators, state_of
from vitflow import Explainer, record_attention
from vitflow.errors import UnsupportedModelError

HEADS, WIDTH, CLASSES = 3, 48, 5


def build(**options) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": WIDTH, "num_heads": HEADS, "depth": 3}
    return small.jitter(timm.create_model("vit_tiny_patch16_224", **{**sizes, "num_classes": CLASSES, **options}))


class Custom(nn.Module):
    """An attention module of somebody's own, with the weights of timm's."""

    def __init__(self, attention: nn.Module, how) -> None:
        super().__init__()
        self.qkv, self.proj, self.how, self.num_heads = attention.qkv, attention.proj, how, HEADS

    def forward(self, x: Tensor, **options) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        made = self.how(q * (width // HEADS) ** -0.5, k, v)
        return self.proj(made.transpose(1, 2).reshape(batch, tokens, width))


def with_custom(how, blocks=(2,)) -> nn.Module:
    model = build()
    for number in blocks:
        model.blocks[number].attn = Custom(model.blocks[number].attn, how)
    return model


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).exp()
    return (weights / weights.sum(dim=-1, keepdim=True)) @ v


def three_axes_in_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q3, k3, v3 = (one.flatten(0, 1) for one in (q, k, v))
    return torch.einsum("bij,bjd->bid", torch.einsum("bid,bjd->bij", q3, k3).softmax(dim=-1), v3).view(q.shape)


def others_in_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (one.permute(2, 0, 1, 3) for one in (q, k, v))
    scores = torch.einsum("ibnd,jbnd->bnij", q, k)
    return torch.einsum("bnij,jbnd->ibnd", scores.softmax(dim=-1), v).permute(1, 2, 0, 3)


def flexible(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        return flex(q, k, v, scale=1.0)


def script(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1), -1) @ v


def scripted(*given: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(script)(*given)


def stray_within(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attention = (q @ k.mT).softmax(dim=-1)
    return attention @ (v + 0 * v.softmax(dim=-1))


def heads_in_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    return ((q @ k.mT).softmax(dim=-1) @ v).unflatten(0, (-1, HEADS))


def ellipsis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("...ij,...jd->...id", torch.einsum("...id,...jd->...ij", q, k).softmax(dim=-1), v)


RECORDED = {
    "heads in the batch": heads_in_batch,
    "einsum with an ellipsis": ellipsis,
    "einsum with values first": lambda q, k, v: torch.einsum("bhjd,bhij->bhid", v, (q @ k.mT).softmax(dim=-1)),
    "keywords": lambda q, k, v: torch.matmul(input=torch.softmax(dim=-1, input=torch.matmul(q, other=k.mT)), other=v),
    "a softmax over the queries": lambda q, k, v: (k @ q.mT).softmax(dim=-2).mT @ v,
    "the same, transposed": lambda q, k, v: (v.mT @ (k @ q.mT).softmax(dim=-2)).mT,
    "torch.special.softmax": lambda q, k, v: torch.special.softmax(q @ k.mT, -1) @ v,
    "einsum": lambda q, k, v: torch.einsum("bhij,bhjd->bhid", (q @ k.mT).softmax(dim=-1), v),
    "einsum of three axes": three_axes_in_einsum,
    "einsum with axes in another order": others_in_einsum,
    "a view": lambda q, k, v: ((q @ k.mT).softmax(dim=-1).flatten(0, 1) @ v.flatten(0, 1)).view(q.shape),
    "a softmax over features before": lambda q, k, v: F.scaled_dot_product_attention(
        q + 0 * q.softmax(dim=-1), k, v, scale=1.0
    ),
    "a softmax over features between": stray_within,
}


UNSEEN = {
    "torch.ops.aten": lambda q, k, v: torch.ops.aten.scaled_dot_product_attention(q, k, v, scale=1.0),
    "exp and sum": by_hand,
    "log_softmax": lambda q, k, v: (q @ k.mT).log_softmax(dim=-1).exp() @ v,
    "flex_attention": flexible,
    "torch.jit.script": scripted,
}


def agree(model: nn.Module, pixels: Tensor, layer: int = 2) -> None:
    """The recorded layer is timm's, whose weights the module has, and the logits are those of the untouched model."""
    with torch.no_grad():
        plain = model(pixels)
        with record_attention(model) as trace:
            logits = model(pixels)
        with record_attention(build()) as literal:
            torch.testing.assert_close(literal.model(pixels), plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-5)
    assert len(trace.attentions) == 3
    torch.testing.assert_close(trace.attentions[layer], literal.attentions[layer], rtol=1e-4, atol=1e-5)
    assert trace.readout[0, 0] == 1


@pytest.mark.parametrize("how", RECORDED.values(), ids=RECORDED)
def test_attention_is_recorded_however_it_is_called(how):
    agree(with_custom(how), torch.randn(2, 3, 32, 32))


def test_a_softmax_in_a_module_of_its_own_is_recorded():
    model = with_custom(None)
    attention = model.blocks[2].attn
    attention.attend = nn.Sequential(nn.Softmax(-1), nn.Dropout())
    attention.how = lambda q, k, v: attention.attend(q @ k.mT) @ v
    agree(model.eval(), torch.randn(2, 3, 32, 32))


def test_heads_that_a_module_around_folds_into_the_batch_are_recorded():
    model = with_custom(None)
    attention = model.blocks[2].attn
    attention.product = small.Custom(lambda self, q, k, v: (q @ k.mT).softmax(-1) @ v, drop=nn.Dropout())
    attention.how = lambda *qkv: attention.product(*(each.flatten(0, 1) for each in qkv)).unflatten(0, (-1, HEADS))
    agree(model.eval(), torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize("route", [lambda x: x.softmax(-1), lambda x: x.softmax(-1) + (2 * x).softmax(-1)])
def test_a_softmax_over_parameters_is_no_attention(route):
    model, literal = build(), build()
    for block in model.blocks:
        experts, mlp = nn.Parameter(torch.zeros(17, WIDTH)), block.mlp
        block.mlp = small.Custom(
            lambda self, x: self.mlp(x) + route(self.route(x)) @ self.experts,
            mlp=mlp,
            route=nn.Linear(WIDTH, 17),
            experts=experts,
        )
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad(), record_attention(model.eval()) as trace, record_attention(literal) as expected:
        torch.testing.assert_close(model(pixels), literal(pixels))
    torch.testing.assert_close(trace.attentions, expected.attentions)


def test_transposed_attention_has_gradients():
    model, pixels = with_custom(lambda q, k, v: (v.mT @ (q @ k.mT).softmax(dim=-1).mT).mT), torch.randn(2, 3, 32, 32)
    gradients = []
    for each in (model, build()):
        with record_attention(each, gradients=True) as trace:
            each(pixels)
        gradients.append(trace.backward(torch.tensor([1, 2])).attentions[2])
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("how", UNSEEN.values(), ids=UNSEEN)
def test_a_layer_that_is_not_seen_is_refused_by_its_name(how):
    model, pixels = with_custom(how), torch.randn(1, 3, 32, 32)
    before = state_of(model), generators()
    with torch.no_grad():
        plain = model(pixels)
        with record_attention(model, head_fusion="mean") as trace:
            logits = model(pixels)
    torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-5)
    assert (state_of(model), generators()) == before
    with pytest.raises(UnsupportedModelError, match=r"Custom \(blocks\.2\.attn\) .* sampling, occlusion") as error:
        _ = trace.readout
    assert "\n" not in str(error.value)
    assert len(trace.attentions) == 2  # what was seen is at hand


def literal_heads(module: nn.MultiheadAttention, x: Tensor, hidden: Tensor | None) -> Tensor:
    """Return the attention of each query by its definition, [batch, heads, queries, keys].

    Args:
        module: of torch, batch first.
        x: [batch, tokens, width].
        hidden: true where a query does not see a token, [batch, heads, queries, tokens].
    """
    (batch, tokens, width), heads = x.shape, module.num_heads
    x, actual = x.double(), []
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.double().chunk(3)
    else:
        weights = [one.double() for one in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)]
    biases = module.in_proj_bias.double().chunk(3)
    query, key = (x @ weight.T + bias for weight, bias in zip(weights[:2], biases[:2], strict=True))
    for image in range(batch):
        for head in range(heads):
            part = slice(head * width // heads, (head + 1) * width // heads)
            for q in range(tokens):
                requested = query[image, q, part] / math.sqrt(width // heads)
                scores = torch.stack([requested @ key[image, k, part] for k in range(tokens)])
                if hidden is not None:
                    scores[hidden[image, head, q]] = -math.inf
                actual.append(scores.softmax(dim=0))
    return torch.stack(actual).view(batch, heads, tokens, -1)


def upper(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)


def by_head(batch: int, tokens: int) -> Tensor:
    hidden = torch.rand(batch * HEADS, tokens, tokens, generator=torch.Generator().manual_seed(1)) < 0.3
    return hidden & ~torch.eye(tokens, dtype=torch.bool)


def padding(batch: int, tokens: int) -> Tensor:
    hidden = torch.zeros(batch, tokens, dtype=torch.bool)
    hidden[:, -3:] = True
    return hidden


def as_floats(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)


# What the module is called with for (batch, tokens).
CALLS = {
    "bool": lambda b, n: {"attn_mask": upper(n)},
    "float": lambda b, n: {"attn_mask": as_floats(upper(n))},
    "zeros": lambda b, n: {"attn_mask": torch.zeros(n, n)},
    "by head": lambda b, n: {"attn_mask": by_head(b, n)},
    "by head, float": lambda b, n: {"attn_mask": as_floats(by_head(b, n))},
    "padding": lambda b, n: {"key_padding_mask": padding(b, n)},
    "both": lambda b, n: {"attn_mask": upper(n), "key_padding_mask": padding(b, n)},
    "both, floats": lambda b, n: {"attn_mask": as_floats(by_head(b, n)), "key_padding_mask": as_floats(padding(b, n))},
    "causal": lambda b, n: {"attn_mask": upper(n), "is_causal": True, "need_weights": False},
    "causal, with weights": lambda b, n: {"attn_mask": upper(n), "is_causal": True},
    "weights of each": lambda b, n: {"attn_mask": upper(n), "average_attn_weights": False},
}


class Many(nn.Module):
    """torch's own module in the place of timm's attention."""

    def __init__(self, options: dict, called, separate: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
        if separate:
            weights = self.inner.in_proj_weight.detach().chunk(3)
            self.inner.in_proj_weight, self.inner._qkv_same_embed_dim = None, False
            for name, weight in zip("qkv", weights, strict=True):
                setattr(self.inner, f"{name}_proj_weight", nn.Parameter(weight.clone()))
        self.called = called

    def forward(self, x: Tensor, **options) -> Tensor:
        output, self.weights = self.inner(x, x, x, **self.called(len(x), x.shape[1]))
        return output


@pytest.mark.parametrize(
    ("called", "separate"), [*((one, False) for one in CALLS.values()), (CALLS["both"], True)], ids=[*CALLS, "separate"]
)
def test_torchs_module_is_recorded_with_masks(called, separate):
    model, pixels, given = build(), torch.randn(2, 3, 32, 32), []
    module = model.blocks[2].attn = Many({}, called, separate).eval()
    hook = module.inner.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    wanted_x = pixels.clone().requires_grad_()
    plain = model(wanted_x)
    plain.square().sum().backward()
    weights = module.weights
    hook.remove()
    with record_attention(model, gradients=True) as trace:
        logits = model(pixels)
    if weights is not None:
        torch.testing.assert_close(module.weights, weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-5)
    masks = called(2, 17)
    hidden = torch.zeros(2, HEADS, 17, 17, dtype=torch.bool)
    for name, mask in masks.items():
        if name in ("attn_mask", "key_padding_mask"):
            mask = mask if mask.dtype == torch.bool else mask < 0
            hidden |= (
                mask[:, None, None]
                if "padding" in name
                else mask.reshape(-1, mask.shape[-1] * 17).view(*((2, HEADS) if mask.ndim == 3 else (1, 1)), 17, 17)
            )
    wanted = literal_heads(module.inner, given[0].detach(), hidden).float()
    torch.testing.assert_close(trace.attentions[2], wanted, rtol=1e-4, atol=1e-6)
    assert trace.readout[0, 0] == 1
    gradient = trace.gradients_of(logits.square()).pixels
    torch.testing.assert_close(gradient, wanted_x.grad, rtol=1e-3, atol=1e-5)
    assert trace.gradients_of(logits.square()).attentions[2].abs().max() > 0
    with torch.no_grad(), record_attention(model, head_fusion="mean") as fused:
        torch.testing.assert_close(model(pixels), plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused.attentions[2], wanted.mean(dim=1), rtol=1e-4, atol=1e-6)


def test_torchs_module_in_training_is_recorded_before_its_dropout():
    model, pixels = build(), torch.randn(2, 3, 32, 32)
    model.blocks[2].attn = Many({"dropout": 0.5}, lambda b, n: {"attn_mask": upper(n)})
    model.train()
    with torch.no_grad():
        torch.manual_seed(3)
        plain = model(pixels)
        torch.manual_seed(3)
        with record_attention(model) as trace:
            logits = model(pixels)
    torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(trace.attentions[2].sum(dim=-1), torch.ones(2, HEADS, 17))


def test_torchs_module_without_a_batch_axis_is_recorded_for_one_image():
    def unbatched(module: nn.Module, x: Tensor, **options) -> Tensor:
        return torch.stack([module.inner(one, one, one)[0] for one in x])

    model = build()
    module = model.blocks[2].attn = small.Custom(unbatched, inner=nn.MultiheadAttention(WIDTH, HEADS)).eval()
    given: list[Tensor] = []
    module.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    trace = run(model, torch.randn(1, 3, 32, 32))
    torch.testing.assert_close(trace.attentions[2], literal_heads(module.inner, given[0], None).float())
    with pytest.raises(UnsupportedModelError, match=r"blocks\.2\.attn\.inner \(MultiheadAttention\)"):
        _ = run(model, torch.randn(2, 3, 32, 32)).readout


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_torchs_module_with_keys_that_are_no_tokens_is_refused(options):
    model = build()
    model.blocks[2].attn = Many(options, lambda b, n: {}).eval()
    with pytest.raises(UnsupportedModelError, match=r"blocks\.2\.attn\.inner \(MultiheadAttention\)"):
        _ = run(model, torch.randn(1, 3, 32, 32)).readout


def test_a_function_of_torch_that_was_wrapped_by_somebody_is_recorded(monkeypatch):
    original, calls, pixels = F.scaled_dot_product_attention, [], torch.randn(2, 3, 32, 32)
    model = build()
    with torch.no_grad(), record_attention(model) as wanted:
        plain = model(pixels)

    def wrapped(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrapped)
    for one in (model, copy.deepcopy(model).to(torch.bfloat16)):
        with torch.no_grad(), record_attention(one) as trace:
            logits = one(pixels.to(next(one.parameters()).dtype))
        assert len(trace.attentions) == 3
    assert len(calls) >= 6
    with torch.no_grad(), record_attention(model) as trace:
        logits = model(pixels)
    torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(trace.attentions, wanted.attentions)


@pytest.mark.parametrize(
    "how",
    [
        lambda q, k, v: torch.stack([script(*one) for one in zip(q, k, v, strict=True)]),
        lambda q, k, v: torch.cat([script(q[i : i + 1], k[i : i + 1], v[i : i + 1]) for i in range(len(q))]),
    ],
    ids=["stacked", "joined"],
)
def test_a_loop_over_images_is_recorded_for_one_and_refused_for_several(how, batch=HEADS):
    model = with_custom(how, blocks=(0, 1, 2))
    agree(model, torch.randn(1, 3, 32, 32))
    with pytest.raises(UnsupportedModelError, match=r"Custom \(blocks\.0\.attn\) .* image by image.* one image"):
        with torch.no_grad(), record_attention(model):
            model(torch.randn(batch, 3, 32, 32))


@pytest.mark.parametrize(
    "attend", [script, functools.partial(F.scaled_dot_product_attention, scale=1.0)], ids=["by hand", "fused"]
)
def test_queries_in_chunks_are_refused(attend, batch=2):
    model = with_custom(lambda q, k, v: torch.cat([attend(some, k, v) for some in q.split(5, dim=2)], dim=2))
    with pytest.raises(UnsupportedModelError, match=r"Custom \(blocks\.2\.attn\) .* chunk by chunk.* occlusion"):
        with torch.no_grad(), record_attention(model):
            model(torch.randn(batch, 3, 32, 32))


def test_two_attentions_of_one_module_are_both_recorded():
    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        one, other = (q @ k.mT).softmax(dim=-1), (k @ q.mT).softmax(dim=-1)
        return one @ v / 2 + other @ v / 2

    model = with_custom(twice)
    with torch.no_grad(), record_attention(model) as trace:
        model(torch.randn(2, 3, 32, 32))
    assert trace.attentions[2].shape == (2, 2 * HEADS, 17, 17)
    assert trace.readout[0, 0] == 1


def run(model: nn.Module, pixels: Tensor, **options):
    with torch.no_grad(), record_attention(model, **options) as trace:
        model(pixels)
    return trace


@pytest.mark.parametrize(("change", "width"), [("load_state_dict", 48), ("through .data", 144)])  # 144 fits a grid, too
def test_mixing_that_new_weights_switch_on_is_refused(change, width):
    def gated(module: nn.Module, tokens: Tensor) -> Tensor:
        return module.block(tokens) + module.gate * tokens.cumsum(dim=1)

    model, pixels = build(embed_dim=width), torch.randn(2, 3, 32, 32)
    model.blocks[1] = small.Custom(gated, block=model.blocks[1], gate=nn.Parameter(torch.zeros(1)))
    assert run(model, pixels).refusal is None
    if change == "load_state_dict":
        model.load_state_dict(model.state_dict() | {"blocks.1.gate": torch.ones(1)})
    else:
        model.blocks[1].gate.data += 1
    assert "mixes its tokens" in run(model, pixels).refusal


def test_methods_that_need_no_attention_explain_what_is_refused():
    model = with_custom(by_hand)
    explainer = Explainer(model)
    image = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8).numpy()
    for method in ("rollout", "attention", "flow", "gae"):
        with pytest.raises(UnsupportedModelError, match=r"blocks\.2.* in VisionTransformer mixes"):
            explainer.explain(image, method=method, **({"target": 1} if method == "gae" else {}))
    for method, options in (("sampling", {"masks": 8}), ("occlusion", {}), ("gradcam", {}), ("input_gradient", {})):
        assert explainer.explain(image, method=method, target=1, **options).heatmap.shape == (32, 32)


class MixedMlp(small.Custom):
    """Hands something from each token to all others, in addition to what its part does."""

    def __init__(self, inner: nn.Module, how) -> None:
        super().__init__(lambda self, x: self.inner(x) + self.how(x), inner=inner, how=how)


def test_mixing_next_to_attention_that_is_seen_is_detected():
    torch.manual_seed(0)
    mixing = torch.randn(17, 17) / 17
    model = build()
    model.blocks[1].mlp = MixedMlp(model.blocks[1].mlp, lambda x: mixing @ x)
    assert "MixedMlp (blocks.1.mlp)" in run(model, torch.randn(1, 3, 32, 32)).refusal
    model = build()
    model.blocks[1] = MixedMlp(model.blocks[1], lambda x: mixing @ x)  # in the same module as what is seen
    assert "MixedMlp (blocks.1)" in run(model, torch.randn(1, 3, 32, 32)).refusal


@pytest.mark.parametrize("token", [0, 1, 2, 3, -1])
@pytest.mark.parametrize("part", ["norm1", "attn"])
def test_a_token_that_is_replaced_for_attention_alone_is_refused(token, part):
    def replace(module: nn.Module, args: tuple[Tensor]) -> Tensor:
        return args[0].index_fill(1, torch.tensor(token % args[0].shape[1]), 0.5)

    model = build(reg_tokens=3)
    model.blocks[1].get_submodule(part).register_forward_pre_hook(replace)
    assert (
        "Attention (blocks.1.attn) in VisionTransformer attends to constants"
        in run(model, torch.randn(1, 3, 32, 32)).refusal
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_contract_is_checked_in_every_precision(dtype):
    pixels = torch.randn(1, 3, 32, 32, dtype=dtype)
    assert run(build().to(dtype), pixels).refusal is None
    assert "Custom (blocks.2.attn)" in run(with_custom(by_hand).to(dtype), pixels).refusal


def test_attention_by_hand_is_noticed_behind_a_small_scale():
    model = build(init_values=1e-5)
    model.blocks[2].attn = Custom(model.blocks[2].attn, UNSEEN["log_softmax"])
    assert "Custom (blocks.2.attn)" in run(model, torch.randn(1, 3, 32, 32)).refusal


def test_a_model_without_values_is_not_checked():
    with torch.device("meta"):
        model = with_custom(by_hand)
    assert run(model, torch.randn(1, 3, 32, 32, device="meta")).refusal is None


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_difference_of_two_attentions_in_transformers_is_refused(implementation):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.DiffLlamaConfig(**sizes, vocab_size=50, num_key_value_heads=2)
    config._attn_implementation = implementation
    model = transformers.DiffLlamaForCausalLM(config).eval()
    with pytest.raises(UnsupportedModelError, match="DiffLlama.*Attention .* difference of two attention matrices"):
        with torch.no_grad(), record_attention(model):
            model(input_ids=torch.arange(5)[None])
