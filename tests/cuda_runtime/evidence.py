"""A captured step as evidence: what its nodes and edges say of collectives, joins and memory.

A replay keeps no order but that of the graph's edges. So that it gives what the eager step gave,
each collective has to come after every writer of what it sends and before every reader of what it
receives, collectives of several communicators need an order that is the same on every rank, all
work has to come before the end of the capture, and no node may use memory that was handed back.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from tests.cuda_runtime.inspection import DEVICE_MEMORY, Work, words

__all__ = ["Evidence", "evidence", "without_edges"]


@dataclass(frozen=True)
class Evidence:
    """What a graph shows.

    Attributes:
        nodes: of the graph.
        edges: of the graph.
        collectives: nodes of NCCL.
        writers: nodes before a collective that write what it sends, counted for each collective.
        readers: nodes after a collective that read what it receives, likewise.
        wrong: in words; empty if there is nothing to say.
    """

    nodes: int
    edges: int
    collectives: int
    writers: int
    readers: int
    wrong: list[str]


def evidence(graph: Work) -> Evidence:
    """Reads a graph of `inspection.graph()`; this process's allocator says what is freed."""
    nodes: list[Work] = [
        {**node, "ranges": [each for each in node["ranges"] if each[0] in DEVICE_MEMORY]}
        for node in graph["nodes"]
    ]
    before = _before(nodes)
    writers = readers = 0
    wrong: list[str] = []
    collectives = [number for number, node in enumerate(nodes) if node["kind"] == "nccl"]
    for number in collectives:
        received = _ranges(nodes[number], written=True)
        sent = _ranges(nodes[number], written=False)
        for other, node in enumerate(nodes):
            if other == number:
                continue
            writes_sent = _overlap(_ranges(node, written=True), sent)
            touches_received = _overlap(_ranges(node), received)
            if not (writes_sent or touches_received):
                continue
            earlier, later = sorted((other, number))
            if not before[later] >> earlier & 1:
                what = "a writer of what it sends" if writes_sent else "a user of what it receives"
                wrong.append(f"{words(nodes[number])} has no order with {what}: {words(node)}")
            writers += writes_sent and other < number
            readers += other > number and _overlap(_ranges(node, written=False), received)
    wrong += _without_one_order([(nodes[number], before[number], number) for number in collectives])
    wrong += _not_joined(nodes, before)
    wrong += _on_freed_memory(nodes, torch.cuda.memory_snapshot())
    edges = sum(len(node["before"]) for node in nodes)
    return Evidence(len(nodes), edges, len(collectives), writers, readers, wrong)


def without_edges(graph: Work, number: int) -> Work:
    """Returns a copy of a graph in which nothing comes before or after one node."""
    cut = deepcopy(graph)
    cut["nodes"][number]["before"] = []
    for node in cut["nodes"]:
        node["before"] = [each for each in node["before"] if each != number]
    return cut


def _before(nodes: Sequence[Work]) -> list[int]:
    """Returns for each node the set of those that come before it, as the bits of a number."""
    found: list[int] = []
    for node in nodes:
        bits = 0
        for other in node["before"]:
            bits |= found[other] | 1 << other
        found.append(bits)
    return found


def _without_one_order(collectives: Sequence[tuple[Work, int, int]]) -> list[str]:
    """Returns pairs of collectives that two ranks may start in another order: of two communicators,
    and without an edge. CUDA does not say whose a collective is, the runtime does.

    Args:
        collectives: each with the set of nodes before it, and its number.
    """
    return [
        f"{words(one)} and {words(other)} are of two communicators and have no order"
        for (one, _, number), (other, before, _) in combinations(collectives, 2)
        if _communicator(one) != _communicator(other) and not before >> number & 1
    ]


def _communicator(node: Work) -> str:
    found = re.match(r"nccl\w+ (\w+) #", node["name"])
    return found.group(1) if found else ""


def _not_joined(nodes: Sequence[Work], before: Sequence[int]) -> list[str]:
    """Returns nodes that do not come before the graph's last node, and are not its last node."""
    if not nodes:
        return []
    last = len(nodes) - 1
    left = [number for number in range(last) if not before[last] >> number & 1]
    return [f"{words(nodes[number])} does not come before the end" for number in left]


def _on_freed_memory(nodes: Sequence[Work], segments: Sequence[Any]) -> list[str]:
    """Returns nodes with memory that is neither allocated nor the graph's own, which is that of
    pools other than the default one.
    """
    usable: list[tuple[int, int]] = []
    for segment in segments:
        blocks = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
        if tuple(segment["segment_pool_id"]) != (0, 0):
            usable.append((segment["address"], segment["address"] + segment["total_size"]))
        else:
            usable += [(block["address"], block["address"] + block["size"]) for block in blocks]
    return [
        f"{words(node)} uses {end - start} bytes at {start:#x}, which are not allocated"
        for node in nodes
        for start, end in _ranges(node)
        if not any(low <= start and end <= high for low, high in usable)
    ]


def _ranges(node: Work, *, written: bool | None = None) -> list[tuple[int, int]]:
    """Returns the memory that a node uses, or the part that it writes, or that it reads."""
    return [
        (start, start + size)
        for start, size, writes in node["ranges"]
        if written is None or bool(writes) is written
    ]


def _overlap(some: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> bool:
    return any(a < d and c < b for a, b in some for c, d in others)
