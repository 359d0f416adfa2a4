"""Table of the methods for texts and their options.

The defaults of `value_weighted` and `causal` depend on the kind of model: see `for_kind`. This module does not import
torch.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitflow.errors import check_known
from vitflow.registry.method_table import Method, get_method
from vitflow.registry.method_table import list_methods as image_methods

# In decoders, unweighted attention relative to the receptive field ranks the retrieved token first more often (97 %,
# with value weighting 62 %); in BERT, plain rollout puts two thirds of the weight on special tokens.
_OF_DECODERS = {"value_weighted": False, "causal": "receptive_field"}
_OF_ENCODERS = {"value_weighted": "output", "causal": "raw"}
#: Default method, without and with images; the maps of gae match the named objects best.
PLAIN, IMAGE_DEFAULT = "rollout", "gae"


def _as_for_images(name: str, defaults: Mapping[str, Any], **paper: Any) -> Method:
    """Return a method for texts that is described as the one for images; `paper` is its preset."""
    function = f"vitflow.text.methods:{name}"
    method = get_method(name)
    question, presets = method.question.replace("patch", "token"), {"paper": paper}
    return replace(
        method, function=function, question=question, defaults=defaults, presets=presets, refine_stage="none"
    )


# None: the default depends on the kind of model, see `for_kind`.
_FUSED = {"head_fusion": "mean", "discard_ratio": 0.0, "residual": 0.5}
_OF_KIND = {"value_weighted": None, "causal": None}
_ROWS = (
    _as_for_images(
        "rollout",
        {**_FUSED, "start_layer": 1, **_OF_KIND},
        head_fusion="mean",
        discard_ratio=0.0,
        value_weighted=False,
        causal="raw",
    ),
    _as_for_images("attention", {"head_fusion": "mean", "layer": -1, "discard_ratio": 0.0, "value_weighted": False}),
    _as_for_images(
        "flow",
        {"layers": 4, "below": "rollout", **_FUSED, **_OF_KIND},
        layers="all",
        below="none",
        discard_ratio=0.0,
        value_weighted=False,
        causal="raw",
    ),
    _as_for_images(
        "gae",
        {"head_fusion": "mean", "start_layer": 1, "value_weighted": None},
        head_fusion="mean",
        value_weighted=False,
    ),
    Method(
        "logit_lens",
        "vitflow.text.methods:logit_lens",
        title="Logit lens",
        summary="Logit lens: tokens whose hidden states have a high logit for the word.",
        question="Which tokens' hidden states decode to this word?",
        defaults={"layer": -1},
        needs=frozenset({"features"}),
        class_specific=True,
        refine_stage="none",
        paper="nostalgebraist, 2020; on images Li et al., ICCV 2025",
    ),
)

#: The methods for texts by name.
TEXT_METHODS: Mapping[str, Method] = {method.name: method for method in _ROWS}


def list_methods(*, text: bool = False) -> list[Method]:
    """Return the methods for images, or for texts if `text`, in the order of the documentation.

    >>> [method.name for method in list_methods(text=True)]
    ['rollout', 'attention', 'flow', 'gae', 'logit_lens']
    """
    return list(_ROWS) if text else image_methods()


def text_method(name: str, options: Mapping[str, Any]) -> tuple[Method, dict[str, Any]]:
    """Return a method for texts by name, and all its options with defaults."""
    check_known("method for texts", name, TEXT_METHODS)
    return TEXT_METHODS[name], TEXT_METHODS[name].complete(options)


def for_kind(options: Mapping[str, Any], *, decoder: bool) -> dict[str, Any]:
    """Replace options that are None by the default for decoders or encoders.

    >>> for_kind({"causal": None, "residual": 0.5}, decoder=True)
    {'causal': 'receptive_field', 'residual': 0.5}
    """
    defaults = _OF_DECODERS if decoder else _OF_ENCODERS
    return {name: defaults.get(name) if value is None else value for name, value in options.items()}
