"""Each wait of a step whose states are on the host is needed, and so is the host's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import shardgrad
from shardgrad.engine import streams
from shardgrad.optim import adam, host_states
from tests.cuda_runtime import inspection
from tests.support.parity import stack


def with_gradients() -> Any:
    """Returns an optimizer of three segments of one size."""
    layers, mesh = stack(64, 64, 64, 64).cuda(), init_device_mesh("cuda", (1,))
    for layer in (layers[0], layers[2], layers[4], layers):
        shardgrad.fully_shard(layer, mesh=mesh)
    layers(torch.ones(4, 64, device="cuda")).sum().backward()
    return shardgrad.optim.AdamW(layers.parameters(), states_on_host=True)


def three_steps() -> None:
    """Others write where the chunks of a step lie, before it and after the last one, which fails at
    its first update.
    """
    optim = with_gradients()
    nbytes = max(segment.numel for segment in optim._segments) * 8
    for _ in range(2):
        _write_and_free(nbytes)
        optim.step()
    with mock.patch.object(adam, "adam_", side_effect=RuntimeError), suppress(RuntimeError):
        optim.step()
    _write_and_free(nbytes)
    torch.cuda.synchronize()


def _write_and_free(nbytes: int) -> None:
    chunks = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    for chunk in chunks:
        chunk.fill_(1)


@contextmanager
def without(line: int | None) -> Iterator[set[int]]:
    """Makes the wait of a line of `host_states.py` do nothing; yields the lines that wait."""
    wait, seen = streams._DeviceEvent.wait, set[int]()

    def wait_unless_removed(event: Any, stream: Any) -> None:
        caller = sys._getframe(1)
        if caller.f_code.co_filename == host_states.__file__:
            seen.add(caller.f_lineno)
            if caller.f_lineno == line:
                return
        wait(event, stream)

    with mock.patch.object(streams._DeviceEvent, "wait", wait_unless_removed):
        yield seen


def conflicts_without(line: int | None) -> tuple[set[int], list[str]]:
    inspection.trace(True)
    try:
        with without(line) as seen:
            three_steps()
        return seen, inspection.conflicts(inspection.log())
    finally:
        inspection.trace(False)
        inspection.findings(forget=True)


@pytest.mark.usefixtures("one_rank")
def test_without_any_of_its_waits_a_step_is_out_of_order() -> None:
    lines, conflicts = conflicts_without(None)
    assert (len(lines), conflicts) == (6, [])
    for line in lines:
        assert conflicts_without(line)[1], f"line {line} of host_states.py is not missed"


@pytest.mark.usefixtures("one_rank")
def test_a_state_dict_waits_for_the_copies_of_the_step_before() -> None:
    optim = with_gradients()
    optim.step()  # the host looks at what a first one has done
    before = moments(optim)
    with inspection.order("late"):
        optim.step()
        after = moments(optim)
    assert all((now != then).all() for now, then in zip(after, before, strict=True))


@pytest.mark.usefixtures("one_rank")
def test_a_state_that_is_replaced_waits_for_the_copies_of_the_step_before() -> None:
    """Step counts, which are on the device, stay: to write one would make the host wait."""
    optim = with_gradients()
    optim.step()
    with inspection.order("late"):
        optim.step()
        for entry in optim.state.values():
            entry |= {key: torch.zeros_like(value) for key, value in entry.items() if value.ndim}
        optim.zero_grad()  # takes over what the program has put there
    assert not any(value.any() for value in moments(optim))


def moments(optim: Any) -> list[torch.Tensor]:
    entries = optim.state_dict()["state"].values()
    return [value.to_local().clone() for each in entries for value in each.values() if value.ndim]
