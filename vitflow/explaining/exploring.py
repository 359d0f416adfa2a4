"""Explore images: what a page needs to answer in the browser, recorded once."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import (
    NoAttentionError,
    OptionError,
    UnsupportedModelError,
    ValueNormsError,
    VitflowWarning,
    printable,
)
from vitflow.explaining.captions import departures, ends, python_call
from vitflow.explaining.choices import MethodChoice, choose_methods, left_out
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.image_model import ImageInput, at_least_one, name_of
from vitflow.explaining.method_table import get_method
from vitflow.explaining.refining import affinity_of
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.similarity import layer_features
from vitflow.explaining.targeted_trace import PlacedImage
from vitflow.explaining.targets import Score, Targets
from vitflow.methods.refinement import AffinityName
from vitflow.models.blocks import layer_output
from vitflow.recording.trace import Trace
from vitflow.viewer.explorer import FUSED, ExploredImage, ExplorerPage, ModelCall, make_explorer

#: Maps that a browser does not compute: they are made beforehand.
READY_METHODS = ("gae", "gradient_rollout", "sampling", "consensus", "gradcam", "flow")
# What is made beforehand, too, where the browser cannot compute it.
_OTHERWISE_LIVE = ("rollout", "attention")
# An image, RGB [height, width, 3].
# Classes that the page names, and those for which class-specific maps are made by default.
_ANSWERS, _TARGETS = 5, "top3"


def explore(
    images: ImageInput | Sequence[ImageInput],
    *,
    model: str | Path | nn.Module | Explainer,
    methods: Sequence[MethodChoice] | None = None,
    targets: Targets = _TARGETS,
    max_size: float = 40.0,
    fit: str = "crop",
    device: str | torch.device | None = None,
    call: ModelCall | None = None,
) -> ExplorerPage:
    """Make a page that answers in the browser when a patch is clicked: what does it attend to, through which layers?

    Args:
        images: one image, or a list of them: paths, bytes, PIL images, or RGB arrays.
        model: a model id (see `load_model`), a module of your own, or an `Explainer`, whose own fit and device hold.
        methods: maps to make beforehand; by default `READY_METHODS`, as far as they apply to the model.
        targets: classes that class-specific ones of them explain; by default the three most probable ones.
        max_size: of the page in megabytes. What does not fit is left out or stored in 8 bits, and the page says so.
        fit, device: as for `vitflow.explain`.
        call: how a reader gets the model, where its id alone does not say it.

    Raises:
        VitflowError: an image, the model or an option is wrong; the message says which and what to do.

    >>> from vitflow.demo import sample_images
    >>> page = explore(sample_images()[0], model="demo", methods=["gae"])
    >>> page.html[:15], page.notes[1]
    ('<!doctype html>', 'Single heads are stored in 8 bits: each number within 3.0% of its value, the faintest as 0.')
    """
    sources = at_least_one(images)
    if not max_size > 0:
        raise OptionError(f"Expected max_size in megabytes, above 0, got {max_size!r}.")
    if methods is not None:
        choose_methods(methods, {})  # before a model is loaded
    explainer = model if isinstance(model, Explainer) else Explainer(model, device=device, fit=fit)
    explorer = _Explorer(explainer, methods, targets, 10**6 * max_size / len(sources))
    explored = [explorer.explore(source, number) for number, source in enumerate(sources, start=1)]
    made = {own["method"] for image in explored for own in image.maps} | {*_OTHERWISE_LIVE, "similarity"}
    return make_explorer(
        explored,
        model=explainer.model_id,
        model_note=explainer.facts.note,
        call=call or _call(model, fit),
        methods={
            one.name: {"title": one.title, "defaults": one.defaults, "published": one.published}
            for one in map(get_method, sorted(made))
        },
        max_size=max_size,
    )


def _call(model: Any, fit: str) -> ModelCall:
    """How a reader gets a model that was handed over."""
    if not isinstance(model, str | Path):
        return ModelCall(None, "explainer" if isinstance(model, Explainer) else "vitflow.Explainer(model)")
    own = [] if fit == "crop" else ["--fit", fit]
    python = python_call("vitflow.Explainer", str(model), fit=None if fit == "crop" else fit)
    return ModelCall(["--model", str(model), *own], python)


@dataclass(frozen=True, slots=True)
class _Explorer:
    """Records images for a page.

    Attributes:
        explainer: of the model.
        methods: what to make beforehand; None for what applies.
        targets: classes for class-specific ones.
        room: bytes that an image may take in the page.
    """

    explainer: Explainer
    methods: Sequence[MethodChoice] | None
    targets: Targets
    room: float

    def explore(self, source: ImageInput, number: int) -> ExploredImage:
        """All that the page needs of an image."""
        placed = self.explainer.placed(source, name_of(source, number))
        image, path = placed.image, str(source) if isinstance(source, str | Path) else None
        found = ExploredImage(placed.name, path, image, placed.placement.window)
        trace = self._record(placed, found)
        self._outputs(trace, found)
        self._features(trace, found)
        if found.layout is not None:
            self._affinities(trace, found)
            self._heads(placed, found)
        saliencies = self._made(placed, found)
        found.maps = [_map(saliency) for saliency in saliencies]
        return found

    def _record(self, image: PlacedImage, found: ExploredImage) -> Trace:
        """Record what the browser computes with, or why it cannot."""
        explainer, weighted = self.explainer, True
        try:
            features = [layer_output(explainer.model, -1)[0]]
        except UnsupportedModelError as error:
            features, found.refused["features"] = [], str(error)
        while True:
            keys = [key for key in FUSED if weighted or not key[1]]
            try:
                trace = explainer.record(image, fusions=keys, keys=True, features=features)
                break
            except ValueNormsError as error:
                weighted, found.refused["weighting"] = False, error.args[0]
            except NoAttentionError as error:
                found.refused["live"] = str(error)
                return explainer.record(image, attention=False, features=features)
        try:
            if trace.staged or trace.layout.num_suffix_tokens:
                raise UnsupportedModelError(
                    f"{type(explainer.model).__name__} has windows, stages with different tokens, or tokens after "
                    "the patches: the browser computes over one set of tokens only. Maps that were made beforehand are "
                    "here."
                )
        except UnsupportedModelError as error:
            found.refused["live"] = str(error)
            return trace
        found.layout, found.pooling = trace.layout, trace.pooling
        found.readout = trace.readout[0].double().cpu().numpy()
        for fusion, weighting in keys:
            layers = trace.fused(fusion, value_weighted=weighting)
            found.attention[fusion, weighting] = torch.stack([layer[0].float().cpu() for layer in layers]).numpy()
        return trace

    def _outputs(self, trace: Trace, found: ExploredImage) -> None:
        """The most probable classes."""
        logits = trace.logits
        if not isinstance(logits, Tensor) or logits.ndim != 2 or not self.explainer.num_classes:
            return
        outputs = self.explainer.outputs
        told = outputs.scores(logits)[0]
        for index in told.topk(min(_ANSWERS, len(told))).indices.tolist():
            answer = Score.of(told, index, outputs)
            found.answers.append({"name": answer.name, "probability": answer.probability, "told": answer.display})

    def _features(self, trace: Trace, found: ExploredImage) -> None:
        """What the patches hold, where that lies on the image."""
        if not trace.features:
            return
        try:
            tokens, layout = layer_features(trace, -1)
        except UnsupportedModelError as error:
            found.refused["features"] = str(error)
            return
        patches = tokens[0, layout.patches].float().cpu()
        found.features = patches.numpy(), (layout.rows, layout.cols)

    def _affinities(self, trace: Trace, found: ExploredImage) -> None:
        """How alike the patches are, by attention and by keys."""
        names: tuple[AffinityName, ...] = ("attention", "keys")
        for name in names:
            try:
                affinity = affinity_of(trace, name, (trace.layout.rows, trace.layout.cols))
            except UnsupportedModelError as error:
                found.refused.setdefault("refine", str(error))
                continue
            found.affinities[name] = affinity.matrix[0].cpu().numpy()
            found.uniform = found.uniform or (name == "attention" and bool(affinity.nearly_uniform[0]))

    def _heads(self, image: PlacedImage, found: ExploredImage) -> None:
        """Every head, if there may be room for them."""
        fused = next(iter(found.attention.values()))
        if fused.size > self.room:
            return
        heads = [layer[0].float().clamp_min(0).cpu() for layer in self.explainer.record(image).heads()]
        if len({len(layer) for layer in heads}) == 1:
            found.heads = torch.stack(heads).numpy()

    def _made(self, image: PlacedImage, found: ExploredImage) -> list[Saliency]:
        """The maps that are made beforehand: unrefined where the browser can do that."""
        names: list[MethodChoice] = list(self.methods or READY_METHODS)
        if self.methods is None:
            names += [] if found.attention else _OTHERWISE_LIVE
            if not self.explainer.num_classes:
                names = [name for name in names if not get_method(str(name)).class_specific]
        plain = [
            one.but(refine=0) if one.method.refined in ("after", "positive") and found.affinities else one
            for one in choose_methods(names, {})
        ]

        def explain() -> list[Saliency]:
            targets = self.targets if any(one.method.class_specific for one in plain) else None
            return self.explainer.explain_batch([image], methods=plain, targets=targets, names=[found.name])

        try:
            return explain()
        except UnsupportedModelError:
            if self.methods is not None:
                raise
        refused = self.explainer.refusals(plain)
        for note in left_out(refused):
            warnings.warn(note, VitflowWarning, stacklevel=4)
        plain = [one for one in plain if one.name not in refused]
        return explain() if plain else []


def _map(saliency: Saliency) -> dict[str, Any]:
    """A map for JSON."""
    told = saliency.to_dict()
    return {
        "method": saliency.method,
        "specific": saliency.class_specific,
        "label": printable(saliency.label) if saliency.class_specific else "",
        "class_index": told["class_index"],
        "probability": saliency.probability,
        "told": saliency.score.display,
        "ends": list(map(printable, ends(saliency.score, saliency.class_specific))),
        "options": told["options"],
        "departures": departures(get_method(saliency.method), saliency.options),
        "shape": list(saliency.grid.shape),
        "values": [float(value) for value in saliency.grid.ravel()],
        "refined": get_method(saliency.method).refined,
        "facts": {name: value for name, value in saliency.facts.items() if isinstance(value, str | int | float)},
    }
