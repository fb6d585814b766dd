"""Suggests changes. Each one is planned; one that does not fit, or gains nothing, is not
suggested.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardgrad.plan.calibration import Calibration
from shardgrad.plan.hardware import Machine
from shardgrad.plan.models import build_plan_model
from shardgrad.plan.planning import Plan, make_plan
from shardgrad.plan.request import Request
from shardgrad.train.failure import TrainingError

__all__ = ["Advice", "advise", "is_hopeless"]

_WORTH = 1.01  # an improvement below one per cent is not reported
_RECOMPUTATION = {
    "none": "no recomputation",
    "selective": "attention and half of the products are kept, the rest is recomputed",
    "full": "activations of one block at a time, for a third more compute",
}
_ORDER = list(_RECOMPUTATION)


@dataclass(frozen=True)
class Advice:
    """A suggested change and its predicted effect.

    Attributes:
        option: the option of `shardgrad plan`.
        why: reason, a short phrase.
        needed_nbytes: memory that a device must have after the change.
        tokens_per_s: tokens per second of a rank after the change.
    """

    option: str
    why: str
    needed_nbytes: int
    tokens_per_s: float


@dataclass(frozen=True)
class _Change:
    option: str
    why: str
    fields: Mapping[str, Any]
    machine: Machine


def advise(plan: Plan, calibration: Calibration, *, most: int = 3) -> list[Advice]:
    """Returns the most effective changes, all of which fit: if the plan does not, the fastest of
    them.

    Args:
        plan: the plan.
        calibration: calibration of the plan.
        most: largest number of changes to return.
    """
    if (
        calibration.compute_s is not None
    ):  # of this model and batch; the factor is what other batches share
        calibration = Calibration(scale=plan.compute_scale)
    found = []
    for change in _changes(plan):
        request = plan.request.but(**change.fields)
        if is_hopeless(request, change.machine, plan.parameters):
            continue
        try:
            after = make_plan(request, change.machine, calibration)
        except TrainingError:
            continue  # not possible with this model or mesh
        if after.fits and (not plan.fits or after.tokens_per_s > plan.tokens_per_s * _WORTH):
            found.append(Advice(change.option, change.why, after.needed_nbytes, after.tokens_per_s))
    return sorted(found, key=lambda advice: -advice.tokens_per_s)[:most]


def is_hopeless(request: Request, machine: Machine, parameters: int | None = None) -> bool:
    """Returns whether weights and optimizer states alone take more memory than the device has.

    Gradients, activations and unsharded layers need more, so such a request need not be rehearsed.

    Args:
        request: the request.
        machine: the machine.
        parameters: number of elements of the model's parameters, if it is known.
    """
    numel = parameters
    if numel is None:
        numel = sum(param.numel() for param in build_plan_model(request).module.parameters())
    weight_nbytes = 2 if request.precision == "bf16" else 4
    states = 2 if request.optimizer == "adamw" else 1
    of_shards = (
        weight_nbytes
        * (1 + states)
        / (request.ranks if request.stage == "hfsdp" else request.shards)
    )
    computed_nbytes = 4 if request.precision == "fp32" else 2
    of_whole = computed_nbytes if request.stage in ("1", "2") else 0
    return numel * (of_shards + of_whole) > machine.device.memory_nbytes


def _changes(plan: Plan) -> Iterator[_Change]:
    """Yields possible changes; if the plan does not fit, only those that reduce memory."""
    request, machine = plan.request, plan.machine

    def but(option: str, why: str, **fields: object) -> _Change:
        return _Change(option, why, fields, machine)

    for mode, why in _RECOMPUTATION.items():
        # What recomputes more takes less memory and more time.
        is_smaller = _ORDER.index(mode) > _ORDER.index(request.activation_checkpointing)
        if mode != request.activation_checkpointing and is_smaller != plan.fits:
            yield but(f"--activation-checkpointing {mode}", why, activation_checkpointing=mode)
    if plan.fits and not request.compile and not request.on_host:
        yield but("--compile", "elementwise kernels of a block are fused", compile=True)
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
        yield but(
            "--precision bf16-mixed", "tensor cores, and half the traffic", precision="bf16-mixed"
        )
    elif request.reduce_dtype != "bf16" and request.wire_dtype is None:
        yield but(
            "--reduce-dtype bf16",
            "half the bytes of every reduction; sums round",
            reduce_dtype="bf16",
        )
    if machine.launch_s and plan.host_s > 0.9 * plan.step_s:
        graphed = dataclasses.replace(machine, launch_s=0.0)
        yield _Change("--graph", "the step is limited by the host", {}, graphed)


def _sharding_changes(plan: Plan, but: Callable[..., _Change]) -> Iterator[_Change]:
    request, per_node = plan.request, plan.machine.devices_per_node
    if request.stage != "2" and (plan.fits or request.stage == "1"):
        yield but("--stage 2", "parameters are gathered once a step and not resharded", stage="2")
    if request.stage != "3":
        yield but("--stage 3", "parameters are unsharded only while they are needed", stage="3")
    if request.no_sync:
        yield but(
            "without --no-sync", "gradients are sharded after each micro-batch", no_sync=False
        )
    elif plan.fits and request.accumulate > 1 and request.stage == "2":
        yield but(
            "--stage 1", "gradients are reduced once a step, and unsharded until then", stage="1"
        )
    elif plan.fits and request.accumulate > 1 and request.stage != "1":
        yield but(
            "--no-sync", "gradients are reduced once a step, and unsharded until then", no_sync=True
        )
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
        yield but(
            f"--mesh {request.ranks}",
            "shard over all ranks, replicate nothing",
            mesh=None,
            stage="3",
        )
    if not plan.fits and request.replicas == 1:
        yield but(
            f"--ranks {request.ranks * 2}", "smaller shards", ranks=request.ranks * 2, mesh=None
        )
