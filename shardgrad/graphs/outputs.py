"""What a step returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
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
    "local_tensor",
    "named",
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
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for tensor in map(local_tensor, state)
    ]

    def copied(leaf: torch.Tensor) -> torch.Tensor:
        address = local_tensor(leaf).data_ptr()
        return leaf.clone() if any(begin <= address < end for begin, end in places) else leaf

    return tree_map_only(torch.Tensor, copied, outputs)


def clones(outputs: Any) -> Any:
    """Returns copies, which no later replay overwrites.

    Streams: the current one.
    """
    return tree_map_only(torch.Tensor, torch.Tensor.clone, outputs)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a DTensor on this rank, and any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def host_value(tensor: torch.Tensor) -> bytes:
    """Returns what a tensor of the host holds, which reaches the device as a number and not as an
    address; nothing of others, and of pinned memory, which the device reads.
    """
    local = local_tensor(tensor)
    if local.device.type != "cpu" or local.is_pinned():
        return b""
    # A copy, since a storage that numpy has seen cannot be resized any more.
    copy = local.detach().clone(memory_format=torch.contiguous_format)
    return bytes(copy.view(-1).view(torch.uint8).numpy())


def used_on(outputs: Any, stream: torch.Stream | None) -> Any:
    """Returns the outputs, and tells the allocator that `stream` uses them.

    For the outputs of an eager step, and for copies. The memory of a graph's outputs belongs to the
    graph.
    """
    if stream is not None:
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor):
                local_tensor(leaf).record_stream(stream)
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
