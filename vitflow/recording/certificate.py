"""Certificate of a model: whether it keeps the contract under which its attention can be multiplied.

It is measured on noise, once per state of the model and input size, by two instruments: `value_dependence` follows what
is computed from the pixels, and `followed_tokens` what each token is computed from. As nothing is chosen by values, the
result holds for every image.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from torch import Tensor, nn

from vitflow.errors import OTHER_METHODS, UnsupportedModelError
from vitflow.methods.staged_rollout import LayerTokens
from vitflow.methods.tokens import TokenLayout
from vitflow.models.blocks import block_paths_of
from vitflow.models.parts import modules_of
from vitflow.recording.attention_kinds import arrangement
from vitflow.recording.coded_tokens import CodedRun
from vitflow.recording.experiment import Call
from vitflow.recording.followed_tokens import Fault, FollowedRun, PermutedRun, Undecided
from vitflow.recording.layer_tokens import decoder_stacks, find_tokens
from vitflow.recording.layers import AttentionLayer, ModuleAttention, stack_of
from vitflow.recording.parallel import layers_of_image
from vitflow.recording.token_codes import code_bits, random_halves, striped_codes
from vitflow.recording.without_attention import WithoutAttention

#: Clauses of the contract by number.
CLAUSES = {
    1: "no index, mask, branch or loop before the last block depends on the values of the image",
    2: "in each block a token is computed from itself, from recorded attention, and from neighbours by convolution or "
    "pooling",
    3: "each attention reads the tokens in order, or in windows that an index can follow",
    4: "the patches of the first grid are at their pixels",
    5: "the output reads outputs of blocks",
}


class Refusal(str):
    """Sentence with the reason why rollout does not apply to a model, and the clause that it breaks."""

    clause: int

    def __new__(cls, sentence: str, clause: int) -> Self:
        """Return the sentence, which names the clause."""
        named = f"clause {clause} of vitflow check"
        refusal = super().__new__(cls, sentence if named in sentence else f"{sentence} ({named.capitalize()}.)")
        refusal.clause = clause
        return refusal


@dataclass(frozen=True, slots=True, eq=False)
class Certificate:
    """Result of the runs on noise.

    Attributes:
        scheme: "permuted", "halves" or "codes", or empty if the model did not run on noise.
        faults: violations of the contract, first one first.
        lost: tokens that are constants at the input of a block, bool [tokens], by the index of its call.
        calls: paths of the blocks in the order of their calls.
        unchecked: paths of modules whose tokens were not read.
        error: why the model did not run on noise.
    """

    scheme: str
    faults: tuple[Fault, ...] = ()
    lost: Mapping[int, Tensor] = field(default_factory=dict)
    calls: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    error: str = ""

    def refusal(self, model: nn.Module) -> Refusal | None:
        """Return why a product of layers would be wrong, or None."""
        return None if not self.faults else _sentence(model, self.faults[0], "a product of layers would be wrong")

    def refusal_of_features(self, model: nn.Module, path: str) -> Refusal | None:
        """Return why the output of a module does not have its tokens at their places, or None."""
        fault = next((each for each in self.faults if each.moves), None)
        if fault is None or path in fault.below:
            return None
        return _sentence(model, fault, f"the tokens of {path} are not at their places")


def _sentence(model: nn.Module, fault: Fault, effect: str) -> Refusal:
    kind = type(model.get_submodule(fault.path)).__name__
    where = f"{kind} ({fault.path}) in {type(model).__name__}" if fault.path else kind
    words = f"{where} {fault.what}, so {effect} (clause {fault.clause} of vitflow check). {OTHER_METHODS}"
    return Refusal(words, fault.clause)


def certify(call: Call, layers: Sequence[AttentionLayer], names: Sequence[str], *, exact: bool = False) -> Certificate:
    """Return the certificate of a model, cached with its state.

    Args:
        layers: located layers.
        names: paths of all recorded attention modules in the order of their calls.
        exact: read the code of each token, instead of halves, where two images do not decide; the result replaces that
            of halves.
    """
    located = {layer.name: layer.located for layer in layers if layer.located is not None}
    names = [name for name in names if name in located]
    key = (certify, *names, call.size)
    known: Certificate | None = call.cache.get(key)
    if known is None or (exact and known.scheme != "codes"):
        known = call.cache[key] = _measure(call, located, names, exact)
    return known


def certify_features(call: Call, layout: TokenLayout | None) -> Certificate | None:
    """Return the certificate of a model whose attention was not recorded; None if it has none that can be located."""

    def surveyed() -> tuple[list[AttentionLayer], list[str]]:
        survey = _Survey(call.model)
        with suppress(Exception), call.experiment(survey.hooks()), survey:
            call(call.noise(1))
        modules, every = layers_of_image(call), list[AttentionLayer]()
        for layer in survey.layers:
            name = modules.layer(layer.name)[0]
            if name == layer.name or all(each.name != name for each in every):
                every.append(replace(layer, name=name))
        names = [layer.name for layer in every]
        above = decoder_stacks(every, 1) if names else set()
        layers = [layer for layer in every if stack_of(layer.name) not in above]
        with suppress(UnsupportedModelError):
            noise = call.noise(1)
            one = replace(call, args=(noise,), kwargs={}, pixels=noise)
            located, _ = find_tokens(one, layers, layout) if layers else ([], None)
            return located, names
        return [], []

    located, names = call.cached((certify_features, call.size, layout), surveyed)
    return certify(call, located, names) if located else None


class _Survey(WithoutAttention):
    """Collects the attention modules of a run, with the shapes of their attention."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.layers: list[AttentionLayer] = []

    def _identity(self, shape: Sequence[int], value: Tensor) -> Tensor:
        name, module = self.path[-1]
        example = value.new_zeros(()).expand(tuple(shape))
        arrange = arrangement(module, example, 1)
        self.layers.append(AttentionLayer(name, (ModuleAttention(example, arrange),)))
        return super()._identity(shape, value)


