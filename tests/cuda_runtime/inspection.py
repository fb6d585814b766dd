"""Looks into the runtime: recorded graphs, eager work and its order, findings, counts of calls.

Only in a process whose torch runs on the runtime (`installed()`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

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


@contextlib.contextmanager
def late_and_ordered() -> Iterator[None]:
    """Runs the block's work as late as streams allow, and requires that whatever shares memory has
    an order. On a GPU it does nothing.
    """
    import torch

    if not installed():
        yield
        return
    with order("late", 3):
        trace(True)
        try:
            yield
            torch.cuda.synchronize()
            assert not conflicts(log(), 3)
        finally:
            trace(False)


def conflicts(work: Sequence[Work], limit: int = 20) -> list[str]:
    """Returns pairs of work that share memory, one of them writing, with no order between them, in
    words.

    Args:
        work: of `log()`, or the nodes of a `graph()`. What an operator touches is known where
            operators have values; copies, fills and collectives are always known.
        limit: of pairs.
    """
    comes_before = before(work)
    ranges = [(start, start + size) for each in work for start, size, _ in each["ranges"]]
    bounds = sorted({bound for both in ranges for bound in both})
    # For each piece of memory between two bounds: what uses it, and whether that writes it.
    uses: list[list[tuple[int, bool]]] = [[] for _ in bounds]
    found: dict[tuple[int, int], str] = {}
    for later, each in enumerate(work):
        for start, size, writes in each["ranges"]:
            for piece in range(bisect_left(bounds, start), bisect_left(bounds, start + size)):
                for earlier, wrote in uses[piece]:
                    is_ordered = comes_before[later] >> earlier & 1
                    if earlier == later or is_ordered or not (wrote or writes):
                        continue
                    shared = f"{bounds[piece + 1] - bounds[piece]} bytes at {bounds[piece]:#x}"
                    a, b = words(work[earlier]), words(each)
                    found[earlier, later] = f"{a} and {b} share {shared} without an order"
                    if len(found) == limit:
                        return list(found.values())
                # What has no order with an earlier use has none with this one, which comes after.
                uses[piece] = [
                    (earlier, wrote)
                    for earlier, wrote in uses[piece]
                    if not comes_before[later] >> earlier & 1 or (wrote and not writes)
                ]
                uses[piece].append((later, bool(writes)))
    return list(found.values())


def before(work: Sequence[Work]) -> list[int]:
    """Returns for each piece of work the set of those that come before it, as the bits of a
    number.
    """
    place = {each.get("id", number): number for number, each in enumerate(work)}
    found: list[int] = []
    for each in work:
        bits = 0
        for other in (place[name] for name in each["before"] if name in place):
            bits |= found[other] | 1 << other
        found.append(bits)
    return found


def words(work: Work) -> str:
    """Returns what a piece of work is, and its stream."""
    name = work.get("operator") or f"{work['kind']} {demangled(work['name'])}"
    return f"{name} on stream {work['stream']}"


def demangled(name: str) -> str:
    """Returns the begin of a kernel's name as it is written in C++."""
    command = ["c++filt", "--no-params", name]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()[:80]
