"""What a step asks of the host and of the device's memory, counted without a GPU.

torch.cuda runs on the runtime of `tests/cuda_runtime`, whose README says what is faithful: streams,
events, the caching allocator, graphs and ProcessGroupNCCL are torch's. Nothing has values there, so
memory that nothing touches is free, and one process stands for rank 0 of a world of any size.

    .venv-cuda/bin/python -m benchmarks counts

With torch 2.15 there is one more engine: FSDP2 that keeps the memory of its whole parameters,
forward and backward in a plain CUDA graph. Megatron-FSDP and FlexShard are counted if they are
installed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle, product
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from benchmarks.engines.floors import collectives
from benchmarks.engines.foreign import flex_shard, megatron
from benchmarks.engines.program import Trained, micro_batches
from benchmarks.engines.task import PRECISIONS, Task
from benchmarks.engines.torch_and_shardgrad import (
    fsdp2,
    fsdp2_graphed,
    fsdp2_muon,
    ours,
    ours_graphed,
    ours_muon,
    ours_with_optimizer,
)
from benchmarks.measure import Cost, cost_of, in_turn, ratios, settle, spread
from benchmarks.models import facts_of
from benchmarks.run import Run, option
from benchmarks.workers import Worker, Workers
from shardgrad.programs.train.presets import PRESETS
from tests.cuda_runtime import inspection

_ENGINES: dict[str, Callable[[Task, torch.device], Trained]] = {
    "fsdp2": fsdp2,
    "shardgrad": ours,
    "shardgrad, its optimizer": ours_with_optimizer,
    "shardgrad-graphed": ours_graphed,
    "fsdp2, Muon": fsdp2_muon,
    "shardgrad, Muon": ours_muon,
    "collectives": collectives,  # the floor: model, autograd and collectives without an engine
}
if hasattr(FSDPModule, "set_keep_unsharded_storage"):
    _ENGINES["fsdp2-graphed"] = fsdp2_graphed
if find_spec("megatron_fsdp"):
    _ENGINES["megatron-fsdp"] = megatron
if find_spec("flex_shard"):
    _ENGINES["flex-shard"] = flex_shard
# Of workers, which are spawned, since a server that other benchmarks have started has its own. The
# runtime then neither copies messages nor keeps an order, so the host's time is that of the program
# and of torch. One rank makes NCCL's id for all, since the others that would do not exist.
ENVIRONMENT = {
    "HOSTCUDA_VALUES": "0",
    "HOSTCUDA_TIMING": "1",
    "TORCH_NCCL_RANKS_PER_ROOT": str(2**20),
}
_WARMUP = 6  # steps; more than a graphed step needs for its capture
_STEPS = 3  # that are counted
_TIMED = 12  # steps of a turn: a graphed one takes less than a millisecond

# What the calls of the runtime are, by the beginning of their names.
_KINDS = {
    "cudaLaunchKernel": "kernels",
    "kernel": "kernels",  # of cuBLAS
    "nccl": "nccl",
    "cudaMemcpy": "copies",
    "cudaMemset": "copies",
    "cudaEventRecord": "events",
    "cudaStreamWaitEvent": "events",
    "cudaEventQuery": "events",
    "cudaEventSynchronize": "events",
    "cudaGraphLaunch": "graphs",
}


class Rank0:
    """An engine on rank 0 of a world whose other ranks do not exist."""

    def __init__(self, worker: Worker, store: dist.Store | None = None) -> None:
        name, task = worker.argument
        device = torch.device("cuda", 0)
        torch.set_num_threads(1)
        torch.cuda.set_device(device)
        os.environ["SHARDGRAD_WATCHDOG"] = "0"  # nobody is there to be asked
        dist.init_process_group(
            "cpu:fake,cuda:nccl", store=store or dist.HashStore(), rank=0, world_size=task.ranks
        )
        self._trained = _ENGINES[name](task, device)
        self._data = cycle(micro_batches(task, 0, facts_of(task.preset).vocab_size, device))

    def counts(self) -> dict[str, int]:
        """Takes steps, and returns what one of the last asked for, and the peaks of all but the
        first.

        The first is left out since it allocates what stays, such as the states of the optimizer,
        while gradients are there. A capture's allocations count like those of an eager step.
        """
        self._step()
        settle()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(_WARMUP - 1):
            self._step()
        before = _calls()
        for _ in range(_STEPS):
            self._step()
        found = _calls() - before
        nodes = inspection.graph()["nodes"] if found["graphs"] else []
        return {
            **{kind: round(found[kind] / _STEPS) for kind in (*_KINDS.values(), "allocations")},
            "nodes": len(nodes),
            "edges": sum(len(node["before"]) for node in nodes),
            "peak_allocated_nbytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_nbytes": torch.cuda.max_memory_reserved(),
        }

    def turn(self, steps: int) -> Cost:
        """Measures the host's time for steps."""
        return cost_of(self._step, repeats=steps, device="cuda")

    def _step(self) -> None:
        self._trained.step(next(self._data))


