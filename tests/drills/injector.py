"""The fault injector: waits inside a rank for a place in the program and runs an action there.

`python -m tests.drills.injector PLAN TRACE WORDS` is `shardgrad WORDS` with the fault of a plan.
The training program has no code for that: functions are wrapped in the process that the ranks are
forked from, and file operations are observed through Python's audit events.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardgrad.diagnosis.flight_recorder import FlightRecorder, GroupLog, recorder
from shardgrad.engine.grad_group import GradGroup
from shardgrad.engine.param_group import ParamGroup, ParamState
from shardgrad.engine.unit import units_under
from shardgrad.programs.cli import main
from shardgrad.programs.train import model
from shardgrad.programs.train.corpus import Sampler
from shardgrad.programs.train.step import TrainStep

_HOUR_S = 3600.0
_WRITES = ("open", "os.rename", "os.remove", "os.mkdir")
_FILE_EVENTS = (*_WRITES, "os.rmdir", "os.link", "shutil.rmtree")


@dataclass(frozen=True)
class Plan:
    """One fault to inject.

    Attributes:
        action: a key of `_ACTIONS`.
        rank: the rank that runs the action.
        step: the step during which it does.
        part: phase of the step in the flight recorder, "batch", or "file": what is done to files of
            checkpoints.
        number: which collective of the phase, or which operation on files, from 1; 0 is where the
            phase begins.
        seconds: how long, for actions that take time.
    """

    action: str
    rank: int
    step: int
    part: str
    number: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Trace:
    """What is written before the action: where it ran, and `time.monotonic()`, which all processes
    of a machine share.
    """

    rank: int
    pid: int
    at_s: float
    step: int
    part: str

    @classmethod
    def read(cls, path: Path) -> Trace | None:
        """Returns the trace, or None if the program has not come to the place."""
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


class FaultInjector:
    """Runs the action of a plan once, at its place.

    Args:
        plan: the fault to inject.
        trace: file to write the `Trace` into, before the action.
    """

    def __init__(self, plan: Plan, trace: Path) -> None:
        self.plan = plan
        self._trace = trace
        self._count = 0
        self._is_done = False
        self.model: torch.nn.Module | None = None

    def _is_here(self, part: str) -> bool:
        is_mine = os.environ.get("RANK") == str(self.plan.rank) and recorder.step == self.plan.step
        return is_mine and not self._is_done and self.plan.part == part

    def entered(self, part: str) -> None:
        """Called when a phase of a step begins."""
        if self._is_here(part):
            self._count = 0
            if self.plan.number == 0:
                self._act()

    def counts(self, part: str) -> None:
        """Called before a collective is launched, or a file is touched."""
        if self._is_here(part):
            self._count += 1
            if self._count == self.plan.number:
                self._act()

    def _act(self) -> None:
        self._is_done = True
        at_s = time.monotonic()
        trace = Trace(self.plan.rank, os.getpid(), at_s, recorder.step, recorder.phase)
        write_at_once(self._trace, json.dumps(asdict(trace)))
        _ACTIONS[self.plan.action](self)


def write_at_once(path: Path, text: str) -> None:
    """Writes a file that nobody sees in part."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def arm(plan: Plan, trace: Path) -> None:
    """Installs the injector in this process and in all that are forked from it."""
    injector = FaultInjector(plan, trace)
    _before(GroupLog, "record", lambda *_: injector.counts(recorder.phase))
    _before(Sampler, "batch", lambda *_: injector.entered("batch"))
    _before(TrainStep, "__init__", lambda _step, state, *_: setattr(injector, "model", state.model))
    enter = FlightRecorder.enter

    @functools.wraps(enter)
    def entered(self: FlightRecorder, part: str, **facts: Any) -> Any:
        result = enter(self, part, **facts)
        injector.entered(part)
        return result

    setattr(FlightRecorder, enter.__name__, entered)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _FILE_EVENTS and _is_of_checkpoints(arguments):
            injector.counts("file")

    sys.addaudithook(hear)


def _is_of_checkpoints(arguments: tuple[Any, ...]) -> bool:
    return "/checkpoints/" in f"{arguments[0]}/"


def _before(home: type, name: str, listen: Callable[..., Any]) -> None:
    """Wraps a method so that `listen` runs before each call."""
    inner = getattr(home, name)

    @functools.wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        listen(*args, **kwargs)
        return inner(*args, **kwargs)

    setattr(home, name, wrapped)


# -- actions


def _signal(number: signal.Signals) -> Callable[[FaultInjector], None]:
    def action(injector: FaultInjector) -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.05)  # a signal may arrive a little later

    return action


def _raise(error: Callable[[], Exception]) -> Callable[[FaultInjector], None]:
    def action(injector: FaultInjector) -> None:
        raise error()

    return action


