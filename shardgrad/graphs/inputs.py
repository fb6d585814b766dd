"""The arguments of a step: copied tensors, static tensors, and values that choose the graph.

| kind | what | at the next call |
| --- | --- | --- |
| copied | tensors | is copied into the graph's input |
| static | parameters, buffers, `mark_static_address` | another address is another graph |
| key | numbers, None, strings, the structure, any other object | another value is another graph |

A host tensor reaches the step as a tensor of the device, since a graph cannot read what a program
writes to host memory later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_map, tree_unflatten

from shardgrad.engine.streams import Stream, wait_for_stream
from shardgrad.errors import StepInputError
from shardgrad.graphs.pool import GraphPool

__all__ = ["InputBuffers", "Inputs", "flatten_inputs"]


@dataclass(frozen=True)
class Inputs:
    """The flattened arguments of one call.

    Attributes:
        tensors: tensors to copy, in order.
        key: chooses the graph, together with the guards.
        rebuild: given tensors in place of `tensors`, returns (args, kwargs).
    """

    tensors: list[torch.Tensor]
    key: Hashable
    rebuild: Callable[[Sequence[torch.Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]


def flatten_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, micro_batches: int | None = None
) -> Inputs:
    """Flattens the arguments of a call.

    Args:
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        micro_batches: the length that each list, tuple and tensor among the arguments must have;
            None for any.

    Raises:
        StepInputError: a tensor cannot be copied, an object cannot be compared, or the number of
            micro-batches is another.
    """
    if micro_batches is not None:
        _require_micro_batches([*enumerate(args), *kwargs.items()], micro_batches)
    leaves, spec = tree_flatten((args, kwargs))
    if any(map(_is_tree, leaves)):
        leaves, spec = tree_flatten(tree_map(_opened, (args, kwargs)))
    tensors: list[torch.Tensor] = []
    indices: list[int] = []
    key: list[Hashable] = [spec]
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if _is_static(leaf):
                key.append((leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype))
                continue
            _require_plain(leaf, index)
            tensors.append(leaf)
            indices.append(index)
            key.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device.type))
        else:
            # The type too, since 1, 1.0 and True are equal, and another program each.
            key.append((f"input {index}", type(leaf).__name__, _comparable(leaf, index)))

    def rebuild(replacements: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        filled = list(leaves)
        for index, tensor in zip(indices, replacements, strict=True):
            filled[index] = tensor
        args, kwargs = tree_unflatten(filled, spec)
        return args, kwargs

    return Inputs(tensors, tuple(key), rebuild)


def _require_micro_batches(arguments: list[tuple[Any, Any]], expected: int) -> None:
    for name, value in arguments:
        if not isinstance(value, list | tuple | torch.Tensor):
            continue
        got = len(value)
        if got != expected:
            raise StepInputError(
                f"argument {name} of a graphed step has another number of micro-batches",
                expected=f"accumulate={expected}",
                got=f"{got} of them",
                fix="a last batch that is smaller can be left out, or padded",
            )


def _is_static(tensor: torch.Tensor) -> bool:
    # As torch.compile does; see torch._dynamo.mark_static_address.
    return isinstance(tensor, nn.Parameter | nn.Buffer) or hasattr(
        tensor, "_dynamo_static_input_type"
    )


def _require_plain(tensor: torch.Tensor, index: int) -> None:
    why = ""
    if type(tensor) is not torch.Tensor:
        why = f"it is a {type(tensor).__name__}"
    elif tensor.layout is not torch.strided:
        why = f"its layout is {tensor.layout}"
    elif tensor.requires_grad:
        why = "it requires a gradient, which would go to a copy of it"
    elif tensor.device.type == "meta":
        why = "it has no data (device meta)"
    if why:
        raise StepInputError(
            f"input {index} of a graphed step cannot be copied: {why}",
            expected="plain dense tensors that require no gradient",
            got=f"{type(tensor).__name__} of shape {tuple(tensor.shape)}, {tensor.layout}",
            fix="make it inside the step, or pass x.detach()",
        )


def _comparable(leaf: Any, index: int) -> Hashable:
    if not isinstance(leaf, Hashable):
        raise StepInputError(
            f"input {index} of a graphed step cannot be compared with the next call's",
            expected="tensors, numbers, None, booleans, strings, and trees or dataclasses of them",
            got=type(leaf).__name__,
            fix="torch.utils._pytree.register_pytree_node makes a class a tree",
        )
    return leaf


# -- trees that torch does not know


class _Opened:
    """A dataclass or a block mask, whose attributes may be trees too."""

    def __init__(self, kind: type, parts: dict[str, Any]) -> None:
        self.kind, self.parts = kind, parts


register_pytree_node(
    _Opened,
    lambda opened: (list(opened.parts.values()), (opened.kind, tuple(opened.parts))),
    lambda values, context: _instance_of(context[0], zip(context[1], values, strict=True)),
)


def _is_tree(leaf: Any) -> bool:
    return isinstance(leaf, BlockMask) or (
        dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
    )


def _opened(leaf: Any) -> Any:
    if not _is_tree(leaf):
        return leaf
    is_mask = isinstance(leaf, BlockMask)
    names = vars(leaf) if is_mask else [field.name for field in dataclasses.fields(leaf)]
    return _Opened(type(leaf), {name: tree_map(_opened, getattr(leaf, name)) for name in names})


def _instance_of(kind: Any, parts: Iterable[tuple[str, Any]]) -> Any:
    """Returns an instance with these attributes. `__init__` does not run: a copy must not validate
    again.
    """
    instance = object.__new__(kind)
    for name, value in parts:
        object.__setattr__(instance, name, value)
    return instance


# -- buffers


class InputBuffers:
    """The inputs of a graph: one buffer for each copied tensor, at a constant address.

    Args:
        inputs: the first with this key.
        pool: gives device and stream.

    Attributes:
        buffers: in the order of `Inputs.tensors`.
        arguments: (args, kwargs) for the step, with the buffers in place of the tensors.
    """

    def __init__(self, inputs: Inputs, pool: GraphPool) -> None:
        self._pool = pool
        kind = pool.device.type
        is_sent = pool.can_capture and any(t.device.type != kind for t in inputs.tensors)
        self._transfers: Stream = torch.Stream(pool.device) if is_sent else None
        self.buffers = [torch.empty_like(tensor, device=pool.device) for tensor in inputs.tensors]
        self.arguments = inputs.rebuild(self.buffers)

    def load(self, inputs: Inputs) -> None:
        """Copies a call's tensors into the buffers.

        Streams: on the pool's stream, inside `GraphPool.turn`. Host tensors are sent on another
            stream while the step before is running, and the host does not wait. Pinned ones are
            sent from where they are, and must not be written before.
        """
        if not self.buffers:
            return
        sources, stream = inputs.tensors, self._pool.stream
        with torch.no_grad():
            if stream is not None and self._transfers is not None:
                with self._transfers:
                    sources = [self._sent(tensor) for tensor in sources]
                wait_for_stream(stream, self._transfers)
            torch._foreach_copy_(self.buffers, sources)
            if stream is not None:
                for source in sources:
                    source.record_stream(stream)

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == self._pool.device.type:
            return tensor
        is_ready = self._pool.device.type != "cuda" or (
            tensor.is_pinned() and tensor.is_contiguous()
        )
        return (tensor if is_ready else _pinned(tensor)).to(self._pool.device, non_blocking=True)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy that CUDA reads while the host goes on."""
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
