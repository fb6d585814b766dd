"""`check_streams` without streams, what it refuses, and the order it learns from a device's
events.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardgrad import fully_shard
from shardgrad.errors import RootError
from shardgrad.programs.testing import StreamCheckError, check_streams
from shardgrad.programs.testing.check_streams import _arguments, _range
from shardgrad.programs.testing.event_order import EventOrder


@pytest.fixture
def model() -> Iterator[nn.Module]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (made[0], made):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    yield made
    dist.destroy_process_group()


def _step(model: nn.Module) -> torch.Tensor:
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    return loss.detach()


def test_on_a_device_without_streams_there_is_nothing_to_report_and_the_step_is_the_same(
    model: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = _step(model)
    with check_streams(model) as report:
        assert torch.equal(_step(model), plain)
    assert report.hazards == []
    assert capsys.readouterr().out == ""


def test_a_model_without_a_unit_is_refused() -> None:
    with (
        pytest.raises(RootError, match=r"has no unit(.|\n)*fully_shard\(model\)"),
        check_streams(nn.Linear(2, 2)),
    ):
        pass


def test_a_model_that_has_not_run_is_refused_with_what_to_do(model: nn.Module) -> None:
    with (
        pytest.raises(RootError, match=r"has not run yet(.|\n)*run one step"),
        check_streams(model),
    ):
        pass


def test_a_block_inside_a_block_is_refused_and_the_outer_one_goes_on(model: nn.Module) -> None:
    _step(model)
    with check_streams(model):
        with pytest.raises(StreamCheckError, match="inside check_streams"), check_streams(model):
            pass
        with pytest.raises(StreamCheckError), check_streams(model):
            pass
    with check_streams(model):
        pass


def test_a_block_that_an_error_leaves_can_be_entered_again(model: nn.Module) -> None:
    _step(model)
    with pytest.raises(KeyError), check_streams(model):
        raise KeyError("from the program")
    with check_streams(model):
        _step(model)


class _Device(EventOrder):
    """A device whose current stream is what the test says."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", 0))
        self.stream = 0

    def current(self) -> int:
        return self.stream


@pytest.fixture
def order() -> Iterator[_Device]:
    made = _Device()
    made.start()
    yield made
    made.stop()


def _record(event: int, stream: int) -> None:
    torch.cuda._gpu_trace.EventRecordCallbacks.fire_callbacks(event, stream)


def _wait(event: int, stream: int) -> None:
    torch.cuda._gpu_trace.EventWaitCallbacks.fire_callbacks(event, stream)


def _ordered(order: _Device, moment: tuple[int, int], stream: int) -> bool:
    order.stream = stream
    return order.is_ordered(moment)


def test_one_stream_is_in_order_and_two_are_not(order: _Device) -> None:
    moment = order.now()
    assert _ordered(order, moment, 0)
    assert not _ordered(order, moment, 1)


def test_an_event_orders_what_came_before_its_record_and_nothing_after(order: _Device) -> None:
    before = order.now()
    _record(7, 0)
    after = order.now()
    _wait(7, 1)
    assert _ordered(order, before, 1)
    assert not _ordered(order, after, 1)


def test_order_passes_through_a_third_stream(order: _Device) -> None:
    moment = order.now()
    _record(7, 0)
    _wait(7, 1)
    _record(8, 1)
    _wait(8, 2)
    assert _ordered(order, moment, 2)


def test_an_event_recorded_again_means_its_last_record(order: _Device) -> None:
    _record(7, 0)
    moment = order.now()
    _record(7, 0)
    _wait(7, 1)
    assert _ordered(order, moment, 1)


def test_an_event_that_takes_the_place_of_a_deleted_one_orders_nothing(order: _Device) -> None:
    moment = order.now()
    _record(7, 0)
    torch.cuda._gpu_trace.EventDeletionCallbacks.fire_callbacks(7)
    _wait(7, 1)
    assert not _ordered(order, moment, 1)


@pytest.mark.parametrize("what", ["event", "stream", "device"])
def test_what_the_host_waited_for_is_before_everything_launched_later(
    order: _Device, what: str
) -> None:
    trace = torch.cuda._gpu_trace
    moment = order.now()
    _record(7, 0)
    if what == "event":
        trace.EventSynchronizationCallbacks.fire_callbacks(7)
    elif what == "stream":
        trace.StreamSynchronizationCallbacks.fire_callbacks(0)
    else:
        trace.DeviceSynchronizationCallbacks.fire_callbacks()
    assert _ordered(order, moment, 1)


def test_nothing_listens_after_the_block() -> None:
    order = _Device()
    order.start()
    order.stop()
    assert order._listeners()
    assert all(listener not in registry.callback_list for registry, listener in order._listeners())


def test_the_trace_is_followed_from_start_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.cuda import _gpu_trace as trace

    monkeypatch.setattr(torch._C, "_activate_gpu_trace", lambda: None)
    order = _Device()
    order.start()
    order.stream = 1
    made = order.now()
    trace.EventRecordCallbacks.fire_callbacks(7, 1)
    order.stream = 2
    assert not order.is_ordered(made)
    trace.EventWaitCallbacks.fire_callbacks(7, 2)
    assert order.is_ordered(made)
    order.stop()
    trace.EventWaitCallbacks.fire_callbacks(7, 3)
    order.stream = 3
    assert not order.is_ordered(made)


def test_what_an_operation_only_views_is_no_access_and_what_follows_it_is() -> None:
    viewed, start = torch.zeros(4), torch.tensor(1)
    assert list(_arguments(torch.ops.aten.narrow.Tensor, (viewed, 0, start, 2), {})) == [
        (start, False)
    ]
    assert list(_arguments(torch.ops.aten.copy_.default, (viewed, start), {})) == [
        (viewed, True),
        (start, False),
    ]


def test_memory_reaches_from_the_first_element_to_the_end_of_the_last() -> None:
    whole = torch.zeros(4, 6)
    for tensor, begin, end in ((whole, 0, 96), (whole[1:3, 2], 32, 60)):
        found = _range(tensor, "x")
        assert (found.begin - whole.data_ptr(), found.end - whole.data_ptr()) == (begin, end)
    empty = _range(whole[2:2], "x")
    assert empty.begin == empty.end
