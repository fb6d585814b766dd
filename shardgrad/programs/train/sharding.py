"""Builds the model and applies `fully_shard`, one block after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardgrad import FSDPModule, fully_shard
from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.model import Transformer, materialise
from shardgrad.programs.train.presets import PRESETS


def build_model(config: TrainConfig, mesh: DeviceMesh, device: torch.device) -> Transformer:
    """Builds the model of `config`, sharded over `mesh`, with initial values that do not depend on
    the mesh.

    A rank never holds all unsharded parameters: a block is materialized
    and sharded before the next block is materialized.

    Returns:
        A module with `layers`, `forward(tokens) -> logits` and `loss(tokens, targets)`.
    """
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": precision_policy(config.precision),
        "zero_stage": config.stage if config.stage == "auto" else int(config.stage),
    }
    with torch.device("meta"):
        model = Transformer(PRESETS[config.preset])

    shard_in_order(
        model,
        model.layers,
        model.ends,
        fill=lambda part: materialise(model, part, device=device, seed=config.seed),
        wrap=checkpoint_wrapper if config.activation_checkpointing else lambda block: block,
        arguments=arguments,
    )
    return model


def shard_in_order(
    model: nn.Module,
    blocks: nn.Module,
    ends: Iterable[str],
    *,
    fill: Callable[[nn.Module], None],
    wrap: Callable[[nn.Module], nn.Module],
    arguments: Mapping[str, Any],
) -> None:
    """Applies `fully_shard` to the blocks of a model on the meta device, to its ends and to itself.

    Args:
        model: the model.
        blocks: the module whose children are the blocks.
        ends: names of other modules that are units.
        fill: materializes a module, just before it is sharded.
        wrap: returns what takes the place of a block, with unsharded parameters.
        arguments: of `fully_shard`.
    """
    wrapped: dict[nn.Module, nn.Module] = {}  # a block may be listed twice
    for name, block in blocks._modules.items():
        if block is None:
            continue
        if block not in wrapped:
            fill(block)
            wrapped[block] = fully_shard(wrap(block), **arguments)
        blocks.register_module(name, wrapped[block])
    # In the root's unit an embedding and a head would be unsharded from the first layer to the end
    # of backward, and the head's gradients reduced after those of all blocks.
    for part in (*map(model.get_submodule, ends), model):
        fill(part)
        fully_shard(part, **arguments)
        if isinstance(part, nn.Embedding) and isinstance(part, FSDPModule):
            part.set_unshard_in_backward(False)  # which reads no weight


def precision_policy(name: str) -> MixedPrecisionPolicy:
    """Returns the policy of `--precision`: `bf16-mixed` computes in bf16 and reduces gradients in
    fp32.
    """
    if name == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
