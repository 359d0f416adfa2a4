"""The methods for texts: what each can be asked.

Two options have a default for each kind of model: see `for_kind`. This module imports no torch.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitflow.errors import check_known
from vitflow.explaining.method import Method
from vitflow.explaining.method_options import COMMON
from vitflow.explaining.method_table import BUILT_IN, OF_TEXTS

# What is best depends on what a token sees: in a decoder plain attention relative to the receptive field finds a
# looked-up word (97 % against 62 % value-weighted); in a BERT plain rollout is on special tokens for two thirds.
_OF_DECODERS = {"value_weighted": False, "causal": "receptive_field"}
_OF_ENCODERS = {"value_weighted": "output", "causal": "raw"}
# Where the defaults for texts are not those for pictures; None stands for those of the kind of model.
_OF_TEXTS = {"head_fusion": "mean", "discard_ratio": 0.0, "value_weighted": None}
_OF_PICTURES = {"patch", "head", "end_layer", *COMMON}

#: The method where none is asked for; of words about a picture the one whose maps lie on the thing that a word names.
PLAIN, PICTURED = "rollout", "gae"


def _for_texts(method: Method) -> Method:
    """A method of the table with its function, its options and their defaults for texts."""
    # What multiplies the layers with their residual connections can be relative to what uniform attention gives.
    causal = "residual" in method.defaults
    # What is off for pictures is off for texts, whatever reads them.
    defaults = {
        name: _OF_TEXTS.get(name, value) if value else value
        for name, value in method.defaults.items()
        if name not in _OF_PICTURES
    }
    paper = {name: value for name, value in method.presets.get("paper", {}).items() if name in defaults}
    return replace(
        method,
        function=method.rows,
        defaults=defaults | ({"causal": None} if causal else {}),
        presets={"paper": paper | ({"causal": "raw"} if causal else {})} if method.presets else {},
        refined="never",
    )


TEXT_METHODS: Mapping[str, Method] = {
    method.name: _for_texts(method) for method in (*BUILT_IN, *OF_TEXTS.values()) if method.rows
}


def text_method(name: str, options: Mapping[str, Any]) -> tuple[Method, dict[str, Any]]:
    """A method for texts, with every option that it has.

    Raises:
        OptionError: there is no such method, or it has no such option.
    """
    check_known("method for texts", name, TEXT_METHODS)
    return TEXT_METHODS[name], TEXT_METHODS[name].complete(options)


def for_kind(options: Mapping[str, Any], *, decoder: bool) -> dict[str, Any]:
    """Options with the defaults of decoders, or of encoders, where these differ.

    >>> for_kind({"causal": None, "residual": 0.5}, decoder=True)
    {'causal': 'receptive_field', 'residual': 0.5}
    """
    defaults = _OF_DECODERS if decoder else _OF_ENCODERS
    return {name: defaults.get(name) if value is None else value for name, value in options.items()}
