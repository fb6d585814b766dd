"""Does what `shardgrad plan` predicts happen? Memory and step time, predicted and measured, on CPU
ranks.

Memory: each run of the ranks has new processes, in which every large block is mapped by itself, so
that resident memory is what is allocated. The peak beyond what was resident before there was a
model, of the heaviest rank, is compared with the plan's.

Time: in every round, in turn: a step with the engine; forward and backward of the unsharded model;
a pass over memory; a small and a large exchange. The plan of the step, with these as its constants,
is compared with the step of the same round. Compute is measured, so what is tested is the rest:
which bytes move, when, what they can hide behind, and what the engine adds.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardgrad
from benchmarks.measure import proc_nbytes, ratios, settle, spread
from benchmarks.run import Run, option
from benchmarks.workers import on_ranks
from shardgrad import ops
from shardgrad.programs.plan.calibration import Calibration
from shardgrad.programs.plan.hardware import Link, machine_of
from shardgrad.programs.plan.planning import plan_of
from shardgrad.programs.plan.rehearsal import rehearse
from shardgrad.programs.plan.request import Request
from shardgrad.programs.train.model import Transformer, materialise
from shardgrad.programs.train.presets import transformer_config

_STEPS = 3  # of the memory measurement: the second has all that a steady step has
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # <malloc.h>
_MAPPED_NBYTES = 64 * 2**10
_SMALL_NBYTES = 4096
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Round = dict[str, float]


@dataclass(frozen=True)
class Task:
    """A training step.

    Attributes:
        preset: of the training program.
        override: fields of it, replaced.
        precision: `fp32`, or `bf16`: compute in bf16, reduce in fp32.
        stage: of ZeRO: "1", "2", "3", or "hfsdp", for which every two ranks are a replica.
        accumulate: micro-batches.
        batch_size: sequences per rank and micro-batch.
        seq_len: tokens per sequence.
    """

    preset: str
    override: tuple[tuple[str, int], ...]
    precision: str
    stage: str
    accumulate: int
    batch_size: int
    seq_len: int

    def mesh_shape(self, ranks: int) -> tuple[int, ...]:
        """Returns the ranks along each axis, the shards' axis last."""
        return (ranks // 2, 2) if self.stage == "hfsdp" else (ranks,)

    def small(self) -> Task:
        """Returns the same task on one narrow block."""
        narrow = (("layers", 1), ("width", 64), ("heads", 1), ("kv_heads", 1), ("hidden", 64))
        return dataclasses.replace(self, override=narrow, batch_size=1, seq_len=16)


@click.command()
@option("--preset", type=click.Choice(["tiny", "small", "medium"]), default="small", help="Model.")
@option(
    "--ranks",
    "worlds",
    type=click.IntRange(2),
    multiple=True,
    default=[2, 4],
    help="Processes; repeatable.",
)
@option(
    "--precision",
    "precisions",
    type=click.Choice(list(_DTYPES)),
    multiple=True,
    default=["fp32"],
    help="Data type of forward and backward; repeatable.",
)
@option("--stage", type=click.Choice(["1", "2", "3", "hfsdp"]), default="3", help="ZeRO stage.")
@option("--accumulate", type=click.IntRange(1), default=1, help="Micro-batches per step.")
@option("--batch-size", type=click.IntRange(1), default=4, help="Sequences per rank.")
@option("--seq-len", type=click.IntRange(2), default=256, help="Tokens per sequence.")
@option("--rounds", type=click.IntRange(2), default=10, help="Rounds of times.")
@option("--repeats", type=click.IntRange(1), default=3, help="Runs that measure memory.")
@click.pass_obj
def main(
    run: Run,
    worlds: Sequence[int],
    precisions: Sequence[str],
    stage: str,
    rounds: int,
    repeats: int,
    **sizes: Any,
) -> None:
    """Compare plans with what ranks of this machine measure."""
    if stage == "hfsdp" and any(ranks < 4 or ranks % 2 for ranks in worlds):
        raise click.UsageError("--stage hfsdp needs replicas of two ranks each: use --ranks 4.")
    override: tuple[tuple[str, int], ...] = ()
    if run.smoke:
        rounds, repeats, worlds = 2, 1, worlds[:1]
        override, sizes = (("layers", 1),), sizes | {"batch_size": 1, "seq_len": 32}
    for ranks in worlds:
        for precision in precisions:
            task = Task(override=override, precision=precision, stage=stage, **sizes)
            peaks = []
            for _ in range(repeats):
                pairs = on_ranks("benchmarks.plan:measure_memory", ranks, task, keep_heap=False)
                peaks.append(max(peak - baseline for baseline, peak in pairs))
            by_rank = on_ranks("benchmarks.plan:measure_times", ranks, task, rounds)
            measured = [
                {name: statistics.fmean(one[name] for one in group) for name in group[0]}
                for group in zip(*by_rank, strict=True)
            ]
            peak_nbytes, predicted_s = _predict(task, ranks, measured)
            steps_s = [one["step_s"] for one in measured]
            run.finish(
                "plan",
                config=dataclasses.asdict(task)
                | {"ranks": ranks, "rounds": rounds, "repeats": repeats},
                samples={"peak_nbytes": peaks, "rounds": measured, "predicted_step_s": predicted_s},
                summary={
                    "peak_nbytes": statistics.median(peaks),
                    "predicted_peak_nbytes": peak_nbytes,
                    "memory_predicted_over_measured": peak_nbytes / statistics.median(peaks),
                    "step_s": spread(steps_s),
                    "predicted_step_s": spread(predicted_s),
                    "time_predicted_over_measured": spread(ratios(predicted_s, steps_s)),
                },
            )


def _predict(task: Task, ranks: int, measured: Sequence[Round]) -> tuple[int, list[float]]:
    """Plans the task: memory once, and a step time with the constants of each round."""
    request = Request(
        preset=task.preset,
        override=dict(task.override),
        ranks=ranks,
        mesh="x".join(map(str, task.mesh_shape(ranks))),
        stage=task.stage,
        precision="fp32" if task.precision == "fp32" else "bf16-mixed",
        batch_size=task.batch_size,
        seq_len=task.seq_len,
        accumulate=task.accumulate,
        on_host=True,
    )
    rehearsal = rehearse(request)
    # The compute that is measured has its launches in it.
    usual = machine_of("cpu", is_graphed=True)
    plans = []
    for one in measured:
        device = dataclasses.replace(usual.device, bandwidth=one["bandwidth"])
        hop = (one["hop_s"],) * 3
        link = Link("loopback", one["link_bandwidth"], hop, hop, "measured in this round")
        machine = dataclasses.replace(usual, device=device, link=link, devices_per_node=ranks)
        plans.append(plan_of([rehearsal], machine, Calibration(compute_s=one["compute_s"])))
    return plans[0].peak_nbytes, [plan.step_s for plan in plans]


# -- on the ranks


class _Program:
    """The training step that `shardgrad.programs.plan.rehearsal` rehearses, on real tensors."""

    def __init__(self, task: Task, *, sharded: bool) -> None:
        with torch.device("meta"):
            self.model = Transformer(transformer_config(task.preset, dict(task.override)))
        materialise(self.model, self.model, device=torch.device("cpu"), seed=0)
        self._task = task
        self._optimizer: torch.optim.Optimizer | None = None
        if sharded:
            shape = task.mesh_shape(dist.get_world_size())
            mesh = init_device_mesh(
                "cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
            )
            policy = MixedPrecisionPolicy()
            if task.precision == "bf16":
                policy = MixedPrecisionPolicy(
                    param_dtype=torch.bfloat16, reduce_dtype=torch.float32
                )
            stage: Any = task.stage if task.stage == "hfsdp" else int(task.stage)
            for unit in (*self.model.layers, self.model):
                shardgrad.fully_shard(unit, mesh=mesh, mp_policy=policy, zero_stage=stage)
            self._optimizer = shardgrad.optim.AdamW(self.model.parameters(), lr=1e-3)
        else:
            self.model.to(_DTYPES[task.precision])
        vocabulary = self.model.config.vocab_size
        self._tokens = torch.randint(vocabulary, (task.batch_size, task.seq_len))

    def step(self) -> None:
        root: Any = self.model  # an `FSDPModule`, where there is an engine
        for number in range(self._task.accumulate):
            if self._optimizer is not None:
                root.set_is_last_backward(number == self._task.accumulate - 1)
            loss: Tensor = self.model.loss(self._tokens, self._tokens)
            loss.backward()
            del loss
        if self._optimizer is None:
            for param in self.model.parameters():
                param.grad = None
            return
        shardgrad.clip_grad_norm_(self.model.parameters(), math.inf)
        self._optimizer.step()
        self._optimizer.zero_grad()


def measure_memory(task: Task) -> tuple[int, int]:
    """Returns this rank's resident bytes before there is a model, and at most until the steps are
    done.

    Large blocks are mapped one by one, so that what the program frees leaves the resident set at
    once, and a first, small model has loaded and initialised whatever is loaded and initialised
    once.
    """
    libc = ctypes.CDLL(None)
    if not (libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_NBYTES) and libc.mallopt(_M_ARENA_MAX, 1)):
        raise RuntimeError("the C library does not take mallopt's settings")
    _Program(task.small(), sharded=True).step()
    baseline = proc_nbytes("/proc/self/status", "VmRSS")
    with open("/proc/self/clear_refs", "w", encoding="ascii") as stream:
        stream.write("5")  # VmHWM starts again from what is resident now
    program = _Program(task, sharded=True)
    for _ in range(_STEPS):
        program.step()
    return baseline, proc_nbytes("/proc/self/status", "VmHWM")


