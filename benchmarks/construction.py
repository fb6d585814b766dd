"""Seconds to wrap a deep model on the meta device, layer by layer, with each engine."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from benchmarks.measure import ratios, settle, spread
from benchmarks.options import common_options
from benchmarks.ranks import join
from benchmarks.record import append, environment, make_record
from benchmarks.tables import show

_ENGINES = ("fsdp2", "shardgrad")


@click.command()
@click.option("--layers", type=click.IntRange(1), default=200, show_default=True)
@click.option("--rounds", type=click.IntRange(2), default=5, show_default=True)
@common_options
def main(layers: int, rounds: int, smoke: bool, out: Path | None) -> None:
    """Measure how long fully_shard takes on every layer and on the model."""
    if smoke:
        layers, rounds = 5, 2
    with tempfile.TemporaryDirectory() as meeting:
        join(0, 1, Path(meeting), keep_heap=False)
        started = environment()
        samples = _measure(layers, rounds)
    import torch.distributed as dist

    import shardgrad.ops

    dist.destroy_process_group()
    summary: dict[str, Any] = {name: {"wall_s": spread(seconds)} for name, seconds in samples.items()}
    summary["shardgrad"]["ratio_to_fsdp2"] = spread(ratios(samples["shardgrad"], samples["fsdp2"]))
    record = make_record(
        "construction",
        environment=started,
        ops_backend=shardgrad.ops.backend(),
        config={"layers": layers, "rounds": rounds, "smoke": smoke},
        samples=samples,
        summary=summary,
    )
    _print(record)
    if out is not None:
        append(out, record)


def _measure(layers: int, rounds: int) -> dict[str, list[float]]:
    """Returns seconds per engine and round."""
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    import shardgrad

    wraps: dict[str, Callable[..., Any]] = {"fsdp2": torch_fully_shard, "shardgrad": shardgrad.fully_shard}
    for fully_shard in wraps.values():
        _wrap(1, fully_shard)  # imports and caches
    settle()
    samples: dict[str, list[float]] = {name: [] for name in _ENGINES}
    for number in range(rounds):
        for name in _ENGINES if number % 2 == 0 else reversed(_ENGINES):
            samples[name].append(_wrap(layers, wraps[name]))
    return samples


def _wrap(layers: int, fully_shard: Callable[..., Any]) -> float:
    import torch

    from shardgrad.train.model import Transformer
    from shardgrad.train.presets import TransformerConfig

    with torch.device("meta"):
        model = Transformer(TransformerConfig(width=1024, layers=layers, heads=16, kv_heads=16, hidden=2816))
    gc.collect()
    start_s = time.perf_counter()
    for unit in (*model.layers, model):
        fully_shard(unit)
    return time.perf_counter() - start_s


def _print(record: dict[str, Any]) -> None:
    table = Table("", "seconds", "quartiles", "/ FSDP2")
    table.title = f"fully_shard on {record['config']['layers']} layers and the model, meta device"
    for name, of in record["summary"].items():
        low, high = of["wall_s"]["quartiles"]
        ratio = of.get("ratio_to_fsdp2")
        table.add_row(
            name,
            f"{of['wall_s']['median']:.4f}",
            f"{low:.4f} .. {high:.4f}",
            "" if ratio is None else f"{ratio['median']:.3f}",
        )
    show(table)


if __name__ == "__main__":
    main()
