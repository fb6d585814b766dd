"""The catalogue: every kind of fault, where it is injected, and what has to come of it."""

from __future__ import annotations

import errno
import gc
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch

from shardgrad.engine.grad_group import GradGroup
from shardgrad.engine.param_group import ParamGroup, ParamState
from shardgrad.programs.train import model

STEPS, EVERY = 6, 2  # steps of a run, and after how many of them a checkpoint is written
TIMEOUT_S = 8.0

_WRITE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir")
FILE_EVENTS = (*_WRITE_EVENTS, "os.rmdir", "os.link", "shutil.rmtree")

Place = tuple[str, int]  # `part` and `number` of a plan


class Plan(NamedTuple):
    """One fault to inject.

    Attributes:
        fault: its name.
        rank: the rank that runs the action.
        step: the step during which it does.
        part: phase of the step in the flight recorder, "batch", or "file": what is done to files of
            checkpoints.
        number: which collective of the phase, or which operation on files, from 1; 0 is where the
            phase begins.
    """

    fault: str
    rank: int
    step: int
    part: str
    number: int


# -- actions


def _signal(number: signal.Signals) -> Callable[[], None]:
    def action() -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.05)  # a signal may arrive a little later

    return action


_KILL = _signal(signal.SIGKILL)
_STOP = _signal(signal.SIGSTOP)
_TERMINATE = _signal(signal.SIGTERM)
_CRASH = _signal(signal.SIGSEGV)
_ABORT = _signal(signal.SIGABRT)
_EXIT = partial(os._exit, 7)


def _kill_launcher() -> None:
    os.kill(os.getppid(), signal.SIGKILL)


def _raise(error: Callable[[], Exception]) -> Callable[[], None]:
    def action() -> None:
        raise error()

    return action


_MISTAKE = _raise(lambda: ValueError("a mistake in the program"))
_END_DATA = _raise(lambda: StopIteration("the data loader has ended"))


def _refuse_files(number: int) -> Callable[[], None]:
    """Makes every later operation on a checkpoint's files fail as on a full or read-only disk."""

    def action() -> None:
        def hear(event: str, arguments: tuple[Any, ...]) -> None:
            is_write = event != "open" or any(flag in str(arguments[1]) for flag in "wax+")
            if event in _WRITE_EVENTS and is_write and is_of_checkpoints(arguments):
                raise OSError(number, os.strerror(number), str(arguments[0]))

        sys.addaudithook(hear)
        raise OSError(number, os.strerror(number))

    return action


_FILL_DISK = _refuse_files(errno.ENOSPC)
_PROTECT_DISK = _refuse_files(errno.EROFS)


def is_of_checkpoints(arguments: tuple[Any, ...]) -> bool:
    """Returns whether an audit event is of the files of checkpoints."""
    return "/checkpoints/" in f"{arguments[0]}/"


def _limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _limit_descriptors() -> None:
    """Leaves no descriptor for the next file that is opened."""
    following = os.open(os.devnull, os.O_RDONLY)
    os.close(following)
    highest = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (following, highest))


def _run_out_of_memory() -> None:
    torch.empty(2**50, dtype=torch.uint8)  # larger than any memory, so the allocator refuses it


def _interrupt() -> None:
    """Sends SIGINT to the process group, as a terminal does on Ctrl-C."""
    os.killpg(os.getpgrp(), signal.SIGINT)


def _interrupt_twice() -> None:
    for _ in range(2):
        _interrupt()
        time.sleep(1.3)


def _turn_clock(hours: float) -> Callable[[], None]:
    def action() -> None:
        true_time = time.time
        time.time = lambda: true_time() + hours * 3600.0

    return action


