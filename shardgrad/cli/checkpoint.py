"""`shardgrad checkpoint`: looking at checkpoints, checking them, and writing them in other formats."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from shardgrad.checkpoint.index import Entry
    from shardgrad.checkpoint.source import Source

_FORMATS = ("shardgrad", "torch", "safetensors")
_PATH = click.argument("path", type=click.Path(path_type=Path))


@click.group(short_help="Verify, inspect and convert checkpoints.")
def checkpoint() -> None:
    """Verify, inspect and convert checkpoints: shardgrad's own, and torch.distributed.checkpoint's.

    PATH is a checkpoint, or a run folder, whose newest checkpoint is meant. Nothing in a checkpoint is run.
    The exit status is 1 if a checkpoint is damaged or cannot be written.
    """


@checkpoint.command()
@_PATH
def verify(path: Path) -> None:
    """Read every byte of a checkpoint and compare it with the checksums written with it."""
    from shardgrad.checkpoint.boxes import Box

    with _opened(path) as source:
        for name, entry in source.tensors.items():
            source.check(name, Box.whole(entry.shape))
        count = _counted(len(source.tensors), "tensor")
        size = _size(sum(map(_nbytes, source.tensors.values())))
        click.echo(f"{_shown(source.folder)} is whole: {count}, {size}.")


@checkpoint.command()
@_PATH
@click.option("--all", "everything", is_flag=True, help="List every tensor and every value.")
def inspect(path: Path, everything: bool) -> None:
    """Say what is in a checkpoint, without reading a tensor."""
    with _opened(path) as source:
        groups: dict[str, list[Entry]] = {}
        for name, entry in source.tensors.items():
            groups.setdefault(name.partition("/")[0], []).append(entry)
        click.echo(f"{_shown(source.folder)}, written by {source.origin}")
        for group, entries in groups.items():
            numel = sum(_numel(entry) for entry in entries)
            size = _size(sum(map(_nbytes, entries)))
            click.echo(f"  {_shown(group)}: {_counted(len(entries), 'tensor')}, {numel:,} elements, {size}")
        click.echo(f"  {_counted(len(source.values), 'value')} beside the tensors")
        if everything:
            for name, entry in source.tensors.items():
                shape = "x".join(map(str, entry.shape)) or "scalar"
                pieces = _counted(len(entry.pieces), "piece")
                click.echo(f"{_shown(name)}  {str(entry.dtype).removeprefix('torch.')} {shape}  {pieces}")
            for name, value in source.values.items():
                click.echo(f"{_shown(name)} = {_shown(repr(value))}")


@checkpoint.command()
@_PATH
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--to",
    type=click.Choice(_FORMATS),
    required=True,
    metavar="|".join(_FORMATS),
    help="Format of the new checkpoint; torch is torch.distributed.checkpoint's.",
)
@click.option(
    "--only", default="", metavar="NAME", help="Take what is below this name, without it; for example model."
)
def convert(path: Path, target: Path, to: str, only: str) -> None:
    """Write a checkpoint again in another format, as TARGET, after verifying it."""
    from shardgrad.checkpoint import convert as write

    with _reported():
        write(_checkpoint_in(path), target, to=to, only=only)
    click.echo(f"{_shown(target)} is written.")


@contextmanager
def _opened(path: Path) -> Iterator[Source]:
    from shardgrad.checkpoint import open_checkpoint

    with _reported(), open_checkpoint(_checkpoint_in(path)) as source:
        yield source


@contextmanager
def _reported() -> Iterator[None]:
    """Turns errors into their text and exit status 1."""
    from shardgrad.errors import ShardgradError

    try:
        yield
    except ShardgradError as error:
        click.echo(f"shardgrad checkpoint: {error}", err=True)
        sys.exit(1)
    except OSError as error:
        click.echo(f"shardgrad checkpoint: {_shown(error)}: free space, or correct the path.", err=True)
        sys.exit(1)


def _checkpoint_in(path: Path) -> Path:
    """Returns the checkpoint that a path means: itself, or the newest in it or in its `checkpoints`."""
    from shardgrad.checkpoint import Series

    for folder in (path, path / "checkpoints"):
        newest = Series(folder).latest()
        if newest is not None:
            return newest
    return path


def _shown(text: object) -> str:
    from shardgrad.checkpoint.text import printable

    return printable(text)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _numel(entry: Entry) -> int:
    return sum(piece.box.numel for piece in entry.pieces)


def _nbytes(entry: Entry) -> int:
    return _numel(entry) * entry.dtype.itemsize


def _size(nbytes: int) -> str:
    size, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}"
