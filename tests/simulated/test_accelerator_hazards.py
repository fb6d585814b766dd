"""Every hazard is caught once and named exactly, and the same program with the missing wait is
silent.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.simulated.accelerator.device import Hazard, checked, name_range

NUMEL = 256
NBYTES = 4 * NUMEL


def _side() -> torch.Stream:
    """Returns a stream that knows what the current one has done."""
    side = torch.Stream("sim")
    side.wait_stream(torch.accelerator.current_stream())
    return side


def _the_only(found: list[Hazard]) -> Hazard:
    assert len(found) == 1, "\n".join(map(str, found))
    return found[0]


def _read_after_write(*, waits: bool) -> None:
    x, out = torch.zeros(NUMEL, device="sim"), torch.zeros(NUMEL // 2, device="sim")
    side = _side()
    x.fill_(1)
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        torch.neg(x[NUMEL // 2 :], out=out)
    torch.accelerator.current_stream().wait_stream(side)


def _write_after_read(*, waits: bool) -> None:
    x, out = torch.zeros(NUMEL, device="sim"), torch.zeros(NUMEL, device="sim")
    side = _side()
    with side:
        torch.neg(x, out=out)
    if waits:
        torch.accelerator.current_stream().wait_stream(side)
    x[:8].fill_(1)
    torch.accelerator.current_stream().wait_stream(side)


def _write_after_write(*, waits: bool) -> None:
    x = torch.zeros(NUMEL, device="sim")
    side = _side()
    x.fill_(1)
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.zero_()
    torch.accelerator.current_stream().wait_stream(side)


def _free_in_flight(*, waits: bool) -> None:
    x = torch.zeros(NUMEL, device="sim")
    side = _side()
    with side:
        x.fill_(1)
    if waits:
        torch.accelerator.current_stream().wait_stream(side)
    del x


@pytest.mark.parametrize(
    ("program", "kind", "earlier", "later", "begin", "end"),
    [
        (
            _read_after_write,
            "read-after-write",
            "aten::fill_.Scalar",
            "aten::neg.out",
            NBYTES // 2,
            NBYTES,
        ),
        (_write_after_read, "write-after-read", "aten::neg.out", "aten::fill_.Scalar", 0, 32),
        (_write_after_write, "write-after-write", "aten::fill_.Scalar", "aten::zero_", 0, NBYTES),
        (_free_in_flight, "free-while-in-flight", "aten::fill_.Scalar", "free", 0, NBYTES),
    ],
)
def test_a_missing_wait_is_one_hazard_with_ops_bytes_streams_and_places(
    program: Callable[..., None], kind: str, earlier: str, later: str, begin: int, end: int
) -> None:
    with checked(raises=False) as found:
        program(waits=False)
    hazard = _the_only(found)
    assert (hazard.kind, hazard.earlier.op, hazard.later.op) == (kind, earlier, later)
    assert (hazard.begin, hazard.end, hazard.device) == (begin, end, 0)
    streams = {hazard.earlier.stream, hazard.later.stream}
    assert len(streams) == 2
    assert "default stream of sim:0" in streams
    for use in (hazard.earlier, hazard.later):
        file, line, function = use.place.split(":")
        assert file == __file__
        assert function == program.__name__
        body = range(program.__code__.co_firstlineno, program.__code__.co_firstlineno + 14)
        assert int(line) in body
    assert hazard.earlier.place != hazard.later.place


@pytest.mark.parametrize(
    "program", [_read_after_write, _write_after_read, _write_after_write, _free_in_flight]
)
def test_the_same_program_with_its_wait_is_silent(program: Callable[..., None]) -> None:
    with checked():
        program(waits=True)


def test_an_event_orders_what_came_before_it_and_nothing_after() -> None:
    x, y = torch.zeros(8, device="sim"), torch.zeros(8, device="sim")
    side, event = _side(), torch.Event("sim")
    x.fill_(1)
    event.record()
    y.fill_(1)
    event.wait(side)
    with checked(), side:
        x.neg_()
    with checked(raises=False) as found, side:
        y.neg_()
    _the_only(found)


def test_order_is_transitive() -> None:
    x = torch.zeros(8, device="sim")
    first, second = _side(), _side()
    with checked():
        with first:
            x.fill_(1)
        second.wait_stream(first)
        torch.accelerator.current_stream().wait_stream(second)
        x.neg_()


def test_the_host_orders_streams_when_it_waits_for_one() -> None:
    x = torch.zeros(8, device="sim")
    side = _side()
    with checked():
        with side:
            x.fill_(1)
        side.synchronize()
        x.neg_()


def test_two_writers_of_one_buffer_must_both_be_waited_for() -> None:
    flat = torch.zeros(NUMEL, device="sim")
    first, second, reader = _side(), _side(), _side()
    with first:
        flat[: NUMEL // 2].fill_(1)
    with second:
        flat[NUMEL // 2 :].fill_(2)
    reader.wait_stream(first)
    with checked(raises=False) as found, reader:
        total = flat.sum()
    hazard = _the_only(found)
    assert (hazard.kind, hazard.begin, hazard.end) == ("read-after-write", NBYTES // 2, NBYTES)
    reader.wait_stream(second)
    torch.accelerator.current_stream().wait_stream(reader)
    assert total.item() == 1.5 * NUMEL


def test_columns_that_interleave_are_not_taken_for_an_overlap() -> None:
    matrix = torch.zeros(16, 16, device="sim")
    side = _side()
    with checked():
        matrix[:, :8].fill_(1)
        with side:
            matrix[:, 8:].fill_(2)
    with checked(raises=False) as found, side:
        matrix[:, 7:].fill_(3)
    assert _the_only(found).begin == 7 * 4


def test_memory_is_not_used_elsewhere_before_its_allocation() -> None:
    side = torch.Stream("sim")
    with checked(raises=False) as found:
        x = torch.empty(8, device="sim")
        with side:
            x.fill_(1)
        side.synchronize()
    hazard = _the_only(found)
    assert (hazard.kind, hazard.earlier.op) == ("write-after-write", "allocate")


def test_a_name_stands_in_the_report() -> None:
    x = torch.zeros(NUMEL, device="sim")
    name_range(x[: NUMEL // 2], "layers.0.weight")
    name_range(x[NUMEL // 2 :], "layers.0.bias")
    side = _side()
    x.fill_(1)
    with checked(raises=False) as found, side:
        x[NUMEL // 2 :].neg_()
    assert _the_only(found).labels == "layers.0.bias"
    assert "of layers.0.bias on sim:0" in str(found[0])
    side.synchronize()


def test_what_comes_again_is_counted() -> None:
    x = torch.zeros(NUMEL, device="sim")
    side = torch.Stream("sim")
    with checked(raises=False) as found:
        for _ in range(3):
            x.fill_(1)
            with side:
                x.sum()
            torch.accelerator.synchronize()
    assert _the_only(found).count == 3


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_between_devices_is_ordered_with_both_streams(waits: bool) -> None:
    x, y = torch.zeros(8, device="sim:0"), torch.zeros(8, device="sim:1")
    side = torch.Stream("sim:0")
    side.wait_stream(torch.accelerator.current_stream(0))
    with checked(raises=False) as found:
        with side:
            x.fill_(1)
        if waits:
            torch.accelerator.current_stream(0).wait_stream(side)
        y.copy_(x)
        y.neg_()
        torch.accelerator.current_stream(0).wait_stream(side)
    assert [hazard.kind for hazard in found] == ([] if waits else ["read-after-write"])
    assert y.tolist() == [-1.0] * 8


@pytest.mark.parametrize("waits", [True, False])
def test_the_ops_of_the_engine_tell_what_they_read_and_write(waits: bool) -> None:
    chunks = [torch.ones(8, device="sim"), torch.ones(8, device="sim")]
    out, side = torch.zeros(8, device="sim"), _side()
    chunks[1].fill_(2)
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with checked(raises=False) as found, side:
        torch.ops.shardgrad.sum_chunks(chunks, out, 1.0, False)
    side.synchronize()
    assert out.tolist() == [3.0] * 8
    assert [(h.kind, h.later.op) for h in found] == (
        [] if waits else [("read-after-write", "shardgrad::sum_chunks")]
    )
