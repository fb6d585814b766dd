"""The fault injector: waits inside a rank for a point in the program and runs an action there.

The training program contains no code for fault injection. The injector wraps functions in the
process that the ranks are forked from, and observes file operations through Python's audit events.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardgrad.diagnosis.flight_recorder import FlightRecorder, GroupLog, recorder
from shardgrad.diagnosis.rank_status import describe_location
from shardgrad.engine.grad_collector import GradCollector
from shardgrad.engine.param import local_of, managed_by
from shardgrad.engine.param_group import ParamGroup, ParamState
from shardgrad.programs.train import model
from shardgrad.programs.train.corpus import Sampler
from shardgrad.programs.train.step import TrainStep

__all__ = ["FilePoint", "InjectionPoint", "PhasePoint", "Plan", "Trace", "arm"]

_HOUR_S = 3600.0
_FILE_EVENTS = (
    "open",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "shutil.rmtree",
)


@dataclass(frozen=True)
class PhasePoint:
    """A point in a phase of a step: its beginning, or the launch of one of its collectives.

    Args:
        part: name of the phase in the flight recorder.
        collective: 0 for the beginning of the phase, else the number of the collective, counted
            from 1.
    """

    part: str
    collective: int = 0


@dataclass(frozen=True)
class FilePoint:
    """A point before an operation on a file or folder of a checkpoint.

    Args:
        operation: number of the operation, counted from 1.
    """

    operation: int


InjectionPoint = PhasePoint | FilePoint


@dataclass(frozen=True)
class Plan:
    """One fault to inject.

    Args:
        action: a key of `_ACTIONS`.
        rank: the rank that runs the action.
        step: the step during which it runs.
        point: where in the step.
        seconds: duration, for actions that have one.
    """

    action: str
    rank: int
    step: int
    point: InjectionPoint
    seconds: float = 0.0


@dataclass(frozen=True)
class Trace:
    """What the injector records before the action, for the judge.

    Attributes:
        plan_rank: rank that runs the action.
        at_s: `time.monotonic()`, which all processes of a machine share.
        step: step in the flight recorder.
        part: phase of the step in the flight recorder.
        unit: unit in the flight recorder.
        recent: the last collectives that this rank launched, oldest first.
        begun: number of collectives that this rank launched, by process group.
        pid: process id of this rank.
    """

    plan_rank: int
    at_s: float
    step: int
    part: str
    unit: str
    recent: tuple[str, ...]
    begun: dict[str, int]
    pid: int

    @property
    def place(self) -> str:
        """The location in the form that reports use."""
        return describe_location(self.step, self.part, self.unit)

    @classmethod
    def read(cls, path: Path) -> Trace | None:
        """Returns the recorded trace, or None if the program never reached the point."""
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return cls(**{**facts, "recent": tuple(facts["recent"])})


class FaultInjector:
    """Runs the action of a plan once, at its injection point.

    Args:
        plan: the fault to inject.
        trace: file to write the `Trace` into, before the action.
    """

    def __init__(self, plan: Plan, trace: Path) -> None:
        self.plan = plan
        self._trace = trace
        self._collectives = 0
        self._operations = 0
        self._about = ""
        self._is_done = False
        self.model: torch.nn.Module | None = None

    @property
    def is_here(self) -> bool:
        """Whether this is the plan's rank and step, and the action has not run yet."""
        here = os.environ.get("RANK") == str(self.plan.rank) and recorder.step == self.plan.step
        return here and not self._is_done

    def entered(self, part: str) -> None:
        """Called when a phase of a step begins."""
        point = self.plan.point
        if self.is_here and isinstance(point, PhasePoint) and point.part == part:
            self._collectives = 0
            self._about = ""
            if point.collective == 0:
                self.act()

    def communicates(self, what: str) -> None:
        """Called before a collective is launched."""
        self._about = what
        point = self.plan.point
        if (
            self.is_here
            and isinstance(point, PhasePoint)
            and point.part == recorder.phase
            and point.collective
        ):
            self._collectives += 1
            if self._collectives == point.collective:
                self.act()

    def touches(self, path: str) -> None:
        """Called before a file operation."""
        point = self.plan.point
        if self.is_here and isinstance(point, FilePoint) and "/checkpoints/" in path + "/":
            self._operations += 1
            if self._operations == point.operation:
                self.act()

    def act(self) -> None:
        """Writes the trace and runs the action."""
        self._is_done = True
        recent = [entry.name for line in recorder.group_logs() for entry in line.recent][-8:]
        recent += [self._about] if self._about else []
        trace = Trace(
            self.plan.rank,
            time.monotonic(),
            recorder.step,
            recorder.phase,
            recorder.unit,
            tuple(recent),
            {line.name: line.count for line in recorder.group_logs()},
            os.getpid(),
        )
        fresh = self._trace.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(trace)), encoding="utf-8")
        fresh.replace(self._trace)
        _ACTIONS[self.plan.action](self)


