"""Host time of a graphed step's call, beside a bare graph's replay and beside the function it was
made from.

The step is that of a chain of small layers, so that the host's work is what there is to see. On a
CPU, where graphed steps run eagerly, it shows what the wrapper costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click
import torch
from torch import Tensor

import shardgrad
from benchmarks.engines.cuda_graph import PlainGraph
from benchmarks.measure import interleaved, samples_of, spread, summarise
from benchmarks.models import Chain
from benchmarks.run import Run, option
from benchmarks.workers import one_rank

_WARMUP = 6  # calls, so that every capture lies before the first round
_BATCH = 4


@click.command()
@option("--units", type=click.IntRange(1), default=8, help="Sharded modules.")
@option("--inputs", type=click.IntRange(1), default=4, help="Tensors given to a step.")
@option("--rounds", type=click.IntRange(2), default=200, help="Turns of each way.")
@option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where to compute.")
@click.pass_obj
def main(run: Run, units: int, inputs: int, rounds: int, device: str) -> None:
    """Measure how long the host takes to call a graphed step, while the device is idle."""
    if run.smoke:
        units, rounds = 2, 2
    with one_rank(device):
        given = [torch.randn(_BATCH, Chain.width, device=device) for _ in range(inputs)]
        works = {name: partial(step, given) for name, step in _steps(units, device).items()}
        costs = interleaved(works, rounds, warmup=_WARMUP, device=device)
    base = "function" if device == "cpu" else "plain graph"
    summary = summarise(costs, base, "host_s")
    beyond = [
        ours.host_s - bare.host_s for ours, bare in zip(costs["graphed"], costs[base], strict=True)
    ]
    summary["graphed"]["overhead_s"] = spread(beyond)
    run.finish(
        "graphed_replay",
        config={"units": units, "inputs": inputs, "rounds": rounds, "device": device},
        samples=samples_of(costs, "host_s"),
        summary=summary,
    )


def _steps(units: int, device: str) -> dict[str, Callable[[Sequence[Tensor]], Any]]:
    def make() -> tuple[Callable[[Sequence[Tensor]], Tensor], Any, Any]:
        model = Chain(units, 1).to(device)
        for unit in (*model.units, model):
            shardgrad.fully_shard(unit)
        optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-3)

        def step(inputs: Sequence[Tensor]) -> Tensor:
            loss = torch.zeros((), device=device)
            for one in inputs:
                part = model(one).square().mean()
                part.backward()
                loss += part.detach()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step, model, optimizer

    function, model, optimizer = make()
    found: dict[str, Callable[[Sequence[Tensor]], Any]] = {
        "function": make()[0],
        "graphed": shardgrad.graphed_step(model, optimizer)(function),
    }
    if device == "cuda":
        bare = make()[0]
        graph = PlainGraph(lambda *tensors: bare(tensors))
        found["plain graph"] = lambda inputs: graph(*inputs)
    return found
