"""The arguments of a step: tensors, which are copied, and values that choose the graph.

| kind | arguments | in a later call |
| --- | --- | --- |
| copied | tensors | are copied into the graph's input buffers, and back if the step writes them |
| key | numbers, None, strings, the structure, other objects | another value needs another graph |

The step gets a device tensor for a CPU tensor, since a graph cannot read what the program later
writes to host memory. What must not be copied is read in place if the step closes over it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import is_dataclass
from itertools import count, product
from operator import mul
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from shardgrad.errors import StepInputError
from shardgrad.graphs.closed_over import NUMBERS
from shardgrad.graphs.outputs import plain_tensors, storage_ids, storage_of
from shardgrad.graphs.reads import Reads

_LEAVES = (torch.Tensor, *NUMBERS, type(None))  # the most frequent leaves


class Inputs(NamedTuple):
    """The flattened arguments of one call.

    Attributes:
        tensors: the tensors, in order.
        key: the input key. Together with the guards it chooses the graph.
        arguments: (args, kwargs), as given.
    """

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
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return Inputs(tensors, key, (args, kwargs))


def _flattened(value: Any, leaves: list[Any]) -> Hashable:
    """Returns the structure of a tree, and appends its leaves to `leaves`.

    Tuples, lists and dictionaries have their own code because this runs at every replay and
    `tree_flatten` takes three times as long.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return kind, *[_flattened(part, leaves) for part in value]
    if kind is dict:
        return kind, *value, *[_flattened(part, leaves) for part in value.values()]
    parts, structure = ([value], None) if isinstance(value, _LEAVES) else tree_flatten(value)
    leaves += parts
    return structure


def _key(index: int, value: Any) -> Hashable:
    """Returns the key of a leaf. `index` names it in errors."""
    if isinstance(value, torch.Tensor):
        kind, layout, trains = type(value), value.layout, value.requires_grad
        if kind is not torch.Tensor or layout is not torch.strided or trains or value.is_meta:
            raise StepInputError(
                f"input {index} of a graphed step cannot be copied",
                expected="a dense torch.Tensor with data, and without requires_grad: only its copy "
                "would get the gradient",
                got=f"{kind.__name__} of shape {tuple(value.shape)}, {layout}, on {value.device}, "
                f"requires_grad={trains}",
                fix="create it inside the step, close over it, or pass x.detach()",
            )
        return value.shape, value.stride(), value.dtype, value.device.type
    if is_dataclass(value) or not isinstance(value, Hashable):
        raise StepInputError(
            f"input {index} of a graphed step is neither a tree that torch knows nor hashable, so "
            "calls cannot be compared",
            expected="tensors, numbers, None, booleans, strings, and trees of them",
            got=(name := type(value).__name__),
            fix=f"torch.utils._pytree.register_dataclass({name}), or register_pytree_node",
        )
    # With the type: 1, 1.0 and True compare equal but are different programs, as are 0.0 and -0.0.
    return (
        f"input {index}",
        type(value).__name__,
        repr(value) if isinstance(value, float) else value,
    )


def _once(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a tensor that have memory of their own in `like`, which may be
    expanded: torch refuses to write the others.
    """
    for dim, steps in enumerate(like.stride()):
        if steps == 0:
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    return tensor


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the addresses of the first element and behind the last."""
    begin, steps = tensor.data_ptr(), tensor.stride()
    return begin, begin + (sum(map(mul, tensor.shape, steps)) - sum(steps) + 1) * tensor.itemsize


# -- buffers


class InputBuffers:
    """The inputs of a graph: one buffer for each tensor.

    Args:
        inputs: the inputs of the first call with this key.
        device: the device of the graph.

    Attributes:
        buffers: the buffers, in the order of `Inputs.tensors`.
        objects: the arguments that are neither tensors nor numbers.
    """

    def __init__(self, inputs: Inputs, device: torch.device) -> None:
        self._device = device
        with torch.inference_mode(False):  # later calls with this key may be outside of the mode
            # Not the arguments themselves, which would be kept as long as the graph.
            self._arguments = tree_map_only(torch.Tensor, self._buffer_for, inputs.arguments)
        leaves = tree_leaves(self._arguments)
        self.buffers = list(plain_tensors(leaves))
        self._loaded = list(map(_once, self.buffers, self.buffers))
        self.objects = [each for each in leaves if not isinstance(each, _LEAVES)]
        self._captured: list[torch.Tensor] = []  # what the latest capture has passed
        self._written: set[int] = set()  # the arguments that the step writes

    def _buffer_for(self, given: torch.Tensor) -> torch.Tensor:
        """Returns a buffer with the strides that the argument has in an eager step, which decide
        how sums round.
        """
        if given.device == self._device:
            return given.new_empty_strided(given.shape, given.stride())
        return torch.empty_like(given, device=self._device)

    def for_capture(self) -> Any:
        """Returns (args, kwargs) with the buffers, as new tensor objects each time, so that
        autograd state of one call does not reach the next.
        """
        with torch.inference_mode(False):  # inference tensors do not count writes
            # `data` counts writes from 0.
            passed = tree_map_only(torch.Tensor, lambda buffer: buffer.data, self._arguments)
        self._captured = list(plain_tensors(tree_leaves(passed)))
        return passed

    def load(self, inputs: Inputs) -> None:
        """Copies a call's tensors into the buffers.

        Streams: on the current one; the host does not wait. Contiguous pinned tensors are sent
            without staging, so the program must not write them until the copy has run.

        Raises:
            StepInputError: the step writes memory that two arguments share.
        """
        self._require_apart(inputs)
        if self.buffers:
            sources = list(map(_once, map(self._staged, inputs.tensors), self.buffers))
            torch._foreach_copy_(self._loaded, sources, non_blocking=True)

    def note_writes(self, reads: Reads, inputs: Inputs) -> None:
        """Notes in a capture which arguments the step writes, such as a hidden state.

        Raises:
            StepInputError: the step writes memory that two arguments share.
        """
        passed = enumerate(self._captured)
        self._written |= {i for i, each in passed if each._version or reads.writes(each)}
        self._require_apart(inputs)

    def _require_apart(self, inputs: Inputs) -> None:
        """Refuses arguments over the same memory if one is written: their buffers are apart."""
        for i, (j, other) in product(self._written, enumerate(inputs.tensors)):
            begins, ends = zip(_span(inputs.tensors[i]), _span(other), strict=True)
            if i != j and max(begins) < min(ends):
                raise StepInputError(
                    f"inputs {i} and {j} of a graphed step share memory, which it writes",
                    fix="pass x.clone() for one of them: a graph has a copy of each",
                )

    def write_back(self, inputs: Inputs, outputs: Any) -> None:
        """Copies what a replay has written into the step's arguments to the program's tensors on
        the device, except to outputs of an earlier replay, where this one's are now.

        Streams: on the current stream, after the replay.
        """
        if not self._written:
            return
        overwritten = storage_ids(tree_leaves(outputs))
        for index in self._written:
            given = inputs.tensors[index].detach()  # autograd does not continue across calls
            if given.device == self._device and storage_of(given) not in overwritten:
                given.copy_(self.buffers[index])

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor from which CUDA copies asynchronously."""
        if self._device.type == "cuda" and tensor.device.type == "cpu":
            return tensor.contiguous().pin_memory()
        return tensor
