"""From samples to what is reported, and whether the machine was quiet enough to report it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shardgrad.bench.catalogue import BASE, CATALOGUE, COMPUTE, HAND_GRAPHED
from shardgrad.bench.contest import Measured, Outcome
from shardgrad.bench.measure import spread
from shardgrad.bench.observation import Observation
from shardgrad.bench.rates import flops_per_step, peak_of
from shardgrad.bench.task import Task

__all__ = ["NOISE", "noise", "samples_of", "summarise", "timelines_of"]

NOISE = 0.10  # quartiles further than this from their median, relative, are too far

_COSTS = ("wall_s", "cpu_s", "minor_faults", "loopback_nbytes")


def samples_of(outcome: Outcome) -> dict[str, Any]:
    """What was measured, by contestant: lists with one value per round, and each rank's memory."""
    found: dict[str, Any] = {}
    for name, measured in outcome.measured.items():
        lists: dict[str, Any] = {field: [getattr(cost, field) for cost in measured.costs] for field in _COSTS}
        found[name] = {"round": measured.rounds, **lists}
        if measured.host_s:
            found[name]["host_s"] = measured.host_s
        if measured.joules:
            found[name]["joules"] = measured.joules
        found[name]["ranks"] = [_without_timeline(one) for one in measured.observations]
    return found


def timelines_of(outcome: Outcome) -> dict[str, Any]:
    """By contestant, one step of the first rank: `spans` of lane, name, start and length in µs; `dropped`."""
    found: dict[str, Any] = {}
    for name, measured in outcome.measured.items():
        if measured.observations and measured.observations[0].timeline:
            first = measured.observations[0]
            spans = [dataclasses.astuple(span) for span in first.timeline]
            found[name] = {"dropped": first.dropped, "spans": spans}
    return found


def summarise(outcome: Outcome, task: Task) -> dict[str, Any]:
    """What is reported of each contestant."""
    found: dict[str, Any] = {}
    for name, measured in outcome.measured.items():
        of: dict[str, Any] = {"wall_s": spread([cost.wall_s for cost in measured.costs])}
        for field in _COSTS[1:]:
            of[field] = statistics.median(getattr(cost, field) for cost in measured.costs)
        of |= _comparisons(measured, outcome.measured)
        of |= _rates(name, of["wall_s"]["median"], task, outcome.hardware)
        of |= _host(name, measured, of, outcome)
        if measured.joules:
            of["joules"] = statistics.median(measured.joules)
        of |= _observed(measured.observations)
        if measured.loss_difference is not None:
            of["loss_difference"] = measured.loss_difference
        found[name] = of
    return found


def noise(summary: Mapping[str, Any]) -> dict[str, float]:
    """How far the further quartile of a step's time is from the median, relative, for each contestant."""
    found = {}
    for name, of in summary.items():
        median = of["wall_s"]["median"]
        found[name] = max(abs(quartile - median) for quartile in of["wall_s"]["quartiles"]) / median
    return found


def _comparisons(measured: Measured, everybody: Mapping[str, Measured]) -> dict[str, Any]:
    """To the base, to a graph without an engine and to compute alone, always of the same round."""
    of: dict[str, Any] = {}
    ratios = [mine / base for mine, base in _pairs(measured, everybody.get(BASE))]
    if len(ratios) >= 2:
        of["ratio_to_base"] = spread(ratios)
    ratios = [mine / hand for mine, hand in _pairs(measured, everybody.get(HAND_GRAPHED))]
    if len(ratios) >= 2:
        of["ratio_to_hand_graphed"] = spread(ratios)
    beyond = [mine - floor for mine, floor in _pairs(measured, everybody.get(COMPUTE))]
    if len(beyond) >= 2:
        of["beyond_compute_s"] = spread(beyond)
    return of


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


def _rates(name: str, wall_s: float, task: Task, hardware: Mapping[str, Any]) -> dict[str, Any]:
    flops = flops_per_step(hardware["model"], tokens=task.tokens, seq_len=task.seq_len)
    devices = 1 if CATALOGUE[name].is_alone or task.share_device else task.ranks
    peak = peak_of(hardware, task.precision)
    return {
        "tokens_per_s": task.tokens / wall_s,
        "mfu": flops / wall_s / (devices * peak.flops_per_s),
    }


def _host(name: str, measured: Measured, of: Mapping[str, Any], outcome: Outcome) -> dict[str, Any]:
    """Host time per unit: until a step's call returns; on a CPU, what threads use beyond compute alone."""
    units = outcome.hardware["model"]["units"]
    if measured.host_s:
        return {"host_s_per_unit": statistics.median(measured.host_s) / units}
    floor = outcome.measured.get(COMPUTE)
    if floor is None or CATALOGUE[name].is_alone or name == COMPUTE:
        return {}
    compute_s = statistics.median(cost.cpu_s for cost in floor.costs)
    return {"host_s_per_unit": (of["cpu_s"] - compute_s) / units}


def _observed(observations: Sequence[Observation]) -> dict[str, Any]:
    """The heaviest rank's memory; the first rank's collectives and launches."""
    if not observations:
        return {}
    first = observations[0]
    of: dict[str, Any] = {
        "peak_rss_nbytes": max(one.peak_rss_nbytes for one in observations),
        "peak_rss_beyond_imports_nbytes": max(
            one.peak_rss_nbytes - one.baseline_rss_nbytes for one in observations
        ),
        "dtensors": first.dtensors,
        "collectives": {kind: dataclasses.asdict(one) for kind, one in first.traffic.items()},
        "communication_s": first.communication_s,
        "exposed_s": first.exposed_s,
    }
    if first.peak_allocated_nbytes is not None and first.peak_reserved_nbytes is not None:
        of["peak_allocated_nbytes"] = max(one.peak_allocated_nbytes or 0 for one in observations)
        of["peak_reserved_nbytes"] = max(one.peak_reserved_nbytes or 0 for one in observations)
        of["pool_nbytes"] = max(one.pool_nbytes for one in observations)
        of["launches"] = first.launches
    return of


def _without_timeline(one: Observation) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(one).items() if key != "timeline"}
