"""The rank's side of `collectives`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from benchmarks.measure import Cost, cost_of, settle
from shardgrad import ops
from shardgrad.engine.buffers import Chunks
from shardgrad.engine.transports import ExchangeTransport, MessageTag

_SECTION_NBYTES = 4 * 2**20  # what one timing moves at least, so that it is long enough for the clock
_MOST_REPEATS = 50

Call = Callable[[], object]


def run(shards: Sequence[int], rounds: int) -> tuple[dict[tuple[str, int], dict[str, list[Cost]]], str]:
    """Returns costs by (operation, shard bytes), transport and round; and the backend of the ops."""
    costs: dict[tuple[str, int], dict[str, list[Cost]]] = {}
    settle()
    for nbytes in shards:
        repeats = max(1, min(_MOST_REPEATS, _SECTION_NBYTES // nbytes))
        for operation, calls in _calls(nbytes // torch.float32.itemsize).items():
            costs[operation, nbytes] = _interleave(calls, rounds, repeats)
    return costs, ops.backend()


def _interleave(calls: dict[str, Call], rounds: int, repeats: int) -> dict[str, list[Cost]]:
    costs: dict[str, list[Cost]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # connections and first touches
    for number in range(rounds):
        for name in calls if number % 2 == 0 else reversed(calls):
            costs[name].append(cost_of(calls[name], repeats=repeats, barrier=dist.barrier))
    return costs


def _calls(numel: int) -> dict[str, dict[str, Call]]:
    """Per operation and transport, a call that runs it once on buffers of its own."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("there is no process group")
    exchange = ExchangeTransport(group)
    tag = MessageTag.of("benchmark", 1)
    ranks = group.size()
    shard, gradients = torch.ones(numel), _chunks(torch.ones(ranks * numel), ranks)
    whole, total = torch.zeros(ranks * numel), torch.zeros(numel)
    staging = _chunks(torch.zeros(exchange.gather_chunks * numel), exchange.gather_chunks)
    receive = _chunks(torch.zeros(exchange.receive_chunks * numel), exchange.receive_chunks)

    def gather_by_exchange() -> None:
        exchange.all_gather(shard, staging, tag).wait()

    def scatter_by_exchange() -> None:
        chunks = exchange.reduce_scatter(gradients, receive, tag).wait()
        ops.sum_chunks(chunks, total)

    return {
        "all_gather": {
            "gloo": lambda: dist.all_gather_into_tensor(whole, shard),
            "exchange": gather_by_exchange,
        },
        "reduce_scatter": {
            "gloo": lambda: dist.reduce_scatter_tensor(total, gradients.whole),
            "exchange": scatter_by_exchange,
        },
    }


def _chunks(whole: torch.Tensor, count: int) -> Chunks:
    return Chunks(whole, whole.chunk(count) if count else ())
