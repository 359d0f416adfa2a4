"""Check of a model: its certificate, clause by clause, and the methods that apply to it."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
from torch import nn

from vitflow.errors import NoGradientError, UnsupportedModelError, ValueNormsError, VitflowWarning
from vitflow.explaining.explainer import Explainer
from vitflow.methods.staged_rollout import LayerTokens
from vitflow.recording.certificate import CLAUSES, Certificate, Refusal
from vitflow.recording.isolation import evaluating
from vitflow.recording.trace import Trace
from vitflow.registry.choices import left_out
from vitflow.registry.method_table import BASELINES, get_method, list_methods

_WIDTH = 100
_ANSWERS = {True: "yes", False: "NO", None: "?"}
_LISTED = 3  # modules in a line
_SCHEMES = {"permuted": "in another order", "codes": "by codes"}
_UNMEASURED = "not measured, as rollout is refused"
_ABOVE = "As rollout, see above."


@dataclass(frozen=True, slots=True)
class CheckedClause:
    """A clause of the contract: True if the model keeps it, False if not, None if that was not measured.

    `module` is the path of the module that decides it, and `measured` describes what was measured.
    """

    number: int
    holds: bool | None
    module: str
    measured: str


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers `first` to `last` with the same tokens: rows × cols patches, other tokens, windows, and grid of the keys.

    Layers are counted from 1. A model whose layers all attend between all tokens has one stage and one window.
    """

    first: int
    last: int
    grid: tuple[int, int]
    other_tokens: int
    keys: tuple[int, int]
    windows: int

    def __str__(self) -> str:
        layers = f"layer {self.first}" if self.first == self.last else f"layers {self.first} – {self.last}"
        others = f" and {self.other_tokens} other {'token' if self.other_tokens == 1 else 'tokens'}"
        keys = f", keys on {self.keys[0]} × {self.keys[1]}" if self.keys != self.grid else ""
        windows = f", {self.windows} windows" if self.windows > 1 else ""
        return f"{layers}: {self.grid[0]} × {self.grid[1]} patches{others if self.other_tokens else ''}{keys}{windows}"


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """Result of `check`; as text, it is the output of `vitflow check`.

    Attributes:
        model, kind: name of the model, and class of its module.
        input_size: height and width of the model input.
        refusal: why rollout does not apply; empty if it does.
        clauses: the clauses of the contract.
        stages: layers with the same tokens.
        value_weighting: why values cannot be weighted; empty if they can.
        unchecked: paths of modules whose tokens were not read.
        methods: methods by name, with the reason why they do not apply, or an empty string.
    """

    model: str
    kind: str
    input_size: tuple[int, int]
    refusal: str
    clauses: tuple[CheckedClause, ...]
    stages: tuple[Stage, ...]
    value_weighting: str
    unchecked: tuple[str, ...]
    methods: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        texts = [{"text": CLAUSES[clause.number]} for clause in self.clauses]
        clauses = [asdict(clause) | text for clause, text in zip(self.clauses, texts, strict=True)]
        return {**asdict(self), "clauses": clauses, "methods": dict(self.methods)}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        height, width = self.input_size
        yield f"{self.model} ({self.kind}), {height} × {width} pixels"
        yield f"rollout: {'no' if self.refusal else 'yes'}"
        unmeasured = [clause for clause in self.clauses if clause.measured == _UNMEASURED]
        for clause in self.clauses:
            if clause not in unmeasured:
                yield from _indented(f"{clause.number} {_ANSWERS[clause.holds]:4} {CLAUSES[clause.number]}", 2, 9)
                at = f" [{clause.module}]" if clause.module else ""
                yield from _indented(f"{clause.measured}{at}", 9)
        if self.refusal:
            yield from _indented(self.refusal, 2)
        if unmeasured:
            yield f"  clauses {', '.join(str(clause.number) for clause in unmeasured)}: {_UNMEASURED}"
        if self.unchecked:
            yield from _indented(f"unchecked, tokens not read: {_some(self.unchecked)}", 2)
        for stage in self.stages:
            yield f"  {stage}"
        if self.stages:
            yield from _indented(f"value weighting: {self.value_weighting or 'yes'}", 2)
        applying = ", ".join(name for name, why in self.methods.items() if not why)
        yield from _indented(f"methods that apply: {applying}", 0)
        refused = {name: _ABOVE if why == self.refusal else why for name, why in self.methods.items() if why}
        for note in left_out(refused):
            yield from _indented(note, 0)


def check(
    model: "str | Path | nn.Module | Explainer",
    *,
    methods: Sequence[str] | None = None,
    device: str | torch.device | None = None,
    data_config: Any = None,
) -> ModelCheck:
    """Check whether a model keeps the contract of attention rollout, and which methods apply to it.

    The model runs on noise, and its tokens are followed from block to block, as before a model's first map. Docs, "How
    it works inside", has the five clauses.

    Args:
        model: a model id (see `load_model`), a module, or an `Explainer`.
        methods: names of the methods that are tried besides rollout; all by default.
        device, data_config: as for `Explainer`.

    Raises:
        OptionError: unknown method.
        VitflowError: the model cannot be loaded, or reads no images.

    >>> checked = check("demo")
    >>> [clause.holds for clause in checked.clauses], checked.clauses[4].measured, checked.methods["rollout"]
    ([True, True, True, True, True], 'class token', '')
    """
    known = [method.name for method in list_methods() if method.name not in BASELINES]
    names = known if methods is None else ["rollout", *(get_method(name).name for name in methods if name != "rollout")]
    explainer = Explainer.of(model, device=device, data_config=data_config)
    with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad(), evaluating(explainer.model):
        warnings.simplefilter("ignore", VitflowWarning)
        trace, refusal, unweighted = _recorded(explainer)
        tried = {name: _why_not(explainer, name) for name in names}
        reads, measured = ("", None) if trace is None else _reads(trace)
    certificate = None if trace is None else trace.certificate
    return ModelCheck(
        model=explainer.model_id,
        kind=type(explainer.model).__name__,
        input_size=explainer.inputs.spec.size,
        refusal=refusal or tried["rollout"],
        clauses=tuple(_clauses(trace, refusal, reads, measured)),
        stages=() if trace is None else tuple(_stages(trace)),
        value_weighting=unweighted,
        unchecked=() if certificate is None else certificate.unchecked,
        methods=tried,
    )


