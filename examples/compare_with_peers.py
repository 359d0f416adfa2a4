"""Put other toolkits' maps beside vitflow's: any method that gives a map per image can be a column.

    pip install vitflow grad-cam captum
    python examples/compare_with_peers.py -o peers.png                       # the bundled model and images
    python examples/compare_with_peers.py cat.jpg --model vit_base_patch16_224.augreg2_in21k_ft_in1k --class tabby

A method is a function that takes what was recorded (the model, its input, the classes asked for, the layout of its
tokens) and returns maps [batch, rows, cols]. Once registered by name it works everywhere a method is named.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from captum.attr import IntegratedGradients
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor, nn

import vitflow
from vitflow.demo import sample_images


@contextmanager
def custom_gradients(model: nn.Module) -> Iterator[None]:
    """Let a toolkit call backward() as it likes: the parameters get their own .grad back."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def to_patches(pixels: Tensor, trace: vitflow.Trace) -> Tensor:
    """Average a map over pixels [batch, height, width] within each patch: [batch, rows, cols]."""
    return nn.functional.adaptive_avg_pool2d(pixels.float(), (trace.layout.rows, trace.layout.cols))


def peer_gradcam(trace: vitflow.Trace, *, block: int) -> Tensor:
    """Grad-CAM of the package grad-cam at the first norm of a block, scaled as that package scales it."""
    with (
        custom_gradients(trace.model),
        GradCAM(
            model=trace.model,
            target_layers=[trace.model.blocks[block].norm1],
            # It expects [batch, channels, rows, cols]; the layout drops the prefix tokens.
            reshape_transform=lambda tokens: trace.layout.to_grid(tokens.transpose(1, 2)),
        ) as cam,
    ):
        actual = cam(trace.pixels.detach(), [ClassifierOutputTarget(int(target)) for target in trace.targets])
    return to_patches(torch.from_numpy(actual), trace)


def integrated_gradients(trace: vitflow.Trace, *, steps: int) -> Tensor:
    """Captum's integrated gradients from the mean image, the evidence for the class summed over channels."""
    with custom_gradients(trace.model):
        actual = IntegratedGradients(trace.model).attribute(
            trace.pixels.detach(), target=trace.targets, n_steps=steps, internal_batch_size=16
        )
    return to_patches(actual.sum(dim=1).clamp_min(0), trace)


def register_peers() -> list[str]:
    """Add both to vitflow's table of methods; return their names."""
    vitflow.register_method(
        "GradCAM (grad-cam)",
        peer_gradcam,
        summary="Grad-CAM as the package grad-cam computes it.",
        defaults={"block": -1},
        needs={"attention"},  # so that the layout of the tokens is known
        class_specific=True,
        paper="Selvaraju et al., ICCV 2017",
        replace=True,
    )
    vitflow.register_method(
        "Integrated gradients (captum)",
        integrated_gradients,
        summary="Integrated gradients as captum computes them.",
        defaults={"steps": 32},
        needs={"attention"},
        class_specific=True,
        paper="Sundararajan, Taly & Yan, ICML 2017",
        replace=True,
    )
    return ["GradCAM (grad-cam)", "Integrated gradients (captum)"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare vitflow's maps with those of grad-cam and captum.")
    parser.add_argument("images", nargs="*", type=Path, help="by default three of the bundled ones")
    parser.add_argument("--model", default="demo", help="a timm id, or the bundled model")
    parser.add_argument("--class", dest="targets", action="append", help="class to explain; repeat it for more")
    parser.add_argument("-o", "--output", type=Path, default=Path("peers.png"), help=".png, .pdf or .svg")
    given = parser.parse_args()
    methods = ["rollout", "gae", "gradcam", *register_peers(), "random", "centre"]
    images = given.images or sample_images()[:3]
    comparison = vitflow.compare(images, model=given.model, methods=methods, targets=given.targets)
    print(comparison.agreement())
    print(comparison.save(given.output))


if __name__ == "__main__":
    main()
