"""A planned step as `shardgrad.explain` reads it: what each operation waits for, and how long it
takes.
"""

from __future__ import annotations

from pathlib import Path

from shardgrad.explain.replay import replay
from shardgrad.explain.step import Kind, Op, Step
from shardgrad.explain.traces import write_trace
from shardgrad.plan.cost import CostModel
from shardgrad.plan.planning import Plan
from shardgrad.plan.recording import Kernel, Marked, Transfer
from shardgrad.plan.rehearsal import Rehearsal, rehearse
from shardgrad.train.failure import UsageError

__all__ = ["export", "step_of"]

_KINDS: dict[str, Kind] = {
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
    "exchange": "exchange",
}


def export(plan: Plan, path: Path) -> None:
    """Rehearses a plan's step with all blocks, and writes it as a Chrome trace.

    Raises:
        UsageError: the plan is for a CPU, or the file cannot be written.
    """
    step = step_of(
        rehearse(plan.request), CostModel(plan.machine, plan.request.shards, plan.compute_scale)
    )
    write_trace(step, replay(step.ops), path)


def step_of(rehearsal: Rehearsal, cost: CostModel) -> Step:
    """Returns a rehearsed step with durations.

    Raises:
        UsageError: the plan is for a CPU, whose host and device are one.
    """
    if cost.machine.device.is_synchronous:
        raise UsageError("A trace of a plan is of an accelerator: choose another --device.")
    reduced = rehearsal.request.reduce_dtype or "fp32"
    ops: list[Op] = []
    latest: dict[str, int] = {}
    pending: dict[str, set[int]] = {}
    marks: dict[int, set[int]] = {}
    launch_s = cost.machine.launch_s
    for event in rehearsal.events:
        if isinstance(event, Marked):
            # What a stream has launched, and what it was told to wait for.
            marks[event.mark] = pending.get(event.stream, set()) | (
                {latest[event.stream]} if event.stream in latest else set()
            )
        elif isinstance(event, Kernel | Transfer):
            waits = tuple(sorted(pending.pop(event.stream, set())))
            if isinstance(event, Kernel):
                if not event.is_launched:
                    pending[event.stream] = set(waits)
                    continue
                kind: Kind = "copy" if event.is_engine else "compute"
                ops.append(
                    Op(event.name, event.stream, kind, cost.kernel_s(event), launch_s, waits)
                )
            else:
                kind = _KINDS[event.kind]
                dtype = reduced if kind in ("reduce-scatter", "all-reduce") else ""
                seconds = cost.transfer_s(event)
                link = cost.links_of(event)
                ops.append(
                    Op(event.name, event.stream, kind, seconds, launch_s, waits, (), link, dtype)
                )
            latest[event.stream] = len(ops) - 1
        elif event.stream is not None and event.mark in marks:
            own = {n for n in marks[event.mark] if ops[n].lane != event.stream}
            pending.setdefault(event.stream, set()).update(own)
    return Step(tuple(ops), None, f"{rehearsal.name}, planned")
