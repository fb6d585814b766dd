"""What a step returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import (
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_map_with_path,
)

from shardgrad.errors import StepOutputError

__all__ = [
    "apart_from",
    "clones",
    "detached",
    "host_value",
    "named",
    "plain_tensors",
    "scalars",
    "used_on",
]


def detached(outputs: Any) -> Any:
    """Returns a step's outputs without their autograd graph.

    Raises:
        StepOutputError: an output is neither a tensor nor None, so a replay could not update it.
    """

    def check(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach()
        if leaf is None:
            return None
        raise StepOutputError(
            f"a graphed step returned a {type(leaf).__name__}, output{keystr(path)}",
            expected="tensors and None, in any tree",
            got=f"{leaf!r}, which would be the same after every replay",
            fix="return the tensor it was made of, without .item(); or compute it outside of the "
            "step",
        )

    return tree_map_with_path(check, outputs)


def apart_from(state: Iterable[torch.Tensor], outputs: Any) -> Any:
    """Returns the outputs, with copies of those that lie in memory that the step's state has.

    A graph's outputs are kept as long as the graph; gradients that are kept are parted with
    ([Note: Kept gradients] in `engine/grad_shard.py`), and would no longer be what a replay
    writes.

    Streams: the current one.
    Capture: safe.
    """
    places = [
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in plain_tensors(state)
    ]

    def copied(leaf: torch.Tensor) -> torch.Tensor:
        addresses = [tensor.data_ptr() for tensor in plain_tensors([leaf])]
        is_state = any(begin <= each < end for begin, end in places for each in addresses)
        return leaf.clone() if is_state else leaf

    return tree_map_only(torch.Tensor, copied, outputs)


def clones(outputs: Any) -> Any:
    """Returns copies, which no later replay overwrites.

    Streams: the current one.
    """
    return tree_map_only(torch.Tensor, torch.Tensor.clone, outputs)


def plain_tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors among values; of a DTensor and other wrapper subclasses, the inner ones,
    which have the memory.
    """
    for value in values:
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            yield from plain_tensors(getattr(value, name) for name in names)
        elif isinstance(value, torch.Tensor):
            yield value


def host_value(tensor: torch.Tensor) -> bytes:
    """Returns what a tensor of the host holds, which reaches the device as a number and not as an
    address; nothing of others, and of pinned memory, which the device reads.
    """
    value = b""
    for each in plain_tensors([tensor]):
        if each.device.type == "cpu" and not each.is_pinned():
            # A copy, since a storage that numpy has seen cannot be resized any more.
            copy = each.detach().clone(memory_format=torch.contiguous_format)
            value += bytes(copy.view(-1).view(torch.uint8).numpy())
    return value


def used_on(outputs: Any, stream: torch.Stream | None) -> Any:
    """Returns the outputs, and tells the allocator that `stream` uses them.

    For the outputs of an eager step, and for copies. The memory of a graph's outputs belongs to the
    graph.
    """
    if stream is not None:
        for tensor in plain_tensors(tree_leaves(outputs)):
            tensor.record_stream(stream)
    return outputs


def named(outputs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors among the outputs, with their path in the tree."""
    for path, leaf in tree_flatten_with_path(outputs)[0]:
        if isinstance(leaf, torch.Tensor):
            yield keystr(path), leaf


def scalars(outputs: Any) -> list[tuple[str, torch.Tensor]]:
    """Returns the outputs that have one element, with their path in the tree, without brackets."""
    return [
        (path.strip("[]'") or "output", leaf)
        for path, leaf in named(outputs)
        if leaf.numel() == 1 and not leaf.is_complex()
    ]
