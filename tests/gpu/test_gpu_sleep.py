"""A device's memory is given back between steps, and graphs go on with its addresses.

On a machine with a GPU: `make test ARGS="tests/gpu"`; without one `make test-cuda`.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardgrad
from shardgrad.errors import AsleepError
from shardgrad.ops.virtual_memory import bring_back, give_back, virtual_zeros
from tests.support.gpu import ON_ONE_RANK
from tests.support.graphed import (
    Values,
    on_one_gpu,
    require_replays,
    require_same,
    step_of,
    values_of,
)

pytestmark = ON_ONE_RANK
WIDTH, LAYERS, WARMUP, CYCLES = 256, 2, 2, 20
MIB = 2**20


def used() -> int:
    """Bytes of the device that anyone has, without what torch's allocator keeps for later."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_memory_of_the_device_comes_back_at_its_address() -> None:
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    before = used()
    memory = virtual_zeros(16 * MIB, torch.float32, device)
    right = torch.arange(16 * MIB, dtype=torch.float32)
    memory.copy_(right)
    view, address = memory[7:].view(-1, 3), memory.data_ptr()
    assert used() - before == 64 * MIB
    for keep in (True, True, False):
        give_back([memory], keep=keep)
        assert used() == before
        other = torch.full((16 * MIB,), 5.0, device=device)
        bring_back([memory])
        assert memory.data_ptr() == address
        assert torch.equal(memory.cpu(), right if keep else torch.zeros_like(right))
        if keep:
            assert torch.equal(view.flatten().cpu(), right[7:])
        del other
    give_back([memory])
    del memory
    gc.collect()
    del view  # whose end gives the addresses back, too, while the memory is away
    assert used() == before


def test_memory_that_ends_in_a_capture_is_given_back_after_it() -> None:
    device = torch.device("cuda", 0)
    x, graph = torch.ones(4, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):  # CUDA keeps some 70 MiB after a first capture
        x.mul_(2)
    before = used()
    memory = virtual_zeros(16 * MIB, torch.float32, device)
    with torch.cuda.graph(graph):
        x.mul_(2)
        del memory
        x.add_(1)
    graph.replay()
    assert x.tolist() == [3.0] * 4
    graph.reset()
    virtual_zeros(1, torch.float32, device)
    assert used() - before < 16 * MIB


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = on_one_gpu(nn.Sequential(*layers), offload_policy=shardgrad.SleepPolicy())
    return model, shardgrad.optim.AdamW(model.parameters(), lr=1e-2)


def batch(number: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).cuda()


def train(*, graphed: bool, level: int = 0) -> Values:
    """Trains, asleep between two steps at a level; 0 for an undisturbed run."""
    model, optimizer = build()
    call: Any = step_of(model, optimizer, 1.0)
    if graphed:
        pool = shardgrad.GraphPool(offload_policy=shardgrad.SleepPolicy())
        call = shardgrad.graphed_step(model, optimizer, warmup=WARMUP, pool=pool)(call)
    for number in range(WARMUP + 1):
        yield call(batch(number))
    table = shardgrad.export_table(model)
    for number in range(CYCLES):
        if level:
            rest(model, optimizer, level, call, measured=number in (0, CYCLES - 1))
        yield call(batch(10 + number))
    assert shardgrad.export_table(model) == table
    require_replays(call, 1, CYCLES + 1)
    yield model


def rest(model: nn.Module, optimizer: Any, level: int, step: Any, *, measured: bool) -> None:
    own = 4 * LAYERS * WIDTH * WIDTH  # bytes of the weights
    x = batch(0)
    awake = used() if measured else 0
    shardgrad.sleep(model, optimizer, step.pool, level=level)
    # Two moments; then weights, gradients and the graph's memory, too.
    asks = 2 * own if level == 1 else 4 * own + step.pool.nbytes
    assert not measured or awake - used() >= asks
    other = torch.full((own // 4,), torch.nan, device="cuda")  # whoever has it meanwhile
    with pytest.raises(AsleepError):
        step(x)
    if level > 1:
        with pytest.raises(AsleepError):
            model(x)
    del other
    shardgrad.wake(model, optimizer, step.pool)


@pytest.mark.parametrize("level", [1, 2])
def test_graphs_are_replayed_after_a_sleep_without_another_capture(level: int) -> None:
    require_same(values_of(train(graphed=False)), values_of(train(graphed=True, level=level)))


def test_states_come_back_on_another_stream_beside_a_backward() -> None:
    def trained(away: bool) -> Values:
        model, optimizer = build()
        side = torch.cuda.Stream()
        for number in range(4):
            if away:
                optimizer.offload()  # type: ignore[attr-defined]
            loss = model(batch(number)).square().mean()
            if away:
                with torch.cuda.stream(side):
                    optimizer.reload()  # type: ignore[attr-defined]
            loss.backward()
            torch.cuda.current_stream().wait_stream(side)
            optimizer.step()
            optimizer.zero_grad()
        yield model

    require_same(values_of(trained(away=False)), values_of(trained(away=True)))


def test_outputs_of_a_pool_that_slept_are_not_numbers_until_the_next_replay() -> None:
    x = torch.ones(MIB, device="cuda")
    pool = shardgrad.GraphPool(offload_policy=shardgrad.SleepPolicy())
    step: Any = shardgrad.graphed_step(pool=pool, warmup=1)(lambda x: x * 2 + 1)
    for _ in range(3):
        out = step(x)
    awake = used()
    pool.offload()
    pool.offload()  # does nothing
    with pytest.raises(AsleepError, match="the pool of graphs is asleep"):
        step(x)
    # Of what captures have reserved, the seed of random numbers is not in the pool.
    assert awake - used() >= pool.nbytes - 2 * MIB > 0
    pool.reload()
    pool.reload()
    assert used() == awake
    assert out.isnan().all()
    assert step(x).data_ptr() == out.data_ptr()
    assert (out == 3).all()
    assert (step.captures, step.replays) == (1, 3)
    pool.offload()
    del out
    step.reset()  # while its memory is away
    assert awake - used() >= pool.nbytes - 2 * MIB


def test_a_capture_that_fails_leaves_a_pool_that_can_sleep() -> None:
    pool = shardgrad.GraphPool(offload_policy=shardgrad.SleepPolicy())
    x = torch.ones(1000, device="cuda")

    def reads(x: Tensor) -> Tensor:
        return x * (x + 1).sum().item()

    failing: Any = shardgrad.graphed_step(pool=pool, warmup=1, on_uncapturable="eager")(reads)
    failing(x)
    with pytest.warns(UserWarning, match="eager"):
        assert (failing(x) == 2000).all()
    step: Any = shardgrad.graphed_step(pool=pool, warmup=1)(lambda x: x * 2)
    for _ in range(3):
        step(x)
    pool.offload()
    pool.reload()
    assert (step(x) == 2).all()
    assert step.captures == 1


def test_what_another_stream_has_written_is_kept() -> None:
    memory = virtual_zeros(MIB, torch.float32, torch.device("cuda", 0))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10**7)
        memory.fill_(2.0)
    give_back([memory])
    bring_back([memory])
    assert torch.equal(memory.cpu(), torch.full((MIB,), 2.0))
