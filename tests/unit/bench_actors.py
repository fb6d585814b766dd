"""Processes that play contestants, well or badly, without torch: each does what its name stands for here."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

from shardgrad.bench.crew import Seat, Trouble, Turn
from shardgrad.bench.measure import Cost
from shardgrad.bench.observation import Observation, Span

HARDWARE = {
    "ops_backend": "compiled",
    "matmul_flops_per_s": 1e9,
    "model": {"numel": 10, "active_numel": 10, "units": 2, "attention_numel": 0, "vocab_size": 256},
}
SECONDS = {"fsdp2": 0.4, "shardgrad": 0.2, "compute": 0.1}


def serve(seat: Seat, pipe: Connection) -> None:
    actor = Actor(seat)
    if seat.name == "deepspeed-3":
        pipe.send(Trouble("ValueError: stage 3 does not like this model", "a traceback"))
        return
    if seat.name == "zero-redundancy" and _in_first_wave(seat):
        pipe.send(Trouble("OutOfMemoryError: 1 GiB", "", is_memory=True))
        return
    pipe.send(None)
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(actor, command)(*arguments))


def _in_first_wave(seat: Seat) -> bool:
    """Once in all its life on each rank: leaves a mark beside its log."""
    mark = f"{seat.log}.{seat.rank}.seen"
    if os.path.exists(mark):
        return False
    with open(mark, "wb"):
        return True


class Actor:
    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._turns = 0

    def hardware(self) -> dict[str, Any]:
        return HARDWARE

    def warm_up(self, steps: int) -> list[float]:
        wrong = 0.5 if self._seat.name == "unsharded" else 0.0
        return [2.0 / (step + 1) + wrong * (step == 3) for step in range(steps)]

    def turn(self, steps: int) -> Turn:
        self._turns += 1
        name, is_second = self._seat.name, self._turns == 2
        if name == "fsdp1" and is_second and self._seat.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if name == "ddp" and is_second:
            time.sleep(60)
        if name == "fsdp2-keep" and is_second:
            words = (
                "RuntimeError: Connection closed by peer" if self._seat.rank == 0 else "KeyError: 'weight'"
            )
            return Trouble(words, words)  # type: ignore[return-value]
        seconds = SECONDS.get(name, 0.3) * (1 + self._turns / 100)
        return Turn(Cost(seconds, seconds / 2, 1.0, 1000.0))

    def observe(self) -> Observation:
        if self._seat.name == "collectives":
            os.kill(os.getpid(), signal.SIGABRT)
        return Observation(100, 300 + self._seat.rank, timeline=[Span("compute", "aten::mm", 0.0, 5.0)])
