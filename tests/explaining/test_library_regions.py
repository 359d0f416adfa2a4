"""Detectors and models for segmentation of transformers and torchvision, small and with random weights.

Each has finite maps in the right place, or is refused in words that say what works.
"""

import functools

import numpy as np
import pytest
import torch
from torch import nn

import vitflow
from tests.pairs import TEXT, Words
from tests.small import Custom
from vitflow import Explainer, record_attention
from vitflow.errors import ModelError, NoAttentionError, UnsupportedModelError

transformers = pytest.importorskip("transformers")

SIZE, CELL = 64, 16
CONFIG = {"input_size": (3, SIZE, SIZE), "mean": (0.5,) * 3, "std": (0.5,) * 3}
VIT = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
VIT |= {"image_size": SIZE, "patch_size": CELL}
STAGES = ["stage1", "stage2", "stage3", "stage4"]
QUERIES = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_queries": 6, "num_labels": 5}
QUERIES |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
DENSE = {"num_labels": 5}


def configured(name, **options):
    return getattr(transformers, f"{name}Config")(**options)


def resnet(kind="ResNet", stages=("stage3",)):
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "layer_type": "basic"}
    return configured(kind, **sizes, out_features=list(stages))


def swin(stages=STAGES):
    sizes = {"embed_dim": 16, "depths": [2, 2, 2, 2], "num_heads": [1, 2, 2, 4], "window_size": 2}
    return configured("Swin", **sizes, image_size=SIZE, patch_size=4, out_features=stages)


def detr(name, **options):
    backbone = {"backbone_config": resnet(), "backbone": None, "use_timm_backbone": False}
    backbone |= {"use_pretrained_backbone": False}
    return configured(name, **(backbone | QUERIES | options))


def owl(name):
    return configured(name, text_config=TEXT, vision_config=VIT, projection_dim=32)


