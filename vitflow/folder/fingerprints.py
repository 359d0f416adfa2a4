"""Fingerprints of runs: a run is resumed only with options that give the same results."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from vitflow.errors import OptionError
from vitflow.registry.choices import Chosen

#: What to do about a folder that contains another run.
REMEDY = "Choose another folder, or replace that run with --overwrite (overwrite=True)."
_KINDS = {"evaluation": "an evaluation", "folder": "a folder run"}
# Messages for differences whose values (hashes) mean nothing to a reader.
_MESSAGES = {
    "weights_sha256": "the model has other weights",
    "state_sha256": "the model has other code, attributes or hooks",
    "class_names_sha256": "the classes have other names",
    "outputs.state_sha256": "the function of the outputs was changed",
    "outputs.weights_sha256": "the function of the outputs has other weights",
    "outputs.reference.state_sha256": "the function subtracted from the outputs was changed",
    "outputs.reference.weights_sha256": "the function subtracted from the outputs has other weights",
    "outputs.vectors_sha256": "the prompts or reference images have other embeddings",
}


def run_fingerprint(
    kind: str,
    source: Mapping[str, Any],
    model: Mapping[str, Any],
    methods: Chosen,
    how: Mapping[str, Any],
) -> dict[str, Any]:
    """Return everything that a run's results depend on, as JSON values; runs with equal fingerprints share a folder.

    Args:
        kind: "folder" or "evaluation".
        source: identifies the images.
        model: the explainer's fingerprint.
        methods: the methods of the run, with distinct labels.
        how: further options that the rows depend on.
    """
    record = {
        "kind": kind,
        **source,
        **model,
        "methods": {choice.label: choice.name for choice in methods},
        "options": {choice.label: choice.options for choice in methods},
        **how,
    }
    plain: dict[str, Any] = json.loads(json.dumps(record, default=str))
    return plain


def check_same_run(before: Mapping[str, Any], folder: object, fingerprint: Mapping[str, Any]) -> None:
    """Refuse a folder that contains a run with another fingerprint.

    Raises:
        OptionError: the fingerprints differ.
    """
    kinds = [_KINDS.get(str(record.get("kind")), "another run") for record in (before, fingerprint)]
    if kinds[0] != kinds[1]:
        raise OptionError(f"The folder {str(folder)!r} contains {kinds[0]}, not {kinds[1]}. {REMEDY}")
    different = fingerprint_difference(before, fingerprint)
    if different:
        raise OptionError(
            f"The folder {str(folder)!r} contains a run with other options: {'; '.join(different)}. {REMEDY}"
        )


def fingerprint_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Describe the differences between two runs' fingerprints.

    >>> fingerprint_difference({"fit": "crop", "options": {"rollout": {"residual": 0.5}}}, {"fit": "crop"})
    ['options.rollout.residual was 0.5 and is not set']
    >>> both = {"methods": {"rollout": "rollout", "gae": "gae"}, "options": {"rollout": {}, "gae": {"layer": 1}}}
    >>> fingerprint_difference(both, {"methods": {"rollout": "rollout"}, "options": {"rollout": {}}})
    ['methods was [rollout, gae] and is [rollout]']
    """
    had, has = (_labels(record) for record in (old, new))
    differences = [f"methods was [{', '.join(had)}] and is [{', '.join(has)}]"] if had != has else []
    differing = set(had) ^ set(has)
    before, after = (
        {path: value for path, value in _leaves(record) if not differing.intersection(path)} for record in (old, new)
    )
    for path in dict.fromkeys([*before, *after]):
        if before.get(path, ...) != after.get(path, ...):
            name = ".".join(path)
            differences.append(
                _MESSAGES.get(name, f"{name} was {_display(before, path)} and is {_display(after, path)}")
            )
    return differences


def _labels(record: Mapping[str, Any]) -> list[str]:
    methods = record.get("methods")
    return list(methods) if isinstance(methods, Mapping) else []


def _leaves(record: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in record.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _display(values: Mapping[tuple[str, ...], Any], path: tuple[str, ...]) -> str:
    return repr(values[path]) if path in values else "not set"
