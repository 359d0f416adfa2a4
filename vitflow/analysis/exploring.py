"""Record everything that an interactive page needs to compute maps in the browser."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.analysis.removal import Kept, logits_without, patch_order, removed_counts
from vitflow.errors import (
    NoAttentionError,
    OptionError,
    UnsupportedModelError,
    ValueNormsError,
    VitflowError,
    printable,
)
from vitflow.explaining.applying import affinity_of
from vitflow.explaining.captions import departures, ends, python_call
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.features import layer_features
from vitflow.explaining.inputs import ImageInput, PlacedImage, at_least_one, name_of
from vitflow.explaining.maps import middle_layer
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targets import Score, Targets
from vitflow.methods.refinement import AffinityName
from vitflow.models.blocks import layer_output
from vitflow.recording.trace import Trace
from vitflow.registry.choices import MethodChoice, choose_methods
from vitflow.registry.method_table import get_method
from vitflow.viewer.explorer import FUSED, ExploredImage, ExplorerPage, ModelCall, make_explorer
from vitflow.viewer.pages import placed_grids

#: Methods that the browser does not compute.
READY_METHODS = ("gae", "gradient_rollout", "sampling", "consensus", "gradcam", "flow")
# Methods that the browser computes, if the model's attention allows it.
_OTHERWISE_LIVE = ("rollout", "attention")
# Number of classes on the page, and the default targets of class-specific maps.
_ANSWERS, _TARGETS = 5, "top3"
# Points of a deletion curve, and the orders that it is compared with: three random ones, whose mean is shown, and the
# centre prior.
_POINTS = 11
_ORDERS: list[MethodChoice] = [*(("random", {"random_seed": seed}) for seed in range(3)), "centre"]


def explore(
    images: ImageInput | Sequence[ImageInput],
    model: str | Path | nn.Module | Explainer,
    *,
    methods: Sequence[MethodChoice] | None = None,
    targets: Targets = _TARGETS,
    max_size: float = 40.0,
    deletion: bool = True,
    call: ModelCall | None = None,
) -> ExplorerPage:
    """Make an interactive page: click a patch to see its attention through the layers, computed in the browser.

    Args:
        images: one image or a list: paths, bytes, PIL images, RGB arrays, or normalised tensors.
        model: a model id (see `load_model`), a module, or an `Explainer`, which has further settings.
        methods: maps to compute in advance; by default those of `READY_METHODS` that the model supports.
        targets: targets of class-specific maps; by default the three most probable classes.
        max_size: maximum size of the page in megabytes. Data that does not fit is left out, and the page reports it.
        deletion: also run the model while the patches of the GAE maps are removed one tenth after the other, whose
            scores the page shows. This takes most of the time.
        call: command and Python call that load the model, if its id is not enough.

    Raises:
        VitflowError: an image, the model or an option is invalid.

    >>> from vitflow.demo import sample_images
    >>> page = explore(sample_images()[0], model="demo", methods=["gae"])
    >>> page.html[:15]
    '<!doctype html>'
    >>> page.notes[0]
    'Attention is stored in half precision: each number within 2⁻¹¹ of its value.'
    """
    sources = at_least_one(images)
    if not max_size > 0:
        raise OptionError(f"Expected max_size in megabytes, above 0, got {max_size!r}.")
    if methods is not None:
        choose_methods(methods, {})  # before a model is loaded
    explainer = Explainer.of(model)
    explorer = _Explorer(explainer, methods, targets, 10**6 * max_size / len(sources), deletion)
    explored = [explorer.explore(source, index) for index, source in enumerate(sources, start=1)]
    names = {entry["method"] for image in explored for entry in image.record["maps"]} | {*_OTHERWISE_LIVE, "similarity"}
    kept = ("title", "defaults", "published", "signed")
    methods_by_name = {name: {each: getattr(get_method(name), each) for each in kept} for name in sorted(names)}
    first = {"start_layer": explored[0].record["start_layer"]}  # the page has numbers only
    methods_by_name["rollout"]["defaults"] = methods_by_name["rollout"]["defaults"] | first
    return make_explorer(
        explored,
        model=explainer.model_id,
        model_note=explainer.model_info.note,
        call=call or _call(model),
        methods=methods_by_name,
        max_size=max_size,
    )


def _call(model: Any) -> ModelCall:
    """Return the call that loads this model."""
    if not isinstance(model, str | Path):
        return ModelCall(None, "explainer" if isinstance(model, Explainer) else "vitflow.Explainer(model)")
    return ModelCall(["--model", str(model)], python_call("vitflow.Explainer", str(model)))


@dataclass(frozen=True, slots=True)
class _Explorer:
    """Records images for a page of at most `max_bytes` per image; methods are None for all that the model supports."""

    explainer: Explainer
    methods: Sequence[MethodChoice] | None
    targets: Targets
    max_bytes: float
    deletion: bool

    def explore(self, source: ImageInput, index: int) -> ExploredImage:
        """Record and compute everything that the page needs for an image."""
        placed = self.explainer.placed(source, name_of(source, index))
        path = str(source) if isinstance(source, str | Path) else None
        explored = ExploredImage.of(placed.name, path, placed.image)
        trace = self._record(placed, explored)
        self._outputs(trace, explored)
        self._features(trace, explored)
        if explored.attention:
            self._affinities(trace, explored)
            self._heads(placed, explored)
        maps = self._computed(placed, explored)
        explored.record["maps"] = [_map(saliency) for saliency in maps]
        if self.deletion:
            self._deletion(placed, explored)
        drawn = [(saliency.placement, saliency.grid.shape) for saliency in maps]
        grids = [explored.features[1]] if explored.features is not None else []
        grids += [explored.record["grid"]] if explored.attention else []
        drawn = [(replace(placed.placement, extent=trace.extent_of(grid)), grid) for grid in reversed(grids)] + drawn
        explored.record |= placed_grids(drawn or [(placed.placement, (1, 1))])
        return explored

    def _record(self, image: PlacedImage, explored: ExploredImage) -> Trace:
        """Record the attention for the browser, or the reason why it cannot be used."""
        explainer, refused, weighted = self.explainer, explored.record["refused"], True
        try:
            features = [layer_output(explainer.model, -1)[0]]
        except UnsupportedModelError as error:
            features, refused["features"] = [], str(error)
        while True:
            keys = [key for key in FUSED if weighted or not key[1]]
            try:
                trace = explainer.record(image, fusions=keys, keys=True, features=features)
                break
            except ValueNormsError as error:
                weighted, refused["weighting"] = False, error.args[0]
            except NoAttentionError as error:
                refused["live"] = str(error)
                return explainer.record(image, attention=False, features=features)
        try:
            supported = not (trace.staged or trace.layout.num_suffix_tokens or trace.replaces_tokens)
        except UnsupportedModelError as error:  # layers without a common layout
            refused["live"] = str(error)
            return trace
        if not supported:
            refused["live"] = (
                f"{type(explainer.model).__name__} has windows, stages, tokens after the patches, or tokens that are "
                "replaced between blocks, which the browser does not support: maps are computed in advance."
            )
            return trace
        explored.record |= {
            "grid": (trace.layout.rows, trace.layout.cols),
            "prefix": trace.layout.num_prefix_tokens,
            "pooling": trace.pooling,
            "start_layer": middle_layer(trace, min(block.layers for block in trace.readouts_of(None).blocks)),
            "readout": trace.readout[0].double().tolist(),
        }
        for fusion, weighting in keys:
            layers = trace.fused(fusion, value_weighted=weighting)
            explored.attention[fusion, weighting] = torch.stack([layer[0].float().cpu() for layer in layers]).numpy()
        return trace

    def _outputs(self, trace: Trace, explored: ExploredImage) -> None:
        """Add the most probable classes."""
        logits = trace.logits
        if not isinstance(logits, Tensor) or logits.ndim != 2 or not self.explainer.num_classes:
            return
        outputs = self.explainer.outputs
        scores = outputs.scores(logits)[0]
        for index in scores.topk(min(_ANSWERS, len(scores))).indices.tolist():
            score = Score.of(scores, index, outputs)
            answer = {"name": score.name, "probability": score.probability, "display": score.display}
            explored.record["answers"].append(answer)

    def _features(self, trace: Trace, explored: ExploredImage) -> None:
        """Add the patch features, if they have a patch grid."""
        if not trace.features:
            return
        try:
            tokens, layout = layer_features(trace, -1)
        except UnsupportedModelError as error:
            explored.record["refused"]["features"] = str(error)
            return
        patches = tokens[0, layout.patches].float().cpu()
        longest = patches.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)  # only directions matter
        explored.features = (patches / longest).numpy(), (layout.rows, layout.cols)

    def _affinities(self, trace: Trace, explored: ExploredImage) -> None:
        """Add the affinities of the patches by attention and by keys."""
        names: tuple[AffinityName, ...] = ("attention", "keys")
        for name in names:
            grid, layers = (trace.layout.rows, trace.layout.cols), range(1, len(trace.layers) + 1)
            try:
                affinities = [affinity_of(trace, name, grid, first_layer) for first_layer in layers]
            except UnsupportedModelError as error:
                explored.record["refused"].setdefault("refine", str(error))
                continue
            explored.affinities[name] = [affinity.matrix[0].cpu().numpy() for affinity in affinities]
            uniform = any(bool(affinity.nearly_uniform[0]) for affinity in affinities)
            explored.record["uniform"] |= name == "attention" and uniform

    def _heads(self, image: PlacedImage, explored: ExploredImage) -> None:
        """Add every head, unless they are clearly too large."""
        fused = next(iter(explored.attention.values()))
        if fused.size > self.max_bytes:
            return
        heads = [layer[0].float().clamp_min(0).cpu() for layer in self.explainer.record(image).heads()]
        if len({len(layer) for layer in heads}) == 1:
            explored.heads = torch.stack(heads).numpy()

    def _computed(self, image: PlacedImage, explored: ExploredImage) -> list[Saliency]:
        """Compute maps in advance, without refinement if the browser can do it."""
        names: list[MethodChoice] = list(self.methods or READY_METHODS)
        if self.methods is None:
            names += [] if explored.attention else _OTHERWISE_LIVE
            if not self.explainer.num_classes:
                names = [name for name in names if not get_method(str(name)).class_specific]
        plain = [
            each.with_options(refine=0)
            if each.method.refine_stage in ("after", "after_clamping") and explored.affinities
            else each
            for each in choose_methods(names, {})
        ]
        specific = any(each.method.class_specific for each in plain)
        arguments: dict[str, Any] = {"targets": self.targets if specific else None, "names": [image.name]}
        if self.methods is not None:
            return self.explainer.explain_batch([image], methods=plain, **arguments)
        return self.explainer.explain_supported(image, plain, **arguments)[0]

    def _deletion(self, image: PlacedImage, explored: ExploredImage) -> None:
        """Add the scores of the classes of GAE maps while patches are removed, or the reason why they cannot be."""
        indices = [entry["class_index"] for entry in explored.record["maps"] if entry["method"] == "gae"]
        targets = [index for index in indices if index is not None][:_ANSWERS]
        if not targets:
            return
        [choice] = [each for each in choose_methods(self.methods or ["gae"], {}) if each.method.name == "gae"][:1]
        maps = self.explainer.explain_batch([image], methods=[choice], targets=targets)
        maps += self.explainer.explain_batch([image], methods=_ORDERS)
        orders = [patch_order(saliency.grid) for saliency in maps]
        kept = [
            Kept(order[count:], saliency.grid.shape, saliency.placement.extent)
            for order, saliency in zip(orders, maps, strict=True)
            for count in removed_counts(order.size, _POINTS)
        ]
        for replace_by in ("drop", "blank"):
            try:
                logits = logits_without(self.explainer, image, kept, replace_by)
                break
            except VitflowError as error:
                explored.record["refused"]["deletion"] = str(error)
        else:
            return
        explored.record["refused"].pop("deletion", None)
        scores = self.explainer.outputs.scores(logits).double().unflatten(0, (len(maps), _POINTS)).numpy()
        others = {"random": scores[-len(_ORDERS) : -1].mean(axis=0), "centre": scores[-1]}
        for saliency, order, falling in zip(maps, orders, scores[: len(targets)], strict=False):
            curves = {name: values[:, saliency.target] for name, values in {"map": falling, **others}.items()}
            explored.record["deletion"].append(_map(saliency) | {"replace": replace_by} | _steps(order, curves))


def _steps(order: NDArray[np.intp], curves: Mapping[str, NDArray[np.float64]]) -> dict[str, Any]:
    """Return curves for JSON, with the step that removes each patch as a digit in place of the values of the map."""
    steps = np.empty(order.size, np.intp)
    steps[order] = np.searchsorted(removed_counts(order.size, _POINTS), np.arange(order.size), side="right")
    rounded = {name: [float(f"{value:.4g}") for value in values] for name, values in curves.items()}
    return {"values": [], "steps": "".join(f"{step:x}" for step in steps), "scores": rounded}


def _map(saliency: Saliency) -> dict[str, Any]:
    """Return a map for JSON."""
    record = saliency.to_dict()
    return {
        "method": saliency.method,
        "specific": saliency.class_specific,
        "label": printable(saliency.label) if saliency.class_specific else "",
        "class_index": record["class_index"],
        "probability": saliency.probability,
        "display": saliency.score.display,
        "ends": list(map(printable, ends(saliency.score, saliency.class_specific))),
        "options": record["options"],
        "departures": departures(get_method(saliency.method), saliency.options),
        "shape": list(saliency.grid.shape),
        "values": [float(value) for value in saliency.grid.ravel()],
        "refine_stage": get_method(saliency.method).refine_stage,
        "facts": {name: value for name, value in saliency.facts.items() if isinstance(value, str | int | float)},
    }