def sam():
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_dim": 32, "num_pos_feats": 8}
    vision |= {"image_size": SIZE, "patch_size": 8, "output_channels": 16, "window_size": 4, "global_attn_indexes": [1]}
    decoder = {"hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    prompts = {"hidden_size": 16, "image_size": SIZE, "patch_size": 8, "mask_input_channels": 4}
    return configured(
        "Sam",
        vision_config=configured("SamVision", **vision),
        prompt_encoder_config=configured("SamPromptEncoder", **prompts),
        mask_decoder_config=configured("SamMaskDecoder", **decoder, iou_head_hidden_dim=16),
    )


CONFIGS = {
    "DetrForObjectDetection": lambda: detr("Detr"),
    "ConditionalDetrForObjectDetection": lambda: detr("ConditionalDetr"),
    "YolosForObjectDetection": lambda: configured(
        "Yolos", **(VIT | {"image_size": [SIZE, SIZE]}), num_detection_tokens=6, **DENSE
    ),
    "OwlViTForObjectDetection": lambda: owl("OwlViT"),
    "Owlv2ForObjectDetection": lambda: owl("Owlv2"),
    "SegformerForSemanticSegmentation": lambda: configured(
        "Segformer",
        hidden_sizes=[16, 16, 32, 32],
        num_attention_heads=[1, 2, 4, 8],
        depths=[1] * 4,
        decoder_hidden_size=16,
        **DENSE,
    ),
    "DPTForSemanticSegmentation": lambda: configured(
        "DPT", **VIT, **DENSE, backbone_out_indices=[0, 1, 2, 3], fusion_hidden_size=16, neck_hidden_sizes=[16] * 4
    ),
    "UperNetForSemanticSegmentation": lambda: configured(
        "UperNet", backbone_config=swin(), hidden_size=16, use_auxiliary_head=False, **DENSE
    ),
    "BeitForSemanticSegmentation": lambda: configured(
        "Beit", **(VIT | {"num_hidden_layers": 5}), **DENSE, out_indices=[2, 3, 4, 5]
    ),
    "SamModel": sam,
    "DeformableDetrForObjectDetection": lambda: detr(
        "DeformableDetr", backbone_config=resnet(stages=STAGES[1:]), num_feature_levels=3
    ),
    "RTDetrForObjectDetection": lambda: configured(
        "RTDetr",
        backbone_config=resnet("RTDetrResNet", STAGES[1:]),
        encoder_hidden_dim=32,
        encoder_in_channels=[16, 32, 32],
        decoder_in_channels=[32, 32, 32],
        num_denoising=0,
        **{name: value for name, value in QUERIES.items() if name != "encoder_layers"},
    ),
    "Mask2FormerForUniversalSegmentation": lambda: configured(
        "Mask2Former",
        backbone_config=swin(),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        dim_feedforward=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=4,
        num_queries=6,
        **DENSE,
    ),
}
DEFORMABLE = [name for name in CONFIGS if name.startswith(("Deformable", "RTDetr", "Mask2Former"))]
PATCHES = [name for name in CONFIGS if name not in DEFORMABLE]


@functools.cache
def model(name):
    """A model whose convolutions look at the centre of their windows alone, so that the place of a cell is known."""
    torch.manual_seed(2)
    built = getattr(transformers, name)(CONFIGS[name]()).eval()
    with torch.no_grad():
        for weight in built.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        for part in built.box_head.parameters() if "Owl" in name else ():
            part.mul_(0.05)  # boxes of about a patch
        for part in built.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.bias.fill_(1.0)  # no ReLU is off everywhere
            if isinstance(part, nn.Conv2d) and part.kernel_size[0] % 2:
                middle = part.kernel_size[0] // 2
                centre = part.weight[:, :, middle, middle].clone()
                part.weight.zero_()
                part.weight[:, :, middle, middle] = 3 * centre
    return built


def pointed(self, pixels):
    points = torch.tensor([[[[20.0, 20.0]]]]).expand(len(pixels), -1, -1, -1)
    return self.sam(pixel_values=pixels, input_points=points).pred_masks.flatten(1, 2)


def explainer(name):
    if name == "SamModel":
        outputs = vitflow.masks((8, 8, 40, 40))
        return Explainer(Custom(pointed, sam=model(name)), data_config=CONFIG, outputs=outputs, fit="squash")
    if "Owl" in name:
        outputs = vitflow.boxes(prompts=vitflow.prompts(["a cat", "a remote"], processor=Words()))
    else:
        outputs = vitflow.masks((8, 8, 40, 40)) if "Segmentation" in name else vitflow.boxes()
    return Explainer(model(name), data_config=CONFIG, outputs=outputs, fit="squash")


def photo(seed=0):
    return np.random.default_rng(seed).integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", PATCHES)
def test_a_changed_patch_changes_the_map_there(name):
    """The attention of the first layer changes most at the changed patch, on average over all patches."""
    scores = {
        "Owl": lambda output: output["logits"][:, 5],
        "Sam": lambda output: output.mean(dim=(2, 3)),
        "Seg": lambda output: output.logits.mean(dim=(2, 3)),
    }
    kind = "Seg" if "Segmentation" in name else name[:3]
    function = scores.get(kind, lambda output: output.logits[:, 2])
    requested = Explainer(explainer(name).model, data_config=CONFIG, outputs=function, fit="squash")
    plain, places = np.full((SIZE, SIZE, 3), 120, np.uint8), [(row, col) for row in range(4) for col in range(4)]
    images = [plain]
    for row, col in places:
        image = plain.copy()
        top, left, side = CELL * row, CELL * col, CELL - 4  # the max pooling of a ResNet reaches over the edge
        image[top : top + side, left : left + side] = photo(1)[:side, :side]
        images.append(image)
    readout = None
    if "Segmentation" in name:  # the head reads several blocks
        with record_attention(explainer(name).model, outputs=function) as trace, torch.no_grad():
            explainer(name).model(torch.zeros(1, 3, SIZE, SIZE))
        top = trace.layers[-1].tokens.queries
        readout = torch.ones(top.rows, top.cols)
    first, *others = (
        each.heatmap
        for each in requested.explain_batch(images, methods=[("attention", {"layer": 1})], targets=1, readout=readout)
    )
    by_offset: dict[tuple[int, int], list[float]] = {}
    for (row, col), other in zip(places, others, strict=True):
        # The convolutions of some models do not see the last pixels.
        difference = np.nanmean(np.abs(other - first).reshape(4, CELL, 4, CELL), axis=(1, 3))
        for y, x in places:
            by_offset.setdefault((y - row, x - col), []).append(difference[y, x] / difference.mean())
    means = {offset: np.mean(values) for offset, values in by_offset.items() if len(values) > 3}
    assert max(means, key=means.__getitem__) == (0, 0) and means[0, 0] > 1.5, means


@pytest.mark.parametrize("name", DEFORMABLE)
def test_deformable_attention_is_refused_with_what_works(name):
    requested = explainer(name)
    with pytest.raises(UnsupportedModelError, match=f"{name} has deformable attention.*Use sampling, occlusion or"):
        requested.explain(photo(), method="gae", target=1)
    for method, options in (("occlusion", {"patch_size": CELL}), ("sampling", {"masks": 8}), ("gradcam", {})):
        saliency = requested.explain(photo(), method=method, target=1, **options)
        assert np.isfinite(saliency.grid).all() and saliency.facts.keys() & {"detection", "region"}


def test_sam_without_a_point_is_refused_with_what_works():
    with pytest.raises(ModelError, match=r"adds the points or boxes.*pred_masks\.flatten\(1, 2\)"):
        Explainer(model("SamModel"), data_config=CONFIG, outputs=vitflow.masks((8, 8, 40, 40)), fit="squash")


def test_segmentation_of_torchvision_takes_methods_without_attention():
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    torch.manual_seed(0)
    cnn = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5).eval()
    requested = Explainer(cnn, data_config=CONFIG, outputs=vitflow.masks((8, 8, 40, 40)), fit="squash")
    for method, options in (("occlusion", {"patch_size": CELL}), ("gradcam", {})):
        saliency = requested.explain(photo(), method=method, target=1, **options)
        assert np.isfinite(saliency.grid).all() and saliency.facts["region"]["pixels"] == 1024
    with pytest.raises(NoAttentionError, match="use input_gradient, sampling or occlusion"):
        requested.explain(photo(), method="gae", target=1)
