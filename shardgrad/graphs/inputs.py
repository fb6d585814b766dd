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
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shardgrad.errors import StepInputError
from shardgrad.graphs.pool import GraphPool
from shardgrad.graphs.staging import HostStaging

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
    leaves, spec = _flatten((args, kwargs))
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
        args, kwargs = _unflatten(filled, spec)
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


@dataclass(frozen=True)
class _Spec:
    """A tree whose leaves may be trees too: dataclasses and block masks."""

    outer: TreeSpec
    inner: tuple[tuple[type, _Spec] | None, ...]


def _flatten(tree: Any) -> tuple[list[Any], _Spec]:
    found, outer = tree_flatten(tree)
    leaves: list[Any] = []
    inner: list[tuple[type, _Spec] | None] = []
    for leaf in found:
        parts = _parts_of(leaf)
        if parts is None:
            leaves.append(leaf)
            inner.append(None)
        else:
            below, spec = _flatten(parts)
            leaves += below
            inner.append((type(leaf), spec))
    return leaves, _Spec(outer, tuple(inner))


def _unflatten(leaves: Sequence[Any], spec: _Spec) -> Any:
    remaining = list(leaves)
    found: list[Any] = []
    for inner in spec.inner:
        if inner is None:
            found.append(remaining.pop(0))
            continue
        kind, below = inner
        count = _count(below)
        found.append(_instance_of(kind, _unflatten(remaining[:count], below)))
        del remaining[:count]
    return tree_unflatten(found, spec.outer)


def _count(spec: _Spec) -> int:
    return sum(1 if inner is None else _count(inner[1]) for inner in spec.inner)


def _parts_of(leaf: Any) -> Any:
    """Returns the attributes of a dataclass or block mask; None for a plain leaf."""
    if isinstance(leaf, BlockMask):
        return dict(vars(leaf))
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    return None


def _instance_of(kind: Any, parts: Any) -> Any:
    """Returns an instance with these attributes. `__init__` does not run: a copy must not validate
    again.
    """
    instance = object.__new__(kind)
    for name, value in parts.items():
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
        self.buffers = [torch.empty_like(tensor, device=pool.device) for tensor in inputs.tensors]
        self._from_host = [
            i for i, t in enumerate(inputs.tensors) if t.device.type != pool.device.type
        ]
        self._from_device = [i for i in range(len(self.buffers)) if i not in set(self._from_host)]
        self._staging = HostStaging([inputs.tensors[i] for i in self._from_host], pool)
        self.arguments = inputs.rebuild(self.buffers)

    def load(self, inputs: Inputs) -> None:
        """Copies a call's tensors into the buffers.

        Streams: on the pool's stream, inside `GraphPool.turn`. Host tensors are transferred on
        another
            stream, in one copy, while the step before is running.
        """
        with torch.no_grad():
            if self._from_device:
                sources = [inputs.tensors[i] for i in self._from_device]
                torch._foreach_copy_([self.buffers[i] for i in self._from_device], sources)
                for source in sources:
                    if self._pool.stream is not None:
                        source.record_stream(self._pool.stream)
            if self._from_host:
                sources = [inputs.tensors[i] for i in self._from_host]
                self._staging.copy(sources, [self.buffers[i] for i in self._from_host])
