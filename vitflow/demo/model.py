"""The bundled demo model: a small timm Vision Transformer, trained on the images that `drawing` draws."""

import json
from pathlib import Path

from safetensors import safe_open
from timm.models.vision_transformer import VisionTransformer

from vitflow.demo.drawing import DEMO_MODEL

DEMO_WEIGHTS = Path(__file__).with_name("vitflow_demo.safetensors")


def load_demo_model(*, dynamic_img_size: bool = False) -> VisionTransformer:
    """Build the demo model with its weights: eval mode, float32, on the CPU; works offline.

    Its logits [batch, classes] are multi-label: `logits.sigmoid()` is the probability of each class on its own.

    Args:
        dynamic_img_size: let the model take images of any size, with its position embedding resampled.

    >>> model = load_demo_model()
    >>> model.pretrained_cfg["input_size"], model.num_classes, model.patch_embed.grid_size
    ((3, 96, 96), 8, (12, 12))
    """
    with safe_open(DEMO_WEIGHTS, framework="pt") as file:
        metadata = file.metadata()
        model = VisionTransformer(**json.loads(metadata["architecture"]), dynamic_img_size=dynamic_img_size)
        model.load_state_dict({name: file.get_tensor(name).float() for name in file.keys()})  # noqa: SIM118
    # timm keeps the configuration as a plain attribute; setattr, for the type checker expects tensors and modules only.
    for name in ("pretrained_cfg", "default_cfg"):
        setattr(model, name, _pretrained_cfg(metadata))
    return model.eval()


def _pretrained_cfg(metadata: dict[str, str]) -> dict[str, object]:
    """Return the header as timm's pretrained_cfg, for timm.data.resolve_model_data_config."""
    class_names = json.loads(metadata["class_names"])
    return {
        "architecture": DEMO_MODEL,
        "input_size": tuple(json.loads(metadata["input_size"])),
        "mean": tuple(json.loads(metadata["mean"])),
        "std": tuple(json.loads(metadata["std"])),
        "interpolation": metadata["interpolation"],
        "crop_pct": float(metadata["crop_pct"]),
        "crop_mode": "center",
        "num_classes": len(class_names),
        "label_names": class_names,
        "activation": metadata.get("activation", "sigmoid"),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": metadata.get("license"),
        "note": "knows eight drawn shapes only",
    }
