"""Certificate of a model: whether it keeps the contract under which its attention can be multiplied.

It is measured on noise, once per state of the model and input size, by two instruments: `value_dependence` follows what
is computed from the pixels, and `followed_tokens` what each token is computed from. As nothing is chosen by values, the
result holds for every image.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
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
from vitflow.recording.coded_tokens import CodedRun
from vitflow.recording.experiment import Call
from vitflow.recording.followed_tokens import Fault, FollowedRun
from vitflow.recording.layer_tokens import decoder_stacks, find_tokens
from vitflow.recording.layers import AttentionLayer, stack_of
from vitflow.recording.parallel import layers_of_image
from vitflow.recording.permuted_tokens import PermutedRun, Undecided
from vitflow.recording.token_codes import code_bits

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
        scheme: "permuted" or "codes", or empty if the model did not run on noise.
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


def certify(call: Call, layers: Sequence[AttentionLayer], names: Sequence[str]) -> Certificate:
    """Return the certificate of a model, cached with its state.

    Args:
        layers: located layers.
        names: paths of all recorded attention modules in the order of their calls.
    """
    located = {layer.name: layer.located for layer in layers if layer.located is not None}
    names = [name for name in names if name in located]
    return call.cached((certify, *names, call.size), lambda: _measure(call, located, names))


def certify_features(call: Call, layout: TokenLayout | None) -> Certificate | None:
    """Return the certificate of a model whose attention was not recorded; None if it has none that can be located."""

    def surveyed() -> tuple[list[AttentionLayer], list[str]]:
        zero, every = call.pixels.new_zeros(()), list[AttentionLayer]()
        for name, shape in layers_of_image(call).shapes.items():
            every.append(AttentionLayer(name, fused={("mean", False): zero.expand(shape)}))
        above = decoder_stacks(every, 1)
        layers = [layer for layer in every if stack_of(layer.name) not in above]
        with suppress(UnsupportedModelError):
            noise = call.noise(1)
            one = replace(call, args=(noise,), kwargs={}, pixels=noise)
            located, _ = find_tokens(one, layers, layout) if layers else ([], None)
            return located, [layer.name for layer in every]
        return [], []

    located, names = call.cached((certify_features, call.size, layout), surveyed)
    return certify(call, located, names) if located else None


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


def _measure(call: Call, located: Mapping[str, LayerTokens], names: Sequence[str]) -> Certificate:
    if call.pixels.is_meta or not located:
        return Certificate("", error="nothing to run")
    blocks = dict(zip(names, blocks_of(call, names), strict=True))
    rough = any("quantized" in type(module).__module__ for module in modules_of(call.model))
    try:
        with suppress(Undecided):
            run = PermutedRun(call, located, blocks, rough=rough)
            run.run()
            return _certificate("permuted", run)
        coded = _coded(partial(CodedRun, call, located, blocks, rough=rough), located.values())
        return replace(_certificate("codes", coded), lost=coded.lost)
    except Exception as error:  # the model may reject noise
        return Certificate("", error=f"{type(error).__name__}: {error}")


def _coded(make: Callable[..., CodedRun], located: Iterable[LayerTokens]) -> CodedRun:
    """Return the first run of codes without a fault, or the first of all.

    Axes that are ambiguous may be read in several ways, and residuals around blocks require two groups of images.
    """
    bits = max(code_bits(layout) for each in located for layout in (each.queries, each.keys))
    first: CodedRun | None = None
    for groups in (1, 2):
        reading = 0
        while reading < (1 if first is None else first.readings):
            run = make(bits=bits, groups=groups, reading=reading)
            run.run()
            if run.needed > bits:
                bits = run.needed
                continue
            if not run.faults:
                return run
            first, reading = first or run, reading + 1
    assert first is not None
    return first


def _certificate(scheme: str, run: FollowedRun) -> Certificate:
    return Certificate(scheme, tuple(run.faults), {}, tuple(run.calls), tuple(dict.fromkeys(run.unchecked)))
