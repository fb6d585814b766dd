"""Runs the engine for two steps in a fake process group, and records the second one."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.device_mesh import DeviceMesh

from shardgrad import clip_grad_norm_
from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.grad_group import GradGroup
from shardgrad.engine.lazy_init import lazy_init
from shardgrad.engine.unit import units_under
from shardgrad.errors import ShardgradError
from shardgrad.optim import AdamW
from shardgrad.policies import GradientPolicy
from shardgrad.programs.plan.memory import Memory
from shardgrad.programs.plan.models import PlanModel, build_plan_model
from shardgrad.programs.plan.recompute import checkpointed
from shardgrad.programs.plan.recording import Event, Recorder, RecordingStreams
from shardgrad.programs.plan.request import Request
from shardgrad.programs.plan.world import fake_tensors, fake_world
from shardgrad.programs.train.failure import TrainingError, UsageError
from shardgrad.programs.train.model import count_parameters
from shardgrad.programs.train.sharding import precision_policy, shard_in_order


@dataclass(frozen=True)
class Rehearsal:
    """A steady-state step of rank 0, which holds at least as much as any other rank.

    Attributes:
        request: the request.
        parameters: number of elements of the model's parameters.
        units: number of calls of `fully_shard`.
        events: events of the step, in the host's order.
        memory: over the step.
    """

    request: Request
    parameters: int
    units: int
    events: tuple[Event, ...]
    memory: Memory


def rehearse(request: Request) -> Rehearsal:
    """Trains for two steps on fake tensors, and returns the record of the second one.

    Raises:
        UsageError: the model cannot be built or sharded.
        TrainingError: the step depends on values, which fake tensors do not have.
    """
    # A collection in the middle of a step would free tensors at a moment that depends on what ran
    # before. At the end it looks only at what is new: the model and its tensors, which refer to
    # each other.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _rehearse(request)
    finally:
        gc.collect(0)
        if was_enabled:
            gc.enable()


def _rehearse(request: Request) -> Rehearsal:
    recorder = Recorder()
    with fake_world(request.shape) as mesh:
        for axis, name in enumerate(mesh.mesh_dim_names or ()):
            recorder.axes[mesh.get_group(axis).group_name] = name
        try:
            with fake_tensors(recorder):
                plan_model = build_plan_model(request)
                parameters = count_parameters(plan_model.module)
                trainer = _Trainer(request, plan_model, mesh, recorder)
                trainer.step()
                warm_up = len(recorder.events)
                recorder.memory.start_over(trainer.owners())
                trainer.step()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise TrainingError(
                f"{request.name} chooses operations by values of tensors ({error.func}), and a "
                "plan has no values: plan a variant with fixed shapes."
            ) from error
        except ShardgradError as error:
            raise UsageError(f"{request.name} cannot be sharded like this: {error}") from error
        return Rehearsal(
            request=request,
            parameters=parameters,
            units=len({group.name for group in trainer.groups}),
            events=tuple(recorder.events[warm_up:]),
            memory=recorder.memory,
        )


class _Trainer:
    """A sharded model and an optimizer whose operations and collectives are recorded."""

    def __init__(
        self, request: Request, plan_model: PlanModel, mesh: DeviceMesh, recorder: Recorder
    ) -> None:
        self._request, self._loss, self._recorder = request, plan_model.loss, recorder
        self._model: Any = plan_model.module  # an `FSDPModule` from here on
        recorder.phase = "construction"
        wire_dtype = torch.bfloat16 if request.wire_dtype == "bf16" else None
        shard_in_order(
            self._model,
            plan_model.blocks,
            plan_model.ends,
            fill=lambda _: None,
            wrap=lambda block: checkpointed(block, request.activation_checkpointing),
            arguments={
                "mesh": mesh,
                "mp_policy": precision_policy(request.precision),
                "gradient_policy": GradientPolicy(wire_dtype=wire_dtype),
                "zero_stage": request.stage if request.stage == "hfsdp" else int(request.stage),
            },
        )
        self.groups = [group for unit in units_under(self._model) for group in unit.groups]
        self._runtime = CommContext(torch.device("cpu"), RecordingStreams(recorder))
        unit = units_under(self._model)[0]
        unit.partner = self._runtime
        self.context = lazy_init(unit)
        params = [param for param in self._model.parameters() if param.requires_grad]
        self._optimizer = AdamW(params, lr=1e-3)

    def step(self) -> None:
        """Runs one step as a training loop does."""
        request, recorder = self._request, self._recorder
        for number in range(request.accumulate):
            is_last = number == request.accumulate - 1
            self._model.set_is_last_backward(is_last)
            self._model.set_requires_gradient_sync(is_last or not request.no_sync)
            recorder.phase = "forward"
            loss = self._loss(request.batch_size, request.seq_len)
            if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
                raise UsageError(
                    f"The loss of {request.name} is not a tensor with one element that requires a "
                    "gradient: return the mean loss."
                )
            recorder.phase = "backward"
            loss.backward()
            del loss
        recorder.phase = "optimizer"
        clip_grad_norm_(self._model.parameters(), math.inf)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def owners(self) -> Iterator[tuple[str, torch.UntypedStorage]]:
        """Yields every storage that outlives a step, with its owner."""
        for ring in self._runtime.rings:
            is_of_gathers = ring is self._runtime.gather_ring
            for slot in ring.slots:
                owner = "all-gather staging" if is_of_gathers else "reduction staging"
                yield owner, slot.bytes.untyped_storage()
        for grads in self.context.grad_groups:
            yield from _memory_of(grads)
        for tail in self._runtime.tails.values():
            yield "tails", tail.untyped_storage()
        for _, tensor in self._optimizer.buffers():
            yield "optimizer state", tensor.untyped_storage()
        for buffer in self._model.buffers():
            yield "buffers", buffer.untyped_storage()


def _memory_of(grads: GradGroup) -> Iterator[tuple[str, torch.UntypedStorage]]:
    """Yields what a group keeps between steps; the last owner of a storage counts."""
    group = grads.group
    if group.gather is not None:  # which sends the shard, or under HFSDP an inner shard
        yield "inner shards", group.gather.chunk.untyped_storage()
    yield "parameters", group.shard.untyped_storage()
    if group.unsharded_memory is not None:
        for storage in group.unsharded_memory.storages:
            yield "unsharded parameters", storage
    if grads.shard is not None:
        yield "gradients", grads.shard.flat.untyped_storage()
    for unreduced in (grads.sums, *grads.buffers().values()):
        yield "unreduced gradients", unreduced.untyped_storage()
