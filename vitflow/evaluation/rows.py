"""What a row of an evaluation's journal must be to be believed; one that is not counts as never written."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vitflow.evaluation.measures.correlation import LAYER_METHODS, REFERENCES
from vitflow.evaluation.measures.grid import CELLS
from vitflow.evaluation.measures.randomisation import default_stages
from vitflow.evaluation.scoring import CURVES, Protocol
from vitflow.explaining.explainer import Explainer
from vitflow.runs.checks import Check, dict_of, has, is_number, is_text, list_of, or_none
from vitflow.runs.columns import checks_of

_VALUE = or_none(is_number)
_numbers_by_name = dict_of(_VALUE)


def accepts(protocol: Protocol, explainer: Explainer) -> Callable[[Mapping[str, Any]], bool]:
    """A check of rows, whether this protocol could have measured them on this model."""
    labels = set(protocol.labels)
    stages = default_stages(explainer.model) if "sanity" in protocol.groups else []
    texts = list_of(is_text)
    measured: dict[str, Check] = {
        **checks_of("measured"),
        "groups": lambda value: texts(value) and set(value) <= set(protocol.groups),
        "constant": lambda value: texts(value) and set(value) <= labels,
        "values": dict_of(_numbers_by_name, labels),
        "seconds": dict_of(_VALUE, labels),
    }
    curves = list_of(_VALUE, protocol.points)
    further: dict[str, Check] = {
        "overlap": dict_of(or_none(list_of(is_number, 4)), labels),
        "curves": lambda value: (
            isinstance(value, dict)
            and set(value) <= labels
            and all(isinstance(own, dict) and all(curves(own.get(name)) for name in CURVES) for own in value.values())
        ),
        "grid": or_none(list_of(is_text, CELLS)),
        "stages": lambda value: _are_stages(value, stages),
        "correlation": _is_correlation,
    }

    def accept(row: Mapping[str, Any]) -> bool:
        if not isinstance(row.get("stamp"), list) or row.get("status") not in ("failed", "measured"):
            return False
        if row["status"] == "failed":
            return has(row, checks_of("failed"))
        return has(row, measured) and all(check(row[name]) for name, check in further.items() if name in row)

    return accept


def _are_stages(value: Any, names: Sequence[str]) -> bool:
    pairs = isinstance(value, list) and all(isinstance(one, list) and len(one) == 2 for one in value)
    return pairs and [name for name, _ in value] == names and all(_numbers_by_name(own) for _, own in value)


def _is_correlation(value: Any) -> bool:
    """Whether a value is [references][methods][layers], of the layers 1 to the last."""
    references = [name if isinstance(name, str) else name[0] for name in REFERENCES]
    if not isinstance(value, dict) or value.get("methods") != list(LAYER_METHODS):
        return False
    layers = value.get("layers")
    if value.get("references") != references or not isinstance(layers, list) or layers != [*range(1, len(layers) + 1)]:
        return False
    rows = list_of(list_of(_VALUE, len(layers)), len(LAYER_METHODS))
    return list_of(rows, len(references))(value.get("values"))
