"""A program for `check`, and one that forgets to wait."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shardgrad


def _train(*, waits: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))).cuda()
    for layer in (*model, model):
        shardgrad.fully_shard(layer)
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)

    @shardgrad.graphed_step(model, optimizer)
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        shardgrad.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    side, losses = torch.cuda.Stream(), []
    for number in range(6):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number)).cuda()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # a batch is prepared beside the step
            x.mul_(2)
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        losses.append(step(x).clone())
        side.wait_stream(torch.cuda.current_stream())
    step.close()
    return losses


def train() -> list[Tensor]:
    return _train(waits=True)


def train_without_waiting() -> list[Tensor]:
    return _train(waits=False)
