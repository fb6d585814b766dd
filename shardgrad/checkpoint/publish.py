"""A folder that appears whole: written under another name, marked complete, then renamed.

At every instant, whatever is interrupted, there is the old folder, or the new one, or both.
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
_under_way: set[Path] = set()  # asides of this process; those of one that died are left over
LOCK = ".lock"  # behind a checkpoint's name while it is saved; by itself, of a folder of checkpoints
REPLACED = ".replaced"  # what the old folder is called while the new one takes its name


class Publication:
    """One folder on its way. Rank 0 calls the methods, the others write into `aside`.

    Args:
        final: the name it will have.

    Attributes:
        aside: where it is written.
    """

    def __init__(self, final: Path) -> None:
        # "." has no name to put another beside, and `resolve` would follow links.
        self._final = Path(os.path.abspath(final))
        self.aside = self._final.with_name(self._final.name + _ASIDE)
        self._has_begun = False
        self._lock: FileLock | None = None

    def begin(self) -> None:
        """Makes an empty folder aside.

        Raises:
            CheckpointSaveError: something that is no checkpoint has the final name, a save into it is under
                way, or another process writes the folder that it is in.
            OSError: it cannot be made.
        """
        final = self._final
        if self.aside in _under_way:
            raise CheckpointSaveError(
                f"a save into {printable(final)} is still under way",
                expected="one save into a folder at a time",
                got="another, which would write over what the first one completes",
                fix="wait() for the asynchronous save first, or choose another name",
            )
        if final.exists() and not is_complete(final) and (not final.is_dir() or any(final.iterdir())):
            raise CheckpointSaveError(
                f"{printable(final)} is no checkpoint, and would be replaced by one",
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
        """Writes the index and the marker, and gives the folder its name. The parts are on the disk already.

        Raises:
            OSError: the old folder, if there was one, still has the name.
        """
        write_synced(self.aside / INDEX, index)
        write_synced(self.aside / COMPLETE, marker_of(index.encode()))
        self._take_name()

    def rename(self) -> None:
        """Gives the folder its name, whatever is in it.

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
        """Removes what was written aside since `begin`; nothing after `rename`."""
        if self._has_begun:
            shutil.rmtree(self.aside, ignore_errors=True)
            self._end()

    def _end(self) -> None:
        self._has_begun = False
        _under_way.discard(self.aside)
        if self._lock is not None:
            self._lock.release()


def recover(folder: Path) -> None:
    """Puts right what an interruption left behind in a folder of checkpoints, and removes unfinished ones."""
    for replaced in folder.glob("*" + REPLACED):
        final = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if not final.exists():
            replaced.rename(final)
        elif is_complete(final) or not is_complete(replaced):  # else it is the only one that is whole
            shutil.rmtree(replaced, ignore_errors=True)
    for leftover in folder.glob("*" + _ASIDE):
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in folder.glob("?*" + LOCK):
        with suppress(CheckpointSaveError):  # a save into that name is under way
            require_free(leftover, leftover)
            leftover.unlink(missing_ok=True)


def discard(checkpoint: Path) -> None:
    """Removes a checkpoint so that no instant shows half of it."""
    aside = checkpoint.with_name(checkpoint.name + _ASIDE)
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)
    sync(aside.parent)  # before anything is removed of what had the name
    shutil.rmtree(aside, ignore_errors=True)
