"""Seconds to wrap a deep model on the meta device, layer by layer, with each engine."""

from __future__ import annotations

import click
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import shardgrad
from benchmarks.measure import interleaved, samples_of, summarise
from benchmarks.run import Run, option
from benchmarks.workers import one_rank
from shardgrad.programs.train.model import Transformer
from shardgrad.programs.train.presets import TransformerConfig


@click.command()
@option("--layers", type=click.IntRange(1), default=200, help="Units, beside the model.")
@option("--rounds", type=click.IntRange(2), default=5, help="Turns of each engine.")
@click.pass_obj
def main(run: Run, layers: int, rounds: int) -> None:
    """Measure how long fully_shard takes on every layer and on the model."""
    if run.smoke:
        layers, rounds = 5, 2
    config = TransformerConfig(width=1024, layers=layers, heads=16, kv_heads=16, hidden=2816)
    units: list[nn.Module] = []

    def prepare() -> None:
        with torch.device("meta"):
            model = Transformer(config)
        units[:] = (*model.layers, model)

    def with_fsdp2() -> None:
        for unit in units:
            torch_fully_shard(unit)

    def with_ours() -> None:
        for unit in units:
            shardgrad.fully_shard(unit)

    works = {"fsdp2": with_fsdp2, "shardgrad": with_ours}
    with one_rank():
        costs = interleaved(works, rounds, prepare=dict.fromkeys(works, prepare))
    run.finish(
        "construction",
        config={"layers": layers, "rounds": rounds},
        samples=samples_of(costs),
        summary=summarise(costs, "fsdp2"),
    )
