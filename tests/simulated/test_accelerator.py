"""The simulated accelerator sees each missing wait, and refuses in a capture what CUDA refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardgrad
from shardgrad.errors import DeviceError
from tests.simulated.accelerator import errors
from tests.simulated.accelerator.device import Graph, Hazard, checked
from tests.simulated.accelerator.errors import CollectiveFailedError
from tests.simulated.accelerator.virtual_ranks import VirtualRanks
from tests.support.ranks import RankError

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


def _current() -> torch.Stream:
    return torch.accelerator.current_stream()


def test_a_hook_runs_on_the_stream_its_accumulation_node_was_born_on() -> None:
    weight, side = torch.ones(8, device="sim", requires_grad=True), torch.Stream("sim")
    side.wait_stream(_current())
    with side:
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    seen: list[torch.Stream] = []
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(_current()))
    (weight * 2).sum().backward()
    assert seen == [side]
    assert node is not None


def test_every_device_has_its_own_backward_thread() -> None:
    threads: dict[int, int] = {}
    losses = []
    for index in range(2):
        weight = torch.ones(8, device=f"sim:{index}", requires_grad=True)
        weight.register_post_accumulate_grad_hook(
            lambda p: threads.__setitem__(p.device.index, threading.get_ident())
        )
        losses.append((weight * 2).sum())
    torch.autograd.backward(losses)
    assert sorted(threads) == [0, 1]
    assert len({*threads.values(), threading.get_ident()}) == 3


def _pointer(stream: torch.Stream | None = None) -> int:
    if stream is None:
        return torch.empty(NUMEL, device="sim").data_ptr()
    with stream:
        return torch.empty(NUMEL, device="sim").data_ptr()


def test_record_stream_keeps_a_block_until_the_host_knows_the_stream_is_done() -> None:
    side = torch.Stream("sim")
    with checked():
        x = torch.zeros(NUMEL, device="sim")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            x.add_(1)
        x.record_stream(side)
        first = x.data_ptr()
        del x
        assert _pointer() != first
        side.synchronize()
        kept = [torch.empty(NUMEL, device="sim") for _ in range(3)]
        assert first in [tensor.data_ptr() for tensor in kept]


def test_memory_that_nobody_wrote_is_not_a_number() -> None:
    assert torch.empty(NUMEL, device="sim").isnan().all().item()


# torch 2.13 gave these two new names.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _mine(numel: int = 4) -> torch.Tensor:
    """Returns numbers that differ on each rank; all sums of them are exact."""
    return torch.arange(float(numel), device="sim") + 10 * dist.get_rank()


def _all(numel: int = 4) -> list[torch.Tensor]:
    return [torch.arange(float(numel)) + 10 * rank for rank in range(dist.get_world_size())]


def _every_collective() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.empty(4 * size, device="sim")
    all_gather(whole, _mine())
    assert torch.equal(whole.cpu(), torch.cat(_all()))

    everyone = _all(4 * size)
    for op, expected in (
        (dist.ReduceOp.SUM, sum(everyone)),
        (dist.ReduceOp.AVG, sum(everyone) / size),
        (dist.ReduceOp.MAX, everyone[-1]),
    ):
        part = torch.empty(4, device="sim")
        reduce_scatter(part, _mine(4 * size), op=op)
        assert torch.equal(part.cpu(), expected.chunk(size)[rank])
        total = _mine(4 * size)
        dist.all_reduce(total, op=op)
        assert torch.equal(total.cpu(), expected)

    given = _mine()
    dist.broadcast(given, src=size - 1)
    assert torch.equal(given.cpu(), _all()[-1])

    taken = torch.empty(4 * size, device="sim")
    dist.all_to_all_single(taken, _mine(4 * size))
    assert torch.equal(taken.cpu(), torch.cat([t.chunk(size)[rank] for t in everyone]))

    rows = torch.empty(2 * size if rank == 0 else 0, device="sim")
    dist.all_to_all_single(
        rows, _mine(2), [2] * size if rank == 0 else [0] * size, [2] + [0] * (size - 1)
    )
    assert rank or torch.equal(rows.cpu(), torch.cat(_all(2)))

    pieces = [torch.empty(4, device="sim") for _ in range(size)]
    dist.all_gather(pieces, _mine())
    assert torch.equal(torch.cat(pieces).cpu(), torch.cat(_all()))
    dist.barrier()
    words: list[str | None] = [None] * size
    dist.all_gather_object(words, f"rank {rank}")
    assert words == [f"rank {r}" for r in range(size)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_collective_gives_what_its_definition_says(world_size: int) -> None:
    with checked():
        VirtualRanks(world_size).run(_every_collective)


def _input_on_another_stream(waits: bool) -> None:
    x, side = torch.zeros(8, device="sim"), torch.Stream("sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.fill_(1)
    if waits:
        torch.accelerator.current_stream().wait_stream(side)
    dist.all_reduce(x)
    side.synchronize()


def _output_on_another_stream(waits: bool) -> None:
    x = torch.ones(8, device="sim")
    work = dist.all_reduce(x, async_op=True)
    if waits:
        work.wait()
    x.neg_()
    torch.accelerator.synchronize()
    work.wait()


def _peers_read_my_chunk(waits: bool) -> None:
    """Rank 1 writes the chunk that only rank 0 reads; its own chunk is ordered."""
    send, part, side = (
        torch.zeros(8, device="sim"),
        torch.empty(4, device="sim"),
        torch.Stream("sim"),
    )
    side.wait_stream(torch.accelerator.current_stream())
    if dist.get_rank() == 1:
        with side:
            send[:4].fill_(1)
        if waits:
            torch.accelerator.current_stream().wait_stream(side)
    reduce_scatter(part, send)
    torch.accelerator.synchronize()


def _early_free(waits: bool) -> None:
    x = torch.ones(8, device="sim")
    work = dist.all_reduce(x, async_op=True)
    if waits:
        work.wait()
    del x, work
    torch.accelerator.synchronize()


@pytest.mark.parametrize(
    ("program", "kinds"),
    [
        (_input_on_another_stream, {"read-after-write"}),
        (_output_on_another_stream, {"read-after-write", "write-after-write"}),
        (_peers_read_my_chunk, {"read-after-write"}),
        (_early_free, {"free-while-in-flight"}),
    ],
)
def test_a_missing_wait_before_or_after_a_collective_is_a_hazard(
    program: Callable[[bool], None], kinds: set[str]
) -> None:
    with checked():
        VirtualRanks(2).run(program, True)
    with checked(raises=False) as found:
        VirtualRanks(2).run(program, False)
    assert found
    assert {hazard.kind for hazard in found} <= kinds


def _one_is_missing() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1, device="sim"))


def test_a_rank_that_does_not_come_is_named_after_the_time_limit() -> None:
    with pytest.raises(RankError, match=r"waited 1 s for rank\(s\) 1 of the group") as caught:
        VirtualRanks(2, collective_timeout_s=1.0).run(_one_is_missing)
    assert isinstance(caught.value.__cause__, CollectiveFailedError)


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


def _synchronizes_a_stream(x: torch.Tensor, side: torch.Stream) -> None:
    side.synchronize()


def _queries_an_event(x: torch.Tensor, side: torch.Stream) -> None:
    side.record_event().query()


def _reads_a_value(x: torch.Tensor, side: torch.Stream) -> None:
    x.sum().item()


def _copies_to_the_host(x: torch.Tensor, side: torch.Stream) -> None:
    x.cpu()


def _copies_from_the_host(x: torch.Tensor, side: torch.Stream) -> None:
    x.copy_(torch.ones(8))


@pytest.mark.parametrize(
    "body",
    [
        _synchronizes_a_stream,
        _queries_an_event,
        _reads_a_value,
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


def _model_on_two_devices() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].to(f"sim:{dist.get_rank()}")
    model[1].to("sim:7")
    shardgrad.fully_shard(model, mesh=init_device_mesh("sim", (dist.get_world_size(),)))


def test_a_model_on_two_devices_is_refused_by_the_engine() -> None:
    with pytest.raises(RankError, match="parameters of one unit live on several devices") as caught:
        VirtualRanks(2).run(_model_on_two_devices)
    assert isinstance(caught.value.__cause__, DeviceError)
