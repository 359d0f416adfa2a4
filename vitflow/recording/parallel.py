"""Attention modules side by side: heads that are modules are one layer, not several.

The recorded model runs once on one image per model and input size, and tensors are marked with the attentions that they
are computed from. Attentions that read the same tokens, and none the other's result, are one layer if the next
attention reads all of them.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import OTHER_METHODS
from vitflow.models.blocks import block_paths_of
from vitflow.models.calls import tensors_in
from vitflow.models.parts import ModelState, plain_token_ids
from vitflow.recording.attending import Attention
from vitflow.recording.attention_kinds import arrangement, is_head_by_head, is_pooling
from vitflow.recording.experiment import Call
from vitflow.recording.interception import Interception
from vitflow.recording.layers import LOWER_LAYERS, AttentionLayer, stream_of
from vitflow.recording.value_dependence import ValueDependence

# The number of tokens of the text on which a language model runs.
_LENGTH = 11


@dataclass(slots=True, eq=False)
class _Attended:
    """One computation of attention.

    Attributes:
        name, run: path of the module, and the number of the call of the module.
        shape: windows, queries and keys.
        inputs: tensors that the running modules got, by path, outermost first.
        number, sources: bits of this attention, and of those from which its operands are computed.
    """

    name: str
    run: int
    shape: tuple[int, int, int]
    inputs: Mapping[str, Sequence[Tensor]]
    number: int
    sources: int


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """The attention modules of a model by layer.

    Attributes:
        joined: path of the layer of each module that has others in parallel, and the number of modules of that layer.
        serial: modules that compute attention from their own attention.
        by_head: layers of which each image has several attentions, such as one for each head.
        shapes: of the attention of each layer on one image, [windows, queries, keys].
    """

    joined: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    serial: Collection[str] = ()
    by_head: Collection[str] = ()
    shapes: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)

    def layer(self, module: str) -> tuple[str, int]:
        """Return the path of the layer of a module, and the number of its modules."""
        return self.joined.get(module, (module, 1))

    def refusal(self, model: nn.Module, names: Sequence[str]) -> str | None:
        """Return why some of these layers cannot be joined from their heads, or None."""
        for block in block_paths_of(model, names):
            if block in self.by_head and isinstance(model.get_submodule(block), nn.ModuleList | nn.ModuleDict):
                return (
                    f"{type(model).__name__} computes each head of {block} in another module, but has no module around "
                    f"these that returns their result. {OTHER_METHODS}"
                )
        return None


def remember_lower_layers(call: Call | None, layers: Sequence[AttentionLayer], count: int) -> None:
    """Store the first `count` layers, which later passes of rollout alone do not record, if each is one module's."""
    if call is None or len({layer.name for layer in layers}) < len(layers) or layers_of_image(call).joined:
        return
    shapes = {layer.name: layer.example.shape for layer in layers[:count]}
    if all(shape[0] == len(call.pixels) for shape in shapes.values()):
        call.cached((LOWER_LAYERS, call.size), lambda: {name: shape[-2:] for name, shape in shapes.items()})


def layers_of_image(call: Call) -> Layers:
    """Return the layers of a model for images or texts of this size, from one run that is cached; none if it fails."""
    if call.pixels.is_meta:
        return Layers()
    return call.cached(_key(call), lambda: _observe(call, call.pixels[:1]))


def _key(call: Call) -> tuple[Any, ...]:
    return layers_of_image, *call.pixels.shape[1:]


def known_layers(call: Call) -> Layers | None:
    """Return `layers_of_image` if a run or a recorded pass has shown them."""
    known: Layers | None = call.known(_key(call))
    return known


