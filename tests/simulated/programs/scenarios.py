"""Programs for the engine on simulated streams, as data.

A `Model` says what is built, a `Plan` what one step does and in which streams. Together they are a
`Scenario`, which `programs.py` runs under the engine and, without streams, on the CPU.

Stream 0 is the one that a step's caller is on, 1 to `SIDE_STREAMS` are others of the same device.
Programs are right by themselves: whoever uses another stream waits for it, and tells the allocator.
What is missing then, the engine has left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

SIDE_STREAMS = 4
BRANCHES = 4  # at most, of a unit; each has parameters of its own
WIDTH = 4
LARGE = 96  # a unit with layers this wide is larger than every slot before it ran

T = TypeVar("T")
Pick = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Places:
    """The streams of one unit in one step.

    Attributes:
        runs: where the module is called.
        branches: where each of its branches computes, inside; the last for all that follow.
        hooks: where the nodes are born that accumulate its gradients, and so where its hooks run.
            None: where forward uses the parameters first.
    """

    runs: int = 0
    branches: tuple[int, ...] = (0,)
    hooks: int | None = None


@dataclass(frozen=True)
class Plan:
    """One step.

    Attributes:
        caller: stream that forward and backward are called in; 0 is the device's default here.
        stem: stream in which the root's first layer computes.
        units: of each unit, from the input on.
        skipped: units that this step does not run.
        fails: an exception ends the step in the middle of backward.
    """

    caller: int = 0
    stem: int = 0
    units: tuple[Places, ...] = ()
    skipped: tuple[int, ...] = ()
    fails: bool = False


def moved(plan: Plan, by: int) -> Plan:
    """Returns the same step with units and branches in streams so much further around."""

    def further(stream: int) -> int:
        return (stream + by) % (SIDE_STREAMS + 1)

    units = [
        replace(unit, runs=further(unit.runs), branches=tuple(map(further, unit.branches)))
        for unit in plan.units
    ]
    return replace(plan, units=tuple(units))


@dataclass(frozen=True)
class Model:
    """What is built, and how it is trained.

    Attributes:
        ranks: number of virtual ranks.
        replicas: above 1 for HSDP.
        depth: units besides the root.
        branches: of each unit, from 2 on.
        nested: the units lie in pairs inside larger units.
        parallel: the units get the same input, and do not wait for each other.
        detached: the last branch of every unit sends no gradient to the unit's input.
        two_outputs: units give two outputs, computed in the streams of their first two branches.
        reshard: `reshard_after_forward`.
        stage: `zero_stage`.
        micro_batches: in each step.
        deferred: what waits for the last micro-batch: "", "reduce" or "all-reduce".
        overlapped: `set_is_last_backward(False)` for all micro-batches but the last.
        moves: the second micro-batch runs units and their branches in other streams.
        low_precision: bfloat16 parameters in forward, float32 reductions.
        wire: dtype that gradients travel in, "" for the reduce dtype.
        tied: the first and the last unit share a weight, which goes up to the root.
        unused: every unit has a parameter that nobody uses.
        frozen: the first branch of every unit does not train.
        frozen_root: the root's own layers do not train, so the first unit is reduced last, and
            nothing says when a unit that reads the stem is through with backward.
        large: index of a unit that is larger than all others, or None.
        direct: every unit is as large, and what can travels by itself, however small it is.
        checkpoint: "", "reentrant" or "saved" (without reentry): units are recomputed in backward.
        forward_prefetch: (unit, units gathered ahead in its forward).
        backward_prefetch: the same for backward.
        participates: steps run under `participate()`.
        clip: "", "shardgrad" or "torch".
        optimizer: "SGD" or "AdamW", of `optimizer_of`.
        optimizer_of: "shardgrad" or "torch".
        update: stream that clips and updates, in every step.
        update_event: only the next forward waits for the update, by `set_post_optim_event`.
        writes_in_hooks: gradients are written once more in the hooks' stream.
        born: stream that each unit was built and sharded in, and the root's at the end.
    """

    ranks: int = 1
    replicas: int = 1
    depth: int = 3
    branches: int = 2
    nested: bool = False
    parallel: bool = False
    detached: bool = False
    two_outputs: bool = False
    reshard: bool | int | None = None
    stage: int | str = 3
    micro_batches: int = 1
    deferred: str = ""
    overlapped: bool = False
    moves: bool = False
    low_precision: bool = False
    wire: str = ""
    tied: bool = False
    unused: bool = False
    frozen: bool = False
    frozen_root: bool = False
    large: int | None = None
    direct: bool = False
    checkpoint: str = ""
    forward_prefetch: tuple[tuple[int, tuple[int, ...]], ...] = ()
    backward_prefetch: tuple[tuple[int, tuple[int, ...]], ...] = ()
    participates: bool = False
    clip: str = ""
    optimizer: str = "SGD"
    optimizer_of: str = "torch"
    update: int = 0
    update_event: bool = False
    writes_in_hooks: bool = False
    born: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """A model and what its steps do."""

    model: Model = field(default_factory=Model)
    plans: tuple[Plan, ...] = ()


def plain_plans(depth: int, steps: int = 4) -> tuple[Plan, ...]:
    """Returns steps in which everything happens in the caller's stream."""
    return tuple(Plan(units=(Places(),) * depth) for _ in range(steps))


