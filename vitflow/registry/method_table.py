"""Methods: name, options, requirements and source, and the table of built-in and registered ones.

This module imports no torch: functions are loaded when they first run.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from math import isfinite
from typing import Any, Literal

from vitflow.errors import OptionError, check_known, unknown_name
from vitflow.registry.options import OPTIONS, REFINING

# Stage at which a method's map is refined.
RefineStage = Literal["after", "after_clamping", "inside", "none"]
_NEEDS = frozenset({"attention", "heads", "gradients", "features", "tokens", "predict", "repeat"})


@dataclass(frozen=True, slots=True)
class Method:
    """A saliency method.

    Attributes:
        name: its name in calls.
        function: `(trace, **options) -> maps`, or its location as "module:name"; `trace` is a `TargetedTrace`, and maps
            are [batch, rows, cols], or `Maps` with facts. Refinement options are passed as `refine_stage` says.
        summary: one line for `vitflow methods`.
        defaults: options and their defaults; `refine` and `affinity` are added automatically.
        needs: what must be recorded: "attention" (fused per head_fusion and value_weighted), "heads", "gradients" (of
            all that is recorded), "features" (tokens after the first norm of block `layer`), "tokens" (output of block
            `layer`, or of every block), "predict" (further forward passes), "repeat" (the pass again, with gradients).
        class_specific: whether the map depends on the target.
        signed: whether the map is drawn around 0 if it has negative values, in red and blue.
        paper, presets: source; named sets of options for `preset`, of which "paper" is the published definition.
        implies: option values that select a preset, {(option, value): preset}.
        refine_stage: "after" or "after_clamping" negative values to 0: by the common step after the function; "inside":
            by the function itself; "none". Functions of the middle two receive the options `refine` and `affinity`.
        question: the question that its map answers.
        title: name in figures and pages; by default `name`.
    """

    name: str
    function: str | Callable[..., Any]
    summary: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    class_specific: bool = False
    signed: bool = True
    paper: str = ""
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    implies: Mapping[tuple[str, Any], str] = field(default_factory=dict)
    refine_stage: RefineStage = "after"
    question: str = ""
    title: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", frozenset(self.needs))
        object.__setattr__(self, "title", self.title or self.name)
        for need in self.needs - _NEEDS:
            raise OptionError(unknown_name("need", need, _NEEDS))
        if self.refine_stage != "none":
            refining = {name: self.defaults.get(name, value) for name, value in REFINING.items()}
            object.__setattr__(self, "defaults", {**self.defaults, **refining})
            object.__setattr__(self, "presets", {name: {"refine": 0, **each} for name, each in self.presets.items()})

    @property
    def published(self) -> dict[str, Any] | None:
        """Options of the publication, without refinement; None without a publication."""
        if not self.paper:
            return None
        published = {**self.defaults, "refine": 0, **self.presets.get("paper", {})}
        return {name: published[name] for name in self.defaults}

    def load(self) -> Callable[..., Any]:
        """Return the function."""
        if callable(self.function):
            return self.function
        module, _, name = self.function.partition(":")
        function: Callable[..., Any] = getattr(import_module(module), name)
        return function

    def function_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that its function receives, without those of the common refinement step."""
        receives = self.refine_stage in ("after_clamping", "inside")
        return {name: value for name, value in options.items() if receives or name not in REFINING}

    def accepts(self, name: str) -> bool:
        """Return True if it has this option; `preset` counts if there are presets."""
        return name in self.defaults or (name == "preset" and bool(self.presets))

    def complete(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in options that are missing or None, from `preset` or the defaults."""
        for name, value in options.items():
            if isinstance(value, float) and not isfinite(value):
                raise OptionError(f"Expected a finite {name}, got {value}.")
            if not self.accepts(name):
                having = [method.name for method in METHODS.values() if method.accepts(name)]
                belongs = f" {name!r} is an option of {', '.join(having)}." if having else ""
                raise OptionError(unknown_name(f"{self.name} option", name, self.defaults or ["(none)"]) + belongs)
        defaults, preset = dict(self.defaults), options.get("preset")
        if preset is None:
            preset = next((name for (key, value), name in self.implies.items() if options.get(key) == value), None)
        if preset is not None:
            check_known(f"{self.name} preset", preset, self.presets)
            defaults |= self.presets[preset]
        if options.get("end_layer") is not None:
            defaults["start_layer"] = 1
        if options.get("start_layer") == "middle" != self.defaults.get("start_layer"):
            raise OptionError(f"start_layer='middle' is an option of rollout: pass {self.name} the number of a layer.")
        values = {name: default if options.get(name) is None else options[name] for name, default in defaults.items()}
        return {name: OPTIONS[name].checked(value) if name in OPTIONS else value for name, value in values.items()}


#: Methods by name.
METHODS: dict[str, Method] = {}
#: Maps that do not depend on the model: a map that scores no better carries no information.
BASELINES = ("random", "centre")
#: Prefixes of methods that are classes of other packages, such as "captum:IntegratedGradients".
PEERS = ("captum:", "cam:")

_PAPER = "Abnar & Zuidema, ACL 2020"


def register_method(
    name: str | Method, function: Callable[..., Any] | str = "", *, replace: bool = False, **fields: Any
) -> Method:
    """Add a method to the table, so that every function and command can use it by name.

    Args:
        name: a `Method`; or its name, followed by `function` and its other fields, such as summary and needs.
        function: called as `function(trace, **options)`, to return maps [batch, rows, cols]; see `Method`.
        replace: allow an existing name to be replaced.

    Raises:
        OptionError: the name is taken, or `needs` contains an unknown name.

    >>> register_method("red", lambda trace: trace.pixels[:, 0], summary="The red channel.").title
    'red'
    >>> del METHODS["red"]  # for this example only
    """
    method = Method(name, function, **fields) if isinstance(name, str) else name
    if method.name in METHODS and not replace:
        raise OptionError(f"There is already a method {method.name!r}: choose another name, or pass replace=True.")
    METHODS[method.name] = method
    return method


def get_method(name: str) -> Method:
    """Return the method of that name or title, or of a class of another package; OptionError lists the known ones.

    >>> get_method("GradCAM").name, get_method("Attention rollout").name
    ('gradcam', 'rollout')
    """
    if name not in METHODS and name.startswith(PEERS):
        method: Method = import_module("vitflow.explaining.peers").external_method(name)
        return method
    same = (key for key, each in METHODS.items() if _letters(name) in (_letters(key), _letters(each.title)))
    name = name if name in METHODS else next(same, name)
    check_known("method", name, METHODS)
    return METHODS[name]


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def list_methods() -> list[Method]:
    """Return all methods for images, in the order of the documentation."""
    return list(METHODS.values())


# Value weighting and refinement by default, of all methods on attention and of class-specific ones.
_WEIGHTED = {"value_weighted": "output", "patch": None, "refine": 1}
_BY_CLASS = {**_WEIGHTED, "affinity": "both"}
_PRODUCT = {"discard_ratio": 0.9, "residual": 0.5}
_PLAIN = {"head_fusion": "mean", "value_weighted": False}
_MASKS = {"masks": 64, "random_seed": 0, "occlusion_batch": 32}

#: The function of rollout, which needs only the product of the layers.
ROLLOUT = "vitflow.explaining.maps:rollout"

register_method(
    "rollout",
    ROLLOUT,
    title="Attention rollout",
    summary="Attention rollout: the product of the attention matrices of the upper layers, with residual connections.",
    question="How much of each patch reaches the output, if attention mixes tokens in proportion?",
    defaults={"head_fusion": "max", **_PRODUCT, "start_layer": "middle", "end_layer": -1, **_WEIGHTED},
    needs={"attention"},
    paper=f"{_PAPER}, §3.1",
    presets={"paper": {"head_fusion": "mean", "discard_ratio": 0.0, "start_layer": 1, "value_weighted": False}},
)
register_method(
    "attention",
    "vitflow.explaining.maps:attention",
    title="Raw attention",
    summary="Raw attention of one layer, fused or of one head.",
    question="What do the readout tokens attend to in one layer?",
    defaults={"layer": -1, "head": None, **_PLAIN, "discard_ratio": 0.0, "patch": None},
    needs={"attention"},
    paper=f"{_PAPER}, the baseline",
    presets={"paper": {}},
)
register_method(
    "flow",
    "vitflow.explaining.maps:flow",
    title="Attention flow",
    summary="Attention flow: the maximum flow from the output to each patch, with attention as capacity.",
    question="How much of each patch can reach the output at most, if attention is capacity?",
    defaults={"layers": 4, "below": "rollout", "head_fusion": "mean", **_PRODUCT, **_WEIGHTED},
    needs={"attention"},
    paper=f"{_PAPER}, §3.2",
    presets={"paper": {"layers": "all", "below": "none", "discard_ratio": 0.0, "value_weighted": False}},
    implies={("layers", "all"): "paper"},
)
register_method(
    "gradient_rollout",
    "vitflow.explaining.maps:gradient_rollout",
    title="Gradient rollout",
    summary="Gradient rollout: rollout over attention times its gradient for the class.",
    question="Along which attention paths does each patch increase the score of this class?",
    defaults={"head_fusion": "max", "discard_ratio": 0.0, "residual": 0.5, "start_layer": 1, **_BY_CLASS},
    needs={"heads", "gradients"},
    class_specific=True,
    paper="after J. Gildenblat, Exploring Explainability for Vision Transformers, 2020",
    presets={"paper": _PLAIN},
)
register_method(
    "gae",
    "vitflow.explaining.maps:gae",
    title="GAE",
    summary="Generic attention explainability: attention times its gradient, accumulated over the layers.",
    question="Which attention increases the score of this class?",
    defaults={"head_fusion": "max", "start_layer": 1, **_BY_CLASS},
    needs={"heads", "gradients"},
    class_specific=True,
    paper="Chefer, Gur & Wolf, ICCV 2021, §3",
    presets={"paper": _PLAIN},
)
register_method(
    "legrad",
    "vitflow.explaining.features:legrad",
    title="LeGrad",
    summary="LeGrad: positive gradients of the output of each layer with respect to its attention, averaged.",
    question="Which attention increases the output that the tokens of each layer would give?",
    defaults={"start_layer": 1},
    needs={"heads", "gradients", "tokens", "predict"},
    class_specific=True,
    paper="Bousselham et al., ICCV 2025",
)
register_method(
    "gradcam",
    "vitflow.explaining.features:gradcam",
    title="Grad-CAM",
    summary="Grad-CAM on the tokens of one block.",
    question="Which patch features increase the score of this class?",
    defaults={"layer": -1},
    needs={"features", "gradients"},
    class_specific=True,
    paper="Selvaraju et al., ICCV 2017",
)
register_method(
    "frozen_gradient",
    "vitflow.explaining.features:frozen_gradient",
    title="Frozen gradient",
    summary="Frozen gradient: tokens times their gradient, with attention, deviations of norms and gates constant.",
    question="What does each patch add to the log-odds of this class?",
    defaults={"refine": 1, "affinity": "both"},
    needs={"repeat"},
    class_specific=True,
    paper="after Ali et al., ICML 2022, and Mehri et al., CVPR 2025",
)
register_method(
    "input_gradient",
    "vitflow.explaining.maps:input_gradient",
    title="Input gradient",
    summary="Absolute gradient of the class score with respect to the pixels, summed per patch.",
    question="Which pixels change the score of this class?",
    defaults={"patch_size": None},
    needs={"gradients"},
    class_specific=True,
    paper="Simonyan et al., ICLR 2014 workshop",
)
register_method(
    "occlusion",
    "vitflow.explaining.maps:occlusion",
    title="Occlusion",
    summary="Occlusion: the drop in the log-odds of the class when a patch is hidden.",
    question="Which patches does the score of this class depend on most?",
    defaults={"patch_size": None, "occlusion_batch": 32, "score": "log-odds"},
    needs={"predict"},
    class_specific=True,
    paper="Zeiler & Fergus, ECCV 2014, §3",
    presets={"paper": {"score": "probability"}},
)
register_method(
    "sampling",
    "vitflow.explaining.sampling:sampling",
    title="Sampling",
    summary="Sampling: the log-odds of the class with a patch minus without it, over random choices of the others.",
    question="Which patches increase the score of this class, whatever other patches are visible?",
    defaults={**_MASKS, "refine": 1, "affinity": "both"},
    needs={"predict"},
    class_specific=True,
    refine_stage="after_clamping",
    paper="after Petsiuk et al., RISE, BMVC 2018, and Englebert et al., TIS, ICCV-W 2023",
)
register_method(
    "consensus",
    "vitflow.explaining.sampling:consensus",
    title="Consensus",
    summary="Consensus: the geometric mean of GAE and sampling, each refined; sampling has twice the weight.",
    question="Which patches increase the score of this class by gradients and by sampling?",
    defaults={"head_fusion": "signed_mean", "value_weighted": "output", **_MASKS, "refine": 1, "affinity": "both"},
    needs={"heads", "gradients", "predict"},
    class_specific=True,
    refine_stage="inside",
)
register_method(
    "similarity",
    "vitflow.explaining.features:similarity",
    title="Similar patches",
    summary="Similarity: the cosine of the features of each patch and those of a patch, a box, or the class token.",
    question="Which patches have features similar to this patch or box?",
    defaults={"layer": -1, "patch": None, "box": None},
    needs={"tokens"},
    signed=False,
    refine_stage="none",
    paper="as in Caron et al., DINO, ICCV 2021, and Amir et al., ECCV-W 2022",
)
register_method(
    "random",
    "vitflow.explaining.maps:random",
    title="Random map",
    summary="Baseline: random numbers.",
    question="What does a map without information look like?",
    defaults={"random_seed": 0},
    refine_stage="none",
)
register_method(
    "centre",
    "vitflow.explaining.maps:centre",
    title="Centre prior",
    summary="Baseline: a Gaussian at the centre of the image.",
    question="What does a map that always highlights the centre look like?",
    refine_stage="none",
)
