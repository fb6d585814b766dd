"""Folders that appear whole, and the series of them that one process writes.

A checkpoint is written under a temporary name, synced and renamed. A name is used once: nothing
that is complete is written over.

The writer of a series has locked a file with `fcntl`: the system unlocks it when the process ends,
however it ends, so the lock of a dead process is free. Network file systems pass such locks on
between hosts; on one that does not, a warning says that a second writer is not noticed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardgrad.errors import CheckpointError, OptionError
from shardgrad.programs.checkpoint.contents import METADATA
from shardgrad.programs.checkpoint.files import content_of, make_folder, replace_synced, sync
from shardgrad.programs.text import printable

_ASIDE = ".tmp"
_LOCK = ".lock"
_POINTER = "latest"
_STEP = re.compile(r"step_[0-9]{6,18}")

# The files that this process has locked, by real path: closing any descriptor of one would unlock
# it, so it is opened once. A forked process does not inherit the locks.
_held: dict[Path, int] = {}
os.register_at_fork(after_in_child=_held.clear)


@contextmanager
def published(final: Path) -> Iterator[Path]:
    """Makes one folder appear whole, at the end of the block, or not at all.

    Yields:
        A new folder next to the final one, to write into; the files in it are on the disk when the
        block ends. Others that write under the same name have their own; the first that is finished
        gets the name.

    Raises:
        CheckpointError: the final path exists and is no empty folder, or another process writes
            into the folder that it is in.
        OSError: the folder cannot be created, or given its name.
    """
    final = Path(os.path.realpath(final))  # "." has no name that a suffix can be added to
    if any(final.iterdir()) if final.is_dir() else final.exists():
        raise CheckpointError(
            f"{printable(final)} already exists",
            expected="a new name",
            got="a checkpoint" if _is_complete(final) else "other files",
            fix="choose another name, or remove it; if a run resumes from an earlier checkpoint, "
            "series.recover() removes the later ones",
        )
    make_folder(final.parent)
    if (final.parent / _LOCK).exists():
        Series(final.parent).acquire()
    aside = _aside(final)
    aside.mkdir()
    try:
        yield aside
        sync(aside)
        aside.rename(final)
        sync(final.parent)  # before anybody counts on it
    finally:
        shutil.rmtree(aside, ignore_errors=True)


class Series:
    """Checkpoints `step_000200/` and so on in one folder, and the file `latest`, which names one of
    them.

    A run resumes from the checkpoint in `latest`, which may be edited to return to an older one:
    :meth:`recover` removes those of later steps.

    One process writes: the first that calls `acquire` or `publish`, or saves where one did before,
    until it calls `release`, on this object or another of the same folder, or ends.

    Args:
        folder: folder of the checkpoints; an attribute too.
        keep: number of checkpoints to keep, at least 1.

    Raises:
        OptionError: `keep` is less.
    """

    def __init__(self, folder: Path | str, *, keep: int = 2) -> None:
        if not isinstance(keep, int) or keep < 1:
            raise OptionError(
                "keep must be positive, since the newest checkpoint is always kept",
                expected="at least 1",
                got=repr(keep),
                fix="keep=2",
            )
        self.folder = Path(folder)
        self._keep = keep

    def acquire(self) -> None:
        """Makes this process the one that writes; does nothing if it is already.

        If the lock was removed, as by `rm -rf checkpoints` under a run, it is taken again.

        Raises:
            CheckpointError: another process writes there; the error says which and since when.
            OSError: the folder cannot be written.
        """
        held = _held.get(self._lock)
        with suppress(FileNotFoundError):
            if held is not None and os.path.samestat(os.fstat(held), self._lock.stat()):
                return
        self.release()  # of a file that was removed
        make_folder(self.folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        descriptor = _held[self._lock] = os.open(self._lock, flags, 0o644)
        try:
            os.lockf(descriptor, os.F_TLOCK, 0)
        except (BlockingIOError, PermissionError):
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            self.release()
            raise CheckpointError(
                f"{printable(self.folder)} is being written by another process",
                expected="one writing process",
                got=printable(holder),
                fix="wait for it to end, or stop it; or write into another folder",
            ) from None
        except OSError as error:
            warnings.warn(
                f"{self.folder} is on a file system without locks ({error.strerror}): a second "
                "process that writes there is not detected.",
                stacklevel=2,
            )
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        own = f"process {os.getpid()} on {socket.gethostname()}, since {since}\n"
        os.ftruncate(descriptor, 0)
        os.write(descriptor, own.encode())

    def release(self) -> None:
        """Lets another process write; does nothing if this one does not."""
        descriptor = _held.pop(self._lock, None)
        if descriptor is not None:
            os.close(descriptor)

    @property
    def _lock(self) -> Path:
        return Path(os.path.realpath(self.folder), _LOCK)

    def path_of(self, step: int) -> Path:
        """Returns the path of the checkpoint of a step.

        Raises:
            OptionError: the step is not a number that a checkpoint may have.
        """
        name = f"step_{step:06d}" if isinstance(step, int) else ""
        if not _STEP.fullmatch(name):
            raise OptionError(
                "there is no such step",
                expected="an int from 0 on, with at most 18 digits",
                got=repr(step),
                fix="series.path_of(200)",
            )
        return self.folder / name

    def complete(self) -> list[Path]:
        """Returns every complete checkpoint, oldest step first."""
        named = (path for path in self.folder.glob("step_*") if _STEP.fullmatch(path.name))
        return sorted(filter(_is_complete, named), key=_step_of)

    def latest(self) -> Path | None:
        """Returns the checkpoint that `latest` names, else that of the newest step; None if there
        is none.

        The named checkpoint may be missing if a save was interrupted before it updated `latest`.
        Other processes may save during the call: it finds a checkpoint, and a later call no older
        one.
        """
        while True:
            name = self._named()
            if name and _is_complete(self.folder / name):
                return self.folder / name
            complete = self.complete()
            if name == self._named():  # else the named one was removed because there is a newer one
                return complete[-1] if complete else None

    def publish(self, path: Path | str) -> None:
        """Writes a checkpoint's name into `latest`, and removes the oldest others beyond `keep`.

        Raises:
            CheckpointError: another process writes there.
            OptionError: the folder has no complete checkpoint of this name.
            OSError: `latest` could not be written and is unchanged.
        """
        self.acquire()
        path, others = self.folder / Path(path).name, self.complete()
        if path not in others:
            raise OptionError(
                "only a complete checkpoint of the series can be published",
                expected="a path from `path_of`, to which a checkpoint was saved",
                got=printable(path),
                fix="checkpoint.save(state, path, then=lambda: series.publish(path))",
            )
        others.remove(path)
        replace_synced(self.folder / _POINTER, path.name + "\n")
        for one in others[::-1][self._keep - 1 :]:
            _discard(one)

    def recover(self) -> None:
        """Removes what an interrupted save left, and what a run that goes back left behind it: the
        checkpoints of later steps than that in `latest`. Call it before the first save.

        Raises:
            CheckpointError: another process writes there.
        """
        self.acquire()
        newest = self.latest()
        for one in self.complete():
            if newest is not None and _step_of(one) > _step_of(newest):
                _discard(one)
        for leftover in self.folder.glob("*" + _ASIDE):
            shutil.rmtree(leftover, ignore_errors=True)

    def _named(self) -> str:
        """Returns the name in `latest`, if it is one of a checkpoint."""
        try:
            with content_of(self.folder / _POINTER, "the name of a checkpoint") as content:
                # It may be edited to the path of the folder, or have a slash behind it.
                name = Path(content.decode(errors="replace").strip()).name
        except CheckpointError:
            return ""
        return name if _STEP.fullmatch(name) else ""


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _aside(path: Path) -> Path:
    """Returns a temporary name, which nothing has."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{_ASIDE}")


def _discard(checkpoint: Path) -> None:
    """Removes a checkpoint; it is renamed first, so that an interruption leaves no incomplete
    checkpoint.
    """
    aside = _aside(checkpoint)
    checkpoint.rename(aside)
    sync(aside.parent)  # before anything is removed of what had the name
    shutil.rmtree(aside, ignore_errors=True)


def _is_complete(path: Path) -> bool:
    return (path / METADATA).is_file()  # writers of torch's format write it last