def arm(plan: Plan, trace: Path) -> None:
    """Installs the injector in this process and in all processes forked from it afterwards.

    There is no way to remove it: use a process that ends with the drill.
    """
    injector = FaultInjector(plan, trace)
    _after(FlightRecorder, "enter", lambda _recorder, part, **_: injector.entered(part))
    _before(GroupLog, "record", lambda _line, what, _chunk: injector.communicates(what))
    _before(Sampler, "batch", lambda *_: injector.entered("batch"))
    _before(TrainStep, "__init__", lambda _step, state, *_: setattr(injector, "model", state.model))

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _FILE_EVENTS:
            injector.touches(str(arguments[0]))

    sys.addaudithook(hear)


def _before(home: type, name: str, listen: Callable[..., Any]) -> None:
    """Wraps a method so that `listen` runs before each call."""
    inner = getattr(home, name)

    @functools.wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        listen(*args, **kwargs)
        return inner(*args, **kwargs)

    setattr(home, name, wrapped)


def _after(home: type, name: str, listen: Callable[..., Any]) -> None:
    """Wraps a method so that `listen` runs after each call."""
    inner = getattr(home, name)

    @functools.wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        listen(*args, **kwargs)
        return result

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
            if (
                event in _FILE_EVENTS[:4]
                and is_write
                and "/checkpoints/" in str(arguments[0]) + "/"
            ):
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


def _lose_store(injector: FaultInjector) -> None:
    """Kills the process that hosts the store, and this rank, so that the other ranks query the
    store.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(os.environ["DRILL_STORE_PID"]), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


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
        others = [each for unit in _units(injector) for each in unit.groups if each is not group]
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


def _units(injector: FaultInjector) -> list[Any]:
    from shardgrad.engine.unit import units_under

    return units_under(injector.model) if injector.model is not None else []


def _poison_gradient(injector: FaultInjector) -> None:
    """Sets one element of the next gradient on this rank to NaN."""
    inner = GradCollector.take

    def take(
        collector: GradCollector, unsharded: torch.Tensor, grad: torch.Tensor, streams: Any
    ) -> bool:
        if unsharded.grad is not None and unsharded.ndim == 2:
            setattr(GradCollector, take.__name__, inner)
            unsharded.grad.view(-1)[0] = float("nan")
        return inner(collector, unsharded, grad, streams)

    setattr(GradCollector, take.__name__, take)


def _poison_loss(injector: FaultInjector) -> None:
    """Makes this rank's next loss NaN."""
    names = vars(model)
    inner = names["next_token_loss"]

    def poisoned(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        names["next_token_loss"] = inner
        loss: torch.Tensor = inner(logits, targets, **options)
        return loss * float("nan")

    names["next_token_loss"] = poisoned


def _flip_parameter(injector: FaultInjector) -> None:
    """Flips one bit of one weight on this rank, as failing memory would."""
    parameters = (
        [] if injector.model is None else [p for p in injector.model.parameters() if p.ndim == 2]
    )
    for parameter in parameters:
        managed = managed_by(parameter)
        local = local_of(parameter if managed is None else managed.sharded).detach()
        if local.numel():
            local.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)
            return


def _sleep(injector: FaultInjector) -> None:
    time.sleep(injector.plan.seconds)


def _cut_link(injector: FaultInjector) -> None:
    """Requests that the link between the hosts be cut, permanently if the plan gives no
    duration.
    """
    request = Path(os.environ["DRILL_CUT"])
    fresh = request.with_suffix(".new")
    fresh.write_text(str(injector.plan.seconds or ""), encoding="ascii")
    fresh.replace(request)
    time.sleep(0.2)  # until the runner has seen the request


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
    "lose store": _lose_store,
    "clock forward": _turn_clock(24.0),
    "clock back": _turn_clock(-24.0),
    "leave order": _leave_order,
    "poison gradient": _poison_gradient,
    "poison loss": _poison_loss,
    "flip parameter": _flip_parameter,
    "cut link": _cut_link,
}
