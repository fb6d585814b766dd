"""Runs the training program in forked processes and collects what they leave behind.

Importing PyTorch takes longer than a whole run of a model this small. The process that runs drills
imports everything a rank needs, does not use it, and forks: a launcher that forks its ranks, or all
ranks, as torchrun starts them. Everything else is the program as users run it, beginning with its
command line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardgrad.programs.train import launch, loop
from tests.drills.hosts import Hosts
from tests.drills.injector import Plan, Trace, arm
from tests.support.processes import orphaned_segments

__all__ = [
    "PATIENT_S",
    "Command",
    "Outcome",
    "Program",
    "ProgramRunner",
    "losses",
]

STEPS, EVERY = 6, 2
TIMEOUT_S = 8.0
PATIENT_S = 60.0  # where nothing is to break: a busy machine may be slow
_SEQUENCES = 12  # in a global batch: every number of ranks up to 4 divides it
_POLL_S = 0.02
# Modules that every rank imports late. Imported here once, so that forked ranks have them.
_WARM = (
    launch,
    loop,
    *map(
        importlib.import_module,
        ("torch._dynamo", "torch.onnx", "numpy.random", "torch.distributed.run"),
    ),
)

Command = Callable[[Sequence[str]], None]


@dataclass(frozen=True)
class Program:
    """How the training program is started.

    Args:
        ranks: number of ranks.
        options: options of `shardgrad train`, in addition to those that make the model small.
        launched: start one process per rank, as torchrun does, instead of passing `--ranks`.
        hosts: number of hosts, with `launched`; ranks are assigned round-robin.
    """

    ranks: int = 2
    options: tuple[str, ...] = ()
    launched: bool = False
    hosts: int = 1

    def arguments(self, folder: Path) -> list[str]:
        """Returns the command line of a new run."""
        small = {"width": 16, "layers": 2, "hidden": 32, "heads": 2, "kv_heads": 2}
        overrides = [
            word for key, value in small.items() for word in ("--override", f"{key}={value}")
        ]
        numbers: dict[str, Any] = {
            "--steps": STEPS,
            "--checkpoint-every": EVERY,
            "--keep": 2,
            "--batch-size": _SEQUENCES // self.ranks,
            "--seq-len": 16,
            "--log-every": 1,
            "--sample-bytes": 0,
            "--eval-every": STEPS,
            "--eval-samples": 4,
            "--warmup-steps": 2,
            "--timeout": TIMEOUT_S,
            "--data": argparse.__file__,
            "--run-dir": folder,
        }
        sized = [] if self.launched else ["--ranks", str(self.ranks)]
        flags = [word for flag, value in numbers.items() for word in (flag, str(value))]
        return ["train", "--device", "cpu", "--no-plot", *overrides, *flags, *sized, *self.options]

    def resumption(self, folder: Path, *, ranks: int | None = None) -> list[str]:
        """Returns the command line that resumes a run, by default on the same number of ranks."""
        sized = [] if self.launched else ["--ranks", str(ranks or self.ranks)]
        if "--mesh" in self.options and ranks is None:
            sized = list(self.options[self.options.index("--mesh") :][:2])
        return ["train", "--resume", str(folder), "--timeout", str(PATIENT_S), *sized]


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        statuses: exit status of the launcher, or of each rank; negative for a signal, None if the
            process was killed when the time bound was reached.
        words: text printed to standard error.
        trace: trace of the injected action; None if the program never reached the injection point.
        took_s: seconds from the action, or from the start if there is no plan, to the last exit.
        left: ids of processes that were still running; they were killed.
        litter: names of shared-memory segments and temporary files that the run left.
    """

    statuses: tuple[int | None, ...]
    words: str
    trace: Trace | None
    took_s: float
    left: tuple[int, ...]
    litter: tuple[str, ...]

    @property
    def ended(self) -> bool:
        """Whether every process exited without being killed by the runner."""
        return None not in self.statuses and not self.left

    @property
    def succeeded(self) -> bool:
        """Whether every status is 0."""
        return all(status == 0 for status in self.statuses)


