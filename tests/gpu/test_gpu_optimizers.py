"""Clip and step on one device. How a captured update follows a schedule and skips is shown by
`tests/simulated/test_simulated_optimizers.py`, and for whole programs by random ones.

On a machine with a GPU: `make test ARGS="tests/gpu"`; without one `make test-cuda`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardgrad

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("one_rank"),
]
DEVICE = torch.device("cuda")
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: shardgrad.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: shardgrad.optim.SGD(p, lr=1e-1, momentum=0.9),
    "muon": lambda p: shardgrad.optim.Muon(p, lr=1e-2),
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))


def build() -> nn.Module:
    model, mesh = layers().to(DEVICE), init_device_mesh("cuda", (1,))
    for layer in model:
        shardgrad.fully_shard(layer, mesh=mesh)
    return shardgrad.fully_shard(model, mesh=mesh)


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(step))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.to_local().detach().cpu().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_device_trains_as_the_cpu_does(name: str) -> None:
    sharded, plain = build(), layers()
    for model, device in ((sharded, DEVICE), (plain, torch.device("cpu"))):
        optim = OPTIMIZERS[name](model.parameters())
        for step in range(3):
            model(batch(step).to(device)).square().mean().backward()
            shardgrad.clip_grad_norm_(model, 0.1)
            optim.step()
            optim.zero_grad()
    # Newton-Schulz multiplies in bfloat16: its step of 1e-2 is right to some parts in a hundred.
    close = {"rtol": 1e-2, "atol": 5e-4} if name == "muon" else {"rtol": 1e-4, "atol": 1e-5}
    for ours, right in zip(weights(sharded), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, right.detach(), **close)
