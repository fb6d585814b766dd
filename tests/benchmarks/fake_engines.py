"""Processes that stand for engines, good or bad, without torch: each does what its name stands for
here.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from benchmarks.engines.trace import Observation
from benchmarks.measure import Cost
from benchmarks.workers import Worker

HARDWARE = {
    "ops_backend": "compiled",
    "matmul_flops_per_s": 1e9,
    "model": {"numel": 10, "units": 2, "attention_numel": 0, "vocab_size": 256},
}
SECONDS = {"fsdp2": 0.4, "shardgrad": 0.2, "compute": 0.1}


class FakeEngine:
    def __init__(self, worker: Worker) -> None:
        self._worker, self._turns = worker, 0
        self._name, _ = worker.argument
        if self._name == "deepspeed-3":
            raise ValueError("stage 3 does not like this model")

    def hardware(self) -> dict[str, Any]:
        return HARDWARE

    def warm_up(self, steps: int) -> list[float]:
        wrong = 0.5 if self._name == "fsdp2-compiled" else 0.0
        return [2.0 / (step + 1) + wrong * (step == 3) for step in range(steps)]

    def turn(self, steps: int) -> Cost:
        self._turns += 1
        rank, is_second = self._worker.rank, self._turns == 2
        if self._name == "shardgrad-keep" and is_second and rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if self._name == "ddp" and is_second:
            time.sleep(60)
        if self._name == "fsdp2-keep" and is_second:
            raise RuntimeError("Connection closed by peer") if rank == 0 else KeyError("weight")
        seconds = SECONDS.get(self._name, 0.3) * (1 + self._turns / 100)
        return Cost(seconds, seconds / 2, 1000.0)

    def observe(self) -> Observation:
        if self._name == "collectives":
            os.kill(os.getpid(), signal.SIGABRT)
        return Observation(100, 300 + self._worker.rank)
