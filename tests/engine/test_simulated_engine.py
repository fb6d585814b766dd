"""The engine, unmodified, on virtual ranks: no hazard, the right losses; and its waits are
needed.
"""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import torch

from shardgrad.engine.streams import AcceleratorStreams
from shardgrad.engine.unit import units_under
from tests.simulated.accelerator.device import NAME, checked
from tests.simulated.accelerator.virtual_ranks import VirtualRanks, on_virtual_ranks, one_at_a_time
from tests.simulated.programs.towers import batch, sharded_tower
from tests.support.parity import token_loss


def _deletes_a_model_with_an_all_gather_in_flight() -> None:
    model = sharded_tower()
    model.layers[0].unshard(async_op=True)
    with one_at_a_time():  # each rank's own collection finds its model
        del model
        gc.collect()  # what gets the memory is work of the current stream


def test_a_model_is_deleted_with_an_all_gather_in_flight() -> None:
    with checked():
        VirtualRanks(2).run(_deletes_a_model_with_an_all_gather_in_flight)
    with checked(raises=False) as found, mock.patch.object(AcceleratorStreams, "join"):
        VirtualRanks(2).run(_deletes_a_model_with_an_all_gather_in_flight)
    assert "simulated::all_gather" in {hazard.earlier.op for hazard in found}


@on_virtual_ranks(2, checks=True)
def test_hooks_on_their_own_stream_come_after_reductions_and_before_gradients() -> None:
    model, side = sharded_tower(), torch.Stream(NAME)
    for layer in model.layers:
        layer.set_all_reduce_hook(lambda chunk: chunk.mul_(3.0), stream=side)
    for step in range(2):
        token_loss(model, batch(step)).backward()


@on_virtual_ranks(2, checks=True)
def test_gathers_wait_for_what_a_forward_has_written() -> None:
    """Weights are halved in forward; what backward gathers, and the next step, must come after."""
    model = sharded_tower(reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def halve(layer: torch.nn.Module, args: Any) -> None:
        with torch.no_grad():
            for param in layer.parameters():
                param.mul_(0.5)

    for layer in model.layers:
        layer.register_forward_pre_hook(halve)
    for _ in range(3):
        data = batch(0)
        token_loss(model, data).backward()
        optimizer.step()
        optimizer.zero_grad()


def _steps_over_a_shard_that_is_being_gathered(steps: int) -> int:
    """Before each step the program gathers a layer that nothing runs; returns how much staging
    there is.
    """
    model = sharded_tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        token_loss(model, batch(step)).backward()
        handle = model.layers[0].unshard(async_op=True)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:  # which waits for the step, too
            handle.wait()
    context = units_under(model)[0].context
    assert context is not None
    return len(context.comm_ctx.gather_ring.slots)


def test_a_step_waits_for_a_gather_that_nothing_uses_and_takes_its_staging_back() -> None:
    with checked():
        few, many = (
            VirtualRanks(2).run(_steps_over_a_shard_that_is_being_gathered, n) for n in (2, 5)
        )
    assert few == many
