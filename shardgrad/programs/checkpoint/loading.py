"""Loads a checkpoint into an existing state, on any number of ranks, with torch's planner."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from copy import copy
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from shardgrad.errors import CheckpointError, OptionTypeError
from shardgrad.programs.checkpoint.contents import check, read_manifest, read_metadata
from shardgrad.programs.checkpoint.files import damaged, opened
from shardgrad.programs.checkpoint.peers import Peers
from shardgrad.programs.checkpoint.saving import flatten
from shardgrad.programs.text import listed, printable

_State = TypeVar("_State", bound=Mapping[Any, Any])
_ZIP = b"PK\x03\x04"
_VALUE, _SCALAR = "a value", "a tensor of real numbers with shape ()"


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
    while it is read. The number of ranks and the sharding may differ from those of the save. Where
    one side has a number and the other a tensor of shape (), as a learning rate may be, the state
    keeps its kind.

    Args:
        state: a state of the structure that was saved. Its tensors are filled in place and keep
            their dtypes, so captured graphs stay valid; whole numbers need the saved dtype.
        folder: a checkpoint in the format of `torch.distributed.checkpoint`.
        optional: shell patterns of names that may be missing on either side; `("*",)` loads the
            names that both sides have.
        verify: compare every file with its checksum before the first tensor is changed; each rank
            reads its share of the files for that.
        group: the ranks that load; None is the default group, or this process alone.

    Returns:
        The state with the same tensors, in dictionaries of the same classes, and the checkpoint's
        other values.

    Raises:
        OptionTypeError: `optional` is a string.
        CheckpointError: the checkpoint is incomplete, damaged, or does not fit; names the entries
            that are missing, unexpected or of another shape. The same on every rank.

    Streams: writes on the current stream. Host memory: a few times the largest part of a
    tensor that one rank wrote.
    """
    if isinstance(optional, str):  # each letter would be a pattern, and * is everything
        raise OptionTypeError(
            "optional must be a sequence of patterns",
            expected="a tuple or a list",
            got=repr(optional),
            fix=f"optional=({optional!r},)",
        )
    folder = Path(folder)
    peers = Peers(group, where=folder)
    leaves: dict[str, Any] = {}
    # The state's numbers for which the checkpoint has tensors, and the reverse.
    of_other_kind: dict[str, Any] = {}

    def is_optional(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in optional)

    def fit() -> set[str]:
        """Returns the entries that this rank has no place for."""
        leaves.update(flatten(state))
        stored = metadata.state_dict_metadata
        odd = []
        for name, leaf in leaves.items():
            if name not in stored:
                if not is_optional(name):
                    odd.append(f"{printable(name)} is missing")
            elif (wanted := _kind(leaf)) != (found := _kind(stored[name])):
                types = set()
                if {wanted, found} == {_VALUE, _SCALAR}:
                    one = {name: torch.empty((), dtype=torch.float64)}
                    read(one, folder, metadata)
                    leaves[name], of_other_kind[name] = one[name], leaf
                    types = {type(leaf), type(one[name])}
                if not types & {int, float}:
                    odd.append(f"{printable(name)} is {found}, not {wanted}")
        _require_none(odd)
        return {name for name in stored.keys() - leaves.keys() if not is_optional(name)}

    def require_used(unused: list[set[str]]) -> None:
        left = set.intersection(*unused)
        _require_none([f"{printable(name)} is only in the checkpoint" for name in left])

    metadata, manifest = peers.broadcast(
        "metadata", lambda: (read_metadata(folder), read_manifest(folder))
    )
    peers.together("plan", fit, require_used)
    if verify:
        mine = dict(sorted(manifest.items())[peers.rank :: peers.count])
        peers.together("verification", lambda: check(folder, mine))
    peers.together("reading", lambda: read(leaves, folder, metadata))
    with torch.no_grad():
        for name, leaf in of_other_kind.items():
            number = leaves[name]
            leaves[name] = leaf.fill_(number) if isinstance(leaf, torch.Tensor) else number.item()
    # So that autograd and the engine notice the change: a DTensor and its local tensor count
    # separately.
    increment_version([leaf for leaf in leaves.values() if isinstance(leaf, torch.Tensor)])
    return _rebuilt(state, leaves)


def read(leaves: dict[str, Any], folder: Path, metadata: Metadata) -> None:
    """Reads entries of a checkpoint, by this process alone: tensors in place, and other values."""
    planner = _Planner(
        flatten_state_dict=False, flatten_sharded_tensors=False, allow_partial_load=True
    )
    reader = _Reader(folder)
    reader.fs = _PlainFiles()
    planner.set_up_planner(leaves, metadata)
    # Who coordinates matters to torch's global plan, which is not made.
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    with torch.no_grad():
        reader.read_data(planner.create_local_plan(), planner).wait()


class _PlainFiles(FileSystem):
    def create_stream(self, path: Any, mode: str) -> Any:
        """Opens a file for reading, if it is a regular one."""
        return opened(path)


class _Reader(FileSystemReader):
    """torch's reader, which reads zip archives only: of anything else, torch would run the older
    formats.
    """

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        view = super()._slice_file(file, sinfo)
        if view.read(len(_ZIP)) != _ZIP:
            what = "zip archives, as torch.save writes them"
            got = "an entry that is damaged, or not a zip archive"
            raise damaged(Path(self.path, sinfo.relative_path), what, got)
        view.seek(0)
        return view


class _Planner(DefaultLoadPlanner):
    """torch's planner; its values are data, where torch's may be any object."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Reads a value."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _rebuilt(state: _State, leaves: Mapping[str, Any]) -> _State:
    """Returns a state of the same structure with other leaves."""
    # By path, since a key may have dots in it: a name can be that of a leaf and of what has leaves.
    _, paths = flatten_state_dict(dict(state))
    made = {path: leaves[name] for name, path in paths.items()}

    def rebuilt(part: Any, path: tuple[str | int, ...] = ()) -> Any:
        if path in made:
            return made[path]
        if isinstance(part, Mapping):
            # Of its own class, if it can be: a schedule counts its milestones with a Counter.
            parts = copy(part) if isinstance(part, dict) else {}
            for key, value in part.items():
                parts[key] = rebuilt(value, (*path, str(key)))
            return parts
        return [rebuilt(value, (*path, i)) for i, value in enumerate(part)]

    whole: _State = rebuilt(state)
    return whole


def _kind(entry: Any) -> str:
    """Describes what an entry of a state and one of a checkpoint must have in common."""
    if isinstance(entry, TensorStorageMetadata):
        shape, dtype = entry.size, entry.properties.dtype
    elif isinstance(entry, torch.Tensor):
        shape, dtype = entry.shape, entry.dtype
    else:
        return _VALUE
    # Whole numbers are not cast: int8 would make 44 of 300.
    numbers = "complex" if dtype.is_complex else "real" if dtype.is_floating_point else dtype
    return f"a tensor of {numbers} numbers with shape {tuple(shape)}"


def _require_none(odd: list[str]) -> None:
    if odd:
        raise CheckpointError(
            "the checkpoint does not fit, and nothing was loaded",
            expected="a state with the same entries, shapes and kinds of dtypes",
            got=listed(odd),
            fix="build the model and the optimizer that were saved; or list intended differences "
            "in `optional`",
        )
