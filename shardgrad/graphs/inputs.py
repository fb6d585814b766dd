"""The arguments of a step: copied tensors, static tensors, and values that choose the graph.

| kind | arguments | in a later call |
| --- | --- | --- |
| copied | tensors | are copied into the graph's input buffers, and back if the step writes them |
| static | parameters, buffers, `mark_static_address` | another address needs another graph |
| key | numbers, None, strings, the structure, other objects | another value needs another graph |

The step gets a device tensor for a CPU tensor, since a graph cannot read what the program later
writes to host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import is_dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_flatten, tree_leaves

from shardgrad.engine.streams import Stream, wait_for_stream
from shardgrad.errors import StepInputError
from shardgrad.graphs.outputs import plain_tensors, storage_of, used_on
from shardgrad.graphs.reads import Reads

__all__ = ["InputBuffers", "Inputs", "flatten_inputs", "for_eager_call"]

_LEAVES = (torch.Tensor, bool, int, float, str, type(None))  # the most frequent leaves


class Inputs(NamedTuple):
    """The flattened arguments of one call.

    Attributes:
        leaves: tensors, numbers and other objects, in order.
        tensors: those of them that are copied.
        key: the input key. Together with the guards it chooses the graph.
        arguments: (args, kwargs), as given.
    """

    leaves: list[Any]
    tensors: list[torch.Tensor]
    key: tuple[Any, ...]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]


def flatten_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Flattens the arguments of a call.

    Raises:
        StepInputError: a tensor cannot be copied, or an object cannot be compared.
    """
    leaves: list[Any] = []
    structure = _flattened((args, kwargs), leaves)
    key = structure, *map(_key, count(), leaves)
    return Inputs(leaves, list(filter(_is_copied, leaves)), key, (args, kwargs))


def _flattened(value: Any, leaves: list[Any]) -> Hashable:
    """Returns the structure of a tree, and appends its leaves to `leaves`."""
    node = _opened(value)
    if node is None:
        leaves.append(value)
        return None
    kind, parts, _ = node
    return kind, *[_flattened(part, leaves) for part in parts]


def _key(index: int, value: Any) -> Hashable:
    """Returns the key of a leaf. `index` names it in errors."""
    if _is_copied(value):
        _require_plain(value, index)
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    if not isinstance(value, Hashable):
        raise StepInputError(
            f"input {index} of a graphed step is not hashable, so calls cannot be compared",
            expected="tensors, numbers, None, booleans, strings, and trees or dataclasses of them",
            got=type(value).__name__,
            fix="register its class with torch.utils._pytree.register_pytree_node",
        )
    # With the type: 1, 1.0 and True compare equal but are different programs.
    return f"input {index}", type(value).__name__, value


def _is_copied(value: Any) -> bool:
    """Returns whether a leaf is a tensor that is not static."""
    # As in torch.compile; see torch._dynamo.mark_static_address. The first test is a shortcut for
    # most tensors: isinstance of these two classes calls a Python function and takes six times as
    # long.
    if type(value) is torch.Tensor and not value.__dict__:
        return True
    return isinstance(value, torch.Tensor) and not (
        isinstance(value, nn.Parameter | nn.Buffer) or hasattr(value, "_dynamo_static_input_type")
    )


def _require_plain(tensor: torch.Tensor, index: int) -> None:
    kind, layout, trains = type(tensor), tensor.layout, tensor.requires_grad
    if kind is not torch.Tensor or layout is not torch.strided or trains or tensor.is_meta:
        raise StepInputError(
            f"input {index} of a graphed step cannot be copied",
            expected="a dense torch.Tensor with data, and without requires_grad: only its copy "
            "would get the gradient",
            got=f"{kind.__name__} of shape {tuple(tensor.shape)}, {layout}, on {tensor.device}, "
            f"requires_grad={trains}",
            fix="create it inside the step, or pass x.detach()",
        )


# -- trees


def _opened(value: Any) -> tuple[Hashable, Iterable[Any], Callable[[list[Any]], Any]] | None:
    """Returns a tree's kind, its children, and a function that rebuilds it from other children;
    None for a leaf.

    Dataclasses without slots and block masks are trees, too, besides torch's pytrees. Tuples, lists
    and dictionaries have their own code because this runs at every replay and `tree_flatten` takes
    three times as long.
    """
    kind: Any = type(value)
    if kind is tuple or kind is list:
        return kind, value, kind
    if kind is dict:
        return (kind, *value), value.values(), lambda parts: dict(zip(value, parts, strict=True))
    if isinstance(value, _LEAVES):
        return None
    parts, spec = tree_flatten(value, is_leaf=lambda part: part is not value)
    if not spec.is_leaf():
        return spec, parts, spec.unflatten
    if not (isinstance(value, BlockMask) or is_dataclass(kind)) or not hasattr(value, "__dict__"):
        return None

    def instance(parts: list[Any]) -> Any:
        made = object.__new__(kind)  # without `__init__`: a copy is not validated again
        vars(made).update(zip(vars(value), parts, strict=True))
        return made

    return (kind, *vars(value)), vars(value).values(), instance