class ProgramRunner:
    """Runs programs in one folder, one at a time.

    Args:
        command: the `shardgrad` command line as a function of its arguments.
        folder: folder for runs and traces; it must exist.
        bound_s: seconds from the action to the last exit; a process that takes longer is killed and
            counts as hung.
    """

    def __init__(self, command: Command, folder: Path, *, bound_s: float) -> None:
        self._command = command
        self.folder = folder
        self.bound_s = bound_s

    def run(self, program: Program, arguments: Sequence[str], plan: Plan | None = None) -> Outcome:
        """Runs a program to its end, with the injector installed if there is a plan."""
        trace = self.folder / "trace.json"
        trace.unlink(missing_ok=True)
        errors = self.folder / "errors.txt"
        errors.unlink(missing_ok=True)
        began_s = time.monotonic()
        temporary = self.folder / "temporary"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        shared = orphaned_segments()

        def main() -> None:
            tempfile.tempdir = str(temporary)
            if plan is not None:
                arm(plan, trace)
            _fork_ranks()
            self._command(arguments)

        with Hosts(program.hosts, self.folder) as hosts:
            if program.launched:
                leaders = _launch(program.ranks, main, errors, hosts)
            else:
                leaders = [_fork(main, errors)]
            statuses, left = self._wait(leaders, trace, hosts)
            found = Trace.read(trace)
            took_s = time.monotonic() - (began_s if found is None else found.at_s)
        words = errors.read_text(encoding="utf-8", errors="replace") if errors.exists() else ""
        litter = [*(orphaned_segments() - shared), *os.listdir(temporary)]
        return Outcome(tuple(statuses), words, found, took_s, left, tuple(litter))

    def _wait(
        self, leaders: list[int], trace: Path, hosts: Hosts
    ) -> tuple[list[int | None], tuple[int, ...]]:
        """Returns the exit statuses of the leaders, None after the bound, and the processes still
        running.

        A stopped rank that is the last one running is killed, as launchers do after another rank
        has failed.
        """
        statuses: dict[int, int] = {}
        deadline_s = time.monotonic() + 4 * self.bound_s  # until an action sets it
        found: Trace | None = None
        while time.monotonic() < deadline_s:
            hosts.obey()
            for pid in set(leaders) - set(statuses):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
            running = set(leaders) - set(statuses)
            if found is None:
                found = Trace.read(trace)
                deadline_s = deadline_s if found is None else found.at_s + self.bound_s
            elif len(leaders) > 1 and running == {found.pid}:
                os.kill(found.pid, signal.SIGKILL)
            if not running and not _members(leaders):
                break
            time.sleep(_POLL_S)
        left = _members(leaders)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for pid in set(leaders) - set(statuses):
            os.waitpid(pid, 0)
        return [statuses.get(pid) for pid in leaders], left


def losses(folder: Path) -> dict[int, float]:
    """Returns the training loss of every step of a run folder, and under -1 the last validation
    loss.
    """
    found = {}
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event["event"] == "step":
            found[event["step"]] = event["loss"]
        elif event["event"] == "validation":
            found[-1] = event["loss"]
    return found


def _fork_ranks() -> None:
    """Makes the launcher in this process fork its ranks instead of starting new interpreters."""
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]


def _fork(
    main: Callable[[], None], errors: Path, prepare: Callable[[], None] = lambda: None
) -> int:
    """Runs `main` in a child that leads a new session; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 70  # a child that failed outside of the program
    try:
        os.setsid()
        descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        silence = os.open(os.devnull, os.O_RDWR)
        for number, source in ((0, silence), (1, silence), (2, descriptor)):
            os.dup2(source, number)
        prepare()
        main()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    finally:
        os._exit(status)


def _launch(ranks: int, main: Callable[[], None], errors: Path, hosts: Hosts) -> list[int]:
    """Forks one process per rank, as torchrun does."""
    address, port = hosts.start_store(ranks)
    settle = partial(_settle, ranks=ranks, address=address, port=port, hosts=hosts)
    return [_fork(main, errors, prepare=partial(settle, rank)) for rank in range(ranks)]


def _settle(rank: int, ranks: int, address: str, port: int, hosts: Hosts) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    hosts.move_to(rank % hosts.count)


def _members(leaders: Sequence[int]) -> tuple[int, ...]:
    """Returns the running processes of the sessions that these processes lead or led."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[3]) in leaders and fields[0] != "Z":
            found.append(int(entry.name))
    return tuple(found)
