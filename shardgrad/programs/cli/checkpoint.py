"""`shardgrad checkpoint`: verify and export checkpoints."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

import click

from shardgrad.programs.text import printable
from shardgrad.programs.train.failure import reason_of

# Names in a folder that has a checkpoint, or had one that was interrupted.
_PARTS = (".metadata", "manifest.json", "latest", "checkpoints", "step_*", "*.distcp")


def _with_checkpoint(_: click.Context, __: click.Parameter, path: Path) -> Path:
    """Refuses a path where nothing is of a checkpoint, before PyTorch is imported."""
    if not any(found for part in _PARTS for found in path.glob(part)):
        raise click.BadParameter(f"There is no checkpoint in {path}: correct the path.")
    return path


def _for_export(_: click.Context, __: click.Parameter, path: Path) -> Path:
    """Refuses a path where no new folder can be written, before PyTorch is imported."""
    try:
        if any(path.iterdir()) if path.is_dir() else path.exists():
            raise click.BadParameter(
                f"{path} is not empty and would be replaced: choose another name, or remove it."
            )
        with tempfile.TemporaryDirectory(dir=path.absolute().parent):
            pass
    except (OSError, ValueError) as error:
        raise click.BadParameter(
            f"{path} cannot be written ({reason_of(error)}): choose another path."
        ) from error
    return path


_PATH = click.argument(
    "path",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    callback=_with_checkpoint,
)


@click.group(short_help="Verify and export checkpoints.")
def checkpoint() -> None:
    """Verify and export checkpoints in the format of torch.distributed.checkpoint.

    PATH is a checkpoint, or a run folder, of which the newest checkpoint is used. No code in a
    checkpoint is executed. The exit status is 1 if a checkpoint is damaged or cannot be written.
    """


@checkpoint.command(epilog="Example: shardgrad checkpoint verify runs/first")
@_PATH
def verify(path: Path) -> None:
    """Read every byte of a checkpoint and compare it with its checksums."""
    from shardgrad.programs.checkpoint import verify as compare
    from shardgrad.programs.train.display import nice_nbytes

    folder = _checkpoint_in(path)
    sizes = [nbytes for nbytes, _ in compare(folder).values()]
    click.echo(
        f"{printable(folder)} is complete and undamaged: {len(sizes)} files, "
        f"{nice_nbytes(sum(sizes))}."
    )


@checkpoint.command(epilog="Example: shardgrad checkpoint export runs/first weights --only model")
@_PATH
@click.argument("target", type=click.Path(path_type=Path), callback=_for_export)
@click.option(
    "--only",
    default="",
    metavar="NAME",
    help="Export only the entries below this name, such as model, and remove the name from theirs.",
)
def export(path: Path, target: Path, only: str) -> None:
    """Verify a checkpoint and write its tensors as safetensors files into the new folder TARGET."""
    from shardgrad.programs.checkpoint import export_checkpoint

    signal.signal(signal.SIGINT, signal.default_int_handler)  # which removes what is half written
    export_checkpoint(_checkpoint_in(path), target, only=only)
    click.echo(f"{printable(target)} is written.")


def _checkpoint_in(path: Path) -> Path:
    """Returns the checkpoint at a path: the newest in it or in its `checkpoints`, else the path
    itself.
    """
    from shardgrad.programs.checkpoint import Series

    for folder in (path, path / "checkpoints"):
        newest = Series(folder).latest()
        if newest is not None:
            return newest
    return path
