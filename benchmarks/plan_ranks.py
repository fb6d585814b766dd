"""The rank's side of `plan`: what a step really takes, and what the machine's constants are."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardgrad
from benchmarks.measure import peak_rss_nbytes
from benchmarks.plan_task import Task
from shardgrad import ops
from shardgrad.train.model import Transformer, materialise
from shardgrad.train.presets import transformer_config

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # <malloc.h>
_MAPPED_NBYTES = 64 * 2**10
_SMALL_NBYTES = 4096
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Round:
    """One round's measurements, of one rank; seconds and bytes per second.

    Attributes:
        step_s: a training step with the engine.
        compute_s: forward and backward of the whole model, without engine, optimizer and communication.
        bandwidth: of a pass that reads and writes a block's parameters.
        hop_s: until a small message has arrived.
        link_bandwidth: of a message as large as a block.
    """

    step_s: float
    compute_s: float
    bandwidth: float
    hop_s: float
    link_bandwidth: float


@dataclass
class Times:
    """Of one rank."""

    rounds: list[Round] = field(default_factory=list)


class _Program:
    """The training step that `shardgrad.plan.rehearsal` rehearses, on real tensors."""

    def __init__(self, task: Task, *, sharded: bool) -> None:
        with torch.device("meta"):
            self.model = Transformer(transformer_config(task.preset, dict(task.override)))
        materialise(self.model, self.model, device=torch.device("cpu"), seed=0)
        self._task = task
        self._optimizer: torch.optim.Optimizer | None = None
        if sharded:
            shape = task.mesh_shape(dist.get_world_size())
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            policy = MixedPrecisionPolicy()
            if task.precision == "bf16":
                policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
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


def run_memory(task: Task, steps: int) -> tuple[int, int]:
    """Returns this rank's resident bytes before there is a model, and at most until `steps` steps are done.

    Large blocks are mapped one by one, so that what the program frees leaves the resident set at once, and a
    first, small model has loaded and initialised whatever is loaded and initialised once.
    """
    libc = ctypes.CDLL(None)
    if not (libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_NBYTES) and libc.mallopt(_M_ARENA_MAX, 1)):
        raise RuntimeError("the C library does not take mallopt's settings")
    _Program(task.small(), sharded=True).step()
    baseline = _resident_nbytes()
    with open("/proc/self/clear_refs", "w", encoding="ascii") as stream:
        stream.write("5")  # VmHWM starts again from what is resident now
    program = _Program(task, sharded=True)
    for _ in range(steps):
        program.step()
    return baseline, peak_rss_nbytes()


def run_times(task: Task, rounds: int) -> Times:
    """Measures a step and the constants of a prediction, in turn."""
    engine, alone = _Program(task, sharded=True), _Program(task, sharded=False)
    for program in (engine, alone):
        for _ in range(2):
            program.step()
    block = sum(param.numel() for param in alone.model.layers[0].parameters())
    times = Times()
    for _ in range(rounds):
        times.rounds.append(
            Round(
                step_s=_seconds(engine.step),
                compute_s=_seconds(alone.step),
                bandwidth=_pass_bandwidth(block),
                hop_s=_exchange_s(_SMALL_NBYTES) / (dist.get_world_size() - 1),
                link_bandwidth=_link_bandwidth(block * 4),
            )
        )
    return times


def _seconds(work: Callable[[], object], repeats: int = 1) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    dist.barrier()
    return (time.perf_counter() - begin) / repeats


def _pass_bandwidth(numel: int) -> float:
    source, target = torch.ones(numel), torch.zeros(numel)
    seconds = _seconds(lambda: ops.sum_chunks([source], target, divisor=2.0), repeats=8)
    return 2 * numel * 4 / seconds


def _exchange_s(nbytes: int, repeats: int = 8) -> float:
    """Returns the seconds in which every rank sends `nbytes` in all, to the others in equal parts."""
    ranks = dist.get_world_size()
    sent, received = (
        torch.zeros(ranks, nbytes // 4 // (ranks - 1)),
        torch.zeros(ranks, nbytes // 4 // (ranks - 1)),
    )
    return _seconds(lambda: dist.all_to_all_single(received, sent), repeats)


def _link_bandwidth(nbytes: int) -> float:
    return nbytes / max(_exchange_s(nbytes) - _exchange_s(_SMALL_NBYTES), 1e-9)


def _resident_nbytes() -> int:
    with open("/proc/self/status", encoding="ascii") as stream:
        line = next(line for line in stream if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024