# -- all sorts of scenarios

_STREAMS = range(SIDE_STREAMS + 1)


def some_scenario(pick: Pick, *, ranks: int = 1, steps: int = 6) -> Scenario:
    """Makes a scenario out of choices.

    Args:
        pick: chooses one of several; hypothesis's, or a random generator's.
        ranks: number of ranks.
        steps: number of steps.
    """
    model = _some_model(pick, ranks)
    return Scenario(model, tuple(_some_plan(pick, model) for _ in range(steps)))


def _some_model(pick: Pick, ranks: int) -> Model:
    depth = pick((2, 3, 4))
    nested = pick((False, False, False, True))
    micro_batches = pick((1, 1, 2))
    replicas = pick((1, 2)) if ranks == 4 else 1
    deferred = ""
    if micro_batches > 1:
        deferred = pick(("", "reduce", "all-reduce") if replicas > 1 else ("", "reduce"))
    checkpoint = pick(("", "", "", "reentrant", "saved"))
    ahead = [()] + [
        ((unit, (other,)),) for unit in range(depth) for other in range(depth) if other != unit
    ]
    return Model(
        ranks=ranks,
        replicas=replicas,
        depth=depth,
        branches=pick(range(2, BRANCHES + 1)),
        nested=nested,
        parallel=not nested and pick((False, False, True)),
        detached=pick((False, False, True)),
        two_outputs=pick((False, True)) and not checkpoint,
        reshard=pick((None, True, False) if ranks // replicas < 4 else (None, True, False, 2)),
        micro_batches=micro_batches,
        deferred=deferred,
        overlapped=micro_batches > 1 and pick((False, True)),
        moves=micro_batches > 1 and pick((False, True)),
        low_precision=pick((False, False, True)),
        tied=pick((False, False, True)),
        unused=pick((False, False, True)),
        frozen=pick((False, False, True)),
        frozen_root=checkpoint != "reentrant" and pick((False, False, True)),
        large=pick((None, *range(depth))),
        direct=ranks > 1 and pick((False, False, True)),
        checkpoint=checkpoint,
        forward_prefetch=pick(ahead) if pick((False, True)) else (),
        backward_prefetch=pick(ahead) if pick((False, True)) else (),
        # Torch's own over DTensors is most of a step's time, and orders nothing by streams. Not on
        # several ranks: what torch remembers of fake tensors is the process's, and not each virtual
        # rank's.
        clip=pick(
            ("", "", "", "shardgrad", "shardgrad", "shardgrad", *(("torch",) if ranks == 1 else ()))
        ),
        optimizer=pick(("SGD", "AdamW")),
        optimizer_of=pick(("shardgrad",) * 7 + ("torch",)),
        update=pick(_STREAMS),
        writes_in_hooks=pick((False, True)),
        born=tuple(pick(_STREAMS) for _ in range(depth + 1)),
    )


def _some_plan(pick: Pick, model: Model) -> Plan:
    # Recomputation runs in the stream of whichever saved tensor is needed first, so torch itself
    # wants a checkpointed module in one stream.
    units = []
    for _ in range(model.depth):
        runs = pick(_STREAMS)
        places = (
            (runs,) if model.checkpoint else tuple(pick(_STREAMS) for _ in range(model.branches))
        )
        units.append(Places(runs, places, pick((None, *_STREAMS))))
    skippable = (*range(1, model.depth - 1), *(() if model.large is None else (model.large,)))
    skipped = (pick(skippable),) if skippable and pick((False, False, True)) else ()
    return Plan(pick(_STREAMS), pick(_STREAMS), tuple(units), skipped)
