"""Loads a checkpoint into an existing state, on any number of ranks, with torch's planner."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from shardgrad.errors import CheckpointError
from shardgrad.programs.checkpoint import manifest
from shardgrad.programs.checkpoint.files import damaged, open_plain
from shardgrad.programs.checkpoint.metadata import METADATA, read_metadata
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
    the checkpoint. The number of ranks and the sharding may differ from those of the save.

    Args:
        state: a state of the structure that was saved. Its tensors are filled in place and keep
            their dtypes, so captured graphs stay valid.
        folder: a checkpoint in the format of `torch.distributed.checkpoint`.
        optional: shell patterns of names that may be missing on either side; `("*",)` loads the
            names that both sides have.
        verify: compare every file with its checksum before the first tensor is changed; each rank
            reads its share of the files for that. Where another tool wrote the checkpoint, each
            rank reads what it needs twice instead.
        group: the ranks that load; None is the default group, or this process alone.

    Returns:
        The state with the same tensors and the checkpoint's other values.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, or does not fit; names the entries
            that are missing, unexpected or of another shape. The same on every rank; nothing was
            changed.

    Streams: writes on the current stream. Host memory: a few times the largest part of a
    tensor that one rank wrote.
    """
    folder = Path(folder)
    peers = Peers(group, error=CheckpointError, where=folder)
    metadata, files = peers.broadcast("metadata", lambda: _open(folder))
    leaves: dict[str, Any] = {}
    planner, reader = _Planner(), _Reader(str(folder))
    parts: list[LoadPlan] = []

    def plan() -> set[str]:
        """Returns the entries that this rank has no place for."""
        leaves.update(flatten(state))
        _require_fit(folder, metadata, leaves, optional)
        items = _planned(leaves, metadata, planner, reader).items
        values = [item for item in items if item.type is LoadItemType.BYTE_IO]
        tensors = [item for item in items if item.type is not LoadItemType.BYTE_IO]
        parts.extend(map(LoadPlan, (values, tensors)))
        stored = metadata.state_dict_metadata.keys()
        return {name for name in stored - leaves.keys() if not _matches(name, optional)}

    def require_used(unused: list[set[str]]) -> None:
        left = sorted(set.intersection(*unused))
        if left:
            what = "the checkpoint has unexpected entries"
            raise _misfit(folder, what, "none", f"also {listed(left)}")

    def read(part: LoadPlan) -> None:
        with torch.no_grad():
            reader.read_data(part, planner).wait()

    def check() -> None:
        manifest.check(folder, files, sorted(files)[peers.rank :: peers.count])
        for part in parts if not files else ():
            reader.check(part)  # torch's archives have checksums of their own

    peers.together("plan", plan, require_used)
    if verify:
        peers.together("verification", check)
    for part in parts:  # the values first: one that cannot be read leaves the tensors as they are
        peers.together("reading", partial(read, part))
    for leaf in leaves.values():
        if isinstance(leaf, torch.Tensor):
            # So that autograd and the engine notice the change: a DTensor and its local tensor
            # count separately.
            increment_version(leaf)
    loaded: _State = rebuild(state, planner.values)
    return loaded


def read_tensors(tensors: dict[str, torch.Tensor], folder: Path, metadata: Metadata) -> None:
    """Reads entries of a checkpoint into tensors of their shapes, in this process alone."""
    planner, reader = _Planner(), _Reader(str(folder))
    reader.read_data(_planned(tensors, metadata, planner, reader), planner).wait()


def _planned(
    leaves: dict[str, Any], metadata: Metadata, planner: _Planner, reader: _Reader
) -> LoadPlan:
    # Who coordinates matters to torch's global plan, which is not made.
    planner.set_up_planner(leaves, metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    return planner.create_local_plan()


def _open(folder: Path) -> tuple[Metadata, manifest.Manifest]:
    if not (folder / METADATA).exists():
        raise CheckpointError(
            "there is no complete checkpoint",
            expected=f"a folder with a file {METADATA}",
            got="another folder, or one whose writing was interrupted"
            if folder.is_dir()
            else "no folder",
            where=printable(folder),
            fix="correct the path, or take an older checkpoint",
        )
    files = manifest.read(folder)
    metadata = read_metadata(folder, files)
    parts = {info.relative_path for info in metadata.storage_data.values()}
    if files and not parts <= files.keys():
        raise damaged(folder / METADATA, "files of the manifest", "others")
    return metadata, files


class _Reader(FileSystemReader):
    """torch's reader, which reads zip archives only: of anything else, torch would run the older
    formats.
    """

    def check(self, plan: LoadPlan) -> None:
        """Reads archives as a load does, with their own checksums, which torch does not compare.

        Raises:
            CheckpointError: one is damaged.
        """
        for info in (self.storage_data[item.storage_index] for item in plan.items):
            with open_plain(Path(self.path) / info.relative_path) as file:
                archive = io.BytesIO(self._slice_file(file, info).read())
            bad = zipfile.ZipFile(archive).testzip()
            if bad is not None:
                raise _bad_entry(info.relative_path, f"a wrong CRC-32 of {printable(bad)}")
            archive.seek(0)
            torch.load(archive, map_location="cpu", weights_only=True)  # reads more headers

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        view = super()._slice_file(file, sinfo)
        if view.read(len(_ZIP)) != _ZIP:
            raise _bad_entry(sinfo.relative_path, "something else")
        view.seek(0)
        return view


def _bad_entry(file: str, got: str) -> CheckpointError:
    return CheckpointError(
        "an entry of the checkpoint is damaged, or not a zip archive",
        expected="what torch.save writes",
        got=got,
        where=printable(file),
        fix="another checkpoint",
    )


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


def _require_fit(
    folder: Path, metadata: Metadata, leaves: Mapping[str, Any], optional: Sequence[str]
) -> None:
    """Compares names, shapes and kinds of dtypes."""
    stored = metadata.state_dict_metadata
    missing = [name for name in leaves if name not in stored and not _matches(name, optional)]
    if missing:
        raise _misfit(
            folder, "the checkpoint lacks entries", f"entries for {listed(missing)}", "nothing"
        )
    odd = [
        f"{printable(name)} {words}"
        for name, leaf in leaves.items()
        if name in stored and (words := _oddity(stored[name], leaf)) is not None
    ]
    if odd:
        raise _misfit(
            folder, "entries are of another shape or kind", "those of the state", listed(odd)
        )


def _oddity(stored: Any, leaf: Any) -> str | None:
    """Returns why an entry of the checkpoint does not fit; None if it does."""
    if not isinstance(stored, TensorStorageMetadata):
        return "is a value, not a tensor" if isinstance(leaf, torch.Tensor) else None
    if not isinstance(leaf, torch.Tensor):
        return "is a tensor, not a value"
    if stored.size != leaf.shape:
        return f"has shape {tuple(stored.size)} for {tuple(leaf.shape)}"
    if _kind(stored.properties.dtype) != _kind(leaf.dtype):
        return f"has {stored.properties.dtype} for {leaf.dtype}"
    return None


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating-point"
    return "bool" if dtype is torch.bool else "integer"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _misfit(folder: Path, what: str, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint does not fit, and nothing was loaded: {what}",
        expected=expected,
        got=got,
        where=printable(folder),
        fix="build the model and the optimizer that were saved; or, where a difference is meant, "
        "name it in `optional`",
    )
