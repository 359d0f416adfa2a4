"""Draw the images of docs/gallery.md and of some how-to pages: python -m tools.draw_gallery [--only NAME]

The photographs come with scikit-image: pip install "vitflow[examples]" or scikit-image. Without --checkpoint the
model's weights come from the hub.
"""

import base64
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
import transformers
from PIL import Image
from timm.data import resolve_model_data_config
from torch import nn

import vitflow
from tools.draw_readme_images import STRIP_QUALITY, load_photographs, parse, strip_bytes, write_jpeg
from tools.drawn import Choice, keep
from tools.scenes import draw_scene
from vitflow.analysis.strips import draw_words
from vitflow.demo import draw_images, load_demo_model, sample_images
from vitflow.images.figures import figure_bytes


@dataclass(frozen=True)
class Drawing:
    """An image of the gallery: how it is drawn, as PNG, by which methods, and the quality of its JPEG."""

    draw: Callable[[], bytes]
    methods: Sequence[Choice]
    quality: int = STRIP_QUALITY


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse(__doc__, arguments, only=True)
    # What the bundled models draw needs no other weights.
    model = None if given.only in BUNDLED else vitflow.load_model(given.model, checkpoint=given.checkpoint)
    with tempfile.TemporaryDirectory() as desk:
        drawings = BUNDLED if model is None else BUNDLED | gallery(model, Path(desk))
        for name, drawing in drawings.items():
            if given.only not in (None, name):
                continue
            file = write_jpeg(drawing.draw(), given.output / "gallery" / f"{name}.jpg", drawing.quality)
            print(keep(file, drawing.methods, given.output), f"{file.stat().st_size // 1000} kB")


def gallery(model: nn.Module, desk: Path) -> dict[str, Drawing]:
    """The images of photographs by their names; each is drawn when it is asked for.

    Args:
        model: a timm model that knows ImageNet.
        desk: an empty folder to work in.
    """
    explainer = vitflow.Explainer(model, device="cpu")
    photographs = load_photographs(desk / "photographs")
    cat, coffee, astronaut = photographs["cat"], photographs["coffee"], photographs["astronaut"]
    five = ["rollout", "flow", "gae", "gradcam", "random"]
    paper = [("rollout", {"preset": "paper"}), "rollout", "gae", "random"]
    same = ["rollout", "gae", "random"]
    similar = ["rollout", ("similarity", {"patch": (5, 4)}), ("similarity", {"box": (155, 225, 215, 265)})]

    def strip(images: Any, methods: Sequence[Choice], by: vitflow.Explainer = explainer, **options: Any) -> bytes:
        drawing = {"dpi": options.pop("dpi", 125)}
        return strip_bytes(vitflow.compare(images, model=by, methods=methods, **options), **drawing)

    def of_library(put: Callable[[nn.Module], nn.Module]) -> bytes:
        seen = resolve_model_data_config(model)
        other = vitflow.Explainer(put(model), data_config=seen, class_names=explainer.class_names)
        return strip(coffee, same, by=other)

    def folder() -> bytes:
        summary = vitflow.explain_folder(cat.parent, desk / "explained", model=explainer, methods=["gae"])
        return base64.b64decode(summary._repr_mimebundle_()[0]["image/png"])

    helmet = vitflow.Contrast("football helmet", against="bobsled")
    return {
        "methods": Drawing(lambda: strip(list(photographs.values()), five, dpi=100), five, 65),
        "contrast": Drawing(lambda: strip(astronaut, ["gae", "gradcam"], targets=helmet), ["gae", "gradcam"]),
        "no-classes": Drawing(lambda: strip(cat, similar), similar),
        "transformers": Drawing(lambda: of_library(as_transformers), same),
        "torchvision": Drawing(lambda: of_library(as_torchvision), same),
        "folder": Drawing(folder, ["gae"], 85),
        "paper": Drawing(lambda: strip([cat, coffee], paper, dpi=120), paper, 75),
    }


TUNED = ["gae", "gradient_rollout"]


def draw_fine_tune() -> bytes:
    """One bundled image by a model that was asked to tell two classes of its own apart."""
    sides = vitflow.Contrast("round", against="with corners")
    return strip_bytes(vitflow.compare(sample_images()[1], model=fine_tune(), methods=TUNED, targets=sides))


