"""The rank's side of `compare`: all contestants in the same processes, in turn, round by round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import shardgrad.ops
from benchmarks.engines import build, make_batches
from benchmarks.measure import Cost, cost_of, peak_rss_nbytes, settle
from benchmarks.task import CONTESTANTS, ENGINES, Outcome, Task

_DISTINCT_STEPS = 16  # then the data repeats
_BF16_TOLERANCE = (
    0.02  # engines may round sums differently; a wrong gradient shows as far more after a few steps
)
_FP32_TOLERANCE = 1e-4  # beyond two ranks, where sums may have another order


class EnginesDisagree(RuntimeError):
    """The engines do not compute the same thing, so that their speeds cannot be compared."""


@dataclass
class _Runner:
    """A contestant, its place in the data, and its losses so far."""

    name: str
    task: Task
    losses: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._contestant = build(self.name, self.task)
        self._data = cycle(make_batches(self.task, _DISTINCT_STEPS))

    def step(self) -> None:
        self.losses.append(self._contestant.step(next(self._data)))


def run_contest(task: Task, rounds: int, steps: int, warmup: int) -> Outcome:
    """Times every contestant in every round, and swaps who goes first from round to round.

    Raises:
        EnginesDisagree: after the warm-up, or at the end.
    """
    runners = {name: _Runner(name, task) for name in CONTESTANTS}
    engines = [runners[name] for name in ENGINES]
    for runner in runners.values():
        for _ in range(warmup):
            runner.step()
    _compare_losses(*engines)
    dtensors = {runner.name: _count_dtensors(runner) for runner in engines}
    settle()
    costs: dict[str, list[Cost]] = {name: [] for name in CONTESTANTS}
    for number in range(rounds):
        for name in CONTESTANTS if number % 2 == 0 else reversed(CONTESTANTS):
            costs[name].append(cost_of(runners[name].step, repeats=steps, barrier=dist.barrier))
    return Outcome(costs, dtensors, _compare_losses(*engines), shardgrad.ops.backend())


def run_memory(task: Task, name: str, steps: int) -> tuple[int, int]:
    """Returns this process's peak memory in bytes: before there is a model, and after `steps` steps."""
    baseline = peak_rss_nbytes()
    runner = _Runner(name, task)
    for _ in range(steps):
        runner.step()
    return baseline, peak_rss_nbytes()


def _compare_losses(one: _Runner, other: _Runner) -> float:
    """Returns the largest relative difference."""
    a, b = torch.stack(one.losses), torch.stack(other.losses)
    differences = ((a - b) / a).abs()
    tolerance = _BF16_TOLERANCE
    if one.task.precision == "fp32":
        tolerance = 0.0 if dist.get_world_size() <= 2 else _FP32_TOLERANCE
    wrong = (~(differences <= tolerance)).nonzero().flatten().tolist()  # NaN is wrong too
    if wrong:
        step = wrong[0]
        raise EnginesDisagree(
            f"rank {dist.get_rank()}, step {step}: the loss of {one.name} is {a[step]:.9g}, that of "
            f"{other.name} is {b[step]:.9g}; relative difference allowed: {tolerance}. No times are reported."
        )
    return float(differences.max())


def _count_dtensors(runner: _Runner) -> int:
    """Counts those constructed from Python in one step, which is not timed."""
    with _counting_dtensors() as count:
        runner.step()
    return count[0]


@contextmanager
def _counting_dtensors() -> Iterator[list[int]]:
    original = DTensor.__new__
    count = [0]

    def counting(*args: Any, **kwargs: Any) -> DTensor:
        count[0] += 1
        return original(*args, **kwargs)

    DTensor.__new__ = staticmethod(counting)  # type: ignore[method-assign]
    try:
        yield count
    finally:
        DTensor.__new__ = original  # type: ignore[method-assign]
