"""The catalogue: every kind of fault, where it is injected, and the expected outcome."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

from tests.drills.injector import FilePoint, InjectionPoint, PhasePoint, Plan
from tests.drills.processes import EVERY, STEPS, TIMEOUT_S, Program

__all__ = ["CATALOGUE", "Expectation", "Fault"]


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

    Args:
        name: name of the kind.
        action: key of the injector's action.
        points: injection points, of which one is drawn.
        expects: expected outcome.
        programs: how the run is started; one is drawn.
        words: text that the report has to contain, in addition to the location.
        seconds: duration, for actions that have one.
        steps: steps in which to inject, of which one is drawn.
        needs_hosts: whether the drill needs network namespaces.
    """

    name: str
    action: str
    points: tuple[InjectionPoint, ...]
    expects: Expectation = Expectation.ENDS
    programs: tuple[Program, ...] = (Program(2), Program(3), Program(4, ("--mesh", "2x2")))
    words: tuple[str, ...] = ()
    seconds: float = 0.0
    steps: tuple[int, ...] = tuple(range(EVERY + 1, STEPS))
    needs_hosts: bool = False

    def draw(self, random: random.Random) -> tuple[Program, Plan]:
        """Draws a program and a plan of this kind."""
        program, point = random.choice(self.programs), random.choice(self.points)
        # The first rank creates a checkpoint's folder, index and name; other ranks write one file
        # each.
        is_of_the_first = isinstance(point, FilePoint) and point.operation > 1
        rank = 0 if is_of_the_first else random.randrange(program.ranks)
        return program, Plan(self.action, rank, random.choice(self.steps), point, self.seconds)


_FORWARD = (PhasePoint("forward"), *(PhasePoint("forward", number) for number in (1, 2, 3)))
_BACKWARD = (
    PhasePoint("backward"),
    *(PhasePoint("backward", number) for number in (1, 2, 3, 4, 5)),
)
_OPTIMIZER = (PhasePoint("optimizer"),)
_CLIP = (PhasePoint("clip"), PhasePoint("clip", 1))
_CHECKPOINT: tuple[InjectionPoint, ...] = (
    *(PhasePoint("checkpoint", number) for number in range(10)),
    FilePoint(1),
    FilePoint(2),
)
_WRITES = tuple(FilePoint(number) for number in range(1, 13))
_DATA = (PhasePoint("batch"),)
_SAVES = (EVERY * 2,)  # the second checkpoint is being written: the first has to stay
_PLACES = {
    "forward": (_FORWARD, None),
    "reduction": (_BACKWARD, None),
    "optimizer": (_OPTIMIZER, None),
    "checkpoint": (_CHECKPOINT, _SAVES),
}
_ALL_WRITE = (Program(2), Program(3))  # no replicas: only one replica writes a piece
_MAJORITY = (Program(3), Program(4))  # with two ranks that differ, either may be the wrong one
_LAUNCHED = (Program(2, launched=True), Program(3, launched=True))
_TWO_HOSTS = (Program(2, launched=True, hosts=2),)
_E = Expectation


def _everywhere(name: str, action: str, **facts: object) -> list[Fault]:
    """Returns a fault with the same action for every phase of a step."""
    found = []
    for place, (points, steps) in _PLACES.items():
        more: dict[str, object] = dict(facts)
        if steps is not None:
            more["steps"] = steps
        found.append(Fault(f"{name} in {place}", action, points, **more))  # type: ignore[arg-type]
    return found


CATALOGUE: tuple[Fault, ...] = (
    *_everywhere("killed", "kill", words=("ended by SIGKILL",)),
    *_everywhere("stopped", "stop", words=("does not answer",)),
    *_everywhere("slowed for a moment", "sleep", seconds=0.7, expects=_E.SURVIVES),
    Fault(
        "slowed beyond the limit",
        "sleep",
        (*_DATA, *_OPTIMIZER),
        seconds=3 * TIMEOUT_S,
        words=("is late",),
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
        programs=_MAJORITY,
        words=("left the common order",),
    ),
    Fault("killed under another launcher", "kill", (*_FORWARD, *_BACKWARD), programs=_LAUNCHED),
    Fault("stopped under another launcher", "stop", (*_FORWARD, *_BACKWARD), programs=_LAUNCHED),
    Fault(
        "store lost",
        "lose store",
        (*_FORWARD, *_BACKWARD),
        _E.SAYS,
        _LAUNCHED,
        words=("The store of the process group is gone",),
    ),
    Fault(
        "link cut for a moment",
        "cut link",
        (*_FORWARD, *_BACKWARD, *_OPTIMIZER),
        _E.SURVIVES,
        _TWO_HOSTS,
        seconds=0.5,
        needs_hosts=True,
    ),
    Fault(
        "link cut for good",
        "cut link",
        (*_FORWARD, *_BACKWARD, *_OPTIMIZER),
        _E.SAYS,
        _TWO_HOSTS,
        words=("step",),
        needs_hosts=True,
    ),
    Fault(
        "crash between writes of a checkpoint", "kill", _WRITES, words=("SIGKILL",), steps=_SAVES
    ),
    Fault("disk full", "disk full", _WRITES[:6], words=("disk is full",), steps=_SAVES),
    Fault("disk read-only", "read-only", _WRITES[:6], words=("Read-only",), steps=_SAVES),
    Fault(
        "file may not grow",
        "file limit",
        (PhasePoint("checkpoint"),),
        programs=_ALL_WRITE,
        words=("disk is full or a quota",),
        steps=_SAVES,
    ),
    Fault(
        "out of file descriptors",
        "descriptors",
        (PhasePoint("checkpoint"),),
        programs=_ALL_WRITE,
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
        (PhasePoint("data"),),
        words=("finite", "the loss of rank"),
    ),
    Fault(
        "NaN in a gradient",
        "poison gradient",
        _BACKWARD[:1],
        _E.SAYS,
        words=("stopped being finite at step", "the norm of the gradients"),
    ),
    Fault(
        "replica differs in one bit",
        "flip parameter",
        (PhasePoint("data"),),
        programs=(Program(4, ("--mesh", "2x2")),),
        words=("Replicas have drifted apart",),
    ),
)