def blocks_of(call: Call, names: Sequence[str]) -> list[str]:
    """Return `block_paths_of` the model of a call, which is cached here."""
    return call.cached((block_paths_of, *names), lambda: block_paths_of(call.model, names))


def set_passed(call: Call, certificate: Certificate, layers: Sequence[AttentionLayer]) -> None:
    """Set the masks of the tokens that layers receive from the layer below, where some are constants."""
    blocks = blocks_of(call, [layer.name for layer in layers])
    for index, lost in certificate.lost.items():
        path = certificate.calls[index]
        names = [number for number, block in enumerate(blocks) if block == path]
        run = certificate.calls[:index].count(path)
        first = names[run * len(names) // certificate.calls.count(path)]
        layers[first].passed = ~lost.to(layers[first].example.device).expand(len(call.pixels), -1)


def _measure(call: Call, located: Mapping[str, LayerTokens], names: Sequence[str], exact: bool) -> Certificate:
    if call.pixels.is_meta or not located:
        return Certificate("", error="nothing to run")
    blocks = dict(zip(names, blocks_of(call, names), strict=True))
    rough = any("quantized" in type(module).__module__ for module in modules_of(call.model))
    layouts = {layout for each in located.values() for layout in (each.queries, each.keys)}
    plain = len(layouts) == 1 and all(each.dense for each in located.values())
    if not exact:
        run = PermutedRun(call, located, blocks, rough=rough)
        with suppress(Undecided):
            error = _error_of(run)
            return _certificate("permuted", run) if error is None else Certificate("", error=error)
    ordered = any(each.windows == 1 and _is_reordered(each.key_index) for each in located.values())
    exact = exact or plain or ordered
    runs = [] if exact else [("halves", random_halves, 6)]
    for scheme, codebook, bits in (*runs, ("codes", striped_codes, max(map(code_bits, layouts)))):
        make = partial(CodedRun, call, located, blocks, codebook=codebook, rough=rough)
        coded = make(bits=bits)
        if (error := _error_of(coded)) is None and scheme == "codes" and coded.needed > bits:
            bits = coded.needed
            coded = make(bits=bits)
            error = _error_of(coded)
        if error is not None:
            return Certificate("", error=error)
        for reading in range(1, coded.readings if coded.faults else 1):
            other = make(bits=bits, reading=reading)
            if _error_of(other) is None and not other.faults:
                coded = other
                break
        if not coded.faults:
            break
    return replace(_certificate(scheme, coded), lost=coded.lost)


def _is_reordered(index: Tensor | None) -> bool:
    """Return True if the keys [windows, keys] of a window are in another order than their tokens."""
    return index is not None and bool((index[index >= 0].diff() < 0).any())


def _error_of(run: FollowedRun) -> str | None:
    """Run a model; return what it raised."""
    try:
        run.run()
    except Undecided:
        raise
    except Exception as error:  # the model may reject noise
        return f"{type(error).__name__}: {error}"
    return None


def _certificate(scheme: str, run: FollowedRun) -> Certificate:
    return Certificate(scheme, tuple(run.faults), {}, tuple(run.calls), tuple(dict.fromkeys(run.unchecked)))
