"""`shardgrad checkpoint`: verify, inspect and convert checkpoints."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardgrad.cli.command import Command

if TYPE_CHECKING:
    from shardgrad.checkpoint.index import Entry
    from shardgrad.checkpoint.source import Source

_FORMATS = ("shardgrad", "torch", "safetensors")
# Names in a folder that has a checkpoint, or had one that was interrupted.
_PARTS = (
    "complete",
    "*index.json",
    ".metadata",
    "latest",
    "checkpoints",
    "step_*",
    "*.distcp",
    "*.safetensors",
)


def _with_checkpoint(_: click.Context, __: click.Parameter, path: Path) -> Path:
    """Refuses a path where nothing is of a checkpoint, before PyTorch is imported."""
    try:
        names = os.listdir(path) if path.is_dir() else [path.name]
    except OSError as error:
        raise click.BadParameter(
            f"{path} cannot be read ({error.strerror}): correct the path."
        ) from error
    if not any(fnmatch(name, part) for name in names for part in _PARTS):
        raise click.BadParameter(f"There is no checkpoint in {path}: correct the path.")
    return path


def _for_checkpoint(_: click.Context, __: click.Parameter, path: Path) -> Path:
    """Refuses a path where no checkpoint can be written, before PyTorch is imported."""
    try:
        names = os.listdir(path) if path.is_dir() else [path.name] if path.exists() else []
        if names and "complete" not in names:
            raise click.BadParameter(
                f"{path} is not a checkpoint of shardgrad, and would be replaced: choose another "
                f"name, or "
                "remove what is there."
            )
        with tempfile.TemporaryDirectory(dir=path.absolute().parent):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise click.BadParameter(
            f"{path} cannot be written ({reason}): choose another path."
        ) from error
    return path


_PATH = click.argument(
    "path", type=click.Path(exists=True, path_type=Path), callback=_with_checkpoint
)


@click.group()
def checkpoint() -> None:
    """Verify, inspect and convert checkpoints of shardgrad and of torch.distributed.checkpoint.

    PATH is a checkpoint, or a run folder, of which the newest checkpoint is used. No code in a
    checkpoint is executed. The exit status is 1 if a checkpoint is damaged or cannot be written.
    """


@checkpoint.command(cls=Command, examples=["shardgrad checkpoint verify runs/first"])
@_PATH
def verify(path: Path) -> None:
    """Read every byte of a checkpoint and compare it with its checksums."""
    from shardgrad.checkpoint.boxes import Box

    with _opened(path) as source:
        for name, entry in source.tensors.items():
            source.check(name, Box.whole(entry.shape))
        count = _counted(len(source.tensors), "tensor")
        size = _size(sum(map(_nbytes, source.tensors.values())))
        click.echo(f"{_shown(source.folder)} is complete and undamaged: {count}, {size}.")


@checkpoint.command(cls=Command, examples=["shardgrad checkpoint inspect runs/first --all"])
@_PATH
@click.option("--all", "everything", is_flag=True, help="List every tensor and every value.")
def inspect(path: Path, everything: bool) -> None:
    """Print a summary of a checkpoint's contents, without reading a tensor."""
    with _opened(path) as source:
        groups: dict[str, list[Entry]] = {}
        for name, entry in source.tensors.items():
            groups.setdefault(name.partition("/")[0], []).append(entry)
        click.echo(f"{_shown(source.folder)}, written by {source.origin}")
        for group, entries in groups.items():
            numel = sum(_numel(entry) for entry in entries)
            size = _size(sum(map(_nbytes, entries)))
            click.echo(
                f"  {_shown(group)}: {_counted(len(entries), 'tensor')}, {numel:,} elements, {size}"
            )
        click.echo(f"  {_counted(len(source.values), 'value')} that are not tensors")
        if everything:
            for name, entry in source.tensors.items():
                shape = "x".join(map(str, entry.shape)) or "scalar"
                pieces = _counted(len(entry.pieces), "piece")
                click.echo(
                    f"{_shown(name)}  {str(entry.dtype).removeprefix('torch.')} {shape}  {pieces}"
                )
            for name, value in source.values.items():
                click.echo(f"{_shown(name)} = {_shown(repr(value))}")


@checkpoint.command(
    cls=Command,
    examples=["shardgrad checkpoint convert runs/first weights --to safetensors --only model"],
)
@_PATH
@click.argument("target", type=click.Path(path_type=Path), callback=_for_checkpoint)
@click.option(
    "--to",
    type=click.Choice(_FORMATS),
    required=True,
    metavar="|".join(_FORMATS),
    help="Format of the new checkpoint; torch is the format of torch.distributed.checkpoint.",
)
@click.option(
    "--only",
    default="",
    metavar="NAME",
    help="Convert only the entries below this name, such as model, and remove the name from "
    "theirs.",
)
def convert(path: Path, target: Path, to: str, only: str) -> None:
    """Verify a checkpoint and write it to TARGET in another format."""
    from shardgrad.checkpoint import convert as write

    write(_checkpoint_in(path), target, to=to, only=only)
    click.echo(f"{_shown(target)} is written.")


@contextmanager
def _opened(path: Path) -> Iterator[Source]:
    from shardgrad.checkpoint import open_checkpoint

    with open_checkpoint(_checkpoint_in(path)) as source:
        yield source


def _checkpoint_in(path: Path) -> Path:
    """Returns the checkpoint at a path: the newest in it or in its `checkpoints`, else the path
    itself.
    """
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
