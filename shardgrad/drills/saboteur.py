"""What breaks a rank from inside: it waits for a spot in the program to come by, and does its deed there.

The program itself knows nothing of it. Functions are wrapped in the process that the ranks are forked from,
and what touches files is heard through Python's audit events, so that no code of the training program is made
for being broken.
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

from shardgrad.diagnosis.flight_recorder import Journal, Line, journal
from shardgrad.diagnosis.rank_status import place_in_words
from shardgrad.engine.grad_collector import Arrivals
from shardgrad.engine.param import local_of, managed_by
from shardgrad.engine.param_group import ParamGroup
from shardgrad.graphs.step import GraphedStep
from shardgrad.training import model
from shardgrad.training.corpus import Sampler
from shardgrad.training.step import TrainStep

__all__ = ["FileSpot", "PartSpot", "Plan", "Spot", "Trace", "arm"]

_HOUR_S = 3600.0
_FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "shutil.rmtree")


@dataclass(frozen=True)
class PartSpot:
    """Inside a part of a step: at its beginning, or as one of its collectives begins.

    Args:
        part: as the journal calls it.
        collective: 0 for the beginning of the part, else the collective counted from 1.
    """

    part: str
    collective: int = 0


@dataclass(frozen=True)
class FileSpot:
    """Before an operation on a file or folder of a checkpoint.

    Args:
        operation: counted from 1.
    """

    operation: int


Spot = PartSpot | FileSpot


@dataclass(frozen=True)
class Plan:
    """What is to happen.

    Args:
        deed: a name in `_DEEDS`.
        rank: who does it.
        step: during which step.
        spot: where in it.
        seconds: for deeds that take time.
    """

    deed: str
    rank: int
    step: int
    spot: Spot
    seconds: float = 0.0


@dataclass(frozen=True)
class Trace:
    """What the saboteur writes down before the deed, for the referee.

    Attributes:
        plan_rank: who.
        at_s: `time.monotonic()`, which all processes of a machine share.
        step: of the journal.
        part: of the journal.
        unit: of the journal.
        recent: the last collectives that this rank had begun, oldest first.
        begun: how many it had begun in each group of ranks, by name.
        pid: of this rank.
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
        """In words, as reports have it."""
        return place_in_words(self.step, self.part, self.unit)

    @classmethod
    def read(cls, path: Path) -> Trace | None:
        """What was written, or None if the spot never came by."""
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return cls(**{**facts, "recent": tuple(facts["recent"])})


class Saboteur:
    """Waits for the plan's spot and does the deed there, once.

    Args:
        plan: what to do.
        trace: file to write before it is done.
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
        """Whether this process is the rank, and this the step, of the plan, and nothing was done yet."""
        here = os.environ.get("RANK") == str(self.plan.rank) and journal.step == self.plan.step
        return here and not self._is_done

    def entered(self, part: str) -> None:
        """A part of a step begins."""
        spot = self.plan.spot
        if self.is_here and isinstance(spot, PartSpot) and spot.part == part:
            self._collectives = 0
            self._about = ""
            if spot.collective == 0:
                self.act()

    def communicates(self, what: str) -> None:
        """A collective is about to begin."""
        self._about = what
        spot = self.plan.spot
        if self.is_here and isinstance(spot, PartSpot) and spot.part == journal.part and spot.collective:
            self._collectives += 1
            if self._collectives == spot.collective:
                self.act()

    def touches(self, path: str) -> None:
        """A file operation is about to begin."""
        spot = self.plan.spot
        if self.is_here and isinstance(spot, FileSpot) and "/checkpoints/" in path + "/":
            self._operations += 1
            if self._operations == spot.operation:
                self.act()

    def act(self) -> None:
        """Writes the trace and does the deed."""
        self._is_done = True
        recent = [entry.what for line in journal.lines() for entry in line.recent][-8:]
        recent += [self._about] if self._about else []
        trace = Trace(
            self.plan.rank,
            time.monotonic(),
            journal.step,
            journal.part,
            journal.unit,
            tuple(recent),
            {line.name: line.count for line in journal.lines()},
            os.getpid(),
        )
        fresh = self._trace.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(trace)), encoding="utf-8")
        fresh.replace(self._trace)
        _DEEDS[self.plan.deed](self)


def arm(plan: Plan, trace: Path) -> None:
    """Makes this process, and all that are forked from it, follow the plan.

    The process is not to be used for anything else.
    """
    saboteur = Saboteur(plan, trace)
    _after(Journal, "enter", lambda _journal, part, **_: saboteur.entered(part))
    _before(Line, "begin", lambda _line, what, _chunk: saboteur.communicates(what))
    _before(Sampler, "batch", lambda *_: saboteur.entered("batch"))
    _before(GraphedStep, "_capture_or_refuse", lambda *_: saboteur.entered("capture"))
    _before(TrainStep, "__init__", lambda _step, state, *_: setattr(saboteur, "model", state.model))

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _FILE_EVENTS:
            saboteur.touches(str(arguments[0]))

    sys.addaudithook(hear)


def _before(home: type, name: str, listen: Callable[..., Any]) -> None:
    """Wraps a method so that somebody hears of each call before it."""
    inner = getattr(home, name)

    @functools.wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        listen(*args, **kwargs)
        return inner(*args, **kwargs)

    setattr(home, name, wrapped)


def _after(home: type, name: str, listen: Callable[..., Any]) -> None:
    """The same, after it."""
    inner = getattr(home, name)

    @functools.wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        listen(*args, **kwargs)
        return result

    setattr(home, name, wrapped)


# -- deeds ------------------------------------------------------------------------------------------------


def _signal(number: signal.Signals) -> Callable[[Saboteur], None]:
    def deed(saboteur: Saboteur) -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.05)  # a signal may arrive a little later

    return deed


def _raise(error: Callable[[], Exception]) -> Callable[[Saboteur], None]:
    def deed(saboteur: Saboteur) -> None:
        raise error()

    return deed


def _refuse_files(number: int) -> Callable[[Saboteur], None]:
    """From now on every operation on a checkpoint's files fails as on a full, or a read-only, disk."""

    def deed(saboteur: Saboteur) -> None:
        def hear(event: str, arguments: tuple[Any, ...]) -> None:
            is_write = event != "open" or any(flag in str(arguments[1]) for flag in "wax+")
            if event in _FILE_EVENTS[:4] and is_write and "/checkpoints/" in str(arguments[0]) + "/":
                raise OSError(number, os.strerror(number), str(arguments[0]))

        sys.addaudithook(hear)
        raise OSError(number, os.strerror(number))

    return deed


