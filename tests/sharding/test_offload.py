"""`CPUOffloadPolicy`: on CPU ranks the host is the device, and everything is as under FSDP2."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import distribute_tensor

from tests.support.parity import (
    Engine,
    Tensors,
    as_under_fsdp2,
    tower,
    train,
)
from tests.support.ranks import on_ranks


@on_ranks(2)
@as_under_fsdp2
def test_a_meta_model_filled_piece_by_piece_on_the_host_trains_like_fsdp2(
    engine: Engine,
) -> Tensors:
    """Fills a model on the meta device as a loader of large checkpoints does: one tensor after
    another.
    """
    whole = tower(seed=3).state_dict()
    with torch.device("meta"):
        model = tower()
    model = engine.shard_tower(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    for name, param in dict(model.state_dict()).items():
        piece = distribute_tensor(whole[name], param.device_mesh, param.placements)
        model.load_state_dict({name: piece}, assign=True, strict=False)
    found = train(engine, model, steps=1)
    model.reshard()
    state = {name: value.to_local().clone() for name, value in model.state_dict().items()}
    assert all(value.device.type == "cpu" for value in state.values())
    return found | {f"{name} at the end": value for name, value in state.items()}
