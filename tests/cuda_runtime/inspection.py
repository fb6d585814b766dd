"""Looks into the runtime: recorded graphs, eager work and its order, findings, counts of calls.

Only in a process whose torch runs on the runtime (`installed()`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from typing import Any

__all__ = [
    "DEVICE_MEMORY",
    "calls",
    "captures",
    "conflicts",
    "findings",
    "graph",
    "graphs",
    "installed",
    "log",
    "order",
    "short_name",
    "trace",
    "words",
]

Work = dict[str, Any]
DEVICE_MEMORY = range(0x200000000000, 0x210000000000)  # addresses, of all devices


@cache
def installed() -> bool:
    """Returns whether torch's CUDA runtime here is the one on the host."""
    with contextlib.suppress(OSError):
        return hasattr(_load(), "hostcuda_calls")
    return False


def _load() -> ctypes.CDLL:
    import torch  # noqa: F401  (has loaded it)

    return ctypes.CDLL("libcudart.so.13")


@cache
def _runtime() -> ctypes.CDLL:
    runtime = _load()
    for name in ("findings", "calls", "exec", "log"):
        getattr(runtime, f"hostcuda_{name}").restype = ctypes.c_char_p
    runtime.hostcuda_order.argtypes = [ctypes.c_char_p]
    return runtime


def graph(index: int = -1) -> Work | None:
    """Returns an instantiated graph: its nodes in the order of recording, each with those `before`
    it.
    """
    found: Work | None = json.loads(_runtime().hostcuda_exec(index))
    return found


def graphs() -> int:
    """Returns how many graphs were instantiated."""
    return int(_runtime().hostcuda_execs())


def findings(*, forget: bool = False) -> list[str]:
    """Returns what is no error of CUDA's and still worth knowing, and why captures were
    invalidated.
    """
    found: list[str] = json.loads(_runtime().hostcuda_findings(int(forget)))
    return found


def calls() -> dict[str, int]:
    """Returns how often each function was called, and how much work of each kind was launched."""
    found: dict[str, int] = json.loads(_runtime().hostcuda_calls())
    return found


def captures() -> int:
    """Returns how many captures are under way."""
    return int(_runtime().hostcuda_captures())


def trace(on: bool) -> None:
    """Begins to keep work with what is before it, or ends that."""
    _runtime().hostcuda_trace(int(on))


def log() -> list[Work]:
    """Returns the work kept since `trace(True)`."""
    found: list[Work] = json.loads(_runtime().hostcuda_log())
    return found


@contextlib.contextmanager
def order(how: str, questions: int | None = None) -> Iterator[None]:
    """Runs work in another legal order inside the block.

    Args:
        how: "host", "late", or the seed of a random order, as in HOSTCUDA_ORDER.
        questions: how often an event is asked about until it may look complete.
    """
    import torch

    torch.cuda.synchronize()
    _runtime().hostcuda_order(how.encode())
    if questions is not None:
        _runtime().hostcuda_questions(questions)
    try:
        yield
    finally:
        _runtime().hostcuda_order(b"host")


def short_name(name: str) -> str:
    """Returns the readable part of a mangled kernel name."""
    parts, rest = [], name
    while match := re.search(r"(?<!\d)(\d{1,3})(?=[A-Za-z_])", rest):
        start, size = match.end(), int(match.group(1))
        parts.append(rest[start : start + size])
        rest = rest[start + size :]
    useful = [
        p
        for p in parts
        if p not in ("at", "native", "detail", "c10") and not p.startswith("_GLOBAL")
    ]
    return "::".join(useful[:3]) or name[:40]


def conflicts(work: list[Work], limit: int = 20) -> list[str]:
    """Returns pairs of work that share memory, one of them writing, with no order between them, in
    words.

    Args:
        work: of `log()`, or the nodes of a `graph()`. What an operator touches is known where
            operators have values; copies, fills and collectives are always known.
        limit: of pairs.
    """
    clocks, chains, positions = _clocks(work)
    ranges = [(start, start + size) for each in work for start, size, _ in each["ranges"]]
    bounds = sorted({bound for both in ranges for bound in both})
    # For each piece of memory between two bounds, by chain, the latest that wrote it, and that read
    # it.
    writers: list[dict[int, int]] = [{} for _ in bounds]
    readers: list[dict[int, int]] = [{} for _ in bounds]
    found: dict[tuple[int, int], str] = {}
    for later, each in enumerate(work):
        for start, size, write in each["ranges"]:
            for piece in range(bisect_left(bounds, start), bisect_left(bounds, start + size)):
                others = [*writers[piece].values(), *(readers[piece].values() if write else ())]
                for earlier in others:
                    is_ordered = clocks[later].get(chains[earlier], -1) >= positions[earlier]
                    if earlier == later or is_ordered or (earlier, later) in found:
                        continue
                    shared = f"{bounds[piece + 1] - bounds[piece]} bytes at {bounds[piece]:#x}"
                    a, b = words(work[earlier]), words(each)
                    found[earlier, later] = f"{a} and {b} share {shared} without an order"
                    if len(found) == limit:
                        return list(found.values())
                (writers if write else readers)[piece][chains[later]] = later
    return list(found.values())


def _clocks(work: list[Work]) -> tuple[list[dict[int, int]], list[int], list[int]]:
    """Returns for each piece of work what is before it, its chain, and its position there.

    A chain is work of which each piece comes after the one before. What is before a piece is, of
    each chain, all up to a position.
    """
    place = {each.get("id", number): number for number, each in enumerate(work)}
    clocks: list[dict[int, int]] = []
    chains: list[int] = []
    positions: list[int] = []
    ends: list[int] = []  # of each chain, the last piece
    for number, each in enumerate(work):
        clock: dict[int, int] = {}
        for before in (place[other] for other in each["before"] if other in place):
            for key, position in clocks[before].items():
                clock[key] = max(clock.get(key, -1), position)
        chain = next(
            (key for key, position in clock.items() if positions[ends[key]] == position), len(ends)
        )
        if chain == len(ends):
            ends.append(number)
        ends[chain] = number
        clock[chain] = clock.get(chain, -1) + 1
        clocks.append(clock)
        chains.append(chain)
        positions.append(clock[chain])
    return clocks, chains, positions


def words(work: Work) -> str:
    """Returns what a piece of work is, and its stream."""
    name = work.get("operator") or f"{work['kind']} {short_name(work['name'])}"
    return f"{name} on stream {work['stream']}"