def _why_not(explainer: Explainer, method: str) -> str:
    """Return why a method does not apply to a noise image, or an empty string."""
    try:
        refusals = explainer.refusals([method], explainer.inputs.two_images()[0])
    except Exception as error:  # of the model, such as one that does not support gradients
        return f"{type(error).__name__}: {error}"
    return str(refusals.get(method, ""))


def _recorded(explainer: Explainer) -> tuple[Trace | None, str, str]:
    """Return a recorded pass or None, why rollout is refused, and why values cannot be weighted."""
    image, unweighted = explainer.inputs.two_images()[0], ""
    try:
        try:
            trace = explainer.record(image, head_fusion="mean", value_weighted=True)
        except ValueNormsError as error:
            unweighted = str(error.args[0])
            trace = explainer.record(image, head_fusion="mean")
    except UnsupportedModelError as error:
        return None, str(error), unweighted
    return trace, trace.refusal or "", unweighted


def _clauses(trace: Trace | None, refusal: str, reads: str, measured: bool | None) -> Iterator[CheckedClause]:
    """Yield the clauses, given the refusal of rollout and what the output reads."""
    certificate = None if trace is None else trace.certificate
    faults = () if certificate is None else certificate.faults
    refused = refusal.clause if isinstance(refusal, Refusal) else 0
    for number in CLAUSES:
        fault = next((each for each in faults if each.clause == number), None)
        if fault is not None:
            yield CheckedClause(number, False, fault.path, fault.what)
        elif number == refused:
            yield CheckedClause(number, False, "", "refused for the reason below")
        elif trace is None or certificate is None or (refusal and number > 3):
            yield CheckedClause(number, None, "", _UNMEASURED)
        elif number <= 3:
            yield _followed(number, certificate, trace)
        elif number == 4:
            yield _placed(trace)
        else:
            yield CheckedClause(number, measured, trace.blocks[-1], reads)


def _followed(number: int, certificate: Certificate, trace: Trace) -> CheckedClause:
    """Return one of the first three clauses, of a run without a fault of it."""
    if certificate.error:
        return CheckedClause(number, None, "", f"not checked: the model did not run on noise ({certificate.error})")
    calls = certificate.calls
    if number == 1:
        return CheckedClause(1, True, calls[-1], f"followed from the pixels through {len(calls)} blocks")
    if number == 2:
        lost = [f"{int(each.sum())} constant tokens at {calls[index]}" for index, each in certificate.lost.items()]
        cut = f"; cut: {_some(lost)}" if lost else ""
        words = f"tokens followed {_SCHEMES[certificate.scheme]} from block to block{cut}"
        return CheckedClause(2, True, f"{calls[0]} … {calls[-1]}", words)
    windowed = sum(layer.tokens.key_index is not None for layer in trace.layers)
    order = f"{len(trace.layers) - windowed} layers in order" + (f", {windowed} in windows" if windowed else "")
    return CheckedClause(3, True, f"{trace.layers[0].name} … {trace.layers[-1].name}", order)


def _placed(trace: Trace) -> CheckedClause:
    extent, first = None if trace.known_layout is None else trace.known_layout.extent, trace.blocks[0]
    if extent is None:
        return CheckedClause(4, None, first, "not measured: cells divide the image evenly")
    rows, cols = (f"{span.start:.4g} – {span.start + span.step:.4g}" for span in extent)
    return CheckedClause(4, True, first, f"first patch: rows {rows}, columns {cols} of the input")


def _reads(trace: Trace) -> tuple[str, bool | None]:
    """Return what the output of a pass reads, and whether that are outputs of blocks; None if it is unknown."""
    if trace.refusal is not None:
        return "", None
    try:
        words = trace.readout_words(None)[0]
    except NoGradientError as error:
        return str(error), None
    except UnsupportedModelError as error:
        return str(error), False
    return words, None if words.endswith("not verified") else True


def _stages(trace: Trace) -> Iterator[Stage]:
    """Yield the stages of the located layers of a pass."""

    def alike(numbered: tuple[int, LayerTokens]) -> tuple[Any, ...]:
        return numbered[1].queries, numbered[1].keys, numbered[1].windows

    located = ((number, layer.located) for number, layer in enumerate(trace.layers, start=1))
    known = [(number, tokens) for number, tokens in located if tokens is not None]
    for (queries, keys, windows), members in groupby(known, alike):
        numbers, grid = [number for number, _ in members], (queries.rows, queries.cols)
        others = queries.num_tokens - queries.num_patches
        yield Stage(numbers[0], numbers[-1], grid, others, (keys.rows, keys.cols), windows)


def _some(names: Sequence[str]) -> str:
    return ", ".join([*names[:_LISTED], *(["…"] if len(names) > _LISTED else [])])


def _indented(text: str, by: int, later: int = 4) -> list[str]:
    return wrap(text, _WIDTH, initial_indent=" " * by, subsequent_indent=" " * max(by, later), break_on_hyphens=False)
