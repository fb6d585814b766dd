"""A trial: tests, run in a forked process in which one file of the package has another text.

The process that forks has imported torch and what tests use, and not the package: each trial
imports that itself, with the change, from the sources on disk, which stay as they are. Ranks,
simulated devices and programs are forked from the trial and have the change too. Tests that start
an interpreter do not.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

from tests.mutants import native
from tests.mutants.mutant import ROOT, Mutant
from tests.support.processes import FairClock

LATE = "died, or did not end in time"
_PERIOD_S = 0.5  # between two looks at the clock, which reads much of /proc
# Without capturing: programs that tests fork write where they are told to, and not where pytest
# listens.
_OPTIONS = [
    "-x",
    "-q",
    "-s",
    "-p",
    "no:cacheprovider",
    "-m",
    "",
    "--tb=short",
    "--no-header",
    "-rN",
]


@dataclass(frozen=True)
class Result:
    """What came of a trial.

    Attributes:
        failed: id of the test that failed, or of the file that could not be imported; "" if all
            passed.
        passed: ids of the tests that passed.
        why: the end of the failure's report, or what else ended the trial.
        is_gone: whether there is no such test.
        cpu_s: seconds of CPU, with those of all its processes that have ended.
        wall_s: seconds.
    """

    failed: str
    passed: tuple[str, ...]
    why: str
    is_gone: bool
    cpu_s: float
    wall_s: float


class Trial:
    """Runs tests in a forked process; starts at once.

    Args:
        tests: pytest's ids. The first failure ends the trial.
        mutant: the change; None for none.
        limit_s: seconds, those left out in which it waited for a core; what takes longer is ended.
        prepare: called in the process before pytest.
        plugins: further ones for pytest.
    """

    def __init__(
        self,
        tests: Sequence[str],
        mutant: Mutant | None,
        *,
        limit_s: float,
        prepare: Callable[[], None] | None = None,
        plugins: Sequence[Any] = (),
    ) -> None:
        self.tests, self.mutant = tests, mutant
        self._limit_s = limit_s
        self._folder = tempfile.TemporaryDirectory(prefix="mutant-")
        self._started_s = time.monotonic()
        self._usage: resource.struct_rusage | None = None
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            _be_the_trial(Path(self._folder.name), tests, mutant, prepare, plugins)
        self._clock = FairClock([self._pid])
        self._looks_s = 0.0

    def is_running(self) -> bool:
        """Whether it has not ended; ends it when it is late."""
        if self._usage is not None:
            return False
        pid, _, usage = os.wait4(self._pid, os.WNOHANG)
        if pid == 0 and self._is_late():
            self._kill()
            pid, _, usage = os.wait4(self._pid, 0)
        if pid == 0:
            return True
        self._kill()  # ranks and other processes of it
        self._usage = usage
        return False

    def _is_late(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._looks_s:
            return False
        self._looks_s = now_s + _PERIOD_S
        return self._clock.elapsed_s() > self._limit_s

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)

    def result(self) -> Result:
        """Returns what came of it; waits for its end."""
        while self.is_running():
            time.sleep(0.02)
        assert self._usage is not None
        found = Path(self._folder.name, "result.json")
        facts: dict[str, Any] = {"failed": self.tests[0], "passed": (), "why": LATE}
        notes = Path(self._folder.name, "passed")
        if found.exists():
            facts = json.loads(found.read_text())
        elif notes.exists():  # it failed in the test after these
            passed = notes.read_text().splitlines()
            following = [test for test in self.tests if test not in passed]
            facts.update(passed=passed, failed=(following or self.tests)[0])
        self._folder.cleanup()
        return Result(
            facts["failed"],
            tuple(facts["passed"]),
            facts["why"],
            facts.get("is_gone", False),
            self._usage.ru_utime + self._usage.ru_stime,
            time.monotonic() - self._started_s,
        )


class _Report:
    """Pytest's plugin of a trial."""

    def __init__(self, folder: Path) -> None:
        self._notes = (folder / "passed").open("w", buffering=1)
        self.failed = self.why = ""
        self.passed: list[str] = []
        self._failing: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Puts tests first that fork: a process that has run a backward here could not run one
        there.
        """
        items.sort(key=_computes_here)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._fail(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._fail(report)
        elif report.when == "teardown" and report.nodeid not in self._failing:
            self.passed.append(report.nodeid)
            self._notes.write(report.nodeid + "\n")

    def _fail(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        self._failing.add(report.nodeid)
        if not self.failed:
            self.failed, self.why = report.nodeid, report.longreprtext[-1500:]


def _computes_here(item: pytest.Item) -> bool:
    return "worlds" not in getattr(item, "fixturenames", ()) and "simulated" not in item.path.parts


def _be_the_trial(
    folder: Path,
    tests: Sequence[str],
    mutant: Mutant | None,
    prepare: Callable[[], None] | None,
    plugins: Sequence[Any],
) -> None:
    """Never returns."""
    status = 1
    try:
        os.setsid()
        os.chdir(ROOT)
        output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signal_number, signal.SIG_DFL)
        _fork_all_processes()
        if mutant is not None:
            change = native.loading(mutant, folder) if mutant.is_native else mutant
            sys.meta_path.insert(0, _Changed(change))
        if prepare is not None:
            prepare()
        report = _Report(folder)
        code = int(pytest.main([*_OPTIONS, *tests], plugins=[report, *plugins]))
        facts = {"failed": report.failed, "passed": report.passed, "why": report.why}
        if code and not report.failed:
            # A test that is not there notices nothing; anything else that stops pytest was noticed.
            facts["is_gone"] = code == pytest.ExitCode.USAGE_ERROR
            facts["failed"] = "" if facts["is_gone"] else tests[0]
            facts["why"] = (folder / "output").read_text()[-1500:]
        _say(folder, facts)
        status = 0
    except native.CompileError as error:
        _say(folder, {"failed": "", "passed": [], "why": str(error)})
    finally:
        os._exit(status)


def _say(folder: Path, facts: dict[str, Any]) -> None:
    partial = folder / "result.partial"
    partial.write_text(json.dumps(facts))
    partial.rename(folder / "result.json")


def _fork_all_processes() -> None:
    import tests.support.processes as processes

    processes.CONTEXT = multiprocessing.get_context("fork")  # type: ignore[assignment]


class _Changed(importlib.abc.MetaPathFinder):
    """Finds the changed module, before Python's own finders do."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._text = mutant.applied(mutant.source())

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != self._mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(name, spec.origin, self._text)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType | None:
        return self.source_to_code(self._text.encode(), self.path)
