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


def test_a_wait_that_is_missing_gives_wrong_values(deferred: str) -> None:
    x = torch.zeros(1000, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x.fill_(3.0)
    assert (x * 1).sum().item() == 0.0, "the fill was seen before anything waited for it"
    torch.cuda.current_stream().wait_stream(side)
    assert (x * 1).sum().item() == 3000.0


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
