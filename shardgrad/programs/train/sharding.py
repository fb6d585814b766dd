"""Builds the model and applies `fully_shard`, one block after another."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

import shardgrad
from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.model import Transformer, materialise
from shardgrad.programs.train.presets import transformer_config
from shardgrad.programs.train.recompute import checkpointed


def build_model(config: TrainConfig, mesh: DeviceMesh, device: torch.device) -> Transformer:
    """Builds the model of `config`, sharded over `mesh`, with initial values that do not depend on
    the mesh.

    A rank never holds all unsharded parameters: a block is materialized
    and sharded before the next block is materialized.

    Returns:
        A module with `layers`, `forward(tokens) -> logits` and `loss(tokens, targets)`.
    """
    shard: Any = shardgrad.fully_shard if config.engine == "shardgrad" else fsdp2_fully_shard
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


def precision_policy(name: str) -> MixedPrecisionPolicy:
    """Returns the policy of `--precision`: `bf16-mixed` computes in bf16 and reduces gradients in
    fp32.
    """
    if name == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
