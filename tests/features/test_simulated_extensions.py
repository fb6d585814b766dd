"""Weights with all-gather extensions on streams: no hazard, and in a graph the bits of eager."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardgrad
from tests.simulated.accelerator.device import NAME
from tests.simulated.accelerator.virtual_ranks import one_at_a_time
from tests.simulated.programs.graphed import same_on
from tests.support.graphed import Graphed, Values, require_replays, step_of
from tests.support.tensor_extensions import Blocked, Narrowed, Scaled, extended

WIDTH = 64


def train(graphed: Graphed, kind: type[Narrowed], reshard: bool | None) -> Values:
    with one_at_a_time():
        model = extended(kind, WIDTH, 96, WIDTH).to(NAME)
    mesh = init_device_mesh(NAME, (dist.get_world_size(),))
    for unit in (model[0], model[2], model):  # backward gathers the first two again
        shardgrad.fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    rate = torch.tensor(1e-2, device=NAME)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)
    step = graphed(model, optimizer)(step_of(model, optimizer, 1.0))
    for number in range(6):
        yield step(torch.full((16, WIDTH), number / 8).to(NAME))
    require_replays(step, 1, 3)
    yield [param.to_local().detach() for param in model.parameters() if param.ndim == 1]


@pytest.mark.parametrize(("ranks", "reshard"), [(1, None), (2, None), (2, False)])
@pytest.mark.parametrize("kind", [Narrowed, Scaled, Blocked])
def test_weights_with_all_gather_extensions_are_captured(
    kind: type[Narrowed], ranks: int, reshard: bool | None
) -> None:
    """They send another dtype, and have scales of their own for each step, as torchao's float8
    weights or MXFP8. On one rank the chunk is read where it is filled; a scale is read on another
    stream than it is computed on.
    """
    same_on(ranks, train, kind, reshard)
