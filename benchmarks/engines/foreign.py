"""Engines from packages that may be installed, as their manuals say: DeepSpeed, Megatron-FSDP,
FlexShard.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.engines.program import (
    COMPUTE_DTYPES,
    REDUCE_DTYPE,
    MicroBatch,
    Program,
    Trained,
    adamw,
    mesh_of,
)
from benchmarks.engines.task import Task
from benchmarks.models import build_model
from shardgrad.programs.train.model import next_token_loss


def _deepspeed(task: Task, device: torch.device, *, stage: int) -> Trained:
    deepspeed = importlib.import_module("deepspeed")
    model = build_model(task.preset, device)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": task.batch_size,
        "gradient_accumulation_steps": task.accumulate,
        "gradient_clipping": task.clip,
        "zero_optimization": {"stage": stage, "overlap_comm": device.type != "cpu"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
    }
    if task.precision != "fp32":
        config[task.precision] = {"enabled": True}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model.parameters()), config=config, dist_init_required=False
    )

    def step(micro_batches: list[MicroBatch]) -> Tensor:
        total = torch.zeros((), device=device)
        for tokens, targets in micro_batches:
            loss = next_token_loss(engine(tokens), targets)
            engine.backward(loss)  # divides by the micro-batches
            engine.step()  # updates after the last
            total += loss.detach() / len(micro_batches)
        return total

    return Trained(step)


deepspeed_1 = partial(_deepspeed, stage=1)
deepspeed_2 = partial(_deepspeed, stage=2)
deepspeed_3 = partial(_deepspeed, stage=3)


def megatron(task: Task, device: torch.device) -> Trained:
    """Megatron-FSDP's second engine."""
    v2 = importlib.import_module("megatron_fsdp.experimental")
    placement = importlib.import_module("megatron_fsdp.experimental.placement")
    policy = importlib.import_module("megatron_fsdp.mixed_precision").MixedPrecisionPolicy
    mesh, flat = mesh_of(task), [placement.Flat()]
    placements = placement.Placements(["shard"], flat, flat, flat)
    model = build_model(task.preset, device).to(COMPUTE_DTYPES[task.precision])
    for part in (*model.layers, model):
        v2.fully_shard(part, mesh, placements, policy(torch.float32, REDUCE_DTYPE, REDUCE_DTYPE))
    params = list(model.parameters())
    optimizer = adamw(params)
    v2.fully_shard_optimizer(optimizer)
    clip = partial(nn.utils.clip_grad_norm_, params)
    program = Program(model, optimizer, clip, device, task.clip)
    program.micro_batch = lambda is_last: v2.microbatch(model, is_last)
    return Trained(program.step)


def flex_shard(task: Task, device: torch.device) -> Trained:
    """FlexShard: one call for the model, and a bucket where others wrap a module."""
    flex = importlib.import_module("flex_shard")
    placements = importlib.import_module("flex_shard.custom_placements.shard").per_param_placements
    model: Any = build_model(task.preset, device)
    policy = flex.MixedPrecisionPolicy(COMPUTE_DTYPES[task.precision], REDUCE_DTYPE)
    bucket = partial(flex.BucketSpec, placement_fn=placements, mesh=mesh_of(task), mp_policy=policy)
    names = {param: name for name, param in model.named_parameters()}
    blocks = [[names.pop(param) for param in block.parameters()] for block in model.layers]
    root = bucket([*names.values()], reshard_after_forward=False)
    flex.flex_shard(model, buckets=[root, *map(bucket, blocks)])
    params = list(model.parameters())

    def clip(max_norm: float) -> None:
        """Clips shards, which are plain tensors, by the norm over all ranks."""
        grads = [param.grad for param in params if param.grad is not None]
        square = nn.utils.get_total_norm(grads) ** 2
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(params, max_norm, square.sqrt())

    program = Program(model, adamw(params), clip, device, task.clip)
    program.micro_batch = lambda is_last: nullcontext() if is_last else model.no_sync()
    return Trained(program.step)
