"""Programs of this project in processes forked from one that has imported torch: the start costs
nothing.

What a program does when an interpreter is really started is for tests that use `subprocess`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.processes import CONTEXT, FairClock

ROOT = Path(__file__).parents[2]


def _become(
    module: str,
    arguments: Sequence[str],
    outputs: tuple[str, str],
    environment: dict[str, str],
    forks: bool,
) -> None:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    silence = os.open(os.devnull, os.O_RDONLY)
    written = [os.open(path, os.O_WRONLY | os.O_APPEND) for path in outputs]
    for number, descriptor in enumerate((silence, *written)):
        os.dup2(descriptor, number)
    if forks:
        fork = multiprocessing.get_context("fork")
        multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]
    sys.argv = [module, *arguments]
    if module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


class Program:
    """`python -m module arguments`, or `python file.py arguments`, with the part of
    `subprocess.Popen` that tests use.

    It leads a session of its own, works in the root of the project, and reads nothing.

    Args:
        module: what is run as `__main__`.
        arguments: words of its command line.
        forks: whether processes that it starts by `multiprocessing` are forked from it; only where
            it has not computed anything before.
        variables: of its environment, besides those of the tests.
    """

    def __init__(
        self, module: str, *arguments: str | Path, forks: bool = False, **variables: str
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="program-")
        self._outputs = tuple(Path(self._folder.name, name) for name in ("output", "errors"))
        for path in self._outputs:
            path.touch()
        outputs = tuple(map(str, self._outputs))
        environment = os.environ | variables
        order = module, [str(argument) for argument in arguments], outputs, environment, forks
        self._process: Any = CONTEXT.Process(target=_become, args=order)
        self._process.start()

    @property
    def pid(self) -> int:
        """Process id, and that of its group."""
        return int(self._process.pid)

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self.poll()

    def poll(self) -> int | None:
        """Returns the exit status, or None while it runs."""
        status: int | None = self._process.exitcode
        return status

    def communicate(self, timeout: float = 60.0) -> tuple[str, str]:
        """Returns output and errors, once it has ended.

        Args:
            timeout: seconds, those left out in which it waited for a core.

        Raises:
            subprocess.TimeoutExpired: it has not ended; its group was killed.
        """
        clock = FairClock([self.pid])
        while self._process.is_alive():
            self._process.join(0.5)
            if clock.elapsed_s() > timeout:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                self._process.join()
                raise subprocess.TimeoutExpired(self._process.name, timeout)
        output, errors = (path.read_text(errors="replace") for path in self._outputs)
        return output, errors


def run(
    module: str, *arguments: str | Path, forks: bool = False, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end."""
    program = Program(module, *arguments, forks=forks)
    output, errors = program.communicate(timeout)
    status = program.poll()
    assert status is not None
    return subprocess.CompletedProcess([module, *map(str, arguments)], status, output, errors)
