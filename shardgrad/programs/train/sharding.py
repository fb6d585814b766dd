"""Builds the model and applies `fully_shard`, one block after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.failure import UsageError
from shardgrad.programs.train.model import Transformer, materialise
from shardgrad.programs.train.presets import transformer_config
from shardgrad.programs.train.recompute import checkpointed

ShardModule = Callable[..., Any]


def build_model(config: TrainConfig, mesh: DeviceMesh, device: torch.device) -> Transformer:
    """Builds the model of `config`, sharded over `mesh`, with initial values that do not depend on
    the mesh.

    A rank never holds all unsharded parameters: a block is materialized
    and sharded before the next block is materialized.

    Returns:
        A module with `layers`, `forward(tokens) -> logits` and `loss(tokens, targets)`.

    Raises:
        UsageError: the engine cannot train with this mesh or precision.
    """
    shard = choose_engine(config.engine, mesh)
    policy = precision_policy(config.precision)
    stage: dict[str, Any] = {}
    if config.stage != "3":
        stage["zero_stage"] = int(config.stage) if config.stage.isdigit() else config.stage
    with torch.device("meta"):
        model = Transformer(transformer_config(config.preset, config.override))
    for name, block in list(model.layers.named_children()):
        materialise(model, block, device=device, seed=config.seed)
        block = checkpointed(block, config.activation_checkpointing)
        if (
            config.compile
        ):  # with what is recomputed inside: operators that are compiled are not seen outside
            block.compile()
        model.layers.register_module(name, block)
        shard(block, mesh=mesh, mp_policy=policy, **stage)
    materialise(model, model, device=device, seed=config.seed)
    shard(model, mesh=mesh, mp_policy=policy, **stage)
    return model


def choose_engine(name: str, mesh: DeviceMesh) -> ShardModule:
    """Returns the function that shards a module, with the signature of torch's `fully_shard`."""
    if name == "shardgrad":
        from shardgrad import fully_shard

        return fully_shard
    if name == "fsdp2":
        from torch.distributed.fsdp import fully_shard as torch_fully_shard

        return torch_fully_shard
    if mesh.size() > 1:
        raise UsageError(
            f"--engine none trains in one process, but {mesh.size()} are running: use --ranks 1."
        )
    return _unsharded


def _unsharded(
    module: nn.Module, *, mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy
) -> nn.Module:
    if mp_policy.param_dtype is not None:
        raise UsageError(
            "--engine none computes in fp32: leave --precision out, or use an engine that shards."
        )
    return module


def precision_policy(name: str) -> MixedPrecisionPolicy:
    """Returns the policy of `--precision`: `bf16-mixed` computes in bf16 and reduces gradients in
    fp32.
    """
    if name == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def set_gradient_sync(model: nn.Module, wanted: bool) -> None:
    """Sets whether the next backward reduces gradients; no effect on an unsharded model."""
    setter = getattr(model, "set_requires_gradient_sync", None)
    if setter is not None:
        setter(wanted)
