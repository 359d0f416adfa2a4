"""Every family of timm with attention between tokens: captured exactly, carried through its stages, or refused by name.

One small representative of each model file, with random weights. `SHRUNK` families come only in large sizes and are
built with fewer blocks.
"""

import copy
import random
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.recording.test_recorder import generators, state_of
from tests.small import jitter, since
from vitflow import Explainer, record_attention
from vitflow.errors import NoAttentionError, UnsupportedModelError
from vitflow.explaining.maps import rollout
from vitflow.models.calls import logits_of

SHRUNK = {"depth": 2, "embed_dim": 96, "num_heads": 4}
# Model, what differs from its usual size, side of the image, prefix tokens and side of the grid of its maps.
PLAIN = [
    ("test_vit", {}, 160, 1, 10),
    ("test_vit3", {}, 160, 1, 10),  # pools by attention
    ("test_vit_relpos", {}, 160, 0, 10),
    ("beit_base_patch16_224", SHRUNK, 224, 1, 14),
    ("deit_tiny_distilled_patch16_224", {"depth": 2}, 224, 2, 14),
    ("eva02_tiny_patch14_224", {"depth": 2}, 224, 1, 16),
    ("vit_small_patch16_rope_mixed_224", {"depth": 2}, 224, 1, 14),
    ("vit_pe_core_tiny_patch16_384", {"depth": 2}, 384, 1, 24),
    ("vit_tiny_patch16_dinov3_qkvb", {"depth": 2}, 256, 5, 16),
    ("vit_small_patch14_reg4_dinov2", {"depth": 2, "img_size": 224}, 224, 5, 16),
    ("vit_pwee_patch16_reg1_gap_256", {"depth": 2}, 256, 1, 16),
    ("vit_tiny_r_s16_p8_224", {"depth": 2}, 224, 1, 7),
    ("qwen3_vit_88m", {"depth": 2}, 256, 0, 16),
    ("naflexvit_base_patch16_gap", {"depth": 2, "embed_dim": 96, "num_heads": 4}, 256, 4, 16),
    ("deepseek_vit_412m", SHRUNK, 224, 0, 16),
    ("gemma4_vit_167m", SHRUNK, 256, 0, 16),
    ("vitamin_small_224", {}, 224, 0, 14),
    ("tnt_s_patch16_224", {"depth": 2}, 224, 1, 14),
    ("efficientformer_l1", {}, 224, 0, 7),
    ("cpubone_nano", {}, 224, 0, 7),
    ("lowformer_b0", {}, 224, 0, 7),
    ("fastvit_mci0", {}, 256, 0, 8),
]
STAGED = [
    ("swin_tiny_patch4_window7_224", {"depths": (2, 2, 2)}, 224, 0, 56),
    ("swinv2_tiny_window8_256", {"depths": (2, 2, 2)}, 256, 0, 64),
    ("swinv2_cr_tiny_224", {"depths": (2, 2, 2)}, 224, 0, 56),
    ("test_coatnet", {}, 160, 0, 10),
    ("csatv2", {}, 256, 0, 8),
    ("test_maxvit", {}, 160, 0, 40),
    ("mobilevit_xxs", {}, 256, 0, 32),
    ("botnet26t_256", {}, 256, 0, 16),
    ("halonet26t", {}, 256, 0, 16),
    ("iformer_t", {}, 224, 0, 14),
    ("efficientformerv2_s0", {}, 224, 0, 14),
    ("pvt_v2_b0", {}, 224, 0, 56),
    ("pit_ti_224", {}, 224, 1, 27),
    ("pit_ti_distilled_224", {}, 224, 2, 27),
    ("convit_tiny", {"depth": 3, "local_up_to_layer": 2}, 224, 0, 14),
    ("cait_xxs24_224", {"depth": 2}, 224, 0, 14),
    ("volo_d1_224", {}, 224, 0, 28),
    ("shvit_s1", {}, 224, 0, 7),
    ("mobilenetv4_hybrid_medium_075", {}, 224, 0, 14),
    ("levit_128s", {}, 224, 0, 14),
    ("visformer_tiny", {}, 224, 0, 14),
    ("gcvit_xxtiny", {}, 224, 0, 56),
    ("tiny_vit_5m_224", {}, 224, 0, 28),
    ("nest_tiny", {}, 224, 0, 56),
    ("twins_svt_small", {"depths": (2, 2, 2, 2)}, 224, 0, 56),
    ("twins_pcpvt_small", {"depths": (1, 1, 1, 1)}, 224, 0, 56),
    ("mvitv2_tiny", {}, 224, 0, 56),
    ("mvitv2_small_cls", {}, 224, 1, 56),
    ("caformer_s18", {}, 224, 0, 14),
    ("hiera_tiny_224", {}, 224, 0, 56),
    ("sam2_hiera_tiny", {}, 256, 0, 64),
    ("davit_tiny", {"depths": (1, 1, 1, 1)}, 224, 0, 56),
    ("mobilenetv5_base", {}, 256, 0, 16),
    ("samvit_base_patch16_224", {**SHRUNK, "window_size": 8, "global_attn_indexes": (1,)}, 224, 0, 14),
]
# Seen, but no product of layers: the words with which it is refused.
REFUSED = [
    ("xcit_nano_12_p16_224", {}, 224, "attention over channels"),
    ("crossvit_tiny_240", {}, 240, "two branches of tokens"),
    ("nextvit_small", {}, 224, "runs of neighbours"),
    ("efficientvit_m0", {}, 224, "CascadedGroupAttention"),
]
# No attention between tokens at all: what is computed instead.
OTHERS = [
    ("edgenext_xx_small", 256, "attention over channels"),
    ("mobilevitv2_050", 256, "separable linear attention"),
    ("coat_lite_tiny", 224, "factorised attention"),
    ("efficientvit_b0", 224, "linear attention"),
    ("swiftformer_xs", 224, "additive attention"),
    ("efficientvim_m1", 224, "a state space model"),
    ("lambda_resnet26t", 256, "lambda layers"),
    ("resnet50_clip", 224, "convolution"),
    ("mixer_s32_224", 224, "mixing of another kind"),
    ("convnext_atto", 224, "convolution"),
]


