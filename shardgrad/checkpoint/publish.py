"""Atomic creation of a folder: written under a temporary name, marked complete, then renamed.

At every moment, also after an interruption, the old folder exists, or the new one, or both.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from shardgrad.checkpoint.files import sync, write_synced
from shardgrad.checkpoint.lock import FileLock, require_free
from shardgrad.checkpoint.source import COMPLETE, INDEX, is_complete, marker_of
from shardgrad.checkpoint.text import printable
from shardgrad.errors import CheckpointSaveError

__all__ = ["LOCK", "REPLACED", "Publication", "discard", "recover"]

_ASIDE = ".tmp"
_under_way: set[Path] = set()  # temporary folders in use by this process; others are left over
LOCK = ".lock"  # suffix of the lock of a checkpoint that is saved; the name of the lock of a series
REPLACED = ".replaced"  # suffix of the old folder while the new one takes its name


class Publication:
    """The atomic creation of one folder. Rank 0 calls the methods, other ranks write into `aside`.

    Args:
        final: the final path.

    Attributes:
        aside: temporary path, next to the final one.
    """

    def __init__(self, final: Path) -> None:
        # abspath, not resolve, which would follow links; "." has no name that a suffix can be added
        # to.
        self._final = Path(os.path.abspath(final))
        self.aside = self._final.with_name(self._final.name + _ASIDE)
        self._has_begun = False
        self._lock: FileLock | None = None

    def begin(self) -> None:
        """Creates the temporary folder.

        Raises:
            CheckpointSaveError: the final path exists and is not a checkpoint, a save into it is
                running, or another process writes the folder that it is in.
            OSError: the folder cannot be created.
        """
        final = self._final
        if self.aside in _under_way:
            raise CheckpointSaveError(
                f"a save into {printable(final)} is still running",
                expected="one save into a folder at a time",
                got="another, which would write over what the first one completes",
                fix="wait() for the asynchronous save first, or choose another name",
            )
        if (
            final.exists()
            and not is_complete(final)
            and (not final.is_dir() or any(final.iterdir()))
        ):
            raise CheckpointSaveError(
                f"{printable(final)} is not a checkpoint, and would be replaced by one",
                expected="a new name, or that of a checkpoint",
                got="a folder with other files" if final.is_dir() else "a file",
                fix="choose another name, or remove what is there",
            )
        require_free(final.parent / LOCK, final.parent)
        self._lock = FileLock.take(final.with_name(final.name + LOCK), final)
        try:
            shutil.rmtree(self.aside, ignore_errors=True)
            self.aside.mkdir()
        except BaseException:
            self._lock.release()
            raise
        self._has_begun = True
        _under_way.add(self.aside)

    def finish(self, index: str) -> None:
        """Writes the index and the marker, and renames the folder. The data files are on the disk
        already.

        Raises:
            OSError: the old folder, if there was one, still has the final name.
        """
        write_synced(self.aside / INDEX, index)
        write_synced(self.aside / COMPLETE, marker_of(index.encode()))
        self._take_name()

    def rename(self) -> None:
        """Renames the folder to its final name.

        Raises:
            OSError: as for `finish`.
        """
        for path in self.aside.iterdir():
            sync(path)
        self._take_name()

    def _take_name(self) -> None:
        sync(self.aside)
        replaced = self._final.with_name(self._final.name + REPLACED)
        is_replacement = self._final.exists()
        if is_replacement:
            shutil.rmtree(replaced, ignore_errors=True)
            self._final.rename(replaced)
        try:
            self.aside.rename(self._final)
        except OSError:
            if is_replacement:
                replaced.rename(self._final)
            raise
        sync(self._final.parent)  # before anything of the old one is removed
        shutil.rmtree(replaced, ignore_errors=True)
        self._end()

    def abandon(self) -> None:
        """Removes the temporary folder; no effect before `begin` and after `rename`."""
        if self._has_begun:
            shutil.rmtree(self.aside, ignore_errors=True)
            self._end()

    def _end(self) -> None:
        self._has_begun = False
        _under_way.discard(self.aside)
        if self._lock is not None:
            self._lock.release()


def recover(folder: Path) -> None:
    """Completes or removes what an interrupted save left in a folder of checkpoints."""
    for replaced in folder.glob("*" + REPLACED):
        final = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if not final.exists():
            replaced.rename(final)
        elif is_complete(final) or not is_complete(replaced):  # else it is the only complete one
            shutil.rmtree(replaced, ignore_errors=True)
    for leftover in folder.glob("*" + _ASIDE):
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in folder.glob("?*" + LOCK):
        with suppress(CheckpointSaveError):  # a save into that name is under way
            require_free(leftover, leftover)
            leftover.unlink(missing_ok=True)


def discard(checkpoint: Path) -> None:
    """Removes a checkpoint; it is renamed first, so that an interruption leaves no incomplete
    checkpoint.
    """
    aside = checkpoint.with_name(checkpoint.name + _ASIDE)
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)
    sync(aside.parent)  # before anything is removed of what had the name
    shutil.rmtree(aside, ignore_errors=True)
