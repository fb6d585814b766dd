"""Collectives between virtual ranks: right values, and reads and writes that the checker sees."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.simulated.accelerator.device import checked
from tests.simulated.accelerator.errors import CollectiveFailedError
from tests.simulated.accelerator.virtual_ranks import VirtualRanks
from tests.support.processes import FairClock
from tests.support.ranks import RankError

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


def _in_place() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(4 * size, device="sim")
    whole[4 * rank : 4 * rank + 4] = _mine()
    all_gather(whole, whole[4 * rank : 4 * rank + 4])
    assert torch.equal(whole.cpu(), torch.cat(_all()))
    send = _mine(4 * size)
    reduce_scatter(send[4 * rank : 4 * rank + 4], send)
    assert torch.equal(send[4 * rank : 4 * rank + 4].cpu(), sum(_all(4 * size)).chunk(size)[rank])


def test_in_place_collectives_are_right_and_silent() -> None:
    with checked():
        VirtualRanks(2).run(_in_place)


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


def test_a_peers_access_is_told_with_its_stream_and_both_places() -> None:
    with checked(raises=False) as found:
        VirtualRanks(2).run(_peers_read_my_chunk, False)
    (hazard,) = found
    assert (hazard.device, hazard.begin, hazard.end) == (1, 0, 16)
    assert hazard.later.op == "simulated::reduce_scatter"
    assert "of sim:0 (communication of group 0" in hazard.later.stream
    assert "of sim:1" in hazard.earlier.stream
    assert all(
        use.place.endswith(":_peers_read_my_chunk") for use in (hazard.earlier, hazard.later)
    )


def _sub_groups() -> tuple[float, float, list[float]]:
    mesh = init_device_mesh("sim", (2, 2), mesh_dim_names=("replicate", "shard"))
    across, along = (torch.full((1,), 10.0 ** dist.get_rank(), device="sim") for _ in range(2))
    dist.all_reduce(across, group=mesh.get_group("replicate"))
    dist.all_reduce(along, group=mesh.get_group("shard"))
    spread = distribute_tensor(torch.arange(4.0, device="sim"), mesh["shard"], [Shard(0)])
    return across.item(), along.item(), spread.full_tensor().tolist()


def test_a_mesh_of_two_axes_has_groups_of_its_own() -> None:
    with checked():
        results = VirtualRanks(4).run(_sub_groups)
    assert [r[0] for r in results] == [101.0, 1010.0, 101.0, 1010.0]
    assert [r[1] for r in results] == [11.0, 11.0, 1100.0, 1100.0]
    assert all(r[2] == [0.0, 1.0, 2.0, 3.0] for r in results)


def _device_of_a_fake_tensor() -> int:
    if dist.get_rank() == 1:
        dist.barrier()  # rank 0 asks first
    with FakeTensorMode():
        index = torch.empty((), device="sim").device.index
    if dist.get_rank() == 0:
        dist.barrier()
    return index


def test_fake_tensors_that_dtensor_asks_do_not_remember_the_device_of_another_rank() -> None:
    assert VirtualRanks(2).run(_device_of_a_fake_tensor) == [0, 1]


def _one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no batch left")
    dist.all_reduce(torch.ones(1, device="sim"))


def test_a_rank_that_raises_ends_the_others_with_its_reason() -> None:
    clock = FairClock()
    with pytest.raises(
        RankError, match="given up: rank 1 raised ValueError: no batch left"
    ) as caught:
        VirtualRanks(2).run(_one_raises)
    assert isinstance(caught.value.__cause__, ValueError)
    assert clock.elapsed_s() < 5


def _one_is_missing() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1, device="sim"))


def test_a_rank_that_does_not_come_is_named_after_the_time_limit() -> None:
    with pytest.raises(RankError, match=r"waited 1 s for rank\(s\) 1 of the group") as caught:
        VirtualRanks(2, collective_timeout_s=1.0).run(_one_is_missing)
    assert isinstance(caught.value.__cause__, CollectiveFailedError)


def _different() -> None:
    x = torch.ones(2, device="sim")
    if dist.get_rank() == 0:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, src=0)


def test_ranks_in_different_collectives_are_told_so() -> None:
    with pytest.raises(
        RankError, match=r"rank 0 of the group is in all_reduce \(sum\), rank 1 in broadcast"
    ):
        VirtualRanks(2).run(_different)


def _different_sizes() -> None:
    dist.all_reduce(torch.ones(2 + dist.get_rank(), device="sim"))


def test_ranks_with_different_sizes_are_told_so() -> None:
    with pytest.raises(RankError, match="sent 3 elements of Float, rank 0 has room for 2"):
        VirtualRanks(2).run(_different_sizes)


def _sleep() -> None:
    time.sleep(3)


def test_a_run_has_a_time_limit() -> None:
    with pytest.raises(RankError, match="rank 0 did not finish within 1 s; it was here"):
        VirtualRanks(2).run(_sleep, timeout_s=1.0)


def test_torch_distributed_is_as_before_after_a_run() -> None:
    VirtualRanks(2).run(_one_rank_number)
    assert not dist.is_initialized()
    assert type(dist.distributed_c10d._world).__name__ == "_World"
    assert dist.distributed_c10d._world.__class__.__module__ == "torch.distributed.distributed_c10d"


def _one_rank_number() -> int:
    return dist.get_rank()