# What `make test` records; `make test-all` records every family.
REPRESENTATIVE = (
    *("test_vit", "vit_small_patch14_reg4_dinov2", "deit_tiny_distilled_patch16_224", "swin_tiny_patch4_window7_224"),
    *("test_maxvit", "pvt_v2_b0", "mobilevit_xxs", "cait_xxs24_224"),
)
NEWER = {"test_maxvit": [since("timm", "1.0.31")]}


def marked(families: list[tuple], representative: tuple[str, ...] = REPRESENTATIVE) -> list:
    """Families as parameters of a test, those that are not representative marked as slow."""
    slow = {one[0]: [] if one[0] in representative else [pytest.mark.slow] for one in families}
    return [pytest.param(*one, marks=[*slow[one[0]], *NEWER.get(one[0], [])], id=one[0]) for one in families]


def build(name: str, **options) -> nn.Module:
    torch.manual_seed(0)
    return jitter(timm.create_model(name, **options), 0.02, by_width=False)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the generator that some models draw from
    random.seed(seed)


def answer(model: nn.Module, pixels: Tensor) -> Tensor:
    with torch.no_grad():
        output = model(pixels)
    return output if isinstance(output, Tensor) else output[0]


class Applied(TorchFunctionMode):
    """Keeps what the untouched model applies its attention to, and what came of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            self.seen.append((args[2], output))
        elif func in (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm):
            self.seen.append((args[1], output))
            self.seen.append((args[0].mT, output.mT))  # values · attentionᵀ
        return output


def reproduced(attention: Tensor, seen: list[tuple[Tensor, Tensor]]) -> bool:
    """Return True if this attention, applied to the values of the unmodified model, gives the model's output."""
    for value, output in seen:
        if value.ndim == attention.ndim and value.shape[-2] == attention.shape[-1]:
            value = value.expand(*attention.shape[:-2], -1, -1) if value.shape[1] == 1 else value
            actual = attention @ value if value.shape[:-2] == attention.shape[:-2] else None
            if actual is None or actual.shape != output.shape:
                continue
            if (actual - output).abs().max() <= 1e-5 * output.abs().max():
                return True
    return False