def is_settled(call: Call, layers: Sequence[AttentionLayer], certified: bool) -> bool:
    """Return True if each module is a layer, or it was known which are one; otherwise a pass has to be repeated.

    In a certified pass each layer reads the result of the one below. This is stored.
    """
    if known_layers(call) is not None:
        return True
    if not certified:
        observed = layers_of_image(call)
        return not (observed.joined or observed.by_head)
    shapes = {layer.name: layer.example.shape for layer in layers}
    one = {name: (shape[0] // len(call.pixels), shape[-2], shape[-1]) for name, shape in shapes.items()}
    call.cached(_key(call), lambda: Layers(shapes=one))
    return True


def short_text(state: ModelState, device: torch.device) -> Call:
    """Return the call of a language model with a short text, for runs that observe it."""
    ids = state.cached(short_text, lambda: plain_token_ids(state.model, _LENGTH))
    text = torch.tensor([ids], device=device)
    return Call(state, (), {"input_ids": text}, text)


def _observe(call: Call, given: Tensor) -> Layers:
    run, modules = _Attentions(), {path: each for path, each in call.state.modules.items() if each._modules}
    with suppress(Exception):  # a model may not run on one image
        with call.experiment(run.hooks(modules)), run, run.values:
            given = given.clone()
            run.values.mark([given], 1)
            call(given)
        return _layers(run.attended, call.model)
    return Layers()


class _Attentions(Interception):
    """Interception that marks tensors with the attentions from which they are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.attended: list[_Attended] = []
        self.values = ValueDependence(lambda _: None)
        self._runs = 0
        self._inputs: list[tuple[int, list[Tensor]]] = []  # of the running modules: number of the call, tensors

    def enter(self, name: str, module: nn.Module, *given: Any) -> None:
        """Add a module that begins to run to the path, and keep its inputs."""
        super().enter(name, module)
        self._runs += 1
        self._inputs.append((self._runs, list(tensors_in(given))))

    def leave(self, name: str, output: Any) -> bool:
        """Remove the running module from the path."""
        left = super().leave(name, output)
        if left:
            self._inputs.pop()
        return left

    def on_attention(self, attention: Attention) -> None:
        """Keep where attention was computed."""
        if any(is_pooling(*each) for each in self.path[-2:]):
            return
        name = self.path[-1][0]
        arrange = arrangement(self.path, attention.probabilities, 1)
        heads = attention.probabilities if arrange is None else arrange(attention.probabilities)
        inputs = {path: given for (path, _), (_, given) in zip(self.path, self._inputs, strict=True)}
        number, sources = 2 << len(self.attended), self.values.bits
        shape = len(heads), *heads.shape[-2:]
        self.attended.append(_Attended(name, self._inputs[-1][0], shape, inputs, number, sources))
        self.values.bits |= number


def _layers(attended: Sequence[_Attended], model: nn.Module) -> Layers:
    """Return the layers of these attentions; parallel ones are joined if that is shown to be right."""
    groups: list[list[_Attended]] = []
    for each in attended:
        if groups and _is_parallel(groups[-1][0], each):
            groups[-1].append(each)
        else:
            groups.append([each])
    serial = {
        above.name
        for below, above in pairwise(attended)
        if below.run == above.run
        and above.sources & below.number
        and not is_head_by_head(model.get_submodule(above.name))
    }
    joined, by_head = dict[str, tuple[str, int]](), {group[0].name for group in groups if len(group) > 1}
    for group in groups:
        runs, number = {each.run for each in group}, sum(each.number for each in group)
        if len(runs) == 1:
            continue
        # Modules that some later attention reads without the others are streams of their own.
        apart = any(0 != each.sources & number != number for each in attended)
        path = _path_of(group, attended)
        entries = {each.name: (path, len(runs)) for each in group}
        if apart or any(joined.get(name, entry) != entry for name, entry in entries.items()):
            continue
        joined |= entries
        by_head.add(path)
    shapes = dict[str, tuple[int, int, int]]()
    for each in attended:
        shapes.setdefault(joined.get(each.name, (each.name, 1))[0], each.shape)
    return Layers(joined, serial, by_head, shapes)


def _path_of(group: Sequence[_Attended], attended: Sequence[_Attended]) -> str:
    """Return the path of the module or list that contains a group and no other attention, or of its first module."""
    names = {each.name for each in group}
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*(name.split(".") for name in names), strict=False))
    whole = ".".join(parts[0] for parts in shared)
    alone = all(each.name in names or not f"{each.name}.".startswith(f"{whole}.") for each in attended)
    return whole if whole and alone else group[0].name


def _is_parallel(first: _Attended, other: _Attended) -> bool:
    """Return True if two attentions have equal shape and global, and are computed from the same tokens."""
    if first.run == other.run:
        return not other.sources & first.number
    same = first.sources == other.sources and first.shape == other.shape and first.shape[0] == 1
    if not same or stream_of(first.name) != stream_of(other.name):
        return False
    paths = zip(first.inputs.items(), other.inputs.items(), strict=False)
    [(_, given), (_, also)] = next((pair for pair in paths if pair[0][0] != pair[1][0]), [("", ()), ("", ())])
    return bool(given) and list(map(_tokens, given)) == list(map(_tokens, also))


def _tokens(tensor: Tensor) -> Any:
    """Return what identifies the tokens of a tensor [batch, tokens, channels], of which it may have some channels."""
    if tensor.ndim < 2 or tensor.layout != torch.strided:
        return id(tensor)
    step = max(1, tensor.stride(-2))
    return tensor.untyped_storage().data_ptr(), tensor.shape[:-1], tensor.stride(), tensor.storage_offset() // step
