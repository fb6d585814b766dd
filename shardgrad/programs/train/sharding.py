"""Builds the model and applies `fully_shard`, one block after another."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardgrad import FSDPModule, fully_shard
from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.model import Transformer, materialise
from shardgrad.programs.train.presets import transformer_config


def build_model(config: TrainConfig, mesh: DeviceMesh, device: torch.device) -> Transformer:
    """Builds the model of `config`, sharded over `mesh`, with initial values that do not depend on
    the mesh.

    A rank never holds all unsharded parameters: a block is materialized
    and sharded before the next block is materialized.

    Returns:
        A module with `layers`, `forward(tokens) -> logits` and `loss(tokens, targets)`.
    """
    policy = precision_policy(config.precision)
    stage: dict[str, Any] = {}
    if config.stage != "3":
        stage["zero_stage"] = int(config.stage) if config.stage.isdigit() else config.stage
    with torch.device("meta"):
        model = Transformer(transformer_config(config.preset, config.override))
    for name, block in list(model.layers.named_children()):
        materialise(model, block, device=device, seed=config.seed)
        if config.activation_checkpointing:  # of unsharded parameters, so before fully_shard
            block = checkpoint_wrapper(block)
        if config.compile:
            block.compile()
        model.layers.register_module(name, block)
        fully_shard(block, mesh=mesh, mp_policy=policy, **stage)
    # In the root's unit an embedding and a head would be unsharded from the first layer to the end
    # of backward, and the head's gradients reduced after those of all blocks.
    for part in (*map(model.get_submodule, model.ends), model):
        materialise(model, part, device=device, seed=config.seed)
        fully_shard(part, mesh=mesh, mp_policy=policy, **stage)
        if isinstance(part, nn.Embedding) and isinstance(part, FSDPModule):
            part.set_unshard_in_backward(False)  # which reads no weight
    return model


def precision_policy(name: str) -> MixedPrecisionPolicy:
    """Returns the policy of `--precision`: `bf16-mixed` computes in bf16 and reduces gradients in
    fp32.
    """
    if name == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
