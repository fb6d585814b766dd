"""What a step is called with, sorted once: tensors that are copied, tensors that stay, and constants.

| kind     | what                                             | at the next call                        |
|----------|--------------------------------------------------|-----------------------------------------|
| copied   | tensors                                          | goes into the buffer that the step sees |
| static   | parameters, buffers, see `mark_static_address`   | other memory is another graph           |
| constant | numbers                                          | has to be equal, or is refused          |
| choice   | None, booleans, strings, the structure, all else | another one is another graph            |

Tensors on the host arrive in the step as tensors on the device, since a graph cannot read what a program
writes to the host's memory later.
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

__all__ = ["InputBuffers", "Inputs", "sort_inputs"]


@dataclass(frozen=True)
class Inputs:
    """One call's arguments, taken apart.

    Attributes:
        tensors: those to be copied, in order.
        choices: decides, with facts of the host, which graph is used.
        constants: numbers, with the places they were found at.
        rebuild: given tensors in the place of `tensors`, returns (args, kwargs).
    """

    tensors: list[torch.Tensor]
    choices: Hashable
    constants: tuple[tuple[int, float], ...]
    rebuild: Callable[[Sequence[torch.Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]


def sort_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], *, micro_batches: int | None = None) -> Inputs:
    """Takes a call's arguments apart.

    Args:
        args: as the step was called.
        kwargs: the same.
        micro_batches: how many there have to be in each argument that is a list, a tuple or a tensor.

    Raises:
        StepInputError: a tensor that cannot be copied into a buffer, an object that cannot be compared, no
            tensor at all, or another number of micro-batches.
    """
    if micro_batches is not None:
        _require_micro_batches([*enumerate(args), *kwargs.items()], micro_batches)
    leaves, spec = _flatten((args, kwargs))
    tensors: list[torch.Tensor] = []
    places: list[int] = []
    choices: list[Hashable] = [spec]
    constants: list[tuple[int, float]] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if _is_static(leaf):
                choices.append((leaf.data_ptr(), leaf.shape, leaf.dtype))
                continue
            _require_plain(leaf, place)
            tensors.append(leaf)
            places.append(place)
            choices.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device.type))
        elif isinstance(leaf, int | float) and not isinstance(leaf, bool):
            constants.append((place, leaf))
            choices.append(type(leaf).__name__)
        else:
            choices.append(_choice(leaf, place))

    if not tensors:
        raise StepInputError(
            "a graphed step was called without a tensor",
            expected="the data as tensors: every replay reads them where the step before left them",
            got=f"{len(leaves)} arguments, none of them a tensor to be copied",
            fix="pass the batch as an argument, instead of closing over it",
        )

    def rebuild(replacements: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        filled = list(leaves)
        for place, tensor in zip(places, replacements, strict=True):
            filled[place] = tensor
        args, kwargs = _unflatten(filled, spec)
        return args, kwargs

    return Inputs(tensors, tuple(choices), tuple(constants), rebuild)


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
    # What torch.compile goes by too; see torch._dynamo.mark_static_address.
    return isinstance(tensor, nn.Parameter | nn.Buffer) or hasattr(tensor, "_dynamo_static_input_type")


def _require_plain(tensor: torch.Tensor, place: int) -> None:
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
            f"input {place} of a graphed step cannot be copied: {why}",
            expected="plain dense tensors that require no gradient",
            got=f"{type(tensor).__name__} of shape {tuple(tensor.shape)}, {tensor.layout}",
            fix="make it inside of the step, or pass x.detach()",
        )


def _choice(leaf: Any, place: int) -> Hashable:
    if not isinstance(leaf, Hashable):
        raise StepInputError(
            f"input {place} of a graphed step cannot be compared with the next call's",
            expected="tensors, numbers, None, booleans, strings, and trees or dataclasses of them",
            got=type(leaf).__name__,
            fix="torch.utils._pytree.register_pytree_node makes a class a tree",
        )
    return leaf


# -- trees that torch does not know -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Spec:
    """A tree whose leaves may be trees of their own: dataclasses and block masks."""

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
        found.append(_whole(kind, _unflatten(remaining[:count], below)))
        del remaining[:count]
    return tree_unflatten(found, spec.outer)


def _count(spec: _Spec) -> int:
    return sum(1 if inner is None else _count(inner[1]) for inner in spec.inner)


def _parts_of(leaf: Any) -> Any:
    """Returns what a leaf is made of, or None if it is one."""
    if isinstance(leaf, BlockMask):
        return dict(vars(leaf))
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    return None


def _whole(kind: Any, parts: Any) -> Any:
    whole = object.__new__(kind)
    for name, value in parts.items():
        object.__setattr__(whole, name, value)
    return whole


# -- buffers ------------------------------------------------------------------------------------------------


class InputBuffers:
    """The memory in which a step finds its inputs, for inputs of one kind.

    Args:
        inputs: the first of their kind.
        pool: whose device and stream are used.
    """

    def __init__(self, inputs: Inputs, pool: GraphPool) -> None:
        self._pool = pool
        self._constants = inputs.constants
        self.buffers = [torch.empty_like(tensor, device=pool.device) for tensor in inputs.tensors]
        self._from_host = [i for i, t in enumerate(inputs.tensors) if t.device.type != pool.device.type]
        self._from_device = [i for i in range(len(self.buffers)) if i not in set(self._from_host)]
        self._staging = HostStaging([inputs.tensors[i] for i in self._from_host], pool)
        self.arguments = inputs.rebuild(self.buffers)

    def load(self, inputs: Inputs) -> None:
        """Copies a call's tensors into the buffers.

        Streams: on the pool's stream, inside a turn. Tensors of the host travel on a stream of their own, so
        that they arrive while the step before is running; for all of them it is one copy.

        Raises:
            StepInputError: a constant has changed.
        """
        if inputs.constants != self._constants:
            self._refuse(inputs.constants)
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

    def _refuse(self, constants: tuple[tuple[int, float], ...]) -> None:
        changed = [
            (place, old, new)
            for (place, old), (_, new) in zip(self._constants, constants, strict=True)
            if old != new
        ]
        raise StepInputError(
            "a number that a graphed step was built with has changed",
            expected=", ".join(f"input {place} = {old!r}" for place, old, _ in changed),
            got=", ".join(f"input {place} = {new!r}" for place, _, new in changed),
            fix="pass a tensor: torch.tensor(x); or step.reset(), to begin anew",
        )
