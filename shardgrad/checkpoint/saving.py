"""Saves a checkpoint, synchronously or in the background from a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardgrad.checkpoint.boxes import tile
from shardgrad.checkpoint.files import DataFile, blocks_of
from shardgrad.checkpoint.index import MOST_NBYTES, Entry, Index, Piece
from shardgrad.checkpoint.peers import Peers
from shardgrad.checkpoint.plan import Part, my_part
from shardgrad.checkpoint.publish import Publication
from shardgrad.checkpoint.text import listed, printable
from shardgrad.checkpoint.tree import Value, flatten
from shardgrad.errors import CheckpointSaveError

__all__ = ["Saving", "save", "save_async"]


def save(
    state: Mapping[Any, Any],
    folder: Path | str,
    *,
    group: dist.ProcessGroup | None = None,
    then: Callable[[], None] | None = None,
) -> None:
    """Saves a state. A collective of all ranks of a group.

    The folder is created, or replaces an existing checkpoint, when all its data is on the disk.
    See [Note: Format].

    Args:
        state: nested dictionaries, lists and tuples of tensors, numbers, strings, booleans and
            None. Of a DTensor each rank saves its shard; of other entries that several ranks have
            under one name, the lowest rank's is saved.
        folder: path of the checkpoint, on a disk visible to all ranks.
        group: the ranks that share the checkpoint; None is the default group, or this process
            alone.
        then: called on the first rank after the folder is complete; if it raises, all ranks raise.

    Raises:
        CheckpointError: the state has an entry that is not data; on every rank.
        CheckpointSaveError: a rank could not write, or the ranks together do not hold an entire
            tensor; on every rank. An existing checkpoint is unchanged.

    Streams: reads tensors on the current stream, and waits for it.
    """
    write = _Write(Path(folder), Peers(group), then)
    write(write.plan(state))


def save_async(
    state: Mapping[Any, Any],
    folder: Path | str,
    *,
    group: dist.ProcessGroup | None = None,
    then: Callable[[], None] | None = None,
) -> Saving:
    """Like :func:`save`, but returns when the state is copied to the host; a thread writes the
    copy.

    The checkpoint has the state at the time of the call.

    Args:
        state: as for `save`; the copy takes host memory for the part that this rank writes.
        folder: path of the checkpoint, on a disk visible to all ranks.
        group: a group that nothing else uses before the save has ended, such as
            `dist.new_group(backend="gloo")`. None only for one process.
        then: as for `save`, called on the thread.

    Returns:
        The running save.

    Raises:
        CheckpointError, CheckpointSaveError: an error before the copy is complete, on every rank.
            `wait` raises later errors.
    """
    peers = Peers(group, aside=group is not None)
    if group is None and peers.count > 1:
        raise CheckpointSaveError(
            "an asynchronous save needs a separate process group",
            expected='group=dist.new_group(backend="gloo")',
            got="None, which training uses at the same time",
            fix="create a group once, and pass it to every save_async",
        )
    write = _Write(Path(folder), peers, then)
    return Saving(write, write.copied(write.plan(state)))


class Saving:
    """A running asynchronous save. The process does not exit before it has ended, unless killed."""

    def __init__(self, write: _Write, part: Part) -> None:
        self._future: Future[None] = Future()
        self._peers = write.peers
        Thread(target=self._run, args=(write, part), name="checkpoint").start()

    def _run(self, write: _Write, part: Part) -> None:
        try:
            write(part)
        except BaseException as error:  # raised by `wait`
            self._future.set_exception(error)
        else:
            self._future.set_result(None)

    def done(self) -> bool:
        """Returns whether the save has ended, with or without an error."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the checkpoint.

        Args:
            timeout_s: largest number of seconds to wait; None waits without limit.

        Raises:
            CheckpointSaveError: the checkpoint could not be written.
            TimeoutError: the checkpoint is not complete after `timeout_s`.
        """
        with self._peers.thread_awaited():
            self._future.result(timeout_s)


class _Write:
    """One save on this rank: planning, writing and publication. Each fails on all ranks or on
    none.
    """

    def __init__(self, folder: Path, peers: Peers, then: Callable[[], None] | None) -> None:
        self._publication = Publication(folder)
        self.peers = peers
        self._then = then

    def plan(self, state: Mapping[Any, Any]) -> Part:
        """Returns what this rank writes. A collective, which raises on all ranks or none."""
        peers = self.peers
        leaves = peers.together("names", lambda: flatten(state))
        plain = peers.gather(
            "list of names",
            [name for name, leaf in leaves.items() if not isinstance(leaf, DTensor)],
        )
        writers: dict[str, int] = {}
        for rank in reversed(range(len(plain))):
            writers.update(dict.fromkeys(plain[rank], rank))
        mine = peers.scatter(
            "choice of writers", [{name: writers[name] for name in names} for names in plain]
        )
        part = peers.together("plan", lambda: my_part(leaves, mine, peers.rank))
        with self._abandoned_on_failure():
            peers.together("new folder", self._publication.begin if peers.leads else _nothing)
        return part

    def copied(self, part: Part) -> Part:
        """Returns copies of what this rank writes. A collective, which raises on all ranks or
        none.
        """
        with self._abandoned_on_failure():
            return self.peers.together("copy", part.copied)

    def __call__(self, part: Part) -> None:
        """Writes and publishes. A collective, which raises on all ranks or none."""
        peers = self.peers
        with self._abandoned_on_failure():
            parts = peers.gather("index", peers.together("writing", lambda: self._write(part)))
            peers.together(
                "publication", (lambda: self._publish(parts)) if peers.leads else _nothing
            )

    @contextmanager
    def _abandoned_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self.peers.leads:
                self._publication.abandon()
            raise

    def _write(self, part: Part) -> _Written:
        file = f"rank_{self.peers.rank:05d}.bin"
        pieces: dict[str, Entry] = {}
        if not part.tensors:
            return _Written(file, 0, pieces, part.values)
        with DataFile(self._publication.aside / file) as data:
            for name, held in part.tensors.items():
                mine: tuple[Piece, ...] = ()
                if held.box.numel:
                    start, checksums = data.append(blocks_of(held.local))
                    mine = (Piece(file, start, held.box, checksums),)
                pieces[name] = Entry(held.local.dtype, held.shape, mine)
        return _Written(file, data.nbytes, pieces, part.values)

    def _publish(self, parts: Sequence[_Written]) -> None:
        index = _merge(parts)
        for name, nbytes in index.files.items():
            _require_file(self._publication.aside / name, nbytes)
        text = index.to_json()
        if len(text.encode()) > MOST_NBYTES:
            raise CheckpointSaveError(
                "the checkpoint's index would be larger than a reader takes",
                expected=f"at most {MOST_NBYTES} bytes",
                got=f"{len(text)} characters for {len(index.tensors)} tensors",
                where=printable(self._publication.aside),
                fix="several checkpoints, of a part of the state each",
            )
        self._publication.finish(text)
        if self._then is not None:
            self._then()


@dataclass(frozen=True)
class _Written:
    """What one rank wrote: its file and the file's size, parts of tensors, and values."""

    file: str
    nbytes: int
    tensors: Mapping[str, Entry]
    values: Mapping[str, Value]


