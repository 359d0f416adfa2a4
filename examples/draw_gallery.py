"""Draw the pictures of docs/gallery.md: python examples/draw_gallery.py [--checkpoint WEIGHTS] [--model ID]

The photographs come with scikit-image: pip install "vitflow[examples]" or scikit-image. Without --checkpoint the
model's weights come from the hub.
"""

import base64
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torchvision
import transformers
from draw_readme_pictures import load_photographs, parse, save_jpeg, write_jpeg
from timm.data import resolve_model_data_config
from torch import nn

import vitflow
from vitflow.demo import draw_pictures, load_demo_model, sample_pictures


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse(__doc__, arguments)
    folder = given.output / "gallery"
    model = vitflow.load_model(given.model, checkpoint=given.checkpoint)
    explainer = vitflow.Explainer(model, device="cpu")
    with tempfile.TemporaryDirectory() as desk:
        photographs = load_photographs(Path(desk) / "photographs")
        cat, coffee, astronaut = photographs["cat"], photographs["coffee"], photographs["astronaut"]

        methods = ["rollout", "flow", "gae", "gradcam", "random"]
        strip = vitflow.compare(list(photographs.values()), model=explainer, methods=methods)
        save_jpeg(strip, folder / "methods.jpg", 65, dpi=100)

        contrast = vitflow.Contrast("football helmet", against="bobsled")
        two = vitflow.compare(astronaut, model=explainer, methods=["gae", "gradcam"], targets=contrast)
        save_jpeg(two, folder / "contrast.jpg")

        mine = fine_tune()
        sides = vitflow.Contrast("round", against="with corners")
        own = vitflow.compare(sample_pictures()[1], model=mine, methods=["gae", "gradient_rollout"], targets=sides)
        save_jpeg(own, folder / "fine-tune.jpg")

        seen = resolve_model_data_config(model)
        for name, same in (("transformers", as_transformers(model)), ("torchvision", as_torchvision(model))):
            other = vitflow.Explainer(same, data_config=seen, class_names=explainer.class_names)
            maps = vitflow.compare(coffee, model=other, methods=["rollout", "gae", "random"])
            save_jpeg(maps, folder / f"{name}.jpg")

        summary = vitflow.explain_folder(cat.parent, Path(desk) / "explained", model=explainer, methods=["gae"])
        write_jpeg(base64.b64decode(summary._repr_mimebundle_()["image/png"]), folder / "folder.jpg")

        paper = [("rollout", {"preset": "paper"}), "rollout", "gae", "random"]
        save_jpeg(vitflow.compare([cat, coffee], model=explainer, methods=paper), folder / "paper.jpg", 75, dpi=120)
    for file in sorted(folder.iterdir()):
        print(file, f"{file.stat().st_size // 1000} kB")


def fine_tune() -> vitflow.Explainer:
    """The bundled model with a new head: is a shape round, or does it have corners?"""
    model = load_demo_model()
    names = model.pretrained_cfg["label_names"]
    rounded = {"red heart", "orange disc", "purple ring", "pink crescent"}
    model.reset_classifier(2)
    explainer = vitflow.Explainer(model, class_names=["with corners", "round"], activation="softmax")
    drawn = [one for one in draw_pictures(400) if len(one.labels) == 1]
    labels = torch.tensor([int(names[one.labels[0]] in rounded) for one in drawn])
    with torch.no_grad():
        pixels = torch.cat([explainer.pixels(one.image) for one in drawn])
        features = model.forward_head(model.forward_features(pixels), pre_logits=True)
    optimizer = torch.optim.LBFGS(model.head.parameters(), max_iter=50)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = nn.functional.cross_entropy(model.head(features), labels) + 0.01 * model.head.weight.square().sum()
        found.backward()
        return found

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
