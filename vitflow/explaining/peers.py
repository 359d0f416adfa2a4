"""Methods of other packages: `captum:NAME` for the attribution classes of captum, `cam:NAME` for pytorch-grad-cam.

captum or pytorch-grad-cam computes the map; this module passes the model, the input and the layer, and returns the
result on the patch grid. Maps equal those of a direct call.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitflow.errors import OptionError, UnsupportedModelError, VitflowError, load_extra, unknown_name
from vitflow.explaining.features import measured_layer
from vitflow.explaining.maps import Maps, TargetedTrace
from vitflow.images.geometry import Extent
from vitflow.methods.cells import cell_owners, sum_cells
from vitflow.models.anatomy import forward_options
from vitflow.models.outputs import Outputs
from vitflow.recording.experiment import undisturbed
from vitflow.registry.method_table import Method

# Classes of captum that require another class, a layer or text; base classes, and those that require several inputs.
_NOT_CAPTUM = ("Neuron", "LLM", "VLLM", "Remote", "NoiseTunnel", "LimeBase", "Interpretable", "Layer", "GuidedGradCam")
_NOT_CAPTUM_END = ("Attribution", "FeaturePermutation")
# Names of the class and of the import of each package, and where its methods are published.
_PACKAGES = {"captum": ("captum.attr", "captum"), "cam": ("pytorch_grad_cam", "grad-cam")}


@cache
def external_method(name: str) -> Method:
    """Return the method for a class of another package, such as "captum:IntegratedGradients" or "cam:LayerCAM"."""
    package, _, wanted = name.partition(":")
    module, extra = _PACKAGES[package]
    classes = _classes(load_extra(module, f"--method {name}", extra), package)
    if wanted not in classes:
        raise OptionError(unknown_name(f"class of {extra}", wanted, classes))
    external = _ExternalMethod(name, classes[wanted])
    return Method(
        name,
        _image_by_image(external.cam if package == "cam" else external.captum),
        summary=f"{wanted} as computed by {extra}.",
        question="Which patches is the score of this class attributed to by this method?",
        defaults={"peer_options": {}, **({"layer": -1} if package == "cam" else {})},
        needs=frozenset({"predict"}),
        class_specific=True,
        refine_stage="none",
        title=f"{wanted} ({extra})",
        paper=f"{extra}, {wanted}",
    )


def _image_by_image(function: Callable[..., Maps]) -> Callable[..., Maps]:
    """Compute each map alone, with the same random numbers, so that it does not depend on the images of its batch."""

    def compute(trace: TargetedTrace, **options: Any) -> Maps:
        targets = trace.class_indices
        maps = [
            function(
                replace(trace, pixels=trace.pixels[index : index + 1], targets=targets[index : index + 1]), **options
            )
            for index in range(len(targets))
        ]
        pixels = torch.cat([each.pixels for each in maps if each.pixels is not None])
        return Maps(torch.cat([each.grids for each in maps]), pixels=pixels)

    return compute


def _with_tuples(value: Any) -> Any:
    """Replace lists by tuples, which captum requires and JSON does not have.

    >>> _with_tuples([[3, 16, 16], 0.5])
    ((3, 16, 16), 0.5)
    """
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _classes(module: Any, package: str) -> dict[str, type]:
    """Return the attribution classes of a package for images, by name."""
    classes = {name: each for name, each in vars(module).items() if inspect.isclass(each)}
    if package == "cam":
        base = load_extra("pytorch_grad_cam.base_cam", "cam", "grad-cam").BaseCAM
        return {name: each for name, each in classes.items() if issubclass(each, base)}
    base = module.Attribution
    return {
        name: each
        for name, each in classes.items()
        if issubclass(each, base) and not name.startswith(_NOT_CAPTUM) and not name.endswith(_NOT_CAPTUM_END)
    }


class _Explained(nn.Module):
    """A model that returns the explained outputs, [batch, k]."""

    def __init__(self, model: nn.Module, outputs: Outputs, name: str) -> None:
        super().__init__()
        self.model, self._outputs, self._name = model, outputs, name

    def forward(self, pixels: Tensor) -> Tensor:
        output = self.model(pixels.clone(), **forward_options(self.model, (pixels.shape[-2], pixels.shape[-1])))
        return self._outputs.required_scores(output, self._name)


@dataclass(frozen=True)
class _ExternalMethod:
    """A class of another package and its functions for the method table."""

    name: str
    kind: Any

    def takes(self, argument: str) -> bool:
        """Return True if the constructor has an argument."""
        return argument in inspect.signature(self.kind).parameters

    def captum(self, trace: TargetedTrace, *, peer_options: Mapping[str, Any]) -> Maps:
        """Attributions of pixels, summed over channels and over the pixels of each patch."""
        grid = trace.cells()
        with self._running(trace) as (model, pixels):
            attribute = inspect.signature(self.kind.attribute).parameters
            options = {key: _with_tuples(value) for key, value in peer_options.items()}
            made = {key: options.pop(key) for key in list(options) if self.takes(key) and key not in attribute}
            for key, value in _features(attribute, pixels, **grid).items():
                options.setdefault(key, value)
            method = self.kind(model, **made)
            result = method.attribute(
                pixels, **({"target": trace.class_indices} if "target" in attribute else {}), **options
            )
        result = result[0] if isinstance(result, tuple) and len(result) == 1 else result
        if not isinstance(result, Tensor) or result.shape != pixels.shape:
            raise UnsupportedModelError(f"{self.name} returned no attributions of pixels.")
        whole = "feature_mask" in attribute or "sliding_window_shapes" in attribute  # each pixel has all of it
        attributions = result.detach().mean(dim=1) if whole else result.detach().sum(dim=1)
        return _of_pixels(attributions, mean=whole, **grid)

    def cam(self, trace: TargetedTrace, *, peer_options: Mapping[str, Any], layer: int) -> Maps:
        """Class activation maps, scaled to 0…1 as the package does, with their mean in each patch."""
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

        path, layout = measured_layer(trace, layer)
        target_layers = [trace.model.get_submodule(path)]

        def on_grid(tokens: Tensor) -> Tensor:
            if tokens.ndim == 4:
                return tokens
            grids: Tensor = layout.to_grid(tokens.transpose(1, 2))
            return grids  # [batch, channels, rows, cols]

        with self._running(trace) as (model, pixels):
            called = inspect.signature(self.kind.__call__).parameters
            options = dict(peer_options)
            given = {key: options.pop(key) for key in list(options) if key in called}
            if self.takes("ablation_layer"):
                from pytorch_grad_cam.ablation_layer import AblationLayerVit

                options.setdefault("ablation_layer", AblationLayerVit())
            with self.kind(model=model, target_layers=target_layers, reshape_transform=on_grid, **options) as cam:
                result = cam(pixels, [ClassifierOutputTarget(int(target)) for target in trace.class_indices], **given)
        maps = torch.from_numpy(result)
        return _of_pixels(maps, mean=True, **trace.cells())

    @contextmanager
    def _running(self, trace: TargetedTrace) -> Iterator[tuple[nn.Module, Tensor]]:
        """Yield the model and its input, quote a package's errors, and restore gradients, modes and random states."""
        parameters = list(trace.model.parameters())
        numbers = np.random.get_state()  # noqa: NPY002 (packages use the global generator)
        gradients = [(parameter, parameter.grad, parameter.requires_grad) for parameter in parameters]
        try:
            with (
                torch.inference_mode(False),
                undisturbed(trace.model, trace.pixels.device),
                torch.enable_grad(),
                warnings.catch_warnings(),
                redirect_stdout(sys.stderr),
            ):
                torch.manual_seed(0)
                np.random.seed(0)  # noqa: NPY002
                warnings.simplefilter("ignore")  # about hooks and gradients that are restored here
                explained = _Explained(trace.model, trace.outputs, trace.model_info.id)
                yield explained.eval(), trace.pixels.detach().clone().requires_grad_()
        except VitflowError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{self.name} failed on {type(trace.model).__name__}: {type(error).__name__}: {str(error)[:300]}"
            ) from error
        finally:
            np.random.set_state(numbers)  # noqa: NPY002
            for parameter, gradient, required in gradients:
                parameter.grad = gradient
                parameter.requires_grad_(required)


