"""One task from its check to its record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardgrad.bench.contest import Outcome, run_contest
from shardgrad.bench.energy import EnergyMeter
from shardgrad.bench.rates import peak_of
from shardgrad.bench.record import environment
from shardgrad.bench.summary import NOISE, noise, samples_of, summarise, timelines_of
from shardgrad.bench.task import Length, Task, check
from shardgrad.train.failure import UsageError

__all__ = ["BENCHMARK", "measure", "record_of"]

BENCHMARK = "bench"

_PACKAGES = ("shardgrad", "torch", "deepspeed", "megatron-fsdp", "transformers")


def measure(
    task: Task, length: Length, names: Sequence[str], logs: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Measures, and returns the record, whatever happened.

    Args:
        task: what contestants do.
        length: how often.
        names: keys of the catalogue.
        logs: folder for what their processes print; made if it is missing.
        tell: hears what is going on.
    """
    started = environment()
    try:
        check(task)
    except UsageError as refusal:
        outcome = Outcome(left_out=dict.fromkeys(names, str(refusal)))
    else:
        logs.mkdir(parents=True, exist_ok=True)
        outcome = run_contest(task, length, names, logs, tell)
    return record_of(task, length, names, outcome, started)


def record_of(
    task: Task, length: Length, names: Sequence[str], outcome: Outcome, started: dict[str, Any]
) -> dict[str, Any]:
    """Puts a record together.

    Args:
        task: what contestants did.
        length: how often.
        names: who was asked to take part.
        outcome: what came of it.
        started: code, versions and hardware, as they were at the start.
    """
    summary = summarise(outcome, task)
    config: dict[str, Any] = {
        **dataclasses.asdict(task),
        **dataclasses.asdict(length),
        "contestants": list(names),
    }
    if outcome.hardware:
        config["mfu_peak"] = dataclasses.asdict(peak_of(outcome.hardware, task.precision))
        meter = EnergyMeter.find(task.device)
        config["energy"] = meter.words if meter else None
    by_name = noise(summary)
    return {
        "benchmark": BENCHMARK,
        "environment": started | {"versions": _versions()} | outcome.hardware,
        "config": config,
        "samples": samples_of(outcome),
        "summary": summary,
        "left_out": {name: outcome.left_out[name] for name in names if name in outcome.left_out},
        "disagreed": outcome.disagreed,
        "unobserved": outcome.unobserved,
        "noise": {
            "allowed": NOISE,
            "by_name": by_name,
            "is_quiet": all(n <= NOISE for n in by_name.values()),
        },
        "timelines": timelines_of(outcome),
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            # A source tree that is not installed has no version; a package that is not there neither.
            found[name] = "source tree" if find_spec(name.replace("-", "_")) else None
    return found
