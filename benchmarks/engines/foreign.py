"""Engines from packages that may be installed: DeepSpeed and Megatron-FSDP, as their manuals
say.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engines.program import (
    COMPUTE_DTYPES,
    REDUCE_DTYPE,
    MicroBatch,
    Program,
    Trained,
    adamw,
    mesh_of,
    scaler_for,
)
from benchmarks.engines.task import Task
from benchmarks.models import build_model
from shardgrad.programs.train.model import next_token_loss


def _deepspeed(task: Task, device: torch.device, *, stage: int) -> Trained:
    deepspeed = importlib.import_module("deepspeed")
    model = build_model(task.preset, device, hf=task.hf)
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
    """Megatron-FSDP."""
    fsdp = importlib.import_module("megatron_fsdp")
    policy = importlib.import_module("megatron_fsdp.mixed_precision").MixedPrecisionPolicy
    unsharded = build_model(task.preset, device, hf=task.hf).to(COMPUTE_DTYPES[task.precision])
    model, optimizer = fsdp.fully_shard(
        module=unsharded,
        optimizer=adamw(unsharded.parameters()),
        device_mesh=mesh_of(task),
        dp_shard_dim="shard",
        fsdp_unit_modules=[type(unsharded.layers[0])],
        zero_dp_strategy="optim_grads_params",
        device=device,
        mixed_precision_policy=policy(torch.float32, REDUCE_DTYPE, REDUCE_DTYPE),
        sync_model_each_microbatch=False,
    )

    def micro_batch(is_last: bool) -> AbstractContextManager[Any]:
        model.set_model_auto_sync(is_last)
        return nullcontext()

    return _trained(model, optimizer, task, device, micro_batch)


def megatron_v2(task: Task, device: torch.device) -> Trained:
    """Megatron-FSDP's experimental second engine."""
    v2 = importlib.import_module("megatron_fsdp.experimental")
    placement = importlib.import_module("megatron_fsdp.experimental.placement")
    policy = importlib.import_module("megatron_fsdp.mixed_precision").MixedPrecisionPolicy
    mesh, flat = mesh_of(task), [placement.Flat()]
    placements = placement.Placements(["shard"], flat, flat, flat)
    model = build_model(task.preset, device, hf=task.hf).to(COMPUTE_DTYPES[task.precision])
    for part in (*model.layers, model):
        v2.fully_shard(part, mesh, placements, policy(torch.float32, REDUCE_DTYPE, REDUCE_DTYPE))
    optimizer = adamw(model.parameters())
    v2.fully_shard_optimizer(optimizer)
    return _trained(model, optimizer, task, device, lambda is_last: v2.microbatch(model, is_last))


def _trained(
    model: Any,
    optimizer: Any,
    task: Task,
    device: torch.device,
    micro_batch: Callable[[bool], AbstractContextManager[Any]],
) -> Trained:
    clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()))
    return Trained(
        Program(
            model, optimizer, clip, device, task.clip, micro_batch, scaler=scaler_for(task)
        ).step
    )