def draw_caption() -> bytes:
    """A drawn scene with the words of the bundled captioner, a map for each."""
    with tempfile.TemporaryDirectory() as desk:
        image = Path(desk) / "drawn.png"
        Image.fromarray(draw_scene(4).image).save(image)
        actual = vitflow.text.explain_generation("demo-caption", "<image> here is", image=image, do_sample=False)
    words, left_out = actual.words()
    strip = draw_words([actual.image(places) for places in words.values()], left_out=left_out)
    strip.set_dpi(125)
    return figure_bytes(strip, ".png")


#: What the bundled models draw.
def draw_peers() -> bytes:
    return strip_bytes(vitflow.compare(sample_images()[1], model="demo", methods=PEERS), dpi=100)


PEERS = ["gae", "captum:IntegratedGradients", "captum:Saliency", "cam:GradCAM", "cam:LayerCAM"]
BUNDLED = {
    "fine-tune": Drawing(draw_fine_tune, TUNED),
    "caption": Drawing(draw_caption, []),
    "peers": Drawing(draw_peers, PEERS),
}


def fine_tune() -> vitflow.Explainer:
    """The bundled model with a new head: is a shape round, or does it have corners?"""
    model = load_demo_model()
    names = model.pretrained_cfg["label_names"]
    rounded = {"red heart", "orange disc", "purple ring", "pink crescent"}
    model.reset_classifier(2)
    explainer = vitflow.Explainer(model, class_names=["with corners", "round"], activation="softmax")
    drawn = [one for one in draw_images(400) if len(one.labels) == 1]
    labels = torch.tensor([int(names[one.labels[0]] in rounded) for one in drawn])
    with torch.no_grad():
        pixels = torch.cat([explainer.pixels(one.image) for one in drawn])
        features = model.forward_head(model.forward_features(pixels), pre_logits=True)
    optimizer = torch.optim.LBFGS(model.head.parameters(), max_iter=50)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        actual = nn.functional.cross_entropy(model.head(features), labels) + 0.01 * model.head.weight.square().sum()
        actual.backward()
        return actual

    optimizer.step(loss)
    return explainer


def as_torchvision(model: nn.Module) -> nn.Module:
    """The same weights in torchvision's Vision Transformer, whose parameters come in nearly the same order."""
    same = torchvision.models.VisionTransformer(
        image_size=224,
        patch_size=16,
        num_layers=len(model.blocks),
        num_heads=model.blocks[0].attn.num_heads,
        hidden_dim=model.embed_dim,
        mlp_dim=4 * model.embed_dim,
    )
    cls_token, position, *rest = model.state_dict().values()
    ordered = [cls_token, *rest[:2], position, *rest[2:]]
    same.load_state_dict(dict(zip(same.state_dict(), ordered, strict=True)))
    return same.eval()


def as_transformers(model: nn.Module) -> nn.Module:
    """The same weights in the ViT of transformers, which keeps queries, keys and values apart."""
    configuration = transformers.ViTConfig(
        hidden_size=model.embed_dim,
        num_hidden_layers=len(model.blocks),
        num_attention_heads=model.blocks[0].attn.num_heads,
        intermediate_size=4 * model.embed_dim,
        layer_norm_eps=1e-6,
        num_labels=model.num_classes,
    )
    same = transformers.ViTForImageClassification(configuration)
    first, last = list(model.state_dict().values())[:4], list(model.state_dict().values())[-4:]
    for block in model.blocks:
        norm1, norm2, mlp = (list(part.state_dict().values()) for part in (block.norm1, block.norm2, block.mlp))
        weights, biases = block.attn.qkv.weight.chunk(3), block.attn.qkv.bias.chunk(3)
        projections = [tensor for pair in zip(weights, biases, strict=True) for tensor in pair]
        first += [*projections, *block.attn.proj.state_dict().values(), *norm1, *norm2, *mlp]
    same.load_state_dict(dict(zip(same.state_dict(), [*first, *last], strict=True)))
    return same.eval()


if __name__ == "__main__":
    main()
