"""Seconds to save and to load a checkpoint, against writing and reading the same bytes raw."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from benchmarks.measure import ratios, settle, spread
from benchmarks.options import common_options
from benchmarks.record import append, environment, make_record
from benchmarks.tables import show

_BLOCK_NBYTES = 4 * 2**20
_BASES = {"save": "raw write", "save_async": "raw write", "load": "raw read", "load unverified": "raw read"}


@click.command()
@click.option("--mib", type=click.IntRange(1), default=512, show_default=True, help="Size of the state.")
@click.option("--tensors", type=click.IntRange(1), default=64, show_default=True)
@click.option("--rounds", type=click.IntRange(2), default=7, show_default=True)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True),
    help="On which disk.  [default: for temporary files]",
)
@common_options
def main(mib: int, tensors: int, rounds: int, folder: Path | None, smoke: bool, out: Path | None) -> None:
    """Measure how fast checkpoints are written and read on one rank; every file is on the disk at the end."""
    if smoke:
        mib, tensors, rounds = 16, 4, 2
    started = environment()
    with tempfile.TemporaryDirectory(dir=folder) as place:
        samples = _measure(Path(place), mib, tensors, rounds)
    import shardgrad.ops

    summary: dict[str, Any] = {}
    for name, seconds in samples.items():
        summary[name] = {
            "wall_s": spread(seconds),
            "gb_per_s": spread([mib * 2**20 / s / 1e9 for s in seconds]),
        }
        if name in _BASES:
            summary[name]["ratio_to_raw"] = spread(ratios(seconds, samples[_BASES[name]]))
    record = make_record(
        "checkpoints",
        environment=started,
        ops_backend=shardgrad.ops.backend(),
        config={"mib": mib, "tensors": tensors, "rounds": rounds, "smoke": smoke},
        samples=samples,
        summary=summary,
    )
    _print(record)
    if out is not None:
        append(out, record)


def _measure(folder: Path, mib: int, tensors: int, rounds: int) -> dict[str, list[float]]:
    """Returns seconds by contestant and round; contestants take turns, so that a slow moment meets all."""
    import torch

    from shardgrad import checkpoint

    rows = mib * 2**20 // tensors // 4 // 256
    state = {f"t{i}": torch.randn(rows, 256) for i in range(tensors)}
    into = {name: torch.empty_like(tensor) for name, tensor in state.items()}

    def save_async() -> None:
        checkpoint.save_async(state, folder / "async").wait()

    work: dict[str, Callable[[], object]] = {
        "raw write": lambda: _write_raw(folder / "raw", state),
        "save": lambda: checkpoint.save(state, folder / "saved"),
        "save_async": save_async,
        "raw read": lambda: _read_raw(folder / "raw", into),
        "load": lambda: checkpoint.load(into, folder / "saved"),
        "load unverified": lambda: checkpoint.load(into, folder / "saved", verify=False),
    }
    samples: dict[str, list[float]] = {name: [] for name in work}
    for function in work.values():  # once, so that every file and every page is there
        function()
    settle()
    for number in range(rounds):
        for name in work if number % 2 == 0 else reversed(work):
            if name in ("save", "save_async"):
                shutil.rmtree(folder / ("saved" if name == "save" else "async"))
            start_s = time.perf_counter()
            work[name]()
            samples[name].append(time.perf_counter() - start_s)
    return samples


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


def _print(record: dict[str, Any]) -> None:
    table = Table("", "seconds", "GB/s", "/ raw", "quartiles")
    table.title = f"{record['config']['mib']} MiB in {record['config']['tensors']} tensors, one rank"
    for name, of in record["summary"].items():
        ratio = of.get("ratio_to_raw")
        table.add_row(
            name,
            f"{of['wall_s']['median']:.3f}",
            f"{of['gb_per_s']['median']:.2f}",
            "" if ratio is None else f"{ratio['median']:.2f}",
            "" if ratio is None else "{:.2f} .. {:.2f}".format(*ratio["quartiles"]),
        )
    show(table)


if __name__ == "__main__":
    main()
