"""Which tests run which lines of the package: measured once, kept in `build/mutants/lines.jsonl`.

Every process of a trial writes into one piece of shared memory, a byte for each line. So lines that
ranks run are found as well; those that run only in hooks on a device's own thread of autograd are
not.
"""

from __future__ import annotations

import json
import mmap
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.mutants.mutant import PACKAGE, ROOT, Mutant, body_around
from tests.mutants.trial import Trial

KEPT = ROOT / "build" / "mutants" / "lines.jsonl"
_CASES = 3
# What takes long, or starts interpreters that know nothing of a trial.
_LEFT_OUT = (
    "benchmarks",
    "clients",
    "drills",
    "gpu",
    "mutants",
    "project",
    "test_mutation_audit.py",
    "test_interleavings.py",
)


class Tracer:
    """Counts lines; a plugin of pytest, and what `sys.settrace` calls."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        size = 0
        for path in sorted(PACKAGE.rglob("*.py")):
            self._first[str(path)] = size
            size += len(path.read_text(encoding="utf-8").splitlines()) + 2
        self._size = size
        self._ran = mmap.mmap(-1, size)
        self._traces: dict[str, Any] = {
            path: self._in(first) for path, first in self._first.items()
        }
        self._out = KEPT

    def _in(self, first: int) -> Any:
        ran = self._ran

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            ran[first + frame.f_lineno] = 1
            return trace

        return trace

    def start(self) -> None:
        """Traces this process, and what is forked from it."""
        traces = self._traces

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            inner = traces.get(frame.f_code.co_filename)
            return None if inner is None else inner(frame, event, argument)

        threading.settrace(trace)
        sys.settrace(trace)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._ran[:] = bytes(self._size)
        began_s = time.perf_counter()
        yield
        took_s = time.perf_counter() - began_s
        ran = bytes(self._ran)
        lines = {}
        for path, first in self._first.items():
            length = len(Path(path).read_bytes().splitlines()) + 2
            found = [number for number in range(length) if ran[first + number]]
            if found:
                lines[str(Path(path).relative_to(PACKAGE))] = found
        with self._out.open("a") as stream:
            stream.write(
                json.dumps({"test": item.nodeid, "s": round(took_s, 3), "lines": lines}) + "\n"
            )


@dataclass(frozen=True)
class Ran:
    """A test, and the lines that it ran.

    Attributes:
        test: pytest's id.
        took_s: seconds, traced.
        lines: numbers by file; of the state of the code when it was measured.
    """

    test: str
    took_s: float
    lines: Mapping[str, frozenset[int]]


def read() -> list[Ran]:
    """Returns what was measured, the fastest test first."""
    found = {}
    for line in KEPT.read_text().splitlines() if KEPT.exists() else ():
        facts = json.loads(line)
        lines = {path: frozenset(numbers) for path, numbers in facts["lines"].items()}
        found[facts["test"]] = Ran(facts["test"], facts["s"], lines)
    return sorted(found.values(), key=lambda ran: ran.took_s)


def test_files() -> list[str]:
    """Returns the files that are measured."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        parts = path.relative_to(ROOT).parts
        if parts[1] not in _LEFT_OUT and parts[-1] not in _LEFT_OUT:
            found.append("/".join(parts))
    return found


def measure(budget_s: float, begins: Sequence[str] = ()) -> Iterator[str]:
    """Measures the test files that have not been measured, until the time is up; yields what it
    does.

    Args:
        budget_s: seconds after which no file is begun.
        begins: how the paths of the files begin, in the order in which they are measured; all if
            empty.
    """
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    done = KEPT.with_name("lines.done")
    finished = set(done.read_text().splitlines()) if done.exists() else set()
    began_s = time.monotonic()
    paths = test_files()
    for path in [path for begin in begins or [""] for path in paths if path.startswith(begin)]:
        if path in finished:
            continue
        if time.monotonic() - began_s > budget_s:
            yield f"time is up before {path}"
            return
        tracer = Tracer()
        # A test that fails only when it is traced does not end its file.
        options = ["--maxfail=1000", "-m", "not long and not gpu"]
        trial = Trial([*options, path], None, limit_s=300, prepare=tracer.start, plugins=[tracer])
        result = trial.result()
        with done.open("a") as stream:
            stream.write(path + "\n")
        yield f"{path}: {len(result.passed)} passed in {result.wall_s:.0f} s {result.failed}"


def candidates(mutant: Mutant, measured: list[Ran]) -> list[str]:
    """Returns the tests that run a mutant's line, the fastest first; many cases of one function
    come last.

    For a default of a function, those that run the function; for what only an import runs, or what
    ran where nothing was traced, those that run anything in the file.
    """
    if mutant.is_native:
        return [ran.test for ran in measured if ran.test.startswith("tests/ops/")]
    source = mutant.source()
    line = mutant.line(source)
    body = body_around(source, line)
    found = [ran for ran in measured if ran.lines.get(mutant.path, frozenset()) & body]
    found = found or [ran for ran in measured if mutant.path in ran.lines]
    first: list[str] = []
    further: list[str] = []
    cases: dict[str, int] = {}
    for ran in found:
        function = ran.test.partition("[")[0]
        cases[function] = cases.get(function, 0) + 1
        (first if cases[function] <= _CASES else further).append(ran.test)
    return first + further
