"""What one rank costs its host in a world of 8 to 16,384 ranks, counted without a GPU.

As in `benchmarks/counts.py`, torch.cuda runs on the runtime of `tests/cuda_runtime`, and one
process stands for rank 0: the store, NCCL and the memory of the other ranks do not exist. So what
grows here with the number of ranks is what this rank's host does or keeps for each of them.

    .venv-cuda/bin/python -m benchmarks scale
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import click
import torch.distributed as dist
from matplotlib.figure import Figure

from benchmarks.counts import ENVIRONMENT, Rank0
from benchmarks.engines.task import Task
from benchmarks.measure import proc_nbytes, spread
from benchmarks.models import facts_of
from benchmarks.run import Run, option
from benchmarks.workers import Worker, Workers
from shardgrad.programs.train.presets import PRESETS
from tests.cuda_runtime import inspection

_ENGINES = ("fsdp2", "shardgrad")
_STEPS = 3  # in a round
_PANELS = {
    "host_s_per_unit": "seconds of the host for each unit in a step",
    "resident_nbytes": "bytes that lazy init and steps add to the host's memory",
}


class CountedStore(dist.Store):
    """A store of this process, which counts what is read from it."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self.reads = 0

    def set(self, key: str, value: Any) -> None:
        """See `torch.distributed.Store`."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """See `torch.distributed.Store`."""
        self.reads += 1
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """See `torch.distributed.Store`."""
        value = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(value).encode()
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """See `torch.distributed.Store`."""
        self.reads += len(keys)
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See `torch.distributed.Store`; nobody else sets anything."""
        if not self.check(keys):
            raise dist.DistStoreError(f"nobody sets {keys}")


class Rank(Rank0):
    """Rank 0 of a world, from its process group on."""

    def __init__(self, worker: Worker) -> None:
        self._began_s = time.perf_counter()
        self._counted = CountedStore()
        super().__init__(worker, self._counted)

    def first_step(self) -> dict[str, float]:
        """Takes the first step, which is lazy init's; returns what there is once in a run."""
        before = proc_nbytes("/proc/self/status", "VmRSS")
        for _ in range(_STEPS):  # a ring's slots are all used
            self._step()
        return {
            "init_s": time.perf_counter() - self._began_s,
            "store_reads": self._counted.reads,
            "resident_nbytes": proc_nbytes("/proc/self/status", "VmRSS") - before,
        }


@click.command()
@option("--preset", type=click.Choice(list(PRESETS)), default="gpt2", help="Model.")
@option(
    "--ranks",
    type=click.IntRange(2),
    multiple=True,
    default=[8, 64, 1024, 4096, 16_384],
    help="World; repeatable.",
)
@option("--rounds", type=click.IntRange(2), default=5, help="Turns of each engine.")
@click.pass_obj
def main(run: Run, preset: str, ranks: Sequence[int], rounds: int) -> None:
    """Count what a rank costs its host in worlds of many ranks, beside FSDP2, without a GPU."""
    if not inspection.installed():
        click.echo(
            "scale: left out, this needs .venv-cuda: python -m tests.cuda_runtime .venv-cuda"
        )
        return
    if run.smoke:
        preset, ranks, rounds = "tiny", [8, 16_384], 2
    os.environ.update(ENVIRONMENT)
    samples: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for world in ranks:
        task = Task(preset, precision="bf16", ranks=world, device="cuda", batch_size=1, seq_len=64)
        for name in _ENGINES:
            case = f"{world} ranks"
            times, found = _measure(name, task, rounds)
            samples.setdefault(case, {})[name] = {"host_s_per_unit": times}
            summary.setdefault(case, {})[name] = {"host_s_per_unit": spread(times), **found}
    run.finish(
        "scale",
        config={"preset": preset, "ranks": list(ranks), "rounds": rounds},
        samples=samples,
        summary=summary,
    )
    if run.out is not None:
        _picture(ranks, summary).savefig(run.out / "scale.svg", metadata={"Date": None})


def _measure(name: str, task: Task, rounds: int) -> tuple[list[float], dict[str, float]]:
    """Returns the host's seconds for each unit in each round, and what else was counted."""
    worker = Workers(
        "benchmarks.scale:Rank", (name, task), 1, 600.0, device="cuda", starts_by="spawn"
    )
    try:
        worker.ready()
        [once] = worker.call("first_step")
        [counts] = worker.call("counts")
        costs = [worker.call("turn", _STEPS)[0] for _ in range(rounds)]
    finally:
        worker.close()
    launches = counts["kernels"] + counts["nccl"] + counts["copies"]
    times = [cost.cpu_s / facts_of(task.preset).units for cost in costs]
    return times, {"launches": launches, **once}


def _picture(ranks: Sequence[int], summary: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, (field, label) in zip(figure.subplots(1, 2), _PANELS.items(), strict=True):
        for name in _ENGINES:
            values = [summary[f"{world} ranks"][name][field] for world in ranks]
            medians = [each["median"] if isinstance(each, dict) else each for each in values]
            axes.plot(ranks, medians, marker="o", label=name)
        axes.set(xscale="log", xlabel="ranks", title=label, ylim=(0, None))
        axes.set_xticks(ranks, [f"{world:,}" for world in ranks])
        axes.title.set_fontsize("small")
        axes.legend(frameon=False)
    return figure
