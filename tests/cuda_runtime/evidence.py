"""What is wrong with a captured step, as its nodes and edges say it.

A replay keeps no order but that of the graph's edges. So that it gives what the eager step gave,
what shares memory needs an order, of a collective and the writers of what it sends as of any two
nodes; collectives of several communicators need an order that is the same on every rank; all work
has to come before the end of the capture; and no node may use memory that was handed back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import torch

from tests.cuda_runtime.inspection import DEVICE_MEMORY, Work, before, conflicts, words


def wrong(graph: Work) -> list[str]:
    """Returns what is wrong with a graph of `inspection.graph()`, in words; this process's
    allocator says what is freed.
    """
    nodes = on_the_device(graph)
    return [
        *conflicts(nodes),
        *_without_one_order(nodes),
        *_not_joined(nodes),
        *_on_freed_memory(nodes, torch.cuda.memory_snapshot()),
    ]


def on_the_device(graph: Work) -> list[Work]:
    """Returns the nodes, with what they touch of the device's memory."""
    return [
        {**node, "ranges": [each for each in node["ranges"] if each[0] in DEVICE_MEMORY]}
        for node in graph["nodes"]
    ]


def collectives(nodes: Sequence[Work]) -> list[int]:
    """Returns the numbers of the nodes of NCCL."""
    return [number for number, node in enumerate(nodes) if node["kind"] == "nccl"]


def without_edges(graph: Work, number: int) -> list[Work]:
    """Returns the nodes of a graph, of which nothing comes before or after one."""
    return [
        {**node, "before": [b for b in node["before"] if b != number] if at != number else []}
        for at, node in enumerate(on_the_device(graph))
    ]


def _without_one_order(nodes: Sequence[Work]) -> Iterator[str]:
    """Yields pairs of collectives that two ranks may start in another order: of two communicators,
    and without an edge. CUDA does not say whose a collective is, the runtime does.
    """
    comes_before = before(nodes)
    for one, other in combinations(collectives(nodes), 2):
        # Their names are "ncclAllGather COMMUNICATOR #NUMBER".
        differ = len({nodes[each]["name"].split()[1] for each in (one, other)}) == 2
        if differ and not comes_before[other] >> one & 1:
            both = f"{words(nodes[one])} and {words(nodes[other])}"
            yield f"{both} are of two communicators and have no order"


def _not_joined(nodes: Sequence[Work]) -> Iterator[str]:
    """Yields nodes that do not come before the graph's last node."""
    joined = before(nodes)[-1]
    for number, node in enumerate(nodes[:-1]):
        if not joined >> number & 1:
            yield f"{words(node)} does not come before the end"


def _on_freed_memory(nodes: Sequence[Work], segments: Sequence[Any]) -> Iterator[str]:
    """Yields nodes with memory that is neither allocated nor the graph's own, which is that of
    pools other than the default one.
    """
    usable: list[tuple[int, int]] = []
    for segment in segments:
        blocks = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
        if tuple(segment["segment_pool_id"]) != (0, 0):
            usable.append((segment["address"], segment["address"] + segment["total_size"]))
        else:
            usable += [(block["address"], block["address"] + block["size"]) for block in blocks]
    for node in nodes:
        for start, size, _ in node["ranges"]:
            if not any(low <= start and start + size <= high for low, high in usable):
                yield f"{words(node)} uses {size} bytes at {start:#x}, which are not allocated"
