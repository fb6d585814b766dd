"""`shardgrad.programs.testing.check_streams` on streams that a program and the engine share."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardgrad import fully_shard
from shardgrad.errors import UnsupportedError
from shardgrad.programs.testing import StreamReport, check_streams
from tests.simulated.accelerator.device import native
from tests.simulated.accelerator.virtual_ranks import VirtualRanks, one_at_a_time


class SimulatedOrder:
    """Asks the simulated device itself: whoever may read a token without a hazard comes after its
    writer.
    """

    def start(self) -> None:
        self._tokens: list[torch.Tensor] = []

    def stop(self) -> None:
        torch.accelerator.synchronize()
        self._tokens.clear()

    def now(self) -> torch.Tensor:
        self._tokens.append(torch.zeros(1, device="sim"))
        return self._tokens[-1]

    def is_ordered(self, moment: torch.Tensor) -> bool:
        before = self._hazards()
        torch.neg(moment)
        return self._hazards() == before

    @staticmethod
    def _hazards() -> int:
        own = torch.accelerator.current_device_index()
        return sum(found["count"] for found in native().hazards() if found["device"] == own)


Step = Callable[[], None]


def _training() -> tuple[nn.Module, Step]:
    mesh = init_device_mesh("sim", (dist.get_world_size(),))
    with one_at_a_time():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).to("sim")
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.linspace(-1, 1, 32).reshape(4, 8).to("sim")

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return model, step


def _whole_weight(model: nn.Module) -> nn.Parameter:
    model[1].unshard()
    return model[1].weight


def _current() -> torch.Stream:
    return torch.accelerator.current_stream()


def _checked(model: nn.Module, step: Step) -> StreamReport:
    with check_streams(model, order=SimulatedOrder()) as report:
        step()
        step()
    return report


def _without_streams_of_its_own() -> StreamReport:
    return _checked(*_training())


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_engine_alone_has_nothing_to_report(world_size: int) -> None:
    for report in VirtualRanks(world_size).run(_without_streams_of_its_own):
        assert report.hazards == []
        assert report.operations > 50
        # One rank sends nothing.
        assert ("the engine's reduce stream" in report.streams) == (world_size > 1)
        assert str(report).endswith("all of them ordered")


def _gradients_halved_on_a_side_stream(*, waits: bool) -> StreamReport:
    model, step = _training()
    side = torch.Stream("sim")

    def halve(grad: torch.Tensor) -> None:
        arrived = _current()
        if waits:
            side.wait_stream(arrived)
        with side:
            grad.mul_(0.5)
        if waits:
            arrived.wait_stream(side)

    _whole_weight(model).register_hook(halve)
    return _checked(model, step)


def test_a_hook_that_writes_a_gradient_on_another_stream_is_named_with_its_line() -> None:
    (report,) = VirtualRanks(1).run(_gradients_halved_on_a_side_stream, waits=False)
    pack = [h for h in report.hazards if h.later.op == "shardgrad::pack"]
    assert len(pack) == 1
    assert pack[0].memory == "gradient of 1.weight"
    assert (pack[0].earlier.op, pack[0].earlier.writes, pack[0].later.writes) == (
        "aten::mul_",
        True,
        False,
    )
    assert pack[0].earlier.place.startswith(f"{__file__}:")
    assert pack[0].earlier.place.endswith(" in halve")
    assert pack[0].earlier.stream.startswith("stream ")
    assert pack[0].later.stream == "the stream that the block began on"
    assert pack[0].count == 2
    # Nor did the hook wait for what made the gradient.
    assert {h.memory for h in report.hazards} == {"gradient of 1.weight"}


def test_the_same_hook_with_its_waits_is_silent() -> None:
    (report,) = VirtualRanks(1).run(_gradients_halved_on_a_side_stream, waits=True)
    assert report.hazards == []


def _gradients_logged_on_a_side_stream(*, waits: bool) -> StreamReport:
    model, _ = _training()
    side, x = torch.Stream("sim"), torch.ones(4, 8, device="sim")
    norms = []

    def step() -> None:
        model(x).square().mean().backward()
        if waits:
            side.wait_stream(_current())
        with side:
            norms.append(model[2].bias.grad.to_local().norm())
        if waits:
            _current().wait_stream(side)

    return _checked(model, step)


def test_a_reader_of_gradients_is_found_on_both_sides() -> None:
    """It reads before the reduction is sure to be over, and the next step writes while it may still
    read.
    """
    report, _ = VirtualRanks(2).run(_gradients_logged_on_a_side_stream, waits=False)
    assert {hazard.memory for hazard in report.hazards} == {"gradient of 2.bias"}
    reads_early, written_early = report.hazards[0], report.hazards[1]
    assert (reads_early.earlier.op, reads_early.earlier.stream) == (
        "shardgrad::sum_chunks",
        "the engine's reduce stream",
    )
    assert written_early.later.op == "shardgrad::sum_chunks"
    assert "_gradients_logged_on_a_side_stream" not in reads_early.later.place
    assert reads_early.later.place.endswith(" in step")
    report, _ = VirtualRanks(2).run(_gradients_logged_on_a_side_stream, waits=True)
    assert report.hazards == []


def _printed() -> str:
    model, step = _training()
    side = torch.Stream("sim")

    def careless(grad: torch.Tensor) -> None:
        with side:
            grad.mul_(0.5)

    _whole_weight(model).register_hook(careless)
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        check_streams(model, order=SimulatedOrder()),
    ):
        step()
    return out.getvalue()


def test_each_hazard_is_one_printed_sentence() -> None:
    (printed,) = VirtualRanks(1).run(_printed)
    lines = printed.splitlines()
    assert lines
    assert all(line.startswith("gradient of 1.weight: ") for line in lines)
    assert all(" it, not ordered after " in line for line in lines)


@contextlib.contextmanager
def _raises(error: type[Exception], match: str) -> Iterator[Any]:
    with pytest.raises(error, match=match) as info:
        yield info


def _without_an_order() -> None:
    model, _ = _training()
    with _raises(UnsupportedError, "cannot follow the streams of sim"), check_streams(model):
        pass
    with check_streams(model, order=SimulatedOrder()):  # the refusal left nothing behind
        pass


def test_a_device_whose_events_nobody_announces_is_refused() -> None:
    VirtualRanks(1).run(_without_an_order)
