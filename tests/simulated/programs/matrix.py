"""The named programs: every mode of `fully_shard`, most of them with work on several streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.simulated.programs.scenarios import (
    SIDE_STREAMS,
    Model,
    Places,
    Plan,
    Scenario,
    plain_plans,
)

STEPS = 4


def _stream(number: int) -> int:
    return number % (SIDE_STREAMS + 1)


def _spread(model: Model, steps: int = STEPS) -> tuple[Plan, ...]:
    """Returns steps whose units, branches and hooks go around the streams, each step
    differently.
    """
    plans = []
    for step in range(steps):
        units = []
        for unit in range(model.depth):
            runs = _stream(step + unit)
            branches = tuple(_stream(step + 2 * unit + branch) for branch in range(model.branches))
            units.append(
                Places(
                    runs, (runs,) if model.checkpoint else branches, _stream(3 * step + unit + 1)
                )
            )
        plans.append(Plan(_stream(2 * step), _stream(step + 1), tuple(units)))
    return tuple(plans)


def _case(steps: int = STEPS, **options: Any) -> Scenario:
    model = Model(**options)
    return Scenario(model, _spread(model, steps))


def _with(scenario: Scenario, changes: dict[int, dict[str, Any]]) -> Scenario:
    """Changes some steps of a scenario."""
    plans = [replace(plan, **changes.get(i, {})) for i, plan in enumerate(scenario.plans)]
    return replace(scenario, plans=tuple(plans))


def _in_one_stream(**options: Any) -> Scenario:
    model = Model(**options)
    return Scenario(model, plain_plans(model.depth, STEPS))


def _one_side(model: Model, **places: Any) -> Scenario:
    """Everything in the caller's stream but what `places` says of every unit."""
    return Scenario(model, (Plan(units=(Places(**places),) * model.depth),) * STEPS)