def _calls() -> Counter[str]:
    found: Counter[str] = Counter(allocations=torch.cuda.memory_stats()["allocation.all.allocated"])
    for name, count in inspection.calls().items():
        for start, kind in _KINDS.items():
            if name.startswith(start):
                found[kind] += count
    return found


@click.command()
@option("--preset", type=click.Choice(list(PRESETS)), default="gpt2", help="Model.")
@option(
    "--ranks",
    type=click.IntRange(1),
    multiple=True,
    default=[1, 2, 4, 8],
    help="World; repeatable.",
)
@option(
    "--precision",
    "precisions",
    type=click.Choice(PRECISIONS),
    multiple=True,
    default=["bf16", "fp32"],
    help="Data type of forward and backward; repeatable.",
)
@option("--batch-size", type=click.IntRange(1), default=2, help="Sequences per rank.")
@option("--seq-len", type=click.IntRange(2), default=256, help="Tokens per sequence.")
@option("--rounds", type=click.IntRange(2), default=10, help="Turns of each engine.")
@click.pass_obj
def main(
    run: Run,
    preset: str,
    ranks: Sequence[int],
    precisions: Sequence[str],
    rounds: int,
    **sizes: int,
) -> None:
    """Count what a step asks of the host and of the device's memory, beside FSDP2, without a
    GPU.
    """
    if not inspection.installed():
        click.echo(
            "counts: left out, this needs .venv-cuda: python -m tests.cuda_runtime .venv-cuda"
        )
        return
    if run.smoke:
        preset, ranks, precisions, rounds = "tiny", [2], ["bf16"], 2
    os.environ.update(ENVIRONMENT)
    summary: dict[str, Any] = {}
    samples: dict[str, Any] = {}
    for precision, world in product(precisions, ranks):
        task = Task(preset, precision=precision, ranks=world, device="cuda", **sizes)
        counts, costs = _measure(task, rounds)
        case = f"{precision}, {world} rank{'s' * (world > 1)}"
        samples[case] = {name: {"cpu_s": [cost.cpu_s for cost in of]} for name, of in costs.items()}
        summary[case] = _summary(counts, costs)
    run.finish(
        "counts",
        config={
            "preset": preset,
            "ranks": list(ranks),
            "precisions": list(precisions),
            **sizes,
            "rounds": rounds,
        },
        samples=samples,
        summary=summary,
    )


def _measure(task: Task, rounds: int) -> tuple[dict[str, dict[str, int]], dict[str, list[Cost]]]:
    """Returns what each engine's step counted, and its cost in each round."""
    workers: dict[str, Workers] = {}
    try:
        for name in _ENGINES:
            workers[name] = Workers(
                "benchmarks.counts:Rank0", (name, task), 1, 600.0, device="cuda", starts_by="spawn"
            )
            workers[name].ready()
        counts = {name: one.call("counts")[0] for name, one in workers.items()}
        costs: dict[str, list[Cost]] = {name: [] for name in workers}
        for number in range(rounds):
            for name in in_turn(list(workers), number):
                costs[name] += workers[name].call("turn", _TIMED)
    finally:
        for one in workers.values():
            one.close()
    return counts, costs


def _summary(
    counts: Mapping[str, dict[str, int]], costs: Mapping[str, list[Cost]]
) -> dict[str, Any]:
    """Puts rows together, of counts and costs by engine."""
    base = counts["fsdp2"]
    times = {name: [cost.cpu_s for cost in of] for name, of in costs.items()}
    return {
        name: {
            "cpu_s": spread(times[name]),
            **of,
            "ratio_to_fsdp2": spread(ratios(times[name], times["fsdp2"])),
            **{
                f"{kind}_ratio_to_fsdp2": of[f"peak_{kind}_nbytes"] / base[f"peak_{kind}_nbytes"]
                for kind in ("allocated", "reserved")
            },
        }
        for name, of in counts.items()
    }
