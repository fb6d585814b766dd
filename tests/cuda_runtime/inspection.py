"""Looks into the runtime: recorded graphs, eager work and its order, findings, counts of calls.

Only in a process whose torch runs on the runtime (`installed()`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

__all__ = [
    "calls",
    "captures",
    "conflicts",
    "findings",
    "graph",
    "graphs",
    "installed",
    "log",
    "order",
    "questions",
    "short_name",
    "trace",
]

Work = dict[str, Any]


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
    """Returns an instantiated graph: its nodes in the order of recording, each with those `before` it."""
    found: Work | None = json.loads(_runtime().hostcuda_exec(index))
    return found


def graphs() -> int:
    """Returns how many graphs were instantiated."""
    return int(_runtime().hostcuda_execs())


def findings(*, forget: bool = False) -> list[str]:
    """Returns what is no error of CUDA's and still worth knowing, and why captures were invalidated."""
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


def questions(count: int) -> None:
    """Lets events look incomplete until something waits for them, or has asked so often."""
    _runtime().hostcuda_questions(count)


def short_name(name: str) -> str:
    """Returns the readable part of a mangled kernel name."""
    parts, rest = [], name
    while match := re.search(r"(?<!\d)(\d{1,3})(?=[A-Za-z_])", rest):
        start, size = match.end(), int(match.group(1))
        parts.append(rest[start : start + size])
        rest = rest[start + size :]
    useful = [p for p in parts if p not in ("at", "native", "detail", "c10") and not p.startswith("_GLOBAL")]
    return "::".join(useful[:3]) or name[:40]


def conflicts(work: list[Work], limit: int = 20) -> list[str]:
    """Returns pairs of work that share memory, one of them writing, with no order between them, in words.

    Args:
        work: of `log()`, or the nodes of a `graph()`. What an operator touches is known where operators have
            values; copies, fills and collectives are always known.
        limit: of pairs.
    """
    place = {each.get("id", number): number for number, each in enumerate(work)}
    ancestors: list[int] = []  # of each, as bits
    for each in work:
        mask = 0
        for other in each["before"]:
            if other in place:
                mask |= ancestors[place[other]] | (1 << place[other])
        ancestors.append(mask)

    def ordered(a: int, b: int) -> bool:
        return bool(ancestors[b] >> a & 1)

    ranges = sorted(
        (start, start + size, bool(write), number)
        for number, each in enumerate(work)
        for start, size, write in each["ranges"]
        if size
    )
    found: dict[tuple[int, int], str] = {}
    active: list[tuple[int, int, bool, int]] = []
    for start, end, write, number in ranges:
        active = [each for each in active if each[1] > start]
        for _, other_end, other_write, other in active:
            pair = (min(number, other), max(number, other))
            if other == number or not (write or other_write) or pair in found:
                continue
            if not ordered(*pair):
                a, b = (_words(work[each]) for each in pair)
                size = min(end, other_end) - start
                found[pair] = f"{a} and {b} share {size} bytes at {start:#x} without an order"
                if len(found) >= limit:
                    return list(found.values())
        active.append((start, end, write, number))
    return list(found.values())


def _words(work: Work) -> str:
    name = work.get("operator") or f"{work['kind']} {short_name(work['name'])}"
    return f"{name} on stream {work['stream']}"
