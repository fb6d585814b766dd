"""Bugs of other engines, found on demand: each is one hazard, always the same."""

from __future__ import annotations

import re

import pytest
import torch

from tests.simulated.accelerator.device import Hazard, checked, name_range, name_stream
from tests.simulated.programs.upstream_bugs import (
    BUGS,
    HALF,
    NUMEL,
    Bug,
    CommunicationBufferFreedEarly,
    HookBornOnASideStream,
    ReductionAwaitsTheCurrentStream,
    RefillAwaitsTheFlusher,
)

NBYTES, HALF_NBYTES = 4 * NUMEL, 4 * HALF


def _name(thing: torch.Tensor | torch.Stream, name: str) -> None:
    if isinstance(thing, torch.Stream):
        name_stream(thing, name)
    else:
        name_range(thing, name)


def _second_step(kind: type[Bug], *, fixed: bool) -> list[Hazard]:
    """Returns the hazards of a second step. In the first the host waits, as it does on a GPU."""
    bug = kind(torch.device("sim", 0), fixed=fixed, made=_name)
    assert bug.step()
    with checked(raises=False) as found:
        assert bug.step()  # the simulated device runs in the order of the program
    return found


# Per bug: kind, bytes, of what; op, stream and function of the use that should have waited, and of
# the first.
_REPORTS = {
    HookBornOnASideStream: (
        ("read-after-write", 0, NBYTES, "bucket"),
        ("aten::mul.out", "reducer", "arrived"),
        ("aten::copy_", "side", "arrived"),
    ),
    ReductionAwaitsTheCurrentStream: (
        ("read-after-write", HALF_NBYTES, NBYTES, "bucket"),
        ("aten::mul.out", "reducer", "reduce"),
        ("aten::copy_", "producer 1", "arrived"),
    ),
    RefillAwaitsTheFlusher: (
        ("write-after-read", 0, HALF_NBYTES, "bucket 0"),
        ("aten::fill_.Scalar", "other producer", "fill"),
        ("aten::mul.out", "reducer", "flush"),
    ),
    CommunicationBufferFreedEarly: (
        ("free-while-in-flight", 0, NBYTES, "buffer"),
        ("free", "default stream of sim:0", "step"),
        ("aten::mul.out", "reducer", "step"),
    ),
}


@pytest.mark.parametrize("kind", BUGS)
def test_each_bug_is_one_hazard_named_exactly(kind: type[Bug]) -> None:
    (hazard,) = _second_step(kind, fixed=False)
    what, later, earlier = _REPORTS[kind]
    assert (hazard.kind, hazard.begin, hazard.end, hazard.labels) == what
    for use, (op, stream, function) in ((hazard.later, later), (hazard.earlier, earlier)):
        assert use.op == op
        assert stream in use.stream
        assert re.fullmatch(rf".*/upstream_bugs\.py:\d+:{kind.__name__}\.{function}", use.place)


@pytest.mark.parametrize("kind", BUGS)
def test_each_bug_is_gone_with_the_wait_that_was_missing(kind: type[Bug]) -> None:
    assert not _second_step(kind, fixed=True)
