"""Where a drill happens: the training program, its ranks forked from this warm process, and what they leave.

Importing PyTorch takes longer than a whole run of a model this small. The process that runs drills imports
all that a rank needs, never uses it, and forks: a launcher that forks its ranks, or ranks side by side as
torchrun would start them. Everything else is the program as people run it, from its command line on.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardgrad.drills.hosts import Hosts
from shardgrad.drills.saboteur import Plan, Trace, arm
from shardgrad.train import launch, loop, spawn

__all__ = ["PATIENT_S", "Command", "Outcome", "Program", "Stage", "losses", "orphaned_segments"]

STEPS, EVERY = 6, 2
TIMEOUT_S = 8.0
PATIENT_S = 60.0  # where nothing is to break: a busy machine may be slow
_SEQUENCES = 12  # in a global batch: every number of ranks up to 4 divides it
_POLL_S = 0.02
_SEGMENTS = re.compile(r"torch_(\d+)_")  # of shared memory, with the process that made them
# What every rank imports late: once here, so that those that are forked have it.
_WARM = (launch, loop, *map(importlib.import_module, ("torch._dynamo", "torch.onnx", "numpy.random")))

Command = Callable[[Sequence[str]], None]


@dataclass(frozen=True)
class Program:
    """How the training program is started.

    Args:
        ranks: processes.
        options: of `shardgrad train`, added to those that make it small.
        launched: by a launcher with a rank in each process, instead of `--ranks`.
        hosts: number of hosts to lie on, with `launched`: ranks are dealt out in turn.
    """

    ranks: int = 2
    options: tuple[str, ...] = ()
    launched: bool = False
    hosts: int = 1

    def arguments(self, folder: Path) -> list[str]:
        """Of a new run."""
        small = {"width": 16, "layers": 2, "hidden": 32, "heads": 2, "kv_heads": 2}
        overrides = [word for key, value in small.items() for word in ("--override", f"{key}={value}")]
        numbers: dict[str, Any] = {
            "--steps": STEPS,
            "--checkpoint-every": EVERY,
            "--keep": 2,
            "--batch-size": _SEQUENCES // self.ranks,
            "--seq-len": 16,
            "--log-every": 1,
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
        """Of a run to go on with, perhaps on another number of ranks."""
        sized = [] if self.launched else ["--ranks", str(ranks or self.ranks)]
        if "--mesh" in self.options and ranks is None:
            sized = list(self.options[self.options.index("--mesh") :][:2])
        return ["train", "--resume", str(folder), "--timeout", str(PATIENT_S), *sized]


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        statuses: exit status of the launcher, or of each rank; negative for a signal, None if it had to be
            killed at the end of the bound.
        words: what was printed to standard error.
        trace: of the deed; None if its spot never came by.
        took_s: from the deed to the last exit, or from the start without a deed.
        left: processes that were still there afterwards; they were ended.
        litter: segments of shared memory, and temporary files of ours, that were still there.
    """

    statuses: tuple[int | None, ...]
    words: str
    trace: Trace | None
    took_s: float
    left: tuple[int, ...]
    litter: tuple[str, ...]

    @property
    def ended(self) -> bool:
        """Whether everything ended by itself."""
        return None not in self.statuses and not self.left

    @property
    def succeeded(self) -> bool:
        """Whether every status is 0."""
        return all(status == 0 for status in self.statuses)


class Stage:
    """Runs programs in a folder of their own, one at a time.

    Args:
        command: the command line: `shardgrad`, given its arguments.
        folder: for runs and traces; it has to exist.
        bound_s: from the deed to the last exit; what takes longer is ended, and counts as a hang.
    """

    def __init__(self, command: Command, folder: Path, *, bound_s: float) -> None:
        self._command = command
        self.folder = folder
        self.bound_s = bound_s

    def run(self, program: Program, arguments: Sequence[str], plan: Plan | None = None) -> Outcome:
        """Runs it to its end, with the saboteur inside if there is a plan."""
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
            told = Trace.read(trace)
            took_s = time.monotonic() - (began_s if told is None else told.at_s)
        words = errors.read_text(encoding="utf-8", errors="replace") if errors.exists() else ""
        litter = [*(orphaned_segments() - shared), *os.listdir(temporary)]
        return Outcome(tuple(statuses), words, told, took_s, left, tuple(litter))

    def _wait(
        self, leaders: list[int], trace: Path, hosts: Hosts
    ) -> tuple[list[int | None], tuple[int, ...]]:
        """Exit statuses of the leaders, None for those that took longer than the bound; and who is left then.

        A rank that was stopped, and is the last one, is ended, as launchers do once others have failed.
        """
        statuses: dict[int, int] = {}
        deadline_s = time.monotonic() + 4 * self.bound_s  # until a deed sets it
        told: Trace | None = None
        while time.monotonic() < deadline_s:
            hosts.obey()
            for pid in set(leaders) - set(statuses):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
            running = set(leaders) - set(statuses)
            if told is None:
                told = Trace.read(trace)
                deadline_s = deadline_s if told is None else told.at_s + self.bound_s
            elif len(leaders) > 1 and running == {told.pid}:
                os.kill(told.pid, signal.SIGKILL)
            if not running and not _members(leaders):
                break
            time.sleep(_POLL_S)
        left = _members(leaders)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for pid in set(leaders) - set(statuses):
            os.waitpid(pid, 0)
        return [statuses.get(pid) for pid in leaders], left


def orphaned_segments() -> set[str]:
    """Names of torch's segments of shared memory whose process has ended."""
    made = {name: _SEGMENTS.match(name) for name in os.listdir("/dev/shm")}
    return {name for name, by in made.items() if by is not None and not Path("/proc", by[1]).exists()}


def losses(folder: Path) -> dict[int, float]:
    """Every step's training loss, and under -1 the last validation's, from a run folder."""
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
    """Makes the launcher in this process fork its ranks, where else it would start fresh interpreters."""

    class Forking:
        """Stands for the `multiprocessing` module."""

        @staticmethod
        def get_context(method: str) -> Any:
            return multiprocessing.get_context("fork")

    vars(spawn)["multiprocessing"] = Forking


def _fork(main: Callable[[], None], errors: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Runs `main` in a child that leads a session of its own; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 70  # of a child that failed outside of the program
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
    """Forks ranks side by side, as torchrun starts them."""
    address, port = hosts.start_store(ranks)
    settle = partial(_settle, ranks=ranks, address=address, port=port, hosts=hosts)
    return [_fork(main, errors, prepare=partial(settle, rank)) for rank in range(ranks)]


def _settle(rank: int, ranks: int, address: str, port: int, hosts: Hosts) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    hosts.move_to(rank % hosts.count)


def _members(leaders: Sequence[int]) -> tuple[int, ...]:
    """The processes of the sessions that these processes lead, or led."""
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
