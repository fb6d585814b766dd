"""A sharded tower of either engine with its optimizer, and what both hold, whole."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from tests.support import under_patch
from tests.support.parity import (
    FSDP2,
    SHARDGRAD,
    Engine,
    Tensors,
    hsdp_mesh,
    token_loss,
    tower,
)

ENGINES = {"fsdp2": FSDP2, "shardgrad": SHARDGRAD}
Trained = tuple[nn.Module, torch.optim.Optimizer]


def build(engine: Engine, seed: int = 0, replicas: int = 1) -> Trained:
    """Returns a sharded tower and its AdamW: each engine with the optimizer its users have."""
    mesh = {} if replicas == 1 else {"mesh": hsdp_mesh(replicas, dist.get_world_size() // replicas)}
    model = engine.shard_tower(tower(seed), **mesh)
    return model, engine.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def take_steps(
    engine: Engine, model: nn.Module, optim: torch.optim.Optimizer, steps: range = range(2)
) -> None:
    for step in steps:
        token_loss(model, engine.tokens(step)).backward()
        optim.step()
        optim.zero_grad()


def whole(model: nn.Module, optim: torch.optim.Optimizer | None = None) -> Tensors:
    """Returns copies of parameters and of their state, whole."""
    found: Tensors = {}
    for name, param in model.named_parameters():
        found[name] = under_patch.whole(param)
        for key, value in {} if optim is None else sorted(optim.state.get(param, {}).items()):
            found[f"{name}.{key}"] = under_patch.whole(value).cpu()
    return found