def _limit(which: int, value: Callable[[], int]) -> Callable[[Saboteur], None]:
    def deed(saboteur: Saboteur) -> None:
        resource.setrlimit(which, (value(), resource.getrlimit(which)[1]))

    return deed


def _next_descriptor() -> int:
    """The number that the next opened file would get."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


def _run_out_of_memory(saboteur: Saboteur) -> None:
    torch.empty(2**50, dtype=torch.uint8)  # refused by the allocator, as any block is that does not fit


def _interrupt_twice(saboteur: Saboteur) -> None:
    """As a person at a terminal, whose Ctrl-C goes to the launcher and to every rank."""
    for _ in range(2):
        os.killpg(os.getpgrp(), signal.SIGINT)
        time.sleep(1.3)


def _interrupt_once(saboteur: Saboteur) -> None:
    os.killpg(os.getpgrp(), signal.SIGINT)


def _kill_launcher(saboteur: Saboteur) -> None:
    os.kill(os.getppid(), signal.SIGKILL)


def _lose_store(saboteur: Saboteur) -> None:
    """Ends the process that hosts the store, and this rank, so that the others have something to ask."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(os.environ["DRILL_STORE_PID"]), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _turn_clock(hours: float) -> Callable[[Saboteur], None]:
    def deed(saboteur: Saboteur) -> None:
        true_time = time.time
        time.time = lambda: true_time() + hours * _HOUR_S

    return deed


def _leave_order(saboteur: Saboteur) -> None:
    """Gathers a unit before its turn, as a program with a wrong branch would.

    One of the same size as that whose turn it is: gloo ends a process that gets more than it expects.
    """
    inner = ParamGroup.unshard

    def unshard(group: ParamGroup, runtime: Any) -> None:
        others = [each for unit in _units(saboteur) for each in unit.groups if each is not group]
        alike = [each for each in others if each.shard.numel() == group.shard.numel() and each.is_sharded]
        if alike and group.is_sharded:
            setattr(ParamGroup, unshard.__name__, inner)
            alike[0].unshard(runtime)
        inner(group, runtime)

    setattr(ParamGroup, unshard.__name__, unshard)


def _units(saboteur: Saboteur) -> list[Any]:
    from shardgrad.engine.root import units_under

    return units_under(saboteur.model) if saboteur.model is not None else []


def _poison_gradient(saboteur: Saboteur) -> None:
    """Makes the next gradient that arrives here NaN in one element."""
    inner = Arrivals.take

    def take(arrivals: Arrivals, unsharded: torch.Tensor, streams: Any) -> bool:
        if unsharded.grad is not None and unsharded.ndim == 2:
            setattr(Arrivals, take.__name__, inner)
            unsharded.grad.view(-1)[0] = float("nan")
        return inner(arrivals, unsharded, streams)

    setattr(Arrivals, take.__name__, take)


def _poison_loss(saboteur: Saboteur) -> None:
    """Makes this rank's next loss NaN."""
    names = vars(model)
    inner = names["next_token_loss"]

    def poisoned(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        names["next_token_loss"] = inner
        loss: torch.Tensor = inner(logits, targets, **options)
        return loss * float("nan")

    names["next_token_loss"] = poisoned


def _flip_parameter(saboteur: Saboteur) -> None:
    """Turns one bit of one weight on this rank, as failing memory would."""
    parameters = [] if saboteur.model is None else [p for p in saboteur.model.parameters() if p.ndim == 2]
    for parameter in parameters:
        managed = managed_by(parameter)
        local = local_of(parameter if managed is None else managed.sharded).detach()
        if local.numel():
            local.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)
            return


def _sleep(saboteur: Saboteur) -> None:
    time.sleep(saboteur.plan.seconds)


def _cut_link(saboteur: Saboteur) -> None:
    """Asks for the cable between the hosts to be pulled; for good if no time is given."""
    request = Path(os.environ["DRILL_CUT"])
    fresh = request.with_suffix(".new")
    fresh.write_text(str(saboteur.plan.seconds or ""), encoding="ascii")
    fresh.replace(request)
    time.sleep(0.2)  # for whoever pulls it


_DEEDS: dict[str, Callable[[Saboteur], None]] = {
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "terminate": _signal(signal.SIGTERM),
    "crash": _signal(signal.SIGSEGV),
    "abort": _signal(signal.SIGABRT),
    "exit": lambda saboteur: os._exit(7),
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