@pytest.mark.parametrize(("name", "options", "side", "prefix", "grid"), marked([*PLAIN, *STAGED]))
def test_a_family_is_captured_exactly(name, options, side, prefix, grid):
    model = build(name, **options)
    pixels = torch.randn(2, 3, side, side)
    with Applied() as applied:
        plain = answer(model, pixels)
    before = state_of(model), generators()  # a first pass may fill buffers by itself, as ConViT's does
    with record_attention(model) as trace:
        logits = answer(model, pixels)
    assert (logits - plain).abs().max() <= 1e-5 * plain.abs().max()
    assert (state_of(model), generators()) == before
    for layer in trace.layers:
        if not layer.parts[0].mixed:
            torch.testing.assert_close(layer.heads.sum(dim=-1), torch.ones(layer.heads.shape[:-1]))
    assert any(reproduced(trace.layers[number].parts[0].tensor, applied.seen) for number in (0, -1))
    assert (trace.layout.num_prefix_tokens, trace.layout.rows, trace.layout.cols) == (prefix, grid, grid)
    assert trace.staged == ((name, options, side, prefix, grid) in STAGED)
    options = {"head_fusion": "mean", "discard_ratio": 0.0, "residual": 0.5, "start_layer": 1}
    grids = rollout(trace, **options, value_weighted=False, patch=None).grids
    assert grids.shape == (2, grid, grid)
    assert (grids >= 0).all()
    assert (grids.flatten(1).sum(dim=1) <= 1 + 1e-5).all()
    assert (grids.flatten(1).sum(dim=1) > 0.1).all()


# Small families whose windows take a pass of their own, with running statistics and random numbers in training mode.
QUICK = ("test_vit", "test_maxvit", "tiny_vit_5m_224", "swin_tiny_patch4_window7_224")


@pytest.mark.parametrize(("name", "options", "side"), marked([one[:3] for one in (*PLAIN, *STAGED, *REFUSED)], QUICK))
def test_a_family_in_training_mode_changes_as_by_its_pass_alone(name, options, side):
    model = build(name, **options).train()
    twin, pixels = copy.deepcopy(model), torch.randn(2, 3, side, side)
    left = []
    for entry in (twin, model):
        seed_all(1)
        with record_attention(entry) if entry is model else nullcontext(), torch.no_grad():
            entry(pixels)
        left.append(generators())
    assert left[0] == left[1]
    for (path, ours), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
        # Batch norm over few pixels makes rounding large; one pass more is seen in the number of batches in any case.
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05, msg=lambda words, path=path: f"{path}: {words}")
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


HIERA = {"embed_dim": 8, "depths": [1, 1, 2, 1], "num_heads": [1, 1, 2, 2], "image_size": [64, 64]}
# Of other libraries than timm: how their windows come about, and the side of the grid of their maps.
ELSEWHERE = {
    "Hiera": (HIERA | {"mask_unit_size": [4, 4], "patch_stride": [2, 2]}, 64, 32),  # queries pooled in windows
    "MobileViT": ({"hidden_sizes": [16, 16, 16]}, 256, 32),  # windows of tokens that are far apart
    "MaxVit": (((64, 64), 8, 4, [8, 8], [1, 1], 4, 0.0), 64, 16),  # einsum over windows before heads
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_windows_of_other_libraries_are_traced(name):
    torch.manual_seed(0)
    options, side, grid = ELSEWHERE[name]
    if name == "MaxVit":
        model = torchvision.models.MaxVit(*options, num_classes=5)
    else:
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{name}Config")(**options)
        model = getattr(transformers, f"{name}ForImageClassification")(config)
    model, pixels = model.eval(), torch.randn(2, 3, side, side)
    with torch.no_grad():
        plain = logits_of(model(pixels))
        with record_attention(model) as trace:
            logits = logits_of(model(pixels))
    torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-5)
    assert (trace.layout.rows, trace.layout.cols) == (grid, grid)
    assert trace.staged
    for layer in trace.layers:
        index = layer.tokens.key_index
        if index is not None:  # each patch is in one window
            assert index[index >= 0].sort().values.tolist() == list(range(layer.tokens.keys.num_patches))


