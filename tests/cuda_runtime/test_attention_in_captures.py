"""Attention in its plain form under a graph: eager bits, unless a capture makes the program another
one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import shardgrad
from shardgrad.errors import ReplayMismatchError

HEADS, GROUPS, WIDTH = 4, 2, 8


class Attention(nn.Module):
    """Causal attention with grouped keys.

    Transformers 5 asks whether it is captured, since it cannot look at the batch there, and then
    repeats the keys itself, in their dtype, where torch would repeat them in float32: `asks`.
    """

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.queries = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.keys, self.values = (nn.Linear(HEADS * WIDTH, GROUPS * WIDTH) for _ in range(2))
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        layers = self.queries, self.keys, self.values
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for layer in layers)
        if repeats := self.asks and torch.cuda.is_current_stream_capturing():
            k, v = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (k, v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not repeats)
        return x + y.transpose(1, 2).flatten(2)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(*, asks: bool) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention(asks=asks) for _ in range(3))).to("cuda", torch.bfloat16)
    for unit in (*model, model):
        shardgrad.fully_shard(unit)
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)

    @shardgrad.graphed_step(model, optimizer, verify=3)
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        loss = model(x).float().square().mean()
        loss.backward()
        norm = shardgrad.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    try:
        for _ in range(8):
            step(torch.randn(2, 16, HEADS * WIDTH, device="cuda", dtype=torch.bfloat16))
        return step.replays
    finally:
        step.close()


def test_replays_of_plain_attention_have_the_bits_of_eager_steps() -> None:
    assert train(asks=False) > 3


def test_attention_that_is_another_program_while_it_is_captured_is_found_by_verifying() -> None:
    with pytest.raises(ReplayMismatchError, match="do something else while it is captured"):
        train(asks=True)
