"""Seconds to save and to load a checkpoint, against writing and reading the same bytes raw."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.measure import interleaved, samples_of, spread, summarise
from benchmarks.run import Run, option
from shardgrad import checkpoint

_BLOCK_NBYTES = 4 * 2**20
_WRITES = ("raw write", "save", "save_async")


@click.command()
@option("--mib", type=click.IntRange(1), default=512, help="Size of the state.")
@option("--tensors", type=click.IntRange(1), default=64, help="Tensors in the state.")
@option("--rounds", type=click.IntRange(2), default=7, help="Turns of each way.")
@option(
    "--folder",
    type=click.Path(path_type=Path, exists=True),
    help="Folder on the disk to measure.  [default: for temporary files]",
)
@click.pass_obj
def main(run: Run, mib: int, tensors: int, rounds: int, folder: Path | None) -> None:
    """Measure how fast checkpoints are written and read on one rank; every file is on the disk at
    the end.
    """
    if run.smoke:
        mib, tensors, rounds = 16, 4, 2
    rows = mib * 2**20 // tensors // 4 // 256
    state = {f"t{i}": torch.randn(rows, 256) for i in range(tensors)}
    into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        disk = Path(temporary)
        costs = interleaved(
            {
                "raw write": lambda: _write_raw(disk / "raw", state),
                "save": lambda: checkpoint.save(state, disk / "saved"),
                "save_async": lambda: checkpoint.save_async(state, disk / "async").wait(),
                "raw read": lambda: _read_raw(disk / "raw", into),
                "load": lambda: checkpoint.load(into, disk / "saved"),
                "load unverified": lambda: checkpoint.load(into, disk / "saved", verify=False),
            },
            rounds,
            prepare={
                "save": lambda: shutil.rmtree(disk / "saved", ignore_errors=True),
                "save_async": lambda: shutil.rmtree(disk / "async", ignore_errors=True),
            },
        )
    writes = {name: of for name, of in costs.items() if name in _WRITES}
    reads = {name: of for name, of in costs.items() if name not in _WRITES}
    summary = summarise(writes, "raw write") | summarise(reads, "raw read")
    for name, of in costs.items():
        summary[name]["bytes_per_s"] = spread([mib * 2**20 / cost.wall_s for cost in of])
    run.finish(
        "checkpoints",
        config={"mib": mib, "tensors": tensors, "rounds": rounds},
        samples=samples_of(costs),
        summary=summary,
    )


def _write_raw(path: Path, state: dict[str, Any]) -> None:
    path.unlink(missing_ok=True)
    with path.open("xb", buffering=0) as stream:
        for tensor in state.values():
            rest = memoryview(tensor.numpy()).cast("B")
            while rest:
                rest = rest[stream.write(rest[:_BLOCK_NBYTES]) :]
        os.fsync(stream.fileno())


def _read_raw(path: Path, into: dict[str, Any]) -> None:
    with path.open("rb", buffering=0) as stream:
        for tensor in into.values():
            rest = memoryview(tensor.numpy()).cast("B")
            while rest:
                rest = rest[stream.readinto(rest[:_BLOCK_NBYTES]) :]
