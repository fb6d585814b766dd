"""Host CPU time that an engine adds to a step, per unit, with nothing sent and almost nothing
computed.

At world size 1 neither engine runs a collective, and units are so small that what is left after
subtracting the same model without an engine is hooks, bookkeeping and copies of a few hundred
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import click
import torch
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import shardgrad
from benchmarks.measure import interleaved, ratios, samples_of, spread
from benchmarks.models import Chain
from benchmarks.run import Run, option
from benchmarks.workers import one_rank

_ENGINES: dict[str, Callable[..., Any]] = {
    "fsdp2": torch_fully_shard,
    "shardgrad": shardgrad.fully_shard,
}
# Parameters of a unit: one layer with a bias, or four of them and a scale.
_LAYERS = {"2": 1, "9": 4}


@click.command()
@option(
    "--units",
    type=click.IntRange(1),
    multiple=True,
    default=[10, 100, 1000],
    help="Units of the model; repeatable.",
)
@option(
    "--params",
    type=click.Choice(list(_LAYERS)),
    multiple=True,
    default=list(_LAYERS),
    help="Parameters of a unit; repeatable.",
)
@option("--rounds", type=click.IntRange(2), default=20, help="Turns of each engine.")
@option("--warmup", type=click.IntRange(1), default=3, help="Steps before the first round.")
@option(
    "--keep-heap/--no-keep-heap", default=True, help="Apply the training program's heap setting."
)
@click.pass_obj
def main(
    run: Run, units: Sequence[int], params: Sequence[str], rounds: int, warmup: int, keep_heap: bool
) -> None:
    """Measure the host time that an engine adds, per unit."""
    if run.smoke:
        units, rounds, warmup = [2, 20], 2, 1
    samples: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    with one_rank(keep_heap=keep_heap):
        for kind in params:
            added: dict[int, dict[str, list[float]]] = {}
            samples[kind], summary[kind] = {}, {}
            for count in units:
                works = {
                    name: _make_step(name, _LAYERS[kind], count) for name in (*_ENGINES, "plain")
                }
                # So many repeats that a round is long enough for the clock.
                costs = interleaved(works, rounds, repeats=math.ceil(100 / count), warmup=warmup)
                samples[kind][f"{count} units"] = samples_of(costs, "cpu_s")
                plain = [cost.cpu_s for cost in costs["plain"]]
                added[count] = {
                    name: [
                        (one.cpu_s - less) / count
                        for one, less in zip(costs[name], plain, strict=True)
                    ]
                    for name in _ENGINES
                }
                summary[kind][f"{count} units"] = {
                    name: {
                        "cpu_per_unit_s": spread(of),
                        "ratio_to_fsdp2": spread(ratios(of, added[count]["fsdp2"])),
                    }
                    for name, of in added[count].items()
                }
            if len(units) > 1:
                summary[kind]["growth"] = {
                    name: _growth(summary[kind], name, units) for name in _ENGINES
                }
    run.finish(
        "host_overhead",
        config={
            "units": list(units),
            "params": list(params),
            "rounds": rounds,
            "warmup": warmup,
            "keep_heap": keep_heap,
        },
        samples=samples,
        summary=summary,
    )


def _growth(summary: dict[str, Any], name: str, units: Sequence[int]) -> dict[str, float]:
    """How the total grows from the smallest count to the largest: as the count to which power."""
    few, many = min(units), max(units)
    low, high = (
        summary[f"{count} units"][name]["cpu_per_unit_s"]["median"] for count in (few, many)
    )
    return {"exponent": 1 + math.log(high / low, many / few)}


def _make_step(name: str, layers: int, count: int) -> Callable[[], None]:
    model = Chain(count, layers)
    if name in _ENGINES:
        for unit in (*model.units, model):
            _ENGINES[name](unit)
    params = list(model.parameters())
    inputs = torch.randn(1, model.width)

    def step() -> None:
        for param in params:
            param.grad = None
        model(inputs).sum().backward()

    return step