def _nothing() -> None:
    """The work of the other ranks while the first rank works."""


def _require_file(path: Path, nbytes: int) -> None:
    """Checks that the first rank sees another rank's file with its size."""
    found = path.stat().st_size if path.is_file() else None
    if found != nbytes:
        raise CheckpointSaveError(
            f"the first rank does not find {path.name} as it was written",
            expected=f"a file of {nbytes} bytes",
            got="no file" if found is None else f"{found} bytes",
            where=printable(path),
            fix="a folder on a disk that all ranks see",
        )


def _merge(parts: Sequence[_Written]) -> Index:
    """Returns the index of the parts that all ranks wrote."""
    tensors: dict[str, Entry] = {}
    values: dict[str, Value] = {}
    for part in parts:
        values.update(part.values)
        for name, mine in part.tensors.items():
            before = tensors.get(name, replace(mine, pieces=()))
            if (before.dtype, before.shape) != (mine.dtype, mine.shape):
                raise CheckpointSaveError(
                    "ranks hold different tensors under one name",
                    expected=f"{before.dtype} {before.shape}",
                    got=f"{mine.dtype} {mine.shape}",
                    where=name,
                    fix="give each its own name",
                )
            tensors[name] = replace(before, pieces=(*before.pieces, *mine.pieces))
    for name, entry in tensors.items():
        if not tile([piece.box for piece in entry.pieces], entry.shape):
            raise CheckpointSaveError(
                "the parts of a tensor on the saving ranks do not cover the tensor",
                expected=f"every element of {entry.shape} once",
                got=listed([f"{piece.box.shape} at {piece.box.offset}" for piece in entry.pieces])
                or "nothing",
                where=printable(name),
                fix="save with all ranks of its mesh, and give tensors of different meshes their "
                "own names",
            )
    files = {part.file: part.nbytes for part in parts if part.tensors}
    return Index(dict(sorted(tensors.items())), dict(sorted(values.items())), files)