@pytest.mark.parametrize(
    ("name", "options", "side", "words"), marked(REFUSED, ("xcit_nano_12_p16_224", "crossvit_tiny_240"))
)
def test_a_family_without_a_product_of_layers_is_refused_by_name(name, options, side, words):
    model = build(name, **options)
    pixels = torch.randn(2, 3, side, side)
    with Applied() as applied:
        plain = answer(model, pixels)
    with record_attention(model) as trace:
        logits = answer(model, pixels)
    assert (logits - plain).abs().max() <= 1e-5 * plain.abs().max()
    assert any(reproduced(layer.parts[0].tensor, applied.seen) for layer in trace.layers)
    with pytest.raises(UnsupportedModelError, match=words) as refusal:
        _ = trace.readout
    assert type(model).__name__ in str(refusal.value)
    assert "occlusion" in str(refusal.value)
    for module in model.modules():  # subclasses of a user compute the same
        module.__class__ = type(f"Own{type(module).__name__}", (type(module),), {})
    with record_attention(model) as trace:
        answer(model, pixels)
    with pytest.raises(UnsupportedModelError, match=words):
        _ = trace.readout


@pytest.mark.parametrize(("name", "side", "words"), marked(OTHERS, ("edgenext_xx_small", "mixer_s32_224")))
def test_a_model_without_attention_between_tokens_says_what_it_computes(name, side, words):
    model = build(name)
    with pytest.raises(NoAttentionError, match=words) as refusal, torch.no_grad(), record_attention(model):
        model(torch.randn(1, 3, side, side))
    assert type(model).__name__ in str(refusal.value)


@pytest.mark.parametrize("name", ["vit_dwee_patch16_reg1_gap_256", "vit_dpwee_patch16_reg1_gap_256"])
def test_differential_attention_is_refused_by_name(name):
    with pytest.raises(UnsupportedModelError, match="Diff"), torch.no_grad():
        with record_attention(model := build(name, depth=2)):
            model(torch.randn(1, 3, 256, 256))


def test_every_model_file_with_attention_has_a_representative():
    """The list of model files that call attention or a softmax, read off the installed timm itself."""
    known, calling = (*PLAIN, *STAGED, *REFUSED, *OTHERS), set()
    represented = {timm.models.model_entrypoint(name).__module__.rpartition(".")[2] for name, *_ in known}
    for file in set(timm.models._registry._model_to_module.values()):
        source = (Path(timm.models.__path__[0]) / f"{file}.py").read_text(encoding="utf-8")
        if "scaled_dot_product_attention(" in source or ".softmax(dim=-1)" in source or "Attention(" in source:
            calling.add(file)
    # They use or define attention blocks, but what they compute is in OTHERS, or they only build another file's models.
    elsewhere = {"vision_transformer_hybrid", "mobilevit", "byoanet", "metaformer", "hieradet_sam2"}
    assert calling - represented - elsewhere <= {"resnet", "xception"}


CONVOLUTIONAL = ["resnet18", "convnext_atto", "edgenext_xx_small", "mixer_s32_224", "xcit_nano_12_p16_224"]


@pytest.mark.parametrize(
    "name",
    marked(
        [(name,) for name in (*CONVOLUTIONAL, "crossvit_tiny_240", "coat_lite_tiny", "swin_tiny_patch4_window7_224")],
        ("resnet18", "swin_tiny_patch4_window7_224"),
    ),
)
def test_methods_that_need_no_attention_work_on_every_model(name):
    model = build(name, num_classes=5)
    image = torch.randint(0, 256, (60, 80, 3), generator=torch.Generator().manual_seed(0)).byte().numpy()
    explainer = Explainer(model)
    methods = {"gradcam": {}, "input_gradient": {}, "occlusion": {"patch_size": 112}}
    if name == "crossvit_tiny_240":
        with pytest.raises(UnsupportedModelError, match="branches"):
            explainer.explain(image, method="gradcam", target=1)
        del methods["gradcam"]
    for method, options in methods.items():
        saliency = explainer.explain(image, method=method, target=1, **options)
        assert saliency.heatmap.shape == (60, 80)
        assert method == "gradcam" or saliency.grid.max() > saliency.grid.min()