CASES: dict[str, Scenario] = {
    "everything in one stream": _in_one_stream(),
    "one stream, two ranks": _in_one_stream(ranks=2),
    "units, branches and hooks on all streams": _case(branches=4),
    "two ranks on all streams": _case(ranks=2),
    "hooks on a side stream": _one_side(Model(), hooks=1),
    "hooks on a side stream that write": _one_side(Model(writes_in_hooks=True), hooks=2),
    "units in side streams": _one_side(Model(), runs=3, branches=(3, 3)),
    "branches on two streams": _one_side(Model(), branches=(1, 2)),
    "branches on four streams": _one_side(Model(branches=4), branches=(1, 2, 3, 4)),
    "two outputs on two streams": _one_side(Model(two_outputs=True), branches=(1, 2)),
    "two outputs, kept whole": _one_side(Model(two_outputs=True, reshard=False), branches=(1, 2)),
    "two outputs, unused parameters": _case(two_outputs=True, unused=True),
    "parameters born on side streams": _case(born=(1, 2, 3, 4)),
    "units in units": _case(nested=True, depth=4),
    "units in units, two outputs": _case(nested=True, depth=4, two_outputs=True),
    "resharded after forward": _case(reshard=True),
    "kept whole after forward": _case(reshard=False),
    "resharded to two of four ranks": _case(ranks=4, reshard=2),
    "resharded to two of four ranks in one stream": _in_one_stream(ranks=4, reshard=2),
    "resharded to two of four ranks, two outputs": _case(ranks=4, reshard=2, two_outputs=True),
    "replicas": _case(ranks=4, replicas=2),
    "replicas, low precision, accumulation": _case(
        ranks=4, replicas=2, low_precision=True, micro_batches=2
    ),
    "replicas summed after the last micro-batch": _case(
        ranks=4, replicas=2, micro_batches=3, deferred="all-reduce", overlapped=True
    ),
    "accumulation, each reduced": _case(micro_batches=2),
    "accumulation, reductions overlap": _case(micro_batches=3, overlapped=True),
    "accumulation, reduced at the end": _case(micro_batches=3, deferred="reduce"),
    "accumulation, reduced at the end, two ranks": _case(
        ranks=2, micro_batches=2, deferred="reduce"
    ),
    "whole from step to step": _case(stage=2, micro_batches=2),
    "whole from step to step, two ranks": _case(
        ranks=2, stage=2, low_precision=True, micro_batches=2
    ),
    "whole gradients until the last backward": _case(stage=1, micro_batches=3, overlapped=True),
    "both axes": _case(ranks=4, replicas=2, stage="hfsdp"),
    "both axes, low precision, accumulation": _case(
        ranks=4,
        replicas=2,
        stage="hfsdp",
        low_precision=True,
        micro_batches=2,
        deferred="all-reduce",
    ),
    "low precision": _case(low_precision=True),
    "low precision in one stream": _in_one_stream(low_precision=True),
    "low precision, two ranks": _case(ranks=2, low_precision=True),
    "narrow on the wire, two ranks": _case(ranks=2, wire="bfloat16"),
    "narrow on the wire, reduced at the end": _case(
        ranks=2, wire="bfloat16", micro_batches=2, deferred="reduce", low_precision=True
    ),
    "narrow on the wire, direct parameters": _case(
        ranks=2, wire="bfloat16", direct=True, low_precision=True
    ),
    "narrow on the wire, replicas summed after the last micro-batch": _case(
        ranks=4, replicas=2, wire="bfloat16", micro_batches=2, deferred="all-reduce"
    ),
    "narrow on the wire, four replicas": _case(ranks=4, replicas=4, wire="bfloat16"),
    "narrow on the wire, both axes": _case(ranks=4, replicas=2, stage="hfsdp", wire="bfloat16"),
    "tied weights": _case(tied=True),
    "tied weights, two ranks": _case(ranks=2, tied=True),
    "unused parameters": _case(unused=True),
    "frozen parameters": _case(frozen=True),
    "nothing of the root trains": _case(
        frozen_root=True, parallel=True, micro_batches=2, moves=True
    ),
    "nothing of the root trains, reductions overlap": _case(
        ranks=2, frozen_root=True, unused=True, micro_batches=2, moves=True, overlapped=True
    ),
    "recomputed by reentry": _case(checkpoint="reentrant"),
    "recomputed from what was saved": _case(checkpoint="saved"),
    "recomputed by reentry, two ranks": _case(ranks=2, checkpoint="reentrant", reshard=True),
    "tied weights recomputed by reentry": _case(checkpoint="reentrant", tied=True),
    "side by side, tied weights recomputed by reentry": Scenario(
        Model(parallel=True, checkpoint="reentrant", tied=True, depth=2),
        (Plan(stem=3, units=(Places(1, (1,)), Places(2, (2,)))),) * STEPS,
    ),
    "side by side, tied weights recomputed at home": Scenario(
        Model(parallel=True, checkpoint="reentrant", tied=True, depth=2),
        (Plan(units=(Places(1, (1,)), Places())),) * STEPS,
    ),
    "side by side": _case(parallel=True, branches=4),
    "a branch that sends nothing back": _case(detached=True, large=1),
    "a branch that sends nothing back, unused parameters": _one_side(
        Model(detached=True, large=1, unused=True), branches=(0, 2)
    ),
    "a branch that sends nothing back, two outputs, kept whole": _one_side(
        Model(detached=True, large=1, two_outputs=True, reshard=False), branches=(1, 2)
    ),
    "a branch that sends nothing back beside a frozen one": _one_side(
        Model(detached=True, large=1, two_outputs=True, frozen=True, depth=2), branches=(0, 2)
    ),
    "gathered ahead in forward": _case(forward_prefetch=((0, (1, 2)),)),
    "gathered ahead in backward": _case(backward_prefetch=((2, (1, 0)),)),
    "gathered ahead and dropped": _case(
        backward_prefetch=((0, (2,)),), low_precision=True, reshard=True
    ),
    "gathered ahead, never run": _with(
        _case(low_precision=True, forward_prefetch=((0, (1,)),), reshard=False, micro_batches=2),
        {1: {"skipped": (1,)}, 3: {"skipped": (1,)}},
    ),
    "a unit larger than all before": _with(
        _case(large=1, steps=6), {0: {"skipped": (1,)}, 1: {"skipped": (1,)}}
    ),
    "a large unit changes its slot, hooks elsewhere": _with(
        _case(depth=2, large=1, branches=3, steps=6),
        {0: {"skipped": (1,)}, 3: {"skipped": (1,)}},
    ),
    "a large unit changes its slot": _with(
        _case(large=0, steps=6), {2: {"skipped": (1,)}, 3: {"skipped": (2,)}, 4: {"skipped": (1,)}}
    ),
    "a large unit changes its slot, two ranks": _with(
        _case(ranks=2, low_precision=True, large=0, steps=6),
        {2: {"skipped": (1,)}, 3: {"skipped": (2,)}, 4: {"skipped": (1,)}},
    ),
    "direct parameters in one stream": _in_one_stream(ranks=2, direct=True),
    "direct parameters on all streams": _case(ranks=2, direct=True),
    "direct parameters, hooks on a side stream": _one_side(Model(ranks=2, direct=True), hooks=1),
    "direct parameters, branches on two streams": _one_side(
        Model(ranks=2, direct=True), branches=(1, 2)
    ),
    "direct parameters, cast on the way": _case(ranks=2, direct=True, low_precision=True),
    "direct parameters, replicas": _case(ranks=4, replicas=2, direct=True),
    "direct parameters, resharded to two of four ranks": _case(ranks=4, reshard=2, direct=True),
    "direct parameters, reductions overlap": _case(
        ranks=2, direct=True, micro_batches=3, overlapped=True
    ),
    "direct parameters, reduced at the end": _case(
        ranks=2, direct=True, micro_batches=2, deferred="reduce"
    ),
    "direct parameters, gathered ahead and dropped": _case(
        ranks=2, direct=True, backward_prefetch=((0, (2,)),), reshard=True
    ),
    "direct parameters, units not run": _with(
        _case(ranks=2, direct=True, steps=6), {1: {"skipped": (1,)}, 3: {"skipped": (1,)}}
    ),
    "direct parameters, recomputed by reentry": _case(
        ranks=2, direct=True, checkpoint="reentrant", reshard=True
    ),
    "clipped": _case(clip="shardgrad", optimizer_of="shardgrad", optimizer="AdamW"),
    "clipped by torch": _case(clip="torch"),
    "clipped, two ranks": _case(ranks=2, clip="shardgrad", optimizer_of="shardgrad"),
    "updated on a side stream": _case(clip="shardgrad", optimizer_of="shardgrad", update=3),
    "updated on a side stream, of which the next forward is told": _case(
        optimizer_of="shardgrad", update=3, update_event=True
    ),
    "updated on a side stream, of which the next forward is told, two ranks": _case(
        ranks=2, update=3, update_event=True
    ),
    "AdamW of torch": _case(optimizer="AdamW"),
    "SGD of shardgrad": _case(optimizer_of="shardgrad"),
    "participation": _case(participates=True),
    "participation, a unit not run": _with(_case(participates=True), {2: {"skipped": (1,)}}),
    "a backward that fails": _with(_in_one_stream(low_precision=True), {1: {"fails": True}}),
    "a backward that fails, units in side streams": _with(
        _one_side(Model(), runs=2, branches=(2, 2)), {1: {"fails": True}}
    ),
}
