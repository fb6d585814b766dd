"""gloo's own all-gather and reduce-scatter against the engine's exchange transport.

Both end in the same place: every rank has all shards, or its sum. The engine reads gathered shards
where they arrived, so its own shard is not copied; its sum over ranks is a separate op, which is
part of what is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click
import torch
import torch.distributed as dist

from benchmarks.measure import Cost, interleaved, over_ranks, samples_of, summarise
from benchmarks.run import Run, option
from benchmarks.workers import on_ranks
from shardgrad import ops
from shardgrad.engine.buffers import Chunks
from shardgrad.engine.transports import ExchangeTransport, MessageTag

_KIB, _MIB = 2**10, 2**20
# What one timing moves at least, so that it is long enough for the clock.
_SECTION_NBYTES = 4 * 2**20
_MOST_REPEATS = 50
_FIELDS = ("wall_s", "cpu_s", "loopback_nbytes")

Costs = dict[str, dict[int, dict[str, list[Cost]]]]


@click.command()
@option(
    "--ranks",
    "worlds",
    type=click.IntRange(2),
    multiple=True,
    default=[2, 4],
    help="Processes; repeatable.",
)
@option("--rounds", type=click.IntRange(2), default=20, help="Turns of each transport.")
@option("--max-mib", type=click.IntRange(1), default=16, help="Largest shard.")
@click.pass_obj
def main(run: Run, worlds: Sequence[int], rounds: int, max_mib: int) -> None:
    """Measure both transports for shards of 4 KiB and up, in fp32."""
    shards = [
        nbytes
        for nbytes in (4 * _KIB * 4**power for power in range(13))
        if nbytes <= max_mib * _MIB
    ]
    if run.smoke:
        worlds, rounds, shards = [2], 2, shards[:2]
    for ranks in worlds:
        by_rank = on_ranks("benchmarks.collectives:measure", ranks, shards, rounds, keep_heap=False)
        costs = over_ranks(by_rank)
        run.finish(
            "collectives",
            config={"ranks": ranks, "rounds": rounds, "shard_nbytes": shards},
            samples=samples_of(costs, *_FIELDS),
            summary=summarise(costs, "gloo", *_FIELDS),
        )


def measure(shards: Sequence[int], rounds: int) -> Costs:
    """Returns a rank's costs by operation, bytes of a shard and transport."""
    costs: Costs = {}
    for nbytes in shards:
        repeats = max(1, min(_MOST_REPEATS, _SECTION_NBYTES // nbytes))
        for operation, calls in _calls(nbytes // torch.float32.itemsize).items():
            costs.setdefault(operation, {})[nbytes] = interleaved(
                calls, rounds, repeats=repeats, barrier=dist.barrier
            )
    return costs


def _calls(numel: int) -> dict[str, dict[str, Callable[[], object]]]:
    """By operation and transport, a call that runs it once on its buffers."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("there is no process group")
    exchange = ExchangeTransport(group)
    tag = MessageTag.of("benchmark", 1)
    ranks = group.size()
    shard, gradients = torch.ones(numel), _chunks(torch.ones(ranks * numel), ranks)
    gathered, total = torch.zeros(ranks * numel), torch.zeros(numel)
    staging = _chunks(torch.zeros(exchange.gather_chunks * numel), exchange.gather_chunks)
    receive = _chunks(torch.zeros(exchange.receive_chunks * numel), exchange.receive_chunks)

    def gather_by_exchange() -> None:
        exchange.all_gather(shard, staging, tag).wait()

    def scatter_by_exchange() -> None:
        chunks = exchange.reduce_scatter(gradients, receive, tag).wait()
        ops.sum_chunks(chunks, total)

    return {
        "all_gather": {
            "gloo": lambda: dist.all_gather_into_tensor(gathered, shard),
            "exchange": gather_by_exchange,
        },
        "reduce_scatter": {
            "gloo": lambda: dist.reduce_scatter_tensor(total, gradients.whole),
            "exchange": scatter_by_exchange,
        },
    }


def _chunks(unsplit: torch.Tensor, count: int) -> Chunks:
    return Chunks(unsplit, unsplit.chunk(count) if count else ())
