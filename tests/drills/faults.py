"""The catalogue: every kind of fault, where it is injected, and what has to come of it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tests.drills.injector import Plan

STEPS, EVERY = 6, 2  # steps of a run, and after how many of them a checkpoint is written
TIMEOUT_S = 8.0

Place = tuple[str, int]  # `part` and `number` of a plan


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
        action: key of the injector's action.
        places: of which one is drawn.
        expects: what has to come of it.
        ranks: numbers of ranks, of which one is drawn.
        words: what the report says besides the rank and the step.
        seconds: how long, for actions that take time.
        steps: of which one is drawn.
    """

    name: str
    action: str
    places: tuple[Place, ...]
    expects: Expectation = Expectation.ENDS
    ranks: tuple[int, ...] = (2, 3, 4)
    words: tuple[str, ...] = ()
    seconds: float = 0.0
    steps: tuple[int, ...] = tuple(range(EVERY + 1, STEPS))

    def draw(self, random: random.Random) -> tuple[int, Plan]:
        """Draws a number of ranks and a plan."""
        ranks, (part, number) = random.choice(self.ranks), random.choice(self.places)
        # The first rank creates a checkpoint's folder, index and name; others write a file each.
        rank = 0 if part == "file" and number > 1 else random.randrange(ranks)
        plan = Plan(self.action, rank, random.choice(self.steps), part, number, self.seconds)
        return ranks, plan


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


def _everywhere(name: str, action: str, **facts: Any) -> list[Fault]:
    """Returns a fault with the same action for every phase of a step."""
    return [
        Fault(f"{name} in forward", action, _FORWARD, **facts),
        Fault(f"{name} in reduction", action, _BACKWARD, **facts),
        Fault(f"{name} in optimizer", action, _OPTIMIZER, **facts),
        Fault(f"{name} in checkpoint", action, _CHECKPOINT, steps=_SAVES, **facts),
    ]


CATALOGUE: tuple[Fault, ...] = (
    *_everywhere("killed", "kill", words=("ended by SIGKILL",)),
    *_everywhere("stopped", "stop", expects=_E.SAYS, words=("Another rank exited",)),
    *_everywhere("slowed for a moment", "sleep", seconds=0.7, expects=_E.SURVIVES),
    Fault(
        "slowed beyond the limit",
        "sleep",
        (*_DATA, *_OPTIMIZER),
        _E.SAYS,
        seconds=3 * TIMEOUT_S,
        words=("Another rank exited",),
    ),
    Fault("segmentation fault", "crash", (*_FORWARD, *_BACKWARD), words=("ended by SIGSEGV",)),
    Fault("abort in a library", "abort", (*_FORWARD, *_BACKWARD), words=("ended by SIGABRT",)),
    Fault("exit without a word", "exit", (*_FORWARD, *_OPTIMIZER), words=("ended with status 7",)),
    Fault(
        "exception on one rank", "raise", (*_FORWARD, *_BACKWARD, *_CLIP), words=("a mistake in",)
    ),
    Fault("data ends early on one rank", "end data", _DATA, words=("the data loader has ended",)),
    Fault("out of memory in forward", "out of memory", _FORWARD, words=("Memory ran out",)),
    Fault("out of memory in backward", "out of memory", _BACKWARD, words=("Memory ran out",)),
    Fault(
        "one rank leaves the order",
        "leave order",
        _FORWARD[:1],
        _E.SAYS,
        ranks=_MAJORITY,
    ),
    Fault(
        "crash between writes of a checkpoint", "kill", _WRITES, words=("SIGKILL",), steps=_SAVES
    ),
    Fault("disk full", "disk full", _WRITES[:6], words=("disk is full",), steps=_SAVES),
    Fault("disk read-only", "read-only", _WRITES[:6], words=("Read-only",), steps=_SAVES),
    Fault(
        "file may not grow",
        "file limit",
        _CHECKPOINT[:1],
        ranks=_FEW,
        words=("disk is full or a quota",),
        steps=_SAVES,
    ),
    Fault(
        "out of file descriptors",
        "descriptors",
        _CHECKPOINT[:1],
        ranks=_FEW,
        words=("too many open files",),
        steps=_SAVES,
    ),
    Fault("clock jumps forward", "clock forward", (*_FORWARD, *_CHECKPOINT[:1]), _E.SURVIVES),
    Fault("clock jumps back", "clock back", (*_FORWARD, *_CHECKPOINT[:1]), _E.SURVIVES),
    Fault("Ctrl-C", "interrupt", (*_FORWARD, *_BACKWARD), _E.STOPS),
    Fault("Ctrl-C twice", "interrupt twice", (*_FORWARD, *_BACKWARD), _E.STOPS),
    Fault("terminated by a scheduler", "terminate", (*_FORWARD, *_BACKWARD), _E.STOPS),
    Fault("launcher killed", "kill launcher", (*_FORWARD, *_BACKWARD), _E.STOPS),
    Fault(
        "NaN in the loss",
        "poison loss",
        _places("data", 0),
        words=("finite", "the loss of rank"),
    ),
    Fault(
        "NaN in a gradient",
        "poison gradient",
        _BACKWARD[:1],
        _E.SAYS,
        words=("became non-finite at step", "the norm of the gradients"),
    ),
)
