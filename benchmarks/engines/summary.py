"""From what was measured of engines to a record, and whether the machine was quiet enough to report
it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from benchmarks.engines.catalogue import BASE, COMPUTE, HAND_GRAPHED
from benchmarks.engines.comparison import Measured, Outcome
from benchmarks.engines.task import Length, Task
from benchmarks.engines.trace import Observation
from benchmarks.measure import samples_of, spread

_COSTS = ("wall_s", "cpu_s", "loopback_nbytes")
_PACKAGES = ("shardgrad", "torch", "deepspeed", "megatron-fsdp", "flex-shard", "transformers")

# Dense FLOP/s without sparsity, from NVIDIA's data sheets. fp32 is that of CUDA cores, as torch's
# default is; the other column is bf16.
_PUBLISHED: Mapping[str, tuple[float, float]] = {
    "H200": (67e12, 989e12),
    "H100 PCIe": (51e12, 756e12),
    "H100 NVL": (60e12, 835e12),
    "H100": (67e12, 989e12),
    "B200": (75e12, 2250e12),
    "A100": (19.5e12, 312e12),
    "L40S": (91.6e12, 362e12),
    "L4": (30.3e12, 121e12),
}


def record_of(
    task: Task,
    length: Length,
    names: Sequence[str],
    outcome: Outcome,
    environment: Mapping[str, Any],
) -> dict[str, Any]:
    """Puts a record together.

    Args:
        task: what engines did.
        length: how often.
        names: of the engines that were asked for.
        outcome: what came of it.
        environment: as it was at the start.
    """
    config: dict[str, Any] = {
        **dataclasses.asdict(task),
        **dataclasses.asdict(length),
        "engines": list(names),
    }
    if outcome.hardware:
        flops_per_s, words = peak_of(outcome.hardware, task.precision)
        config["mfu_peak"] = {"flops_per_s": flops_per_s, "words": words}
    return {
        "benchmark": "training_step",
        "environment": {**environment, "versions": _versions(), **outcome.hardware},
        "config": config,
        "samples": _samples(outcome, task),
        "summary": summarize(outcome, task),
        "left_out": {name: outcome.left_out[name] for name in names if name in outcome.left_out},
        "disagreed": outcome.disagreed,
        "unobserved": outcome.unobserved,
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            # A source tree that is not installed has no version; a package that is not there
            # neither.
            found[name] = "source tree" if find_spec(name.replace("-", "_")) else None
    return found


def _samples(outcome: Outcome, task: Task) -> dict[str, Any]:
    """By engine: lists with one value per round, and what was observed of each rank."""
    fields = _COSTS if task.device == "cpu" else (*_COSTS, "host_s")
    found = samples_of(
        {name: measured.costs for name, measured in outcome.measured.items()}, *fields
    )
    for name, measured in outcome.measured.items():
        found[name]["round"] = measured.rounds
        found[name]["ranks"] = [dataclasses.asdict(one) for one in measured.observations]
    return found


def summarize(outcome: Outcome, task: Task) -> dict[str, Any]:
    """What is reported of each engine."""
    found: dict[str, Any] = {}
    for name, measured in outcome.measured.items():
        of: dict[str, Any] = {"wall_s": spread([cost.wall_s for cost in measured.costs])}
        for field in _COSTS[1:]:
            of[field] = statistics.median(getattr(cost, field) for cost in measured.costs)
        of |= _comparisons(measured, outcome.measured)
        of |= _rates(of["wall_s"]["median"], task, outcome.hardware)
        of |= _host(name, measured, outcome, task)
        of |= _observed(measured.observations)
        if measured.loss_difference is not None:
            of["loss_difference"] = measured.loss_difference
        found[name] = of
    return found


def _comparisons(measured: Measured, all_measured: Mapping[str, Measured]) -> dict[str, Any]:
    """To the base, to a graph without an engine and to compute alone, always of the same round."""
    wanted = {
        "ratio_to_base": [mine / base for mine, base in _pairs(measured, all_measured.get(BASE))],
        "ratio_to_hand_graphed": [
            a / b for a, b in _pairs(measured, all_measured.get(HAND_GRAPHED))
        ],
        "beyond_compute_s": [
            mine - floor for mine, floor in _pairs(measured, all_measured.get(COMPUTE))
        ],
    }
    return {field: spread(values) for field, values in wanted.items() if len(values) >= 2}


def _pairs(mine: Measured, other: Measured | None) -> list[tuple[float, float]]:
    """Seconds of both, in rounds that both took part in."""
    if other is None:
        return []
    theirs = dict(zip(other.rounds, other.costs, strict=True))
    return [
        (cost.wall_s, theirs[number].wall_s)
        for number, cost in zip(mine.rounds, mine.costs, strict=True)
        if number in theirs
    ]


def _rates(wall_s: float, task: Task, hardware: Mapping[str, Any]) -> dict[str, Any]:
    flops = flops_per_step(hardware["model"], tokens=task.tokens, seq_len=task.seq_len)
    devices = 1 if task.share_device else task.ranks
    peak, _ = peak_of(hardware, task.precision)
    mfu = flops / wall_s / (devices * peak)
    # More than all of it: the peak was measured while something else ran.
    return {"tokens_per_s": task.tokens / wall_s, "mfu": mfu if mfu <= 1 else None}


def peak_of(hardware: Mapping[str, Any], precision: str) -> tuple[float, str]:
    """FLOP/s that one rank's hardware could compute, and their source.

    The published peak of a known GPU; elsewhere the rate that matrix products had on all ranks at
    once.

    Args:
        hardware: what a rank found.
        precision: of the task.
    """
    for name, rates in _PUBLISHED.items():
        if name in str(hardware.get("device_name", "")):
            return rates[precision != "fp32"], f"NVIDIA's figure for the {name}, dense {precision}"
    words = f"measured: a 1024 x 1024 product in {precision} on every rank at once"
    return hardware["matmul_flops_per_s"], words


def flops_per_step(model: Mapping[str, int], *, tokens: int, seq_len: int) -> float:
    """What a step has to compute, however it is done: 6 N + 12 L H Q T for each token.

    N counts the parameters, L H Q are layers times the width of attention, T is
    the length of the sequence. Recomputation does not count, nor does it help that half of causal
    attention is masked.

    Args:
        model: `numel` and `attention_numel`.
        tokens: of the step, on all ranks.
        seq_len: T.

    Source: PaLM (Chowdhery et al., 2022, arXiv:2204.02311), appendix B.
    """
    return float(tokens * (6 * model["numel"] + 12 * model["attention_numel"] * seq_len))


def _host(name: str, measured: Measured, outcome: Outcome, task: Task) -> dict[str, Any]:
    """Host time per unit: until a step's call returns; on a CPU, what threads use beyond compute
    alone.
    """
    units = outcome.hardware["model"]["units"]
    if task.device != "cpu":
        return {
            "host_s_per_unit": statistics.median(cost.host_s for cost in measured.costs) / units
        }
    floor = outcome.measured.get(COMPUTE)
    if floor is None or name == COMPUTE:
        return {}
    cpu_s, compute_s = (
        statistics.median(cost.cpu_s for cost in one.costs) for one in (measured, floor)
    )
    return {"host_s_per_unit": (cpu_s - compute_s) / units}


def _observed(observations: Sequence[Observation]) -> dict[str, Any]:
    """The heaviest rank's memory; the first rank's collectives and launches."""
    if not observations:
        return {}
    first = observations[0]
    of: dict[str, Any] = {
        "peak_rss_beyond_imports_nbytes": max(
            one.peak_rss_nbytes - one.baseline_rss_nbytes for one in observations
        ),
        "collectives": {kind: dataclasses.asdict(one) for kind, one in first.traffic.items()},
    }
    if first.peak_allocated_nbytes is not None and first.peak_reserved_nbytes is not None:
        of["peak_allocated_nbytes"] = max(one.peak_allocated_nbytes or 0 for one in observations)
        of["peak_reserved_nbytes"] = max(one.peak_reserved_nbytes or 0 for one in observations)
        of["pool_nbytes"] = max(one.pool_nbytes for one in observations)
        of["launches"] = first.launches
    return of
