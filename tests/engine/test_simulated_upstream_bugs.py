"""Bugs of other engines, found on demand: each is one hazard, always the same."""

from __future__ import annotations

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


# Per bug: kind, bytes, of what.
_REPORTS = {
    HookBornOnASideStream: ("read-after-write", 0, 4 * NUMEL, "bucket"),
    ReductionAwaitsTheCurrentStream: ("read-after-write", 4 * HALF, 4 * NUMEL, "bucket"),
    RefillAwaitsTheFlusher: ("write-after-read", 0, 4 * HALF, "bucket 0"),
    CommunicationBufferFreedEarly: ("free-while-in-flight", 0, 4 * NUMEL, "buffer"),
}


@pytest.mark.parametrize("kind", BUGS)
def test_each_bug_is_one_hazard_with_its_places(kind: type[Bug]) -> None:
    (hazard,) = _second_step(kind, fixed=False)
    assert (hazard.kind, hazard.begin, hazard.end, hazard.labels) == _REPORTS[kind]
    assert all(f":{kind.__name__}." in use.place for use in (hazard.later, hazard.earlier))


@pytest.mark.parametrize("kind", BUGS)
def test_each_bug_is_gone_with_the_wait_that_was_missing(kind: type[Bug]) -> None:
    assert not _second_step(kind, fixed=True)
