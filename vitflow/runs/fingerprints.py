"""Whether an output folder's run may be gone on with: only by one that would have given the same results."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from vitflow.errors import OptionError
from vitflow.explaining.choices import Chosen
from vitflow.recording.probing import same_model

#: What to do about a folder that holds another run.
REMEDY = "Choose another folder, or replace that run with --overwrite (overwrite=True)."
_KINDS = {"evaluation": "an evaluation", "folder": "a folder run", "captions": "a run of captions"}
# What is told in words, for its values say nothing to a reader.
_IN_WORDS = {
    "weights_sha256": "the model has other weights",
    "class_names_sha256": "the classes have other names",
    "outputs.code_sha256": "the function of the outputs was edited",
    "outputs.weights_sha256": "the function of the outputs has other weights",
    "outputs.rest.code_sha256": "the function of what is subtracted from the outputs was edited",
    "outputs.rest.weights_sha256": "the function of what is subtracted from the outputs has other weights",
    "outputs.vectors_sha256": "what is asked has other embeddings",
}


def run_fingerprint(
    kind: str,
    source: Mapping[str, Any],
    model: Mapping[str, Any],
    methods: Chosen,
    how: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that the results of a run depend on, ready for JSON; two runs that agree in it may share a folder.

    Args:
        kind: "folder" or "evaluation".
        source: what the images are.
        model: the explainer's fingerprint.
        methods: of the run, by other labels each.
        how: what else the rows depend on.
    """
    record = {
        "kind": kind,
        **source,
        **model,
        "methods": {one.label: one.name for one in methods},
        "options": {one.label: one.options for one in methods},
        **how,
    }
    plain: dict[str, Any] = json.loads(json.dumps(record, default=str))
    return plain


def check_same_run(before: Mapping[str, Any], folder: object, fingerprint: Mapping[str, Any]) -> None:
    """Refuse a folder that holds a run with another fingerprint.

    Raises:
        OptionError: it does.
    """
    kinds = [_KINDS.get(str(own.get("kind")), "another run") for own in (before, fingerprint)]
    if kinds[0] != kinds[1]:
        raise OptionError(f"The folder {str(folder)!r} holds {kinds[0]}, not {kinds[1]}. {REMEDY}")
    different = fingerprint_difference(before, fingerprint)
    if different:
        raise OptionError(
            f"The folder {str(folder)!r} holds a run with other options: {'; '.join(different)}. {REMEDY}"
        )


def fingerprint_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two runs' fingerprints, in words; what the models answer may differ by rounding.

    >>> fingerprint_difference({"fit": "crop", "options": {"rollout": {"residual": 0.5}}}, {"fit": "crop"})
    ['options.rollout.residual was 0.5 and is not set']
    >>> both = {"methods": {"rollout": "rollout", "gae": "gae"}, "options": {"rollout": {}, "gae": {"layer": 1}}}
    >>> fingerprint_difference(both, {"methods": {"rollout": "rollout"}, "options": {"rollout": {}}})
    ['that run also had gae']
    """
    had, has = (_methods(record) for record in (old, new))
    told = [
        f"that run {words} {', '.join(labels)}"
        for words, labels in (
            ("also had", [label for label in had if label not in has]),
            ("did not have", [label for label in has if label not in had]),
        )
        if labels and had and has
    ]
    apart = set(had) ^ set(has) if had and has else set()
    before, after = (
        {path: value for path, value in _leaves(without_probe(one)) if _counts(path, apart)} for one in (old, new)
    )
    for path in dict.fromkeys([*before, *after]):
        if before.get(path, ...) != after.get(path, ...):
            name = ".".join(path)
            told.append(_IN_WORDS.get(name, f"{name} was {_shown(before, path)} and is {_shown(after, path)}"))
    if not told and not same_model(old.get("probe"), new.get("probe")):
        told.append("the model answers otherwise, although its weights are the same")
    if not told and list(had) != list(has):
        told.append(f"that run had its methods in the order {', '.join(had)}")
    return told


def without_probe(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint as users are told it: without the numbers that stand for what the model answers."""
    return {name: value for name, value in fingerprint.items() if name != "probe"}


def _methods(record: Mapping[str, Any]) -> Mapping[str, Any]:
    methods = record.get("methods")
    return methods if isinstance(methods, Mapping) else {}


def _counts(path: tuple[str, ...], apart: set[str]) -> bool:
    """Whether a value is not that of a method which only one of the two runs has, and which is told by its name."""
    return len(path) < 2 or path[0] not in ("methods", "options") or path[1] not in apart


def _leaves(record: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in record.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _shown(values: Mapping[tuple[str, ...], Any], path: tuple[str, ...]) -> str:
    return repr(values[path]) if path in values else "not set"
