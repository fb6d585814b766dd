"""States on the host, on simulated streams: the same bits, and no copy out of order.

That each wait is needed is shown by `tests/cuda_runtime/test_host_states.py`; here the host waits
for copies to it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardgrad
from tests.simulated.accelerator.device import NAME, checked
from tests.simulated.accelerator.virtual_ranks import VirtualRanks
from tests.simulated.programs.towers import batch, sharded_tower
from tests.support.parity import token_loss

OPTIMIZERS: dict[str, Any] = {
    "adamw": shardgrad.optim.AdamW,
    "muon": lambda p, **o: shardgrad.optim.Muon([each for each in p if each.ndim == 2], **o),
}


def _train(name: str, on_host: bool) -> list[torch.Tensor]:
    model = sharded_tower()
    optim = OPTIMIZERS[name](model.parameters(), lr=1e-2, states_on_host=on_host)
    for step in range(4):
        token_loss(model, batch(step)).backward()
        shardgrad.clip_grad_norm_(model, 0.5)
        optim.step()
        optim.zero_grad()
    states = [
        flat for what, flat in optim.buffers() if " of segment" in what and "step" not in what
    ]
    optim.state_dict()  # waits
    assert {flat.device.type for flat in states} == {"cpu" if on_host else NAME}
    return [flat.cpu() for flat in (*states, *(p.to_local() for p in model.parameters()))]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_on_the_host_train_bit_for_bit_like_states_on_the_device(name: str) -> None:
    with checked():
        on_host = VirtualRanks(2).run(_train, name, True)
    for ours, right in zip(on_host, VirtualRanks(2).run(_train, name, False), strict=True):
        assert all(map(torch.equal, ours, right))
