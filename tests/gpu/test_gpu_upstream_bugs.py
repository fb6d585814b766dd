"""Bugs of other engines on a GPU: with a late stream their numbers are wrong every time, the
engine's right.

The models are in `tests/simulated/programs/upstream_bugs.py`; the simulated device runs them too.
Without a GPU only the engine's part runs, on the CPU, without streams.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any
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

HAS_CUDA = torch.cuda.is_available()
NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_CUDA, reason="no GPU: only a late stream makes numbers wrong"),
]
# About 25 ms, in which the host launches what a step has left a hundred times over.
LATE_CYCLES = 50_000_000
STEPS = 4


def late() -> None:
    if HAS_CUDA:
        torch.cuda._sleep(LATE_CYCLES)


def _late_steps(kind: type[Bug], *, fixed: bool) -> list[bool]:
    """Returns, for each of five steps with a late stream, whether its numbers were right."""
    torch.cuda._sleep(1)  # loading a kernel makes the device finish everything first
    bug = kind(torch.device("cuda"), fixed=fixed)
    bug.step()
    bug.late = late
    found = []
    for _ in range(5):
        found.append(bug.step().is_right)
        if isinstance(bug, CommunicationBufferFreedEarly) and not fixed:
            assert bug.reused, "the allocator did not lend the freed block, so this shows nothing"
    return found


@pytest.mark.skipif(
    os.environ.get("HOSTCUDA_ORDER", "host") != "host",
    reason="where a wait is missing, another legal order may be the right one",
)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=NEEDS_CUDA) for kind in BUGS])
def test_each_bug_gives_wrong_numbers_every_time(kind: type[Bug]) -> None:
    assert _late_steps(kind, fixed=False) == [False] * 5


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=NEEDS_CUDA) for kind in BUGS])
def test_each_bug_gives_right_numbers_with_the_wait_that_was_missing(kind: type[Bug]) -> None:
    assert _late_steps(kind, fixed=True) == [True] * 5


def _weights(kind: type[Bug], device: torch.device, *, sharded: bool) -> list[torch.Tensor]:
    mesh = init_device_mesh(device.type, (1,)) if sharded else None
    # One rank has nothing to send. Over NCCL it is made to all the same, so that slots are waited
    # for.
    sends = patch.object(
        comm_context, "transport_for", lambda group, device: StreamTransport(group)
    )
    with sends if device.type == "cuda" else nullcontext():
        training = Training(WORK[kind], device, mesh, late)
        for _ in range(STEPS):
            training.step()
    return training.weights()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("kind", BUGS)
@pytest.mark.usefixtures("one_rank")
def test_the_engine_does_the_same_work_right_bit_for_bit(kind: type[Bug], device: str) -> None:
    ours, plain = (
        _weights(kind, torch.device(device), sharded=sharded) for sharded in (True, False)
    )
    for sharded, whole in zip(ours, plain, strict=True):
        assert torch.equal(sharded, whole)


PRODUCERS = [(GradGroup, "wait_for_producers")]


@pytest.mark.parametrize(
    ("kind", "waits"),
    [
        pytest.param(kind, waits, marks=NEEDS_CUDA, id=kind.__name__)
        for kind, waits in [
            (HookBornOnASideStream, PRODUCERS),
            (ReductionAwaitsTheCurrentStream, PRODUCERS),
            (RefillAwaitsTheFlusher, [(Slot, "start_writing")]),
        ]
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_the_engine_without_its_waits_has_the_bug(
    kind: type[Bug], waits: list[tuple[Any, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _weights(kind, torch.device("cuda"), sharded=False)
    for owner, method in waits:
        monkeypatch.setattr(owner, method, lambda *args, **kwargs: None)
    ours = _weights(kind, torch.device("cuda"), sharded=True)
    assert not all(torch.equal(sharded, whole) for sharded, whole in zip(ours, plain, strict=True))
