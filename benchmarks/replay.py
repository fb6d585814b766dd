"""Host time of a graphed step's call, beside a bare graph's replay and beside the function it was made from.

The step is that of a chain of small layers, so that the host's work is what there is to see. On a CPU, where
graphed steps run eagerly, it shows what the wrapper costs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from benchmarks.measure import cost_on, ratios, settle, spread
from benchmarks.options import common_options, device_option
from benchmarks.ranks import one_rank
from benchmarks.record import append, environment, make_record
from benchmarks.tables import show

_WARMUP = 6  # calls, so that a capture is behind everybody
_BATCH = 4


@click.command()
@click.option("--units", type=click.IntRange(1), default=8, show_default=True, help="Sharded modules.")
@click.option(
    "--inputs", type=click.IntRange(1), default=4, show_default=True, help="Tensors given to a step."
)
@click.option("--rounds", type=click.IntRange(2), default=40, show_default=True)
@click.option("--calls", type=click.IntRange(1), default=50, show_default=True, help="Per round.")
@device_option
@common_options
def main(
    units: int, inputs: int, rounds: int, calls: int, device: str, smoke: bool, out: Path | None
) -> None:
    """Measure how long the host takes to call a graphed step."""
    if smoke:
        units, rounds, calls = 2, 2, 2
    with one_rank(device):
        import shardgrad.ops

        started = environment()
        samples = _measure(units, inputs, rounds, calls, device)
        backend = shardgrad.ops.backend()
    base = "plain graph" if "plain graph" in samples else "function"
    summary = {
        name: {"host_s": spread(of), f"ratio_to_{base.replace(' ', '_')}": spread(ratios(of, samples[base]))}
        for name, of in samples.items()
    }
    beyond = [mine - bare for mine, bare in zip(samples["graphed"], samples[base], strict=True)]
    summary["graphed"]["overhead_s"] = spread(beyond)
    config = {"units": units, "inputs": inputs, "rounds": rounds, "calls": calls, "device": device}
    record = make_record(
        "replay",
        environment=started,
        ops_backend=backend,
        config=config | {"smoke": smoke},
        samples=samples,
        summary=summary,
    )
    _print(record, base)
    if out is not None:
        append(out, record)


def _measure(units: int, count: int, rounds: int, calls: int, device: str) -> dict[str, list[float]]:
    """Returns host seconds of a call, per contestant and round; nobody waits for the device between calls."""
    import torch

    from benchmarks.chain import Chain

    contestants = _contestants(units, device)
    inputs = [torch.randn(_BATCH, Chain.width, device=device) for _ in range(count)]
    steps: dict[str, Callable[[], object]] = {
        name: (lambda call=call: call(inputs)) for name, call in contestants.items()
    }
    for step in steps.values():
        for _ in range(_WARMUP):
            step()
    settle()
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in steps if number % 2 == 0 else reversed(steps):
            samples[name].append(_host_s(steps[name], calls, device))
    return samples


def _host_s(step: Callable[[], object], calls: int, device: str) -> float:
    """Seconds of one call: on a GPU until it returns, with an idle device before each."""
    if device == "cpu":
        return cost_on(device, step, repeats=calls).wall_s
    import time

    import torch

    total_s = 0.0
    for _ in range(calls):
        torch.accelerator.synchronize()
        began_s = time.perf_counter()
        step()
        total_s += time.perf_counter() - began_s
    torch.accelerator.synchronize()
    return total_s / calls


def _contestants(units: int, device: str) -> dict[str, Callable[[Any], Any]]:
    import torch

    import shardgrad
    from benchmarks.chain import Chain
    from shardgrad.bench.plain_graph import PlainGraph

    def make_step() -> tuple[Callable[[Any], Any], Any, Any]:
        model = Chain(units, 1).to(device)
        for unit in (*model.units, model):
            shardgrad.fully_shard(unit)
        optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-3)

        def step(inputs: Any) -> Any:
            loss = torch.zeros((), device=device)
            for one in inputs:
                part = model(one).square().mean()
                part.backward()
                loss += part.detach()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step, model, optimizer

    function, model, optimizer = make_step()
    found = {
        "function": make_step()[0],
        "graphed": shardgrad.graphed_step(model, optimizer)(function),
    }
    if device == "cuda":
        bare = make_step()[0]
        graph = PlainGraph(lambda *tensors: bare(tensors))
        found["plain graph"] = lambda inputs: graph(*inputs)
    return found


def _print(record: dict[str, Any], base: str) -> None:
    table = Table("", "host µs", "quartiles", f"/ {base}")
    table.title = f"one call of a step with {record['config']['units']} units, {record['config']['device']}"
    for name, of in record["summary"].items():
        low, high = of["host_s"]["quartiles"]
        ratio = of[f"ratio_to_{base.replace(' ', '_')}"]
        table.add_row(
            name,
            f"{of['host_s']['median'] * 1e6:.1f}",
            f"{low * 1e6:.1f} .. {high * 1e6:.1f}",
            f"{ratio['median']:.3f}",
        )
    overhead = record["summary"]["graphed"]["overhead_s"]["median"]
    table.caption = f"graphed costs {overhead * 1e6:.1f} µs of a call beyond {base}"
    show(table)


if __name__ == "__main__":
    main()
