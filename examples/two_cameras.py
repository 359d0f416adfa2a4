"""A policy that takes two cameras and the state of a robot: which camera does its action use, and where in it?

The weights are random: the example shows the calls. Run it with `python examples/two_cameras.py`.
"""

import timm
import torch
from torch import Tensor, nn

import vitflow
from vitflow.evaluation import InputScores, blank_inputs

SIZE = {"img_size": 64, "patch_size": 8, "depth": 3, "num_classes": 0}
DATA = {"input_size": (3, 64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3}


class Policy(nn.Module):
    """The features of two camera images and the state of a robot to an action, [observations, 7]."""

    def __init__(self) -> None:
        super().__init__()
        towers = {name: timm.create_model("vit_tiny_patch16_224", **SIZE) for name in ("front", "wrist")}
        self.towers = nn.ModuleDict(towers)
        self.head = nn.Sequential(nn.Linear(2 * 192 + 7, 64), nn.GELU(), nn.Linear(64, 7))

    def forward(self, images: dict[str, Tensor], state: Tensor) -> Tensor:
        """Return the action."""
        features = [tower(images[name]) for name, tower in self.towers.items()]
        return self.head(torch.cat([*features, state], dim=1))


class OneCamera(nn.Module):
    """The action as a function of one camera: the features of the other inputs are those of one observation."""

    def __init__(self, policy: Policy, camera: str, images: dict[str, Tensor], state: Tensor) -> None:
        super().__init__()
        self.tower, self.head, self.camera, self.state = policy.towers[camera], policy.head, camera, state
        with torch.no_grad():
            self.features = {name: tower(images[name]) for name, tower in policy.towers.items()}

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the action for images of the camera, [images, 7]."""
        features = {**self.features, self.camera: self.tower(pixels)}
        parts = [part.expand(len(pixels), -1) for part in (*features.values(), self.state)]
        return self.head(torch.cat(parts, dim=1))


def main() -> tuple[InputScores, vitflow.Saliency]:
    """Compare the cameras over twelve observations, and explain the first number of the action in one image."""
    torch.manual_seed(0)
    policy = Policy().eval()
    images = {name: torch.rand(12, 3, 64, 64) * 2 - 1 for name in ("front", "wrist")}
    state = torch.randn(12, 7)
    with torch.no_grad():
        action = policy(images, state)
    # The score is how near the action stays to that of all images; its highest value is 0.
    result = blank_inputs(lambda changed: -(policy(changed, state) - action).norm(dim=1), images)
    print(result)

    first = {name: image[:1] for name, image in images.items()}
    explainer = vitflow.Explainer(
        OneCamera(policy, "wrist", first, state[:1]),
        outputs=lambda action: action[:, :1],
        class_names=["first number of the action"],
        activation="value",
        data_config=DATA,
    )
    saliency = explainer.explain(first["wrist"], method="gae")
    print(saliency)
    return result, saliency


if __name__ == "__main__":
    main()
