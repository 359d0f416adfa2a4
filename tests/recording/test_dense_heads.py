"""Readouts of transformers' detection and segmentation models with random weights, each against separate gradients."""

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from tests.explaining.test_library_regions import CONFIGS
from tests.small import Custom, since
from vitflow import Explainer, boxes, masks, record_attention
from vitflow.errors import UnsupportedModelError

transformers = pytest.importorskip("transformers")

VIT = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 16}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic"}
RESNET |= {"out_features": ["stage4"]}
DETR = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "d_model": 32, "num_labels": 4}
for half in ("encoder", "decoder"):
    DETR |= {f"{half}_layers": 2, f"{half}_attention_heads": 2, f"{half}_ffn_dim": 32}


def of_transformers(name: str) -> nn.Module:
    return getattr(transformers, name)(CONFIGS[name]())


def beit(states: tuple[int, ...] = (0, 2, 3, 4)) -> nn.Module:
    head = {"out_indices": list(states), "pool_scales": [1, 2], "use_auxiliary_head": False}
    return transformers.BeitForSemanticSegmentation(transformers.BeitConfig(**VIT, **head, image_size=64, num_labels=5))


def upernet() -> nn.Module:
    stages = [f"stage{number}" for number in range(1, 5)]
    backbone = transformers.BeitConfig(**VIT, image_size=64, out_features=stages, reshape_hidden_states=True)
    config = transformers.UperNetConfig(
        backbone_config=backbone, num_labels=5, use_auxiliary_head=False, pool_scales=[1, 2], hidden_size=16
    )
    return transformers.UperNetForSemanticSegmentation(config)


def detr() -> nn.Module:
    config = transformers.DetrConfig(backbone_config=transformers.ResNetConfig(**RESNET), **DETR, num_queries=100)
    return transformers.DetrForObjectDetection(config)


def scores(output) -> Tensor | None:
    """Classes in the lower half of the image, classes of query 2, or the mean of the first mask."""
    if getattr(output, "pred_boxes", None) is not None:
        return output.logits[:, 2]
    if getattr(output, "pred_masks", None) is not None:
        return output.pred_masks.flatten(1).mean(dim=1, keepdim=True)
    logits = output.logits
    return logits[:, :, logits.shape[2] // 2 :].mean(dim=(2, 3))


# The model, the input size, and the number of blocks that the head reads.
MODELS = {
    "yolos": (lambda: of_transformers("YolosForObjectDetection"), 64, 1),
    "dpt": (lambda: of_transformers("DPTForSemanticSegmentation"), 64, 4),
    "beit": (beit, 64, 4),
    "upernet": (upernet, 64, 4),
    "detr": (detr, 320, 1),  # 100 queries on 10 × 10 patches
    "conditional_detr": (lambda: of_transformers("ConditionalDetrForObjectDetection"), 64, 1),
    "sam": (lambda: of_transformers("SamModel"), 64, 1),
    "segformer": (lambda: of_transformers("SegformerForSemanticSegmentation"), 64, 4),
}


# The module whose tokens the head reads, if it is not the last block.
LAST = {"yolos": "vit.layernorm"}


def built(name: str) -> tuple[nn.Module, int]:
    torch.manual_seed(0)
    build, size, _ = MODELS[name]
    return varied(build()), size


def varied(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15)
    return model.eval()


# Before, index 0 named no state of BEiT, whose head had three.
NEWER = {"beit": since("transformers", "5.10.2")}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NEWER.get(name, ())) for name in MODELS if name != "segformer"]
)
def test_the_readout_is_the_gradient_at_the_tokens_that_the_head_reads(name):
    model, size = built(name)
    model = model.double()
    image = torch.randn(1, 3, size, size, dtype=torch.float64)
    with record_attention(model, gradients=True, outputs=scores) as trace:
        model(image)
    blocks = trace.readouts_of(torch.tensor([0])).blocks
    assert len(blocks) == MODELS[name][2]
    # Separately: the output of each block is replaced by a leaf, so that no gradient passes to lower blocks.
    paths = [*trace.blocks[:-1], LAST.get(name, trace.blocks[-1])]
    leaves: list[Tensor] = []

    def cut(module, args, output):
        tokens = output[0] if isinstance(output, tuple) else output
        leaves.append(tokens.detach().requires_grad_())
        return (leaves[-1], *output[1:]) if isinstance(output, tuple) else leaves[-1]

    handles = [model.get_submodule(path).register_forward_hook(cut, prepend=True) for path in paths]
    scores(model(image))[0, 0].backward()
    for handle in handles:
        handle.remove()
    norms = [leaf.grad[0].norm(dim=-1).flatten() for leaf in leaves if leaf.grad is not None and leaf.grad.any()]
    total = sum(norm.sum() for norm in norms)
    for block, norm in zip(blocks, norms, strict=True):
        torch.testing.assert_close(block.readout[0], norm / norm.sum())
        torch.testing.assert_close(block.share[0], norm.sum() / total)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "sam"])
