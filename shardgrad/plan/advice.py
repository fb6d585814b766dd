"""Suggests changes. Each one is rehearsed with a few blocks of the model (`depth.py`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardgrad.plan.depth import estimate, shallow
from shardgrad.plan.hardware import Machine
from shardgrad.plan.planning import Calibration, Plan
from shardgrad.train.failure import TrainingError

__all__ = ["Advice", "advise"]

_WORTH = 1.01  # an improvement below one per cent is not reported


@dataclass(frozen=True)
class Advice:
    """A suggested change and its predicted effect.

    Attributes:
        option: the option of `shardgrad plan`.
        why: reason, a short phrase.
        needed_nbytes: memory that a device must have after the change.
        tokens_per_s: tokens per second of a rank after the change.
        fits: whether the device has enough memory after the change.
    """

    option: str
    why: str
    needed_nbytes: int
    tokens_per_s: float
    fits: bool


@dataclass(frozen=True)
class _Change:
    option: str
    why: str
    fields: Mapping[str, Any]
    machine: Machine


def advise(plan: Plan, calibration: Calibration, *, most: int = 3) -> list[Advice]:
    """Returns the most effective changes: those that make the plan fit, or faster if it fits already.

    Args:
        plan: the plan.
        calibration: calibration of the plan.
        most: largest number of changes to return.
    """
    changes = [change for change in _changes(plan) if not _is_hopeless(plan, change)]
    depth = plan.rehearsal.blocks
    as_it_is = shallow(plan.request, depth)
    base = estimate(as_it_is, plan.machine, calibration, depth)
    found = []
    for change in changes:
        try:
            tried = shallow(plan.request.but(**change.fields), depth) if change.fields else as_it_is
            after = estimate(tried, change.machine, calibration, depth)
        except TrainingError:
            continue  # not possible with this model or mesh
        needed = int(plan.needed_nbytes + after.needed_nbytes - base.needed_nbytes)
        tokens_per_s = plan.tokens_per_s * after.tokens_per_s / base.tokens_per_s
        fits = needed <= change.machine.device.memory_nbytes
        found.append(Advice(change.option, change.why, needed, tokens_per_s, fits))
    if plan.fits:
        faster = [a for a in found if a.fits and a.tokens_per_s > plan.tokens_per_s * _WORTH]
        return sorted(faster, key=lambda a: -a.tokens_per_s)[:most]
    worth = (_WORTH - 1) * plan.peak_nbytes
    smaller = [a for a in found if plan.needed_nbytes - a.needed_nbytes > worth]
    # Changes that fit come first, in the order of speed; then the others, in the order of memory.
    return sorted(smaller, key=lambda a: (not a.fits, -a.tokens_per_s if a.fits else a.needed_nbytes))[:most]


def _is_hopeless(plan: Plan, change: _Change) -> bool:
    """Returns whether weights and optimizer states alone take more memory than the device has.

    Gradients, activations and unsharded layers need more, so such a change need not be rehearsed.
    """
    after, numel = plan.request.but(**change.fields), plan.rehearsal.parameters
    weight_nbytes = 2 if after.precision == "bf16" else 4
    states = 2 if after.optimizer == "adamw" else 1
    of_shards = weight_nbytes * (1 + states) / (after.ranks if after.stage == "hfsdp" else after.shards)
    computed_nbytes = 4 if after.precision == "fp32" else 2
    of_whole = computed_nbytes if after.stage in ("1", "2") else 0
    return numel * (of_shards + of_whole) > change.machine.device.memory_nbytes


def _changes(plan: Plan) -> Iterator[_Change]:
    """Yields possible changes; if the plan does not fit, only those that reduce memory."""
    request, machine = plan.request, plan.machine

    def but(option: str, why: str, **fields: object) -> _Change:
        return _Change(option, why, fields, machine)

    if not request.activation_checkpointing:
        yield but(
            "--activation-checkpointing",
            "activations of one block at a time, for a third more compute",
            activation_checkpointing=True,
        )
    elif plan.fits:
        yield but("without --activation-checkpointing", "no recomputation", activation_checkpointing=False)
    if request.batch_size % 2 == 0:
        size, count = request.batch_size // 2, request.accumulate * 2
        yield but(
            f"--batch-size {size} --accumulate {count}",
            "half the activations, the same global batch",
            batch_size=size,
            accumulate=count,
        )
    if plan.fits:
        yield but(
            f"--batch-size {request.batch_size * 2}",
            "more work for the same traffic; the global batch doubles",
            batch_size=request.batch_size * 2,
        )
    yield from _sharding_changes(plan, but)
    if request.precision == "fp32":
        yield but("--precision bf16-mixed", "tensor cores, and half the traffic", precision="bf16-mixed")
    elif request.reduce_dtype != "bf16":
        yield but("--reduce-dtype bf16", "half the bytes of every reduction; sums round", reduce_dtype="bf16")
    if machine.launch_s and plan.timeline.host_s > 0.9 * plan.timeline.step_s:
        graphed = dataclasses.replace(machine, launch_s=0.0)
        yield _Change("--graph", "the step is limited by the host", {}, graphed)


def _sharding_changes(plan: Plan, but: Callable[..., _Change]) -> Iterator[_Change]:
    request, per_node = plan.request, plan.machine.devices_per_node
    if request.stage != "2" and (plan.fits or request.stage == "1"):
        yield but("--stage 2", "parameters are gathered once a step and not resharded", stage="2")
    if request.stage != "3":
        yield but("--stage 3", "parameters are unsharded only while they are needed", stage="3")
    if request.no_sync:
        yield but("without --no-sync", "gradients are sharded after each micro-batch", no_sync=False)
    elif plan.fits and request.accumulate > 1 and request.stage == "2":
        yield but("--stage 1", "gradients are reduced once a step, and unsharded until then", stage="1")
    elif plan.fits and request.accumulate > 1 and request.stage != "1":
        yield but("--no-sync", "gradients are reduced once a step, and unsharded until then", no_sync=True)
    if request.shards > per_node and request.ranks % per_node == 0:
        replicas = request.ranks // per_node
        yield but(
            f"--mesh {replicas}x{per_node}",
            "all-gathers stay inside a node, only reduced gradients leave it",
            mesh=f"{replicas}x{per_node}",
        )
    if request.replicas > 1 and request.stage == "3":
        yield but("--stage hfsdp", "replicas share optimizer states too", stage="hfsdp")
    if request.replicas > 1:
        yield but(f"--mesh {request.ranks}", "shard over all ranks, replicate nothing", mesh=None, stage="3")
    if not plan.fits and request.replicas == 1:
        yield but(f"--ranks {request.ranks * 2}", "smaller shards", ranks=request.ranks * 2, mesh=None)
