"""The methods for texts: what each can be asked.

Two options have a default for each kind of model: see `for_kind`. This module imports no torch.
"""

from collections.abc import Mapping
from typing import Any

from vitflow.errors import OptionError, unknown_name
from vitflow.explaining.asking.method_table import Method

_PAPER = {"value_weighted": False}
_RAW = {**_PAPER, "causal": "raw"}
# What is best depends on what a token sees: in a decoder plain attention relative to the receptive field finds a
# looked-up word (97 % against 62 % value-weighted); in a BERT plain rollout is on special tokens for two thirds.
_OF_DECODERS = {"value_weighted": False, "causal": "receptive_field"}
_OF_ENCODERS = {"value_weighted": "output", "causal": "raw"}
TEXT_METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(
            "rollout",
            "Attention rollout: attention as proportions, multiplied through the layers.",
            "vitflow.methods.sequence.layer_rows:rollout_rows",
            defaults={
                "head_fusion": "mean",
                "discard_ratio": 0.0,
                "residual": 0.5,
                "start_layer": 1,
                "value_weighted": None,
                "causal": None,
            },
            needs=frozenset({"attention"}),
            paper="Abnar & Zuidema, ACL 2020, §3.1",
            presets={"paper": _RAW},
        ),
        Method(
            "attention",
            "Raw attention of one layer.",
            "vitflow.methods.sequence.layer_rows:attention_rows",
            defaults={"head_fusion": "mean", "layer": -1, "discard_ratio": 0.0, "value_weighted": None},
            needs=frozenset({"attention"}),
            paper="Abnar & Zuidema, ACL 2020, the baseline",
            presets={"paper": _PAPER},
        ),
        Method(
            "flow",
            "Attention flow: attention as capacities, and the maximum flow to each token.",
            "vitflow.methods.sequence.layer_rows:flow_rows",
            defaults={
                "layers": 4,
                "below": "rollout",
                "head_fusion": "mean",
                "discard_ratio": 0.0,
                "residual": 0.5,
                "value_weighted": None,
                "solver": "exact",
                "causal": None,
            },
            needs=frozenset({"attention"}),
            paper="Abnar & Zuidema, ACL 2020, §3.2",
            presets={"paper": {**_RAW, "layers": "all", "below": "none"}},
            implies={("layers", "all"): "paper"},
        ),
        Method(
            "gae",
            "Generic attention explainability: attention times its gradient, added up through the layers.",
            "vitflow.methods.sequence.layer_rows:relevance_rows",
            defaults={"head_fusion": "mean", "start_layer": 1, "value_weighted": None},
            needs=frozenset({"heads", "gradients"}),
            class_specific=True,
            paper="Chefer, Gur & Wolf, ICCV 2021, §3",
            presets={"paper": _PAPER},
        ),
    )
}


def text_method(name: str, options: Mapping[str, Any]) -> tuple[Method, dict[str, Any]]:
    """A method for texts, with every option that it has.

    Raises:
        OptionError: there is no such method, or it has no such option.
    """
    if name not in TEXT_METHODS:
        raise OptionError(unknown_name("method for texts", name, TEXT_METHODS))
    return TEXT_METHODS[name], TEXT_METHODS[name].complete(options)


def for_kind(options: Mapping[str, Any], *, decoder: bool) -> dict[str, Any]:
    """Options with the defaults of decoders, or of encoders, where these differ.

    >>> for_kind({"causal": None, "residual": 0.5}, decoder=True)
    {'causal': 'receptive_field', 'residual': 0.5}
    """
    defaults = _OF_DECODERS if decoder else _OF_ENCODERS
    return {name: defaults.get(name) if value is None else value for name, value in options.items()}