def test_boxes_and_masks_explain_the_models_of_transformers(name):
    model, size = built(name)
    config = {"input_size": (3, size, size), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
    detects = name in ("yolos", "detr", "conditional_detr")
    question = boxes((0, 0, size, size)) if detects else masks((0, 0, size // 2, size // 2))
    explainer = Explainer(model, outputs=question, data_config=config)
    image = np.random.default_rng(0).integers(0, 255, (size, size, 3), dtype=np.uint8)
    for method in ("rollout", "gae", "sampling", "occlusion"):
        actual = explainer.explain(image, method=method, target=1)
        assert np.isfinite(actual.grid).all() and 0 <= actual.score.value <= 1
        assert ("receptive fields overlap" in actual.model_note) is ("detr" in name)
    if detects:
        with torch.no_grad():
            output = model(explainer.pixels(image))
        detection, logits = actual.facts["detection"], output.logits[0, :, 1]
        others = output.logits[0].softmax(dim=-1)[:, 1] if name != "conditional_detr" else logits.sigmoid()
        assert detection["probability"] == pytest.approx(float(others[detection["query"]]), abs=1e-3)
        middle, half = output.pred_boxes[0, detection["query"], :2], output.pred_boxes[0, detection["query"], 2:] / 2
        expected = size * torch.cat([middle - half, middle + half])
        np.testing.assert_allclose(detection["box"], expected.numpy(), atol=0.1)


def test_a_head_that_reads_the_embeddings_as_well_is_refused():
    data = {"input_size": (3, 64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    explainer = Explainer(varied(beit((0, 1, 2, 3))), outputs=scores, data_config=data)
    with pytest.raises(UnsupportedModelError, match="directly from the image"):
        explainer.explain(torch.randn(1, 3, 64, 64).clamp(-1, 1), method="rollout", target=0)


def test_layers_of_a_decoder_on_top_are_no_layers_of_image_tokens():
    model, size = built("detr")
    with record_attention(model) as trace, torch.no_grad():
        model(torch.randn(1, 3, size, size))
    assert [layer.name for layer in trace.layers] == [f"model.encoder.layers.{index}.self_attn" for index in range(2)]
    assert (trace.layout.rows, trace.layout.cols, trace.layout.num_prefix_tokens) == (10, 10, 0)


def test_a_decoder_of_a_custom_module_is_a_part_of_the_head():
    def detect(self: nn.Module, pixels: Tensor) -> Tensor:
        tokens, states = self.backbone.forward_features(pixels), self.queries.expand(len(pixels), -1, -1)
        for layer in self.layers:
            states = states + layer(states, tokens, tokens)[0]
        return self.classes(states)[:, 2]

    backbone = timm.create_model("test_vit", img_size=64, num_classes=0)
    width, image = backbone.num_features, torch.randn(1, 3, 64, 64)
    layers = nn.ModuleList(nn.MultiheadAttention(width, 2, batch_first=True) for _ in range(2))
    queries = nn.Parameter(torch.randn(1, 7, width))
    model = Custom(detect, backbone=backbone, queries=queries, layers=layers, classes=nn.Linear(width, 4)).eval()
    with record_attention(model, gradients=True) as trace:
        model(image)
    assert {layer.name.split(".")[0] for layer in trace.layers} == {"backbone"}
    readout = trace.readout_of(torch.tensor([1]))[0]
    tokens = model.backbone.forward_features(image).detach().requires_grad_()
    model.backbone.forward_features = lambda pixels: tokens
    model(image)[0, 1].backward()
    norms = tokens.grad[0].norm(dim=-1)
    torch.testing.assert_close(readout, norms / norms.sum(), rtol=1e-4, atol=1e-6)
