"""The outputs of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import keystr, tree_leaves, tree_map_only, tree_map_with_path

from shardgrad.errors import StepOutputError


def detached(outputs: Any, device: torch.device) -> Any:
    """Returns a step's outputs, detached from the autograd graph.

    Raises:
        StepOutputError: an output is neither a tensor on the device nor None, so a replay could not
            update it.
    """

    def check(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device.type == device.type:
            return leaf.detach()
        if leaf is None:
            return None
        raise StepOutputError(
            f"a graphed step returned a {type(leaf).__name__}, output{keystr(path)}",
            expected=f"tensors on {device.type} and None, in any tree",
            got=f"{leaf!r}, which a replay would not update",
            fix="return a tensor, without .item(), or compute the value outside of the step; a "
            "function with yield or async def cannot be a step",
        )

    return tree_map_with_path(check, outputs)


def apart_from(state: Iterable[torch.Tensor], outputs: Any) -> Any:
    """Returns the outputs, with a copy of each that shares memory with the step's state or inputs.

    A graph's outputs live as long as the graph. An output that is a gradient would count as one
    that the program keeps ([Note: Kept gradients] in `engine/grad_shard.py`): the engine would give
    up that memory, and replays would no longer write the gradients there. An output that is an
    input may be another argument of the next call, which copies its arguments one after the other.

    Streams: the current one.
    Capture: safe.
    """
    taken = storage_ids(state)

    def copied(leaf: torch.Tensor) -> torch.Tensor:
        is_of_state = taken & storage_ids([leaf]) or any(map(is_slice, plain_tensors([leaf])))
        return leaf.clone() if is_of_state else leaf

    return tree_map_only(torch.Tensor, copied, outputs)


def storage_of(tensor: torch.Tensor) -> int:
    """Returns the identity of a tensor's storage; 0 if it has none, like a sparse tensor."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return 0


def storage_ids(values: Iterable[Any]) -> set[int]:
    """Returns the identities of the storages of all tensors among the values."""
    return set(map(storage_of, plain_tensors(values)))


def is_slice(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's storage is a slice of other memory, as that of a gradient is of
    its shard.
    """
    return storage_of(tensor) != 0 and not tensor.untyped_storage().resizable()


def plain_tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors among the values. For a DTensor or another wrapper subclass, yields its
    inner tensors, which own the memory.
    """
    for value in values:
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            yield from plain_tensors(getattr(value, name) for name in names)
        elif isinstance(value, torch.Tensor):
            yield value


def is_of_host(tensor: torch.Tensor) -> bool:
    """Returns whether the device gets the tensor by value; it reads pinned memory by address."""
    return tensor.device.type == "cpu" and not tensor.is_pinned()


def host_value(found: Any) -> bytes:
    """Returns the bytes of a CPU tensor, which reaches the device by value. Returns b"" for device
    tensors, for pinned memory, which the device reads by address, and for anything else.
    """
    value = b""
    for each in plain_tensors([found]):
        if is_of_host(each):
            # A copy, since `numpy()` makes a storage non-resizable.
            value += bytes(each.detach().ravel().clone().view(torch.uint8).numpy())
    return value


def used_on(outputs: Any, stream: torch.Stream | None) -> Any:
    """Records with the allocator that `stream` uses the tensors of a tree, and returns the tree.

    Outputs of a graph need no record, since their memory belongs to the graph.
    """
    if stream is not None:
        for tensor in plain_tensors(tree_leaves(outputs)):
            tensor.record_stream(stream)
    return outputs
