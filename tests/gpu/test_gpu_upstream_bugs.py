"""Bugs of other engines on a GPU: with a late stream their numbers are wrong every time, the
engine's right.

The models are in `tests/simulated/programs/upstream_bugs.py`; the simulated device runs them too.
"""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from shardgrad.engine import comm_context
from shardgrad.engine.buffers import Slot
from shardgrad.engine.grad_group import GradGroup
from shardgrad.engine.transports import StreamTransport
from tests.simulated.programs.upstream_bugs import (
    BUGS,
    WORK,
    Bug,
    CommunicationBufferFreedEarly,
    HookBornOnASideStream,
    ReductionAwaitsTheCurrentStream,
    RefillAwaitsTheFlusher,
    Training,
)
from tests.support.gpu import ON_A_GPU
from tests.support.graphed import require_same

pytestmark = ON_A_GPU
DEVICE = torch.device("cuda")
# About 25 ms, in which the host launches what a step has left a hundred times over.
LATE_CYCLES = 50_000_000
STEPS = 4


def late() -> None:
    torch.cuda._sleep(LATE_CYCLES)


def _late_steps(kind: type[Bug], *, fixed: bool) -> list[bool]:
    """Returns, for each of five steps with a late stream, whether its numbers were right."""
    torch.cuda._sleep(1)  # loading a kernel makes the device finish everything first
    bug = kind(DEVICE, fixed=fixed)
    bug.step()
    bug.late = late
    found = []
    for _ in range(5):
        found.append(bug.step())
        if isinstance(bug, CommunicationBufferFreedEarly) and not fixed:
            assert bug.reused, "the allocator did not lend the freed block, so this shows nothing"
    return found


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("kind", BUGS)
def test_each_bug_gives_wrong_numbers_every_time_without_the_wait_that_was_missing(
    kind: type[Bug], fixed: bool
) -> None:
    if not fixed and os.environ.get("HOSTCUDA_ORDER", "host") != "host":
        pytest.skip("where a wait is missing, another legal order may be the right one")
    assert _late_steps(kind, fixed=fixed) == [fixed] * 5


def _weights(kind: type[Bug], *, sharded: bool) -> list[torch.Tensor]:
    mesh = init_device_mesh("cuda", (1,)) if sharded else None
    # One rank has nothing to send. Over NCCL it is made to all the same, so that slots are waited
    # for.
    with patch.object(comm_context, "transport_for", lambda group, device: StreamTransport(group)):
        training = Training(WORK[kind], DEVICE, mesh, late)
        for _ in range(STEPS):
            training.step()
    return training.weights()


@pytest.mark.parametrize("kind", BUGS)
@pytest.mark.usefixtures("one_rank")
def test_the_engine_does_the_same_work_right_bit_for_bit(kind: type[Bug]) -> None:
    require_same(_weights(kind, sharded=False), _weights(kind, sharded=True))


@pytest.mark.parametrize(
    ("kind", "owner", "wait"),
    [
        (HookBornOnASideStream, GradGroup, "wait_for_producers"),
        (ReductionAwaitsTheCurrentStream, GradGroup, "wait_for_producers"),
        (RefillAwaitsTheFlusher, Slot, "release"),
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_the_engine_without_its_wait_has_the_bug(kind: type[Bug], owner: type, wait: str) -> None:
    plain = _weights(kind, sharded=False)
    with patch.object(owner, wait):
        ours = _weights(kind, sharded=True)
    assert not all(map(torch.equal, ours, plain))
