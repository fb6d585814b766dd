"""The contestants that torch and shardgrad bring along, each built as its own manual says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardgrad
from shardgrad.bench.batches import MicroBatch
from shardgrad.bench.models import build_model
from shardgrad.bench.plain_graph import captured
from shardgrad.bench.program import LR, REDUCE_DTYPE, Contestant, Program, adamw, compute_dtype
from shardgrad.bench.task import Task
from shardgrad.train.sharding import set_gradient_sync

__all__ = ["build"]

_FIRST_SCALE = 2.0**10  # so that no step of the warm-up is skipped
_WARMUP = 3  # eager steps before a capture, as many as `graphed_step` takes


def build(name: str, task: Task, device: torch.device) -> Contestant:
    """Makes a contestant, with the same initial weights as every other.

    Args:
        name: a key of the catalogue.
        task: what it shall do.
        device: of this rank.

    Raises:
        Exception: whatever the engine raises that cannot do it.
    """
    family, _, variant = name.partition("-")
    if family in ("compute", "collectives", "hand"):
        from shardgrad.bench import floors

        return floors.build(name, task, device)
    if family in ("deepspeed", "megatron"):
        from shardgrad.bench import foreign

        return foreign.build(name, task, device)
    if name == "shardgrad-graphed":
        return _graphed(task, device)
    if name == "fsdp2-graphed":
        return _half_graphed(task, device)
    makers: dict[str, Callable[[], Program]] = {
        "fsdp1": lambda: _fsdp1(task, device),
        "ddp": lambda: _ddp(task, device),
        "zero": lambda: _ddp(task, device, shards_optimizer=True),
        "unsharded": lambda: _unsharded(task, device),
        "fsdp2": lambda: _sharded(task, device, _torch_fully_shard(), variant),
        "shardgrad": lambda: _sharded(task, device, shardgrad.fully_shard, variant),
    }
    return Contestant(makers[family]().step)


def _torch_fully_shard() -> Callable[..., Any]:
    from torch.distributed.fsdp import fully_shard

    return fully_shard


def mesh_of(task: Task) -> DeviceMesh:
    """One axis of shards, or an axis of replicas before it."""
    names = ("replicate", "shard")[-len(task.mesh_shape) :]
    return init_device_mesh(task.device, task.mesh_shape, mesh_dim_names=names)


def scaler_for(task: Task) -> Any:
    """Torch's loss scaler in fp16, otherwise None."""
    if task.precision != "fp16":
        return None
    return torch.amp.GradScaler(task.device, init_scale=_FIRST_SCALE)


def autocast(task: Task) -> Callable[[], AbstractContextManager[Any]]:
    """What engines that do not cast parameters run a forward in."""
    if task.precision == "fp32":
        return nullcontext
    return lambda: torch.autocast(task.device, compute_dtype(task.precision))


# -- engines with FSDP2's interface ------------------------------------------------------------------------


def _sharded(
    task: Task,
    device: torch.device,
    fully_shard: Callable[..., Any],
    variant: str = "",
    *,
    owns_optimizer: bool = False,
) -> Program:
    policy = MixedPrecisionPolicy()
    if task.precision != "fp32":
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype(task.precision), reduce_dtype=REDUCE_DTYPE)
    options: dict[str, Any] = {"mesh": mesh_of(task), "mp_policy": policy}
    if variant == "keep":
        options["reshard_after_forward"] = False

    def wrap(part: nn.Module) -> None:
        if variant == "compiled" and not hasattr(part, "layers"):
            part.compile()
        fully_shard(part, **options)

    model = build_model(task, device, wrap=wrap)
    is_ours = fully_shard is shardgrad.fully_shard
    clip = shardgrad.clip_grad_norm_ if is_ours else nn.utils.clip_grad_norm_
    params = list(model.parameters())
    scaler = scaler_for(task)
    if is_ours and scaler is not None:
        scaler = shardgrad.GradScaler(init_scale=_FIRST_SCALE)
    program = Program(
        model,
        shardgrad.optim.AdamW(params, lr=LR) if owns_optimizer else adamw(params),
        partial(clip, params),
        device,
        task.clip,
        scaler=scaler,
    )

    def micro_batch(is_last: bool) -> AbstractContextManager[Any]:
        set_gradient_sync(model, is_last)
        return nullcontext()

    program.micro_batch = micro_batch
    return program


def _graphed(task: Task, device: torch.device) -> Contestant:
    program = _sharded(task, device, shardgrad.fully_shard, owns_optimizer=True)
    used = [program.forward, program.optimizer, *([program.scaler] if program.scaler else [])]
    step = shardgrad.graphed_step(*used, warmup=_WARMUP)(program.step)
    return Contestant(step, lambda: step.pool.nbytes, step.close)


def _half_graphed(task: Task, device: torch.device) -> Contestant:
    """What trainers do that capture: forward and backward are a graph, clip and optimizer are not."""
    program = _sharded(task, device, _torch_fully_shard())
    graph, forward_and_backward = captured(program.forward_and_backward)

    def step(micro_batches: list[MicroBatch]) -> Tensor:
        loss = forward_and_backward(micro_batches)
        program.update()
        if not graph.is_captured:  # from then on, replays write the same gradients anew
            program.optimizer.zero_grad()
        return loss

    return Contestant(step, lambda: graph.pool_nbytes, graph.close)


# -- torch's other engines, and none -----------------------------------------------------------------------


def _fsdp1(task: Task, device: torch.device) -> Program:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    mesh = mesh_of(task)
    policy = MixedPrecision()
    if task.precision != "fp32":
        policy = MixedPrecision(compute_dtype(task.precision), REDUCE_DTYPE)
    strategy = ShardingStrategy.FULL_SHARD if mesh.ndim == 1 else ShardingStrategy.HYBRID_SHARD
    whole = build_model(task, device)
    blocks = set(whole.layers)
    model = FullyShardedDataParallel(
        whole,
        sharding_strategy=strategy,
        device_mesh=mesh,
        device_id=device,
        auto_wrap_policy=lambda module, recurse, **_: recurse or module in blocks,
        mixed_precision=policy,
        use_orig_params=True,
    )
    scaler = None
    if task.precision == "fp16":
        scaler = ShardedGradScaler(task.device, init_scale=_FIRST_SCALE)
    return Program(
        model,
        adamw(model.parameters()),
        model.clip_grad_norm_,
        device,
        task.clip,
        micro_batch=lambda is_last: nullcontext() if is_last else model.no_sync(),
        scaler=scaler,
    )


def _ddp(task: Task, device: torch.device, *, shards_optimizer: bool = False) -> Program:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(build_model(task, device))
    params = list(model.parameters())
    optimizer: torch.optim.Optimizer
    if shards_optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=LR, fused=True)
    else:
        optimizer = adamw(params)
    return Program(
        model,
        optimizer,
        partial(nn.utils.clip_grad_norm_, params),
        device,
        task.clip,
        micro_batch=lambda is_last: nullcontext() if is_last else model.no_sync(),
        precision=autocast(task),
        scaler=scaler_for(task),
    )


def _unsharded(task: Task, device: torch.device) -> Program:
    """Its micro-batches are all ranks', so that it makes the same update as all of them together."""
    model = build_model(task, device)
    params = list(model.parameters())
    return Program(
        model,
        adamw(params),
        partial(nn.utils.clip_grad_norm_, params),
        device,
        task.clip,
        precision=autocast(task),
        scaler=scaler_for(task),
    )
