"""The CPU's bits on CUDA, eagerly and in replays, in every order that streams allow; and not in any
other.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.cuda_runtime import inspection

ORDERS = ["host", "late", "1", "2", "3"]


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> Iterator[str]:
    with inspection.order(request.param):
        yield request.param


@pytest.fixture(params=["late", "4"])
def deferred(request: pytest.FixtureRequest) -> Iterator[str]:
    with inspection.order(request.param):
        yield request.param


def losses(device: str, *, graphed: bool) -> list[float]:
    torch.manual_seed(0)
    layers = nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8)
    model = nn.Sequential(*layers).to(device)
    lr = torch.tensor(1e-2, device=device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, fused=True, capturable=device == "cuda"
    )
    x = torch.zeros(4, 8, device=device)

    def step() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    graph = None
    seen = []
    for number in range(8):
        x.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(number)))
        if not graphed or number < 3:
            seen.append(step().item())
            continue
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                loss = step()
        graph.replay()
        seen.append(loss.item())
    return seen


def test_training_has_the_same_bits_on_cpu_and_cuda_and_in_replays(order: str) -> None:
    right = losses("cpu", graphed=False)
    assert losses("cuda", graphed=False) == right
    with torch.cuda.stream(torch.cuda.Stream()):
        assert losses("cuda", graphed=True) == right


def test_operators_that_ask_the_device_get_its_answer(order: str) -> None:
    x = torch.tensor([0.0, 1.0, 0.0, 2.0]).to("cuda") * 2
    assert x.nonzero().flatten().tolist() == [1, 3]
    assert x[x > 0].tolist() == [2.0, 4.0]
    assert x.sum().item() == 6.0
    assert bool((x > 3).any())
    assert torch.unique(x).tolist() == [0.0, 2.0, 4.0]


def test_random_numbers_follow_the_generator(order: str) -> None:
    def draw() -> list[Tensor]:
        torch.manual_seed(5)
        first = torch.rand(4, device="cuda")
        return [first.cpu(), nn.functional.dropout(first, 0.5).cpu()]

    first, again = draw(), draw()
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], torch.rand(4, device="cuda").cpu())


def test_a_wait_that_is_missing_gives_wrong_values(deferred: str) -> None:
    x = torch.zeros(1000, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x.fill_(3.0)
    assert (x * 1).sum().item() == 0.0, "the fill was seen before anything waited for it"
    torch.cuda.current_stream().wait_stream(side)
    assert (x * 1).sum().item() == 3000.0


def test_memory_that_is_written_before_a_reader_is_done_is_seen(deferred: str) -> None:
    x = torch.ones(1000, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        copy = x * 1
    x.zero_()
    torch.cuda.current_stream().synchronize()
    side.synchronize()
    assert copy.sum().item() == 0.0


@pytest.mark.parametrize("waits", [True, False])
def test_memory_that_the_allocator_may_lend_again_has_no_values(deferred: str, waits: bool) -> None:
    x = torch.ones(1000, device="cuda")
    start = x.data_ptr()
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    inspection.trace(True)
    with torch.cuda.stream(side):
        copy = x * 1
    if waits:
        here.wait_stream(side)
    del x  # allocated for this stream, and still read on the other
    torch.empty(1, device="cuda")
    here.synchronize()
    side.synchronize()
    found = inspection.conflicts(inspection.log())
    inspection.trace(False)
    assert bool(copy.isnan().all()) is not waits
    assert [f"bytes at {start:#x} " in each for each in found] == [True] * (not waits)


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_that_the_host_reads_too_early_is_stale(deferred: str, waits: bool) -> None:
    pinned = torch.zeros(4, pin_memory=True)
    pinned.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    assert pinned.tolist() == [float(waits)] * 4


@pytest.mark.parametrize("pinned", [True, False])
def test_a_source_on_the_host_is_read_late_only_if_it_is_pinned(
    deferred: str, pinned: bool
) -> None:
    source = torch.ones(4).pin_memory() if pinned else torch.ones(4)
    there = torch.empty(4, device="cuda")
    there.copy_(source, non_blocking=True)
    source.zero_()
    assert there.tolist() == [0.0 if pinned else 1.0] * 4


def test_replays_take_branches_in_another_order(deferred: str) -> None:
    x = torch.zeros(8, device="cuda")
    first, side = torch.cuda.Stream(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=first):
        x.add_(1)
        side.wait_stream(first)
        with torch.cuda.stream(side):
            x.mul_(10)
        x.add_(5)  # no order between these two
        first.wait_stream(side)
    assert len(inspection.conflicts(inspection.graph()["nodes"])) == 1
    seen = set()
    for seed in range(6):
        with inspection.order(str(seed)):
            x.zero_()
            graph.replay()
            seen.add(x[0].item())
    assert seen == {15.0, 60.0}


def test_an_event_looks_unfinished_until_it_was_asked_often_enough() -> None:
    with inspection.order("late", questions=3):
        torch.ones(4, device="cuda")
        event = torch.cuda.Event()
        event.record()
        assert [event.query() for _ in range(4)] == [False, False, True, True]


def test_work_that_is_ordered_has_no_conflict_and_other_work_has_one() -> None:
    def run(waits: bool) -> list[str]:
        x = torch.zeros(64, device="cuda")
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        inspection.trace(True)
        x.add_(1)
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.mul_(2)
        torch.cuda.synchronize()
        found = inspection.conflicts(inspection.log())
        inspection.trace(False)
        return found

    assert run(waits=True) == []
    [found] = run(waits=False)
    assert "256 bytes" in found
    assert "add_" in found
    assert "mul_" in found
