"""Loads a checkpoint into an existing state, on any number of ranks, with torch's planner."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from shardgrad.errors import CheckpointError
from shardgrad.programs.checkpoint import manifest
from shardgrad.programs.checkpoint.metadata import read_metadata
from shardgrad.programs.checkpoint.peers import Peers
from shardgrad.programs.checkpoint.state import flatten, rebuild
from shardgrad.programs.text import listed, printable

_State = TypeVar("_State", bound=Mapping[Any, Any])
_ZIP = b"PK\x03\x04"


def load(
    state: _State,
    folder: Path | str,
    *,
    optional: Sequence[str] = (),
    verify: bool = True,
    group: dist.ProcessGroup | None = None,
) -> _State:
    """Loads a checkpoint into the tensors of a state. A collective of all ranks of a group.

    Everything is checked before anything is changed: names, shapes, and with `verify` every byte of
    a checkpoint that has checksums. Of one that another tool wrote, damage is found, if at all,
    while it is read. The number of ranks and the sharding may differ from those of the save.

    Args:
        state: a state of the structure that was saved. Its tensors are filled in place and keep
            their dtypes, so captured graphs stay valid.
        folder: a checkpoint in the format of `torch.distributed.checkpoint`.
        optional: shell patterns of names that may be missing on either side; `("*",)` loads the
            names that both sides have.
        verify: compare every file with its checksum before the first tensor is changed; each rank
            reads its share of the files for that.
        group: the ranks that load; None is the default group, or this process alone.

    Returns:
        The state with the same tensors and the checkpoint's other values.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, or does not fit; names the entries
            that are missing, unexpected or of another shape. The same on every rank.

    Streams: writes on the current stream. Host memory: a few times the largest part of a
    tensor that one rank wrote.
    """
    folder = Path(folder)
    peers = Peers(group, where=folder)

    def look() -> tuple[Metadata, manifest.Manifest]:
        """Returns what the checkpoint is to hold."""
        files = manifest.read(folder)
        return read_metadata(folder, files), files

    metadata, files = peers.broadcast("metadata", look)
    leaves: dict[str, Any] = {}

    def fit() -> set[str]:
        """Returns the entries that this rank has no place for."""
        leaves.update(flatten(state))
        stored = metadata.state_dict_metadata
        odd = [
            f"{printable(name)} {words}"
            for name, leaf in leaves.items()
            if name in stored or not _matches(name, optional)
            if (words := _oddity(stored.get(name), leaf))
        ]
        if odd:
            raise _misfit(folder, odd)
        return {name for name in stored.keys() - leaves.keys() if not _matches(name, optional)}

    def require_used(unused: list[set[str]]) -> None:
        left = set.intersection(*unused)
        if left:
            raise _misfit(folder, [f"{printable(name)} is only in the checkpoint" for name in left])

    def check() -> None:
        manifest.check(folder, files, sorted(files)[peers.rank :: peers.count])

    peers.together("plan", fit, require_used)
    if verify:
        peers.together("verification", check)
    values: dict[str, Any] = {}
    peers.together("reading", lambda: values.update(read(leaves, folder, metadata)))
    for leaf in leaves.values():
        if isinstance(leaf, torch.Tensor):
            # So that autograd and the engine notice the change: a DTensor and its local tensor
            # count separately.
            increment_version(leaf)
    loaded: _State = rebuild(state, values)
    return loaded


def read(leaves: dict[str, Any], folder: Path, metadata: Metadata) -> dict[str, Any]:
    """Reads entries of a checkpoint into tensors of their shapes, by this process alone; returns
    those that are no tensors.
    """
    planner, reader = _Planner(), _Reader(str(folder))
    # Who coordinates matters to torch's global plan, which is not made.
    planner.set_up_planner(leaves, metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    with torch.no_grad():
        reader.read_data(planner.create_local_plan(), planner).wait()
    return planner.values


class _Reader(FileSystemReader):
    """torch's reader, which reads zip archives only: of anything else, torch would run the older
    formats.
    """

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        view = super()._slice_file(file, sinfo)
        if view.read(len(_ZIP)) != _ZIP:
            raise CheckpointError(
                "an entry of the checkpoint is damaged, or not a zip archive",
                expected="a zip archive, as torch.save writes it",
                got="other bytes",
                where=printable(sinfo.relative_path),
                fix="use another checkpoint",
            )
        view.seek(0)
        return view


class _Planner(DefaultLoadPlanner):
    """torch's planner for a flat state; its values are data, where torch's may be any object.

    Attributes:
        values: what was read that is not a tensor, by name.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, allow_partial_load=True)
        self.values: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Reads a value."""
        self.values[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _oddity(stored: Any, leaf: Any) -> str:
    """Returns why an entry of the checkpoint does not fit; nothing if it does."""
    if stored is None:
        return "is missing"
    if not isinstance(stored, TensorStorageMetadata):
        return "is a value, not a tensor" if isinstance(leaf, torch.Tensor) else ""
    if not isinstance(leaf, torch.Tensor):
        return "is a tensor, not a value"
    dtype = stored.properties.dtype
    if stored.size != leaf.shape:
        return f"has shape {tuple(stored.size)} for {tuple(leaf.shape)}"
    if (dtype.is_floating_point, dtype.is_complex) != (leaf.is_floating_point(), leaf.is_complex()):
        return f"has {dtype} for {leaf.dtype}"
    return ""


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _misfit(folder: Path, odd: list[str]) -> CheckpointError:
    return CheckpointError(
        "the checkpoint does not fit, and nothing was loaded",
        expected="a state with the same entries, shapes and kinds of dtypes",
        got=listed(odd),
        where=printable(folder),
        fix="build the model and the optimizer that were saved; or list intended differences "
        "in `optional`",
    )