def _refuse_files(number: int) -> Callable[[FaultInjector], None]:
    """Makes every later operation on a checkpoint's files fail as on a full or read-only disk."""

    def action(injector: FaultInjector) -> None:
        def hear(event: str, arguments: tuple[Any, ...]) -> None:
            is_write = event != "open" or any(flag in str(arguments[1]) for flag in "wax+")
            if event in _WRITES and is_write and _is_of_checkpoints(arguments):
                raise OSError(number, os.strerror(number), str(arguments[0]))

        sys.addaudithook(hear)
        raise OSError(number, os.strerror(number))

    return action


def _limit(which: int, value: Callable[[], int]) -> Callable[[FaultInjector], None]:
    def action(injector: FaultInjector) -> None:
        resource.setrlimit(which, (value(), resource.getrlimit(which)[1]))

    return action


def _next_descriptor() -> int:
    """Returns the descriptor that the next opened file would get."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


def _run_out_of_memory(injector: FaultInjector) -> None:
    torch.empty(2**50, dtype=torch.uint8)  # larger than any memory, so the allocator refuses it


def _interrupt_twice(injector: FaultInjector) -> None:
    """Sends SIGINT twice to the process group, as a terminal does on Ctrl-C."""
    for _ in range(2):
        os.killpg(os.getpgrp(), signal.SIGINT)
        time.sleep(1.3)


def _interrupt_once(injector: FaultInjector) -> None:
    os.killpg(os.getpgrp(), signal.SIGINT)


def _kill_launcher(injector: FaultInjector) -> None:
    os.kill(os.getppid(), signal.SIGKILL)


def _turn_clock(hours: float) -> Callable[[FaultInjector], None]:
    def action(injector: FaultInjector) -> None:
        true_time = time.time
        time.time = lambda: true_time() + hours * _HOUR_S

    return action


def _leave_order(injector: FaultInjector) -> None:
    """Unshards a unit out of order, as a program with a rank-dependent branch would.

    Both units have one size, since gloo ends a process that receives more bytes than it expects.
    """
    inner = ParamGroup.unshard

    def unshard(group: ParamGroup, runtime: Any) -> None:
        units = units_under(injector.model) if injector.model is not None else []
        others = [each for unit in units for each in unit.groups if each is not group]
        alike = [
            each
            for each in others
            if each.shard.numel() == group.shard.numel() and each.state is ParamState.SHARDED
        ]
        if alike and group.state is ParamState.SHARDED:
            setattr(ParamGroup, unshard.__name__, inner)
            alike[0].unshard(runtime)
        inner(group, runtime)

    setattr(ParamGroup, unshard.__name__, unshard)


def _poison_gradient(injector: FaultInjector) -> None:
    """Sets one element of the next gradient on this rank to NaN."""
    inner = GradGroup.take

    def take(grads: GradGroup, unsharded: torch.Tensor, grad: torch.Tensor, streams: Any) -> bool:
        if unsharded.grad is not None and unsharded.ndim == 2:
            setattr(GradGroup, take.__name__, inner)
            unsharded.grad.view(-1)[0] = float("nan")
        return inner(grads, unsharded, grad, streams)

    setattr(GradGroup, take.__name__, take)


def _poison_loss(injector: FaultInjector) -> None:
    """Makes this rank's next loss NaN."""
    names = vars(model)
    inner = names["next_token_loss"]

    def poisoned(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        names["next_token_loss"] = inner
        loss: torch.Tensor = inner(logits, targets, **options)
        return loss * float("nan")

    names["next_token_loss"] = poisoned


def _sleep(injector: FaultInjector) -> None:
    time.sleep(injector.plan.seconds)


_ACTIONS: dict[str, Callable[[FaultInjector], None]] = {
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "terminate": _signal(signal.SIGTERM),
    "crash": _signal(signal.SIGSEGV),
    "abort": _signal(signal.SIGABRT),
    "exit": lambda injector: os._exit(7),
    "sleep": _sleep,
    "raise": _raise(lambda: ValueError("a mistake in the program")),
    "end data": _raise(lambda: StopIteration("the data loader has ended")),
    "out of memory": _run_out_of_memory,
    "disk full": _refuse_files(errno.ENOSPC),
    "read-only": _refuse_files(errno.EROFS),
    "file limit": _limit(resource.RLIMIT_FSIZE, lambda: 1000),
    "descriptors": _limit(resource.RLIMIT_NOFILE, _next_descriptor),
    "interrupt": _interrupt_once,
    "interrupt twice": _interrupt_twice,
    "kill launcher": _kill_launcher,
    "clock forward": _turn_clock(24.0),
    "clock back": _turn_clock(-24.0),
    "leave order": _leave_order,
    "poison gradient": _poison_gradient,
    "poison loss": _poison_loss,
}


if __name__ == "__main__":
    tempfile.tempdir = os.environ["DRILL_TEMPORARY"]
    if sys.argv[1]:
        arm(Plan(**json.loads(sys.argv[1])), Path(sys.argv[2]))
    main(sys.argv[3:], prog_name="shardgrad")