def for_eager_call(inputs: Inputs, device: torch.device) -> Any:
    """Returns (args, kwargs) with the program's own tensors where they are on the device, so that
    writes reach it, also through other tensors that share the memory, and with copies of the
    others.

    Streams: on the current stream.
    """

    def passed(given: torch.Tensor) -> torch.Tensor:
        is_there = given.device.type == device.type
        return given.detach() if is_there else given.to(device, non_blocking=True)

    return _filled(inputs.arguments, map(passed, inputs.tensors))


def _filled(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Returns the tree with its copied tensors replaced by the next ones of `tensors`."""
    node = _opened(value)
    if node is not None:
        _, parts, made_of = node
        return made_of([_filled(part, tensors) for part in parts])
    return next(tensors) if _is_copied(value) else value


# -- buffers


class InputBuffers:
    """The static inputs of a graph: one buffer for each copied tensor.

    Args:
        inputs: the inputs of the first call with this key.
        device: the device of the graph.

    Attributes:
        buffers: the buffers, in the order of `Inputs.tensors`.
        objects: the arguments that are neither tensors nor numbers.
    """

    def __init__(self, inputs: Inputs, device: torch.device) -> None:
        self._device = device
        are_sent = not all(map(self._is_on_device, inputs.tensors))
        self._transfers: Stream = torch.Stream(device) if are_sent else None
        with torch.inference_mode(False):  # later calls with this key may be outside of the mode
            self.buffers = [torch.empty_like(each, device=device) for each in inputs.tensors]
        self._arguments = inputs.arguments
        self.objects = [each for each in inputs.leaves if not isinstance(each, _LEAVES)]
        self._captured: list[torch.Tensor] = []  # what the latest capture has passed
        self._written: set[int] = set()  # the arguments that the step writes

    def for_capture(self) -> Any:
        """Returns (args, kwargs) with the buffers, as new tensor objects each time, so that
        autograd state of one call does not reach the next.
        """
        with torch.inference_mode(False):  # inference tensors do not count writes
            self._captured = [each.data for each in self.buffers]  # counts writes from 0
        return _filled(self._arguments, iter(self._captured))

    def load(self, inputs: Inputs, stream: Stream) -> None:
        """Copies a call's tensors into the buffers.

        Streams: on `stream`, the current one. Host tensors are sent on another stream while the
            previous step is running, and the host does not wait. Contiguous pinned tensors are sent
            without staging, so the program must not write them until the copy has run.
        """
        if not self.buffers:
            return
        sources = inputs.tensors
        if stream is not None and self._transfers is not None:
            with self._transfers:
                sources = [self._sent(tensor) for tensor in sources]
            wait_for_stream(stream, self._transfers)
            used_on(sources, stream)
        torch._foreach_copy_(self.buffers, sources)

    def note_writes(self, reads: Reads) -> None:
        """Notes after a capture which arguments the step writes, such as a hidden state."""
        for index, passed in enumerate(self._captured):
            if passed._version or reads.writes(passed):
                self._written.add(index)

    def write_back(self, inputs: Inputs, outputs: Any) -> None:
        """Copies what a replay has written into the step's arguments to the program's tensors on
        the device, except to outputs of an earlier replay, where this one's are now.

        Streams: on the current stream, after the replay.
        """
        if not self._written:
            return
        overwritten = set(map(storage_of, plain_tensors(tree_leaves(outputs))))
        for index in self._written:
            given = inputs.tensors[index].detach()  # autograd does not continue across calls
            if self._is_on_device(given) and storage_of(given) not in overwritten:
                given.copy_(self.buffers[index])

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._device.type

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._is_on_device(tensor):
            return tensor
        if self._device.type == "cuda" and not (tensor.is_pinned() and tensor.is_contiguous()):
            tensor = _pinned(tensor)
        return tensor.to(self._device, non_blocking=True)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in pinned memory, from which CUDA copies asynchronously."""
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
