"""Mistakes of one rank over NCCL, where the host waits for the device, and not in a collective.

The watchdog has no collective to end there: it names what every rank has called, and the cure.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import shardgrad
from tests.mistakes.apart import named_apart
from tests.mistakes.models import Net, batch, net
from tests.support.apart import STALL_S

BACKEND = "cpu:gloo,cuda:nccl"
WITHIN_S = 30.0

Program = Callable[[], None]


def sharded() -> Net:
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    model = net().cuda()
    for block in model.blocks:
        shardgrad.fully_shard(block)
    return shardgrad.fully_shard(model)


def train(model: Net, steps: int) -> None:
    """As most loops do, it reads the loss after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(batch().cuda()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


def a_state_dict_on_one_rank() -> None:
    model = sharded()
    train(model, 1)
    if dist.get_rank() == 0:
        get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )


def a_loss_on_one_rank() -> None:
    model, hosts = sharded(), dist.new_group(backend="gloo")
    train(model, 1)
    if dist.get_rank() == 0:
        evaluate(model)
    dist.barrier(group=hosts)


def evaluate(model: Net) -> float:
    with torch.no_grad():
        return model(batch().cuda()).square().mean().item()


def more_steps_on_one_rank() -> None:
    train(sharded(), 1 + 2 * (dist.get_rank() == 0))


def a_late_rank() -> None:
    """The host of rank 1 stands on one line for as long as three stalls, with an idle device."""
    model = sharded()
    train(model, 1)
    if dist.get_rank() == 1:
        time.sleep(3 * STALL_S)
    train(model, 1)
    warnings.warn("the end", stacklevel=1)


def test_of_a_rank_that_is_merely_late_over_nccl_nothing_is_said() -> None:
    missing, said = named_apart(
        a_late_rank, lambda _, text: "the end" in text, [0, 1], limit_s=WITHIN_S, backend=BACKEND
    )
    assert not missing
    assert said == {rank: ["UserWarning: the end"] for rank in (0, 1)}


@pytest.mark.parametrize(
    ("program", "says", "cure"),
    [
        (
            a_state_dict_on_one_rank,
            "Rank 1 has finished its program. Rank 0 was waiting for it in "
            "get_model_state_dict() at",
            "get_model_state_dict is a collective: call it on every rank",
        ),
        (
            a_loss_on_one_rank,
            "Ranks wait for each other in different collectives: rank 0 in evaluate at "
            "test_runtime",
            "every rank must reach the barrier: move it out of `if rank == 0:`",
        ),
        (
            more_steps_on_one_rank,
            "Rank 1 has finished its program. Rank 0 was waiting for it in train at "
            "test_runtime_mistakes.py",
            "with shardgrad.participate(model):` on ranks that have no batch",
        ),
    ],
)
def test_what_one_rank_alone_does_is_named_over_nccl(
    program: Program, says: str, cure: str
) -> None:
    def is_named(_: int, text: str) -> bool:
        return text.startswith("WaitingRanksWarning: shardgrad: ") and says in text and cure in text

    missing, said = named_apart(program, is_named, [0], limit_s=WITHIN_S, backend=BACKEND)
    assert not missing, said
