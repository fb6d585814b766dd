"""Host CPU time that an engine adds to a step, per unit, with nothing sent and almost nothing computed.

At world size 1 neither engine runs a collective, and units are so small that what is left after subtracting
the same model without an engine is hooks, bookkeeping and copies of a few hundred bytes.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from benchmarks.measure import cost_of, ratios, settle, spread
from benchmarks.options import common_options, heap_option
from benchmarks.ranks import join
from benchmarks.record import append, environment, make_record
from benchmarks.tables import show

_ENGINES = ("fsdp2", "shardgrad")
_CONTESTANTS = (*_ENGINES, "plain")
# Parameters of a unit: one layer with a bias, or four of them and a scale.
_LAYERS = {"2": 1, "9": 4}


@click.command()
@click.option("--units", type=click.IntRange(1), multiple=True, default=[10, 100, 1000], show_default=True)
@click.option(
    "--params", type=click.Choice(list(_LAYERS)), multiple=True, default=list(_LAYERS), help="Per unit."
)
@click.option("--rounds", type=click.IntRange(2), default=20, show_default=True)
@click.option(
    "--warmup", type=click.IntRange(1), default=3, show_default=True, help="Steps of each contestant."
)
@heap_option
@common_options
def main(
    units: Sequence[int],
    params: Sequence[str],
    rounds: int,
    warmup: int,
    keep_heap: bool,
    smoke: bool,
    out: Path | None,
) -> None:
    """Measure host time per unit. --units and --params may be repeated."""
    if smoke:
        units, rounds, warmup = [2, 20], 2, 1
    with tempfile.TemporaryDirectory() as meeting:
        join(0, 1, Path(meeting), keep_heap=keep_heap)
        started = environment()
        samples = {
            kind: {count: _overheads(kind, count, rounds, warmup) for count in units} for kind in params
        }
    import torch.distributed as dist

    import shardgrad.ops

    dist.destroy_process_group()
    record = make_record(
        "host_overhead",
        environment=started,
        ops_backend=shardgrad.ops.backend(),
        config={
            "units": list(units),
            "params": list(params),
            "rounds": rounds,
            "warmup": warmup,
            "keep_heap": keep_heap,
            "smoke": smoke,
        },
        samples=samples,
        summary={kind: _summarise(by_count) for kind, by_count in samples.items()},
    )
    _print(record["summary"])
    if out is not None:
        append(out, record)


def _overheads(kind: str, count: int, rounds: int, warmup: int) -> dict[str, list[float]]:
    """Returns microseconds per unit and step, per engine and round."""
    steps = {name: _make_step(name, _LAYERS[kind], count) for name in _CONTESTANTS}
    for step in steps.values():
        for _ in range(warmup):
            step()
    settle()
    repeats = math.ceil(100 / count)  # so that a round is long enough for the clock
    cpu_s: dict[str, list[float]] = {name: [] for name in _CONTESTANTS}
    for number in range(rounds):
        for name in _CONTESTANTS if number % 2 == 0 else reversed(_CONTESTANTS):
            cpu_s[name].append(cost_of(steps[name], repeats=repeats).cpu_s)
    return {
        name: [(each - plain) / count * 1e6 for each, plain in zip(cpu_s[name], cpu_s["plain"], strict=True)]
        for name in _ENGINES
    }


def _make_step(name: str, layers: int, count: int) -> Callable[[], None]:
    import torch
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    import shardgrad
    from benchmarks.chain import Chain

    model = Chain(count, layers)
    if name != "plain":
        fully_shard: Callable[..., Any] = shardgrad.fully_shard if name == "shardgrad" else torch_fully_shard
        for unit in model.units:
            fully_shard(unit)
        fully_shard(model)
    params = list(model.parameters())
    inputs = torch.randn(1, model.width)

    def step() -> None:
        for param in params:
            param.grad = None
        model(inputs).sum().backward()

    return step


def _summarise(samples: dict[int, dict[str, list[float]]]) -> dict[str, Any]:
    """Per engine the microseconds per unit by count, their ratio, and how the total grows with the count."""
    summary: dict[str, Any] = {
        name: {count: spread(by_name[name]) for count, by_name in samples.items()} for name in _ENGINES
    }
    summary["ratio_to_fsdp2"] = {
        count: spread(ratios(by_name["shardgrad"], by_name["fsdp2"])) for count, by_name in samples.items()
    }
    low, high = min(samples), max(samples)
    if low < high:
        summary["growth_exponent"] = {
            name: 1 + math.log(summary[name][high]["median"] / summary[name][low]["median"], high / low)
            for name in _ENGINES
        }
    return summary


def _print(summary: dict[str, Any]) -> None:
    table = Table("parameters", "units", *(f"{name} µs" for name in _ENGINES), "/ FSDP2")
    table.title = "host CPU time per unit and step, beyond the plain model"
    for kind, of in summary.items():
        for count in of["fsdp2"]:
            times = (f"{of[name][count]['median']:.1f}" for name in _ENGINES)
            table.add_row(kind, str(count), *times, f"{of['ratio_to_fsdp2'][count]['median']:.3f}")
        if "growth_exponent" in of:
            exponents = (f"count^{of['growth_exponent'][name]:.2f}" for name in _ENGINES)
            table.add_row("", "growth of the total", *exponents, "", end_section=True)
    show(table)


if __name__ == "__main__":
    main()