def measure_times(task: Task, rounds: int) -> list[Round]:
    """Measures a step and the constants of a prediction, in turn; seconds, and bytes per second.

    `compute_s` is forward and backward of the unsharded model, without engine, optimizer and
    communication; `bandwidth` that of a pass which reads and writes a block's parameters; `hop_s`
    how long a small message takes; `link_bandwidth` that of a message as large as a block.
    """
    engine, alone = _Program(task, sharded=True), _Program(task, sharded=False)
    for program in (engine, alone):
        for _ in range(2):
            program.step()
    settle()
    block = sum(param.numel() for param in alone.model.layers[0].parameters())
    return [
        {
            "step_s": _seconds(engine.step),
            "compute_s": _seconds(alone.step),
            "bandwidth": _pass_bandwidth(block),
            "hop_s": _exchange_s(_SMALL_NBYTES) / (dist.get_world_size() - 1),
            "link_bandwidth": _link_bandwidth(block * 4),
        }
        for _ in range(rounds)
    ]


def _seconds(work: Callable[[], object], repeats: int = 1) -> float:
    # Until the last rank is done, as no `Cost` is: the constants are those of all ranks at once.
    dist.barrier()
    began_s = time.perf_counter()
    for _ in range(repeats):
        work()
    dist.barrier()
    return (time.perf_counter() - began_s) / repeats


def _pass_bandwidth(numel: int) -> float:
    source, target = torch.ones(numel), torch.zeros(numel)
    seconds = _seconds(lambda: ops.sum_chunks([source], target, divisor=2.0), repeats=8)
    return 2 * numel * 4 / seconds


def _exchange_s(nbytes: int, repeats: int = 8) -> float:
    """Returns the seconds in which every rank sends `nbytes` in all, to the others in equal
    parts.
    """
    ranks = dist.get_world_size()
    sent, received = (torch.zeros(ranks, nbytes // 4 // (ranks - 1)) for _ in range(2))
    return _seconds(lambda: dist.all_to_all_single(received, sent), repeats)


def _link_bandwidth(nbytes: int) -> float:
    return nbytes / max(_exchange_s(nbytes) - _exchange_s(_SMALL_NBYTES), 1e-9)
