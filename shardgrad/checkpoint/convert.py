"""Converts checkpoints between formats, a block or a tensor at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from shardgrad.checkpoint.boxes import Box, row_runs
from shardgrad.checkpoint.files import DataFile, blocks_of
from shardgrad.checkpoint.index import BLOCK_NBYTES, Entry, Index, Piece
from shardgrad.checkpoint.loading import open_checkpoint
from shardgrad.checkpoint.peers import Peers
from shardgrad.checkpoint.publish import Publication
from shardgrad.checkpoint.safetensors import write_safetensors
from shardgrad.checkpoint.source import Source
from shardgrad.checkpoint.text import printable
from shardgrad.checkpoint.tree import split
from shardgrad.errors import CheckpointError, OptionError
from shardgrad.extras import require

__all__ = ["FORMATS", "convert"]


def convert(source: Path | str, target: Path | str, *, to: str, only: str = "") -> None:
    """Verifies a checkpoint and writes it in another format, on one process.

    Args:
        source: a checkpoint of shardgrad or of `torch.distributed.checkpoint`.
        target: path of the new checkpoint.
        to: one of `FORMATS`. `safetensors` has only the tensors, not the other values.
        only: convert only the entries below this name, such as "model", and remove it from their
            names.

    Raises:
        OptionError: there is no such format.
        CheckpointError: the source is damaged, or has no entry below `only`.
        CheckpointSaveError, OSError: the target cannot be written, or is not a checkpoint.
        PartnerUnavailableError: the format is `safetensors`, which is not installed.

    Host memory: a few blocks of 4 MiB (`shardgrad`), one tensor (`torch`), one file
    (`safetensors`).
    """
    if to not in FORMATS:
        raise OptionError(
            "checkpoints are not written in that format",
            expected=", ".join(FORMATS),
            got=printable(to),
            fix=f"to={next(iter(FORMATS))!r}",
        )
    if to == "safetensors":
        require("safetensors", feature="a safetensors file")
    with open_checkpoint(source) as opened:
        part = _Part(opened, only)
        for name in part.tensors:
            opened.check(part.original(name), Box.whole(part.tensors[name].shape))
        FORMATS[to](part, Path(target))


class _Part:
    """The entries of a source below one name."""

    def __init__(self, source: Source, only: str) -> None:
        self.source = source
        self._prefix = f"{only.rstrip('/')}/" if only else ""
        self.tensors = self._below(source.tensors)
        self.values = self._below(source.values)
        if only and not self.tensors and not self.values:
            raise CheckpointError(
                "there is nothing of that name in the checkpoint",
                expected=f"names that begin with {printable(self._prefix)}",
                got="none",
                where=printable(source.folder),
                fix="`shardgrad checkpoint inspect` lists the names",
            )

    def original(self, name: str) -> str:
        return self._prefix + name

    def _below(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        begin = len(self._prefix)
        return {
            name[begin:]: entry for name, entry in entries.items() if name.startswith(self._prefix)
        }

    def read(self, name: str) -> torch.Tensor:
        return self.source.read(self.original(name))


def _flat_names(part: _Part) -> dict[str, str]:
    """Returns the name of every tensor by its name with dots, which the other formats use.

    Raises:
        CheckpointError: two tensors would have one name.
    """
    names: dict[str, str] = {}
    for name in part.tensors:
        flat = ".".join(split(name))
        if flat in names:
            raise _clash(part, f"{printable(names[flat])} and {printable(name)}", "have one name")
        names[flat] = name
    return names


def _refuse_nesting(part: _Part) -> None:
    """Checks that no entry's name is a prefix of another's, which no nested state has."""
    entries = {*part.tensors, *part.values}
    for name in entries:
        path = name.split("/")
        for length in range(1, len(path)):
            outer = "/".join(path[:length])
            if outer in entries:
                raise _clash(
                    part, f"{printable(outer)} and {printable(name)}", "lie inside each other"
                )


def _clash(part: _Part, which: str, how: str) -> CheckpointError:
    return CheckpointError(
        f"{which} in the checkpoint {how} in that format",
        expected="names that differ when dots stand between their parts, none of them above "
        "another",
        got=which,
        where=printable(part.source.folder),
        fix='to="shardgrad", which keeps them apart; or a part of the checkpoint',
    )


def _to_shardgrad(part: _Part, target: Path) -> None:
    publication = Publication(target)
    publication.begin()
    file = "rank_00000.bin"
    tensors: dict[str, Entry] = {}
    try:
        with DataFile(publication.aside / file) as data:
            for name, entry in part.tensors.items():
                box = Box.whole(entry.shape)
                pieces: tuple[Piece, ...] = ()
                if box.numel:
                    start, checksums = data.append(_reblocked(_rows(part, name, entry)))
                    pieces = (Piece(file, start, box, checksums),)
                tensors[name] = Entry(entry.dtype, entry.shape, pieces)
        publication.finish(Index(tensors, part.values, {file: data.nbytes}).to_json())
    except BaseException:
        publication.abandon()
        raise


def _rows(part: _Part, name: str, entry: Entry) -> Iterator[memoryview]:
    """Yields a tensor's bytes, a few rows at a time."""
    whole = Box.whole(entry.shape)
    for box, _, _ in row_runs(whole, entry.shape, BLOCK_NBYTES // entry.dtype.itemsize):
        rows = torch.empty(box.shape, dtype=entry.dtype)
        part.source.fill(part.original(name), box, rows)
        yield from blocks_of(rows)


def _reblocked(parts: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yields the same bytes in blocks of `BLOCK_NBYTES`."""
    buffer = bytearray()
    for part in parts:
        buffer += part
        while len(buffer) >= BLOCK_NBYTES:
            yield memoryview(bytes(buffer[:BLOCK_NBYTES]))
            del buffer[:BLOCK_NBYTES]
    if buffer:
        yield memoryview(bytes(buffer))


class _LazyPlanner(DefaultSavePlanner):
    """Reads a tensor when torch writes it; before that it is on the meta device."""

    def __init__(self, part: _Part, names: Mapping[str, str]) -> None:
        super().__init__()
        self._part = part
        self._names = names

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns the object to write, read from the source if it is a tensor."""
        found = super().lookup_object(index)
        return self._part.read(self._names[index.fqn]) if isinstance(found, torch.Tensor) else found


def _to_torch(part: _Part, target: Path) -> None:
    names = _flat_names(part)
    _refuse_nesting(part)
    publication = Publication(target)
    publication.begin()
    state: dict[str, Any] = {}
    with torch.device("meta"):
        for name, entry in part.tensors.items():
            _put(state, name, torch.empty(entry.shape, dtype=entry.dtype))
    for name, value in part.values.items():
        _put(state, name, value)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.distributed.*")
            save_state_dict(
                _with_lists(state),
                checkpoint_id=publication.aside,
                planner=_LazyPlanner(part, names),
                no_dist=True,
            )
        publication.rename()
    except BaseException:
        publication.abandon()
        raise


def _put(state: dict[str, Any], name: str, leaf: Any) -> None:
    *path, last = split(name)
    for key in path:
        state = state.setdefault(key, {})
    state[last] = leaf


def _with_lists(node: Any) -> Any:
    """Returns the state with lists instead of dictionaries whose keys count from 0."""
    if not isinstance(node, dict):
        return node
    values = [_with_lists(value) for value in node.values()]
    is_list = bool(node) and set(node) == {str(i) for i in range(len(node))}
    if is_list:
        return [
            value
            for _, value in sorted(
                zip(map(int, node), values, strict=True), key=lambda pair: pair[0]
            )
        ]
    return dict(zip(node, values, strict=True))


def _to_safetensors(part: _Part, target: Path) -> None:
    names = _flat_names(part)
    entries = {flat: part.tensors[name] for flat, name in names.items()}
    sizes = {flat: entry.nbytes(Box.whole(entry.shape)) for flat, entry in entries.items()}
    write_safetensors(sizes, lambda flat: part.read(names[flat]), target, peers=Peers())


FORMATS: dict[str, Callable[[_Part, Path], None]] = {
    "shardgrad": _to_shardgrad,
    "torch": _to_torch,
    "safetensors": _to_safetensors,
}
