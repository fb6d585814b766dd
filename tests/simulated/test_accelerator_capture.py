"""A capture refuses what CUDA refuses; a replay repeats it on the same addresses, without
Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.simulated.accelerator import errors
from tests.simulated.accelerator.device import Graph, checked
from tests.simulated.accelerator.virtual_ranks import VirtualRanks


def _current() -> torch.Stream:
    return torch.accelerator.current_stream()


def _side() -> torch.Stream:
    side = torch.Stream("sim")
    side.wait_stream(_current())
    return side


class Training:
    """A small training step on static inputs, with gradients that stay where they are."""

    def __init__(self, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(16), nn.Linear(16, 4)
        ).to("sim")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.batch = torch.zeros(5, 8, device="sim")
        self.loss = torch.zeros((), device="sim")

    def load(self, step: int) -> None:
        self.batch.copy_(torch.randn(5, 8, generator=torch.Generator().manual_seed(step)))

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def eager(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            self.load(step)
            self.step()
            losses.append(self.loss.item())
        return losses

    def state(self) -> list[torch.Tensor]:
        return [p.detach().cpu().clone() for p in self.model.parameters()]


def _equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _graphed(dropout: float = 0.0) -> tuple[Training, Graph, torch.Stream]:
    side = _side()
    training, graph = Training(dropout), Graph()
    side.wait_stream(_current())
    with side:  # where the captured step will run, so that no node was born elsewhere
        training.eager(range(2))
    with graph.capture(side):
        training.step()
    return training, graph, side


def test_replays_equal_eager_steps_bit_for_bit() -> None:
    with checked():
        training, graph, side = _graphed()
        losses = []
        for step in range(2, 6):
            with side:
                training.load(step)
                graph.replay()
                losses.append(training.loss.item())
        other = Training()
        assert losses == other.eager(range(6))[2:]
        assert _equal(training.state(), other.state())


def test_a_python_number_takes_the_dtype_of_what_it_meets_in_a_replay_too() -> None:
    x, y, side, graph = (
        torch.tensor(3.0, device="sim"),
        torch.zeros((), device="sim"),
        _side(),
        Graph(),
    )
    right = 0.1 / (torch.tensor(3.0) + 1e-6)  # in float32 throughout; in float64 another bit
    with graph.capture(side):
        y.copy_(0.1 / (x + 1e-6))
    graph.replay()
    torch.accelerator.current_stream().wait_stream(side)
    assert y.item() == right.item()


def test_replays_draw_the_random_numbers_an_eager_step_would_draw() -> None:
    training, graph, side = _graphed(dropout=0.5)
    losses = []
    for step in range(2, 5):
        with side:
            training.load(step)
            graph.replay()
            losses.append(training.loss.item())
    assert losses == Training(dropout=0.5).eager(range(5))[2:]


def test_capturing_leaves_memory_and_addresses_as_they_were() -> None:
    side = _side()
    with side:
        training = Training()
        training.eager(range(2))
        before = training.state()
        addresses = [(p.data_ptr(), p.grad.data_ptr()) for p in training.model.parameters()]
        gradients = [p.grad.cpu() for p in training.model.parameters()]
    with Graph().capture(side):
        training.step()
    assert _equal(training.state(), before)
    assert _equal([p.grad.cpu() for p in training.model.parameters()], gradients)
    assert [(p.data_ptr(), p.grad.data_ptr()) for p in training.model.parameters()] == addresses


def test_a_replay_runs_no_python() -> None:
    training, graph, side = _graphed()
    entered: list[str] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_name)

    with side:
        sys.setprofile(profile)
        try:
            graph._native.replay()
        finally:
            sys.setprofile(None)
    assert entered == []
    assert len(graph) > 20
    assert training.loss.item() > 0


def test_forked_streams_are_part_of_the_graph_and_ordered_in_it() -> None:
    x, y = torch.zeros(8, device="sim"), torch.zeros(8, device="sim")
    main, other, graph = _side(), torch.Stream("sim"), Graph()
    with graph.capture(main):
        x.add_(1)
        other.wait_stream(main)
        with other:
            y.add_(x)
        main.wait_stream(other)
    with checked():
        _current().wait_stream(main)
        for _ in range(3):
            graph.replay()
        assert (x[0].item(), y[0].item()) == (3.0, 6.0)


def test_a_missing_wait_inside_a_graph_is_a_hazard_of_its_replay() -> None:
    x, y = torch.zeros(8, device="sim"), torch.zeros(8, device="sim")
    main, other, graph = _side(), torch.Stream("sim"), Graph()
    with graph.capture(main):
        other.wait_stream(main)
        x.add_(1)
        with other:
            y.add_(x)
        main.wait_stream(other)
    with checked(raises=False) as found:
        graph.replay()
    (hazard,) = found
    assert (hazard.kind, hazard.later.op) == ("read-after-write", "aten::add.out")
    assert hazard.later.stream.endswith("in a graph")
    assert hazard.later.place.split(":")[0] == __file__


@pytest.mark.parametrize("waits", [True, False])
def test_a_replay_is_ordered_with_the_work_around_it_by_its_stream(waits: bool) -> None:
    x = torch.zeros(8, device="sim")
    main, writer, graph = _side(), _side(), Graph()
    with graph.capture(main):
        x.add_(1)
    with checked(raises=False) as found:
        with writer:
            x.fill_(1)
        if waits:
            _current().wait_stream(writer)
        graph.replay()
    assert [hazard.kind for hazard in found] == ([] if waits else ["read-after-write"])


def test_memory_freed_since_the_capture_is_told_at_the_replay() -> None:
    main, graph = _side(), Graph()
    with main:
        kept = torch.zeros(8, device="sim")
        gone = torch.ones(8, device="sim")
    with graph.capture(main):
        kept.add_(gone)
    del gone
    with checked(raises=False) as found, main:
        graph.replay()
    assert [(h.kind, h.earlier.op) for h in found] == [("use-after-free", "free")]


def test_torchs_own_graph_class_works_too() -> None:
    if not hasattr(torch.accelerator, "Graph"):
        pytest.skip("torch has torch.accelerator.Graph from 2.13 on")
    x, side, graph = torch.zeros(8, device="sim"), _side(), torch.accelerator.Graph()
    with side:
        with graph:
            x.add_(1)
        graph.replay()
        graph.replay()
        assert x[0].item() == 2.0


def _captured_collective() -> list[float]:
    rank = dist.get_rank()
    x, side, graph = torch.zeros(4, device="sim"), torch.Stream("sim"), Graph()
    side.wait_stream(_current())
    with graph.capture(side):
        x.add_(rank + 1)
        dist.all_reduce(x)
        x.mul_(2)
    seen = [x[0].item()]
    _current().wait_stream(side)
    for _ in range(2):
        graph.replay()
        seen.append(x[0].item())
    return seen


def test_a_graph_holds_collectives_that_meet_again_at_every_replay() -> None:
    with checked():
        results = VirtualRanks(2).run(_captured_collective)
    # (0 + 1) + (0 + 2) = 3, twice is 6; then (6 + 1) + (6 + 2) = 15, twice is 30.
    assert results == [[0.0, 6.0, 30.0]] * 2


# -- what is refused


def _synchronizes_a_stream(x: torch.Tensor, side: torch.Stream) -> None:
    side.synchronize()


def _synchronizes_the_device(x: torch.Tensor, side: torch.Stream) -> None:
    torch.accelerator.synchronize()


def _synchronizes_an_event(x: torch.Tensor, side: torch.Stream) -> None:
    side.record_event().synchronize()


def _queries_an_event(x: torch.Tensor, side: torch.Stream) -> None:
    side.record_event().query()


def _reads_a_value(x: torch.Tensor, side: torch.Stream) -> None:
    x.sum().item()


def _compares(x: torch.Tensor, side: torch.Stream) -> None:
    torch.equal(x, x + 1)


def _indexes_by_a_mask(x: torch.Tensor, side: torch.Stream) -> None:
    x[x > 0]


def _copies_to_the_host(x: torch.Tensor, side: torch.Stream) -> None:
    x.cpu()


def _copies_from_the_host(x: torch.Tensor, side: torch.Stream) -> None:
    x.copy_(torch.ones(8))


@pytest.mark.parametrize(
    "body",
    [
        _synchronizes_a_stream,
        _synchronizes_the_device,
        _synchronizes_an_event,
        _queries_an_event,
        _reads_a_value,
        _compares,
        _indexes_by_a_mask,
        _copies_to_the_host,
        _copies_from_the_host,
    ],
)
def test_the_host_cannot_wait_inside_a_capture(
    body: Callable[[torch.Tensor, torch.Stream], None],
) -> None:
    x, side = torch.zeros(8, device="sim"), _side()
    with pytest.raises(errors.HostSyncInCaptureError, match="sim:0"), Graph().capture(side):
        body(x, side)
    assert x.sum().item() == 0.0  # the device goes on


def test_an_event_from_before_the_capture_is_refused_in_it() -> None:
    side, event = _side(), torch.Event("sim")
    event.record(_current())
    with pytest.raises(errors.ForeignEventError, match="recorded outside"), Graph().capture(side):
        event.wait(side)


def test_an_event_of_a_capture_is_refused_after_it() -> None:
    side, event = _side(), torch.Event("sim")
    with Graph().capture(side):
        event.record(side)
    with pytest.raises(errors.ForeignEventError, match="recorded inside"):
        event.wait(_current())
    with pytest.raises(errors.ForeignEventError, match="recorded inside"):
        event.synchronize()


def test_a_stream_that_is_not_joined_is_named_at_the_end() -> None:
    x, main, other = torch.zeros(8, device="sim"), _side(), torch.Stream("sim")

    def forks() -> None:
        with Graph().capture(main):
            other.wait_stream(main)
            with other:
                x.add_(1)

    with pytest.raises(
        errors.UnjoinedStreamError, match=f"work on stream {other.stream_id} was not joined"
    ):
        forks()
    assert x[0].item() == 0.0


def test_a_stream_that_joined_and_did_nothing_need_not_come_back() -> None:
    main, other = _side(), torch.Stream("sim")
    with Graph().capture(main):
        other.wait_stream(main)


def _allocates() -> None:
    torch.empty(8, device="sim")


def _launches() -> None:
    _X.add_(1)


_X = torch.zeros(0)


@pytest.mark.parametrize("body", [_allocates, _launches])
def test_a_stream_that_has_not_joined_may_neither_allocate_nor_launch(
    body: Callable[[], None],
) -> None:
    global _X
    _X = torch.zeros(8, device="sim")
    main, other = _side(), _side()
    with (
        pytest.raises(errors.OutsideCaptureError, match=f"stream {other.stream_id} of sim:0"),
        Graph().capture(main),
        other,
    ):
        body()


def test_captures_do_not_nest() -> None:
    first, second = _side(), _side()
    with (
        pytest.raises(errors.NestedCaptureError, match="sim:0 is being captured already"),
        Graph().capture(first),
        Graph().capture(second),
    ):
        pass
    with Graph().capture(first):  # the device can be captured again
        pass


def test_a_replay_inside_a_capture_is_refused() -> None:
    side, graph = _side(), Graph()
    with graph.capture(side):
        pass
    with pytest.raises(errors.NestedCaptureError, match="replayed"), Graph().capture(side):
        graph.replay()


def test_the_default_stream_cannot_be_captured_or_join() -> None:
    with pytest.raises(errors.DefaultStreamCaptureError), Graph().capture(_current()):
        pass
    default, side = _current(), _side()
    with pytest.raises(errors.DefaultStreamCaptureError), Graph().capture(side):
        default.wait_stream(side)


def test_a_graph_is_captured_once_and_replayed_only_then() -> None:
    side, graph = _side(), Graph()
    with pytest.raises(errors.CaptureError, match="was captured"):
        graph.replay()
    with graph.capture(side):
        pass
    with pytest.raises(errors.CaptureError, match="holds a capture"), graph.capture(side):
        pass