def _features(
    attribute: Mapping[str, Any], pixels: Tensor, rows: int, cols: int, extent: Extent | None
) -> dict[str, Any]:
    """Return the arguments that let a package perturb whole patches, and required baselines."""
    options: dict[str, Any] = {}
    if "feature_mask" in attribute:
        owners = cell_owners(pixels.shape[-2], pixels.shape[-1], rows, cols, extent).to(pixels.device)
        options["feature_mask"] = owners.expand(1, *pixels.shape[1:]).contiguous()
    if "sliding_window_shapes" in attribute:
        window = (pixels.shape[1], pixels.shape[2] // rows, pixels.shape[3] // cols)
        options |= {"sliding_window_shapes": window, "strides": window}
    if "baselines" in attribute and attribute["baselines"].default is inspect.Parameter.empty:
        options["baselines"] = pixels.detach().new_zeros(2, *pixels.shape[1:])
    return options


def _of_pixels(pixels: Tensor, rows: int, cols: int, extent: Extent | None, *, mean: bool = False) -> Maps:
    """Sum a map of pixels [batch, height, width] over patches, or average it, and keep it for drawing."""
    grids = sum_cells(pixels.double(), rows, cols, extent)
    if mean:
        grids = grids / sum_cells(torch.ones_like(pixels[:1], dtype=torch.float64), rows, cols, extent)
    return Maps(grids, pixels=pixels.float())
