"""The engines that torch and shardgrad bring along, each built as its own manual says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardgrad
from benchmarks.engines.cuda_graph import captured
from benchmarks.engines.program import (
    COMPUTE_DTYPES,
    EPSILON,
    LR,
    REDUCE_DTYPE,
    MicroBatch,
    Program,
    Trained,
    adamw,
    mesh_of,
    muon,
)
from benchmarks.engines.task import Task
from benchmarks.models import build_model

_WARMUP = 3  # eager steps before a capture


def _sharded(
    task: Task,
    device: torch.device,
    fully_shard: Callable[..., Any],
    *,
    compiles: bool = False,
    optimizer: Callable[..., Any] | None = None,
    **options: Any,
) -> Program:
    policy = MixedPrecisionPolicy()
    if task.precision != "fp32":
        policy = MixedPrecisionPolicy(
            param_dtype=COMPUTE_DTYPES[task.precision], reduce_dtype=REDUCE_DTYPE
        )

    mesh = mesh_of(task)

    def wrap(part: nn.Module) -> None:
        if compiles and not hasattr(part, "layers"):
            part.compile()
        fully_shard(part, mesh=mesh, mp_policy=policy, **options)

    model: Any = build_model(task.preset, device, wrap=wrap)
    is_ours = fully_shard is shardgrad.fully_shard
    params = list(model.parameters())

    def micro_batch(is_last: bool) -> AbstractContextManager[Any]:
        model.set_requires_gradient_sync(is_last)
        return nullcontext()

    return Program(
        model,
        adamw(params) if optimizer is None else optimizer(model),
        partial(shardgrad.clip_grad_norm_ if is_ours else nn.utils.clip_grad_norm_, params),
        device,
        task.clip,
        micro_batch=micro_batch,
    )


def _own_adamw(model: nn.Module) -> shardgrad.optim.AdamW:
    return shardgrad.optim.AdamW(model.parameters(), lr=LR, eps=EPSILON)


def fsdp2(task: Task, device: torch.device, **options: Any) -> Trained:
    """Torch's `fully_shard`."""
    return Trained(_sharded(task, device, torch_fully_shard, **options).step)


def ours(task: Task, device: torch.device, **options: Any) -> Trained:
    """shardgrad's `fully_shard`."""
    return Trained(_sharded(task, device, shardgrad.fully_shard, **options).step)


ours_with_optimizer = partial(ours, optimizer=_own_adamw)
fsdp2_muon = partial(fsdp2, optimizer=partial(muon, library=torch.optim))
ours_muon = partial(ours, optimizer=partial(muon, library=shardgrad.optim))
fsdp2_keep = partial(fsdp2, reshard_after_forward=False)
ours_keep = partial(ours, reshard_after_forward=False)
fsdp2_compiled = partial(fsdp2, compiles=True)


def ours_graphed(task: Task, device: torch.device, **options: Any) -> Trained:
    """A whole step as a graph."""
    program = _sharded(task, device, shardgrad.fully_shard, optimizer=_own_adamw, **options)
    step = shardgrad.graphed_step(program.forward, program.optimizer, warmup=_WARMUP)(program.step)
    return Trained(step, lambda: step.pool.nbytes)


ours_auto = partial(ours_graphed, zero_stage="auto")
ours_windows = partial(ours_graphed, comm="symmetric_memory")
ours_compiled = partial(ours_graphed, compiles=True)


def fsdp2_graphed(task: Task, device: torch.device) -> Trained:
    """What trainers do that capture: forward and backward are a graph, clip and optimizer are not.

    From torch 2.15 on FSDP2 can keep its unsharded memory, so that addresses stay.
    """
    program = _sharded(task, device, torch_fully_shard)
    if hasattr(program.forward, "set_keep_unsharded_storage"):
        program.forward.set_keep_unsharded_storage(True)
    graph, forward_and_backward = captured(program.forward_and_backward)

    def step(micro_batches: list[MicroBatch]) -> Tensor:
        loss = forward_and_backward(micro_batches)
        program.update()
        if not graph.is_captured:  # from then on, replays write the same gradients again
            program.optimizer.zero_grad()
        return loss

    return Trained(step, lambda: graph.pool_nbytes)


def ddp(task: Task, device: torch.device) -> Trained:
    """`DistributedDataParallel`; its parameters are not cast, but computed with under autocast."""
    model = DistributedDataParallel(build_model(task.preset, device))
    params = list(model.parameters())
    program = Program(
        model,
        adamw(params),
        partial(nn.utils.clip_grad_norm_, params),
        device,
        task.clip,
        micro_batch=lambda is_last: nullcontext() if is_last else model.no_sync(),
    )
    if task.precision != "fp32":
        program.autocast = partial(torch.autocast, task.device, COMPUTE_DTYPES[task.precision])
    return Trained(program.step)