def _leave_order() -> None:
    """Unshards a unit out of order, as a program with a rank-dependent branch would.

    Both units have one size, since gloo ends a process that receives more bytes than it expects.
    """
    inner = ParamGroup.unshard

    def unshard(group: ParamGroup, runtime: Any) -> None:
        alike = [
            each
            for each in gc.get_objects()
            if isinstance(each, ParamGroup)
            and each is not group
            and each.shard.numel() == group.shard.numel()
            and each.state is group.state is ParamState.SHARDED
        ]
        if alike:
            setattr(ParamGroup, unshard.__name__, inner)
            alike[0].unshard(runtime)
        inner(group, runtime)

    setattr(ParamGroup, unshard.__name__, unshard)


def _poison_gradient() -> None:
    """Sets one element of the next gradient on this rank to NaN."""
    inner = GradGroup.take

    def take(grads: GradGroup, unsharded: torch.Tensor, grad: torch.Tensor, streams: Any) -> bool:
        if unsharded.grad is not None and unsharded.ndim == 2:
            setattr(GradGroup, take.__name__, inner)
            unsharded.grad.view(-1)[0] = float("nan")
        return inner(grads, unsharded, grad, streams)

    setattr(GradGroup, take.__name__, take)


def _poison_loss() -> None:
    """Makes this rank's next loss NaN."""
    names = vars(model)
    inner = names["next_token_loss"]

    def poisoned(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        names["next_token_loss"] = inner
        return inner(logits, targets, **options) * float("nan")

    names["next_token_loss"] = poisoned


# -- where, and what has to come of it


class Expectation(Enum):
    """The expected outcome of a fault."""

    ENDS = (
        "every rank exits with a report that names the faulty rank and location; the run can be "
        "resumed"
    )
    SAYS = "every rank exits with a report that names its own location; the run can be resumed"
    SURVIVES = "the run continues, with the same losses"
    STOPS = "the run stops as on request; it can be resumed"


@dataclass(frozen=True)
class Fault:
    """One kind of fault inside a run.

    Attributes:
        name: of the kind.
        action: what the rank does at the place.
        places: of which one is drawn.
        expects: what has to come of it.
        ranks: numbers of ranks, of which one is drawn.
        words: what the report says besides the rank and the step.
        steps: of which one is drawn.
    """

    name: str
    action: Callable[[], None]
    places: tuple[Place, ...]
    expects: Expectation = Expectation.ENDS
    ranks: tuple[int, ...] = (2, 3, 4)
    words: tuple[str, ...] = ()
    steps: tuple[int, ...] = tuple(range(EVERY + 1, STEPS))

    def draw(self, random: random.Random) -> tuple[int, Plan]:
        """Draws a number of ranks and a plan."""
        ranks, (part, number) = random.choice(self.ranks), random.choice(self.places)
        # The first rank creates a checkpoint's folder, index and name; others write a file each.
        rank = 0 if part == "file" and number > 1 else random.randrange(ranks)
        return ranks, Plan(self.name, rank, random.choice(self.steps), part, number)


def _places(part: str, *numbers: int) -> tuple[Place, ...]:
    return tuple((part, number) for number in numbers)


_FORWARD = _places("forward", 0, 0, 1, 2, 3)
_BACKWARD = _places("backward", *range(6))
_OPTIMIZER = _places("optimizer", 0)
_CLIP = _places("clip", 0, 1)
_WRITES = _places("file", *range(1, 13))
_CHECKPOINT = _places("checkpoint", *range(10)) + _WRITES[:2]
_DATA = _places("batch", 0)
_SAVES = (EVERY * 2,)  # the second checkpoint is being written: the first has to stay
_FEW = (2, 3)
_MAJORITY = (3, 4)  # with two ranks that differ, either may be the wrong one
_E = Expectation


def _everywhere(name: str, action: Callable[[], None], **facts: Any) -> list[Fault]:
    """Returns a fault with the same action for every phase of a step."""
    return [
        Fault(f"{name} in forward", action, _FORWARD, **facts),
        Fault(f"{name} in reduction", action, _BACKWARD, **facts),
        Fault(f"{name} in optimizer", action, _OPTIMIZER, **facts),
        Fault(f"{name} in checkpoint", action, _CHECKPOINT, steps=_SAVES, **facts),
    ]


_FAULTS = (
    *_everywhere("killed", _KILL, words=("ended by SIGKILL",)),
    *_everywhere("stopped", _STOP, expects=_E.SAYS, words=("Another rank exited",)),
    *_everywhere("slowed for a moment", partial(time.sleep, 0.7), expects=_E.SURVIVES),
    Fault(
        "slowed beyond the limit",
        partial(time.sleep, 3 * TIMEOUT_S),
        (*_DATA, *_OPTIMIZER),
        _E.SAYS,
        words=("Another rank exited",),
    ),
    Fault(
        "segmentation fault",
        _CRASH,
        (*_FORWARD, *_BACKWARD),
        words=("ended by SIGSEGV",),
    ),
    Fault(
        "abort in a library",
        _ABORT,
        (*_FORWARD, *_BACKWARD),
        words=("ended by SIGABRT",),
    ),
    Fault(
        "exit without a word",
        _EXIT,
        (*_FORWARD, *_OPTIMIZER),
        words=("ended with status 7",),
    ),
    Fault(
        "exception on one rank",
        _MISTAKE,
        (*_FORWARD, *_BACKWARD, *_CLIP),
        words=("a mistake in",),
    ),
    Fault(
        "data ends early on one rank",
        _END_DATA,
        _DATA,
        words=("the data loader has ended",),
    ),
    Fault("out of memory in forward", _run_out_of_memory, _FORWARD, words=("Memory ran out",)),
    Fault("out of memory in backward", _run_out_of_memory, _BACKWARD, words=("Memory ran out",)),
    Fault(
        "one rank leaves the order",
        _leave_order,
        _FORWARD[:1],
        _E.SAYS,
        ranks=_MAJORITY,
    ),
    Fault("crash between writes of a checkpoint", _KILL, _WRITES, words=("SIGKILL",), steps=_SAVES),
    Fault("disk full", _FILL_DISK, _WRITES[:6], words=("disk is full",), steps=_SAVES),
    Fault(
        "disk read-only",
        _PROTECT_DISK,
        _WRITES[:6],
        words=("Read-only",),
        steps=_SAVES,
    ),
    Fault(
        "file may not grow",
        _limit_files,
        _CHECKPOINT[:1],
        ranks=_FEW,
        words=("disk is full or a quota",),
        steps=_SAVES,
    ),
    Fault(
        "out of file descriptors",
        _limit_descriptors,
        _CHECKPOINT[:1],
        ranks=_FEW,
        words=("too many open files",),
        steps=_SAVES,
    ),
    Fault("clock jumps forward", _turn_clock(24.0), (*_FORWARD, *_CHECKPOINT[:1]), _E.SURVIVES),
    Fault("clock jumps back", _turn_clock(-24.0), (*_FORWARD, *_CHECKPOINT[:1]), _E.SURVIVES),
    Fault("Ctrl-C", _interrupt, (*_FORWARD, *_BACKWARD), _E.STOPS),
    Fault("Ctrl-C twice", _interrupt_twice, (*_FORWARD, *_BACKWARD), _E.STOPS),
    Fault("terminated by a scheduler", _TERMINATE, (*_FORWARD, *_BACKWARD), _E.STOPS),
    Fault(
        "launcher killed",
        _kill_launcher,
        (*_FORWARD, *_BACKWARD),
        _E.STOPS,
    ),
    Fault(
        "NaN in the loss",
        _poison_loss,
        _places("data", 0),
        words=("finite", "the loss of rank"),
    ),
    Fault(
        "NaN in a gradient",
        _poison_gradient,
        _BACKWARD[:1],
        _E.SAYS,
        words=("became non-finite at step", "the norm of the gradients"),
    ),
)
CATALOGUE = {fault.name: fault for fault in _FAULTS}
