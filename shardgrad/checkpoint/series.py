"""The checkpoints of a run: one folder per step, the newest one, and how many are kept."""

from __future__ import annotations

import re
from pathlib import Path

from shardgrad.checkpoint.files import content_of, replace_synced
from shardgrad.checkpoint.lock import FileLock
from shardgrad.checkpoint.publish import LOCK, REPLACED, discard, recover
from shardgrad.checkpoint.source import is_complete
from shardgrad.checkpoint.text import printable
from shardgrad.checkpoint.torch_format import METADATA
from shardgrad.errors import CheckpointError, OptionError

__all__ = ["Series"]

_POINTER = "latest"
_POINTER_NBYTES = 4096  # a path, at most
_ABANDONED = ".abandoned"
_STEP = re.compile(r"step_([0-9]{6,18})")


class Series:
    """Checkpoints `step_000200/` and so on in one folder, and the file `latest`, which names one of
    them.

    A run resumes from the checkpoint in `latest`, which may be edited to return to an older one.
    The checkpoints of later steps are abandoned by that: the next one that is published renames
    them to `step_000400.abandoned`, and retention removes them first.

    One process writes: the first that calls `acquire` or `publish`, until it calls `release` or
    ends.

    Args:
        folder: folder of the checkpoints.
        keep: number of checkpoints to keep.
    """

    def __init__(self, folder: Path | str, *, keep: int = 2) -> None:
        self._folder = Path(folder)
        self._keep = keep
        self._lock: FileLock | None = None
        self._published: set[int] = set()
        self._known: set[int] | None = None

    def acquire(self) -> None:
        """Makes this process the one that writes; does nothing if it is already.

        Raises:
            CheckpointSaveError: another process writes there; the error says which and since when.
            OSError: the folder cannot be written.
        """
        self._known_steps()
        if self._lock is None:
            self._lock = FileLock.take(self._folder / LOCK, self._folder)

    def release(self) -> None:
        """Lets another process write; does nothing if this one does not."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def path_of(self, step: int) -> Path:
        """Returns the path of the checkpoint of a step."""
        self._known_steps()
        return self._folder / _name_of(step)

    def complete(self) -> list[Path]:
        """Returns every complete checkpoint that is not abandoned, oldest step first."""
        names = {path.name.removesuffix(REPLACED) for path in self._folder.glob("step_*")}
        steps = sorted(int(name[1]) for text in names if (name := _STEP.fullmatch(text)))
        return [
            found
            for step in steps
            if (found := _complete(self._folder / _name_of(step))) is not None
        ]

    def latest(self) -> Path | None:
        """Returns the checkpoint that `latest` names, else that of the newest step; None if there
        is none.

        The named checkpoint may be missing if a save was interrupted before it updated `latest`.
        Other processes may save during the call: it finds a checkpoint, and a later call no older
        one.
        """
        name = self._named()
        while True:
            named = _complete(self._folder / name) if name else None
            if named is not None:
                return named
            newest = next(reversed(self.complete()), None)
            before, name = name, self._named()
            if name == before:  # else the named one was removed because there is a newer one
                return newest

    def publish(self, path: Path) -> None:
        """Writes a checkpoint's name into `latest`, and removes the oldest ones beyond `keep`.

        A checkpoint of an earlier step than one that was published before by this object, as
        asynchronous saves may end in another order, does not become the newest.

        Raises:
            CheckpointSaveError: another process writes there.
            OptionError: the name is not one of a step.
            OSError: `latest` could not be written and is unchanged.
        """
        path = self._folder / path.name
        step = _step_of(path)
        self.acquire()
        newest = self.latest()
        newest_step = step if newest is None else _step_of(newest)
        known = self._known_steps()
        if step < newest_step and newest_step in self._published:
            kept = {path, newest}
        else:
            kept = {path}
            went_on_from = min(step, newest_step)
            later = [one for one in self.complete() if _step_of(one) > went_on_from and one != path]
            abandoned = [one for one in later if _step_of(one) in known]
            replace_synced(self._folder / _POINTER, path.name + "\n")
            for one in abandoned:
                _abandon(one)
                known.discard(_step_of(one))
        self._published.add(step)
        known.add(step)
        self._remove_oldest(kept)

    def recover(self) -> None:
        """Completes or removes what an interrupted save left; call it before the first save.

        Raises:
            CheckpointSaveError: another process writes there.
        """
        self.acquire()
        recover(self._folder)

    def _known_steps(self) -> set[int]:
        """Returns the steps that were saved before this object was used, or were published by it.

        Others are asynchronous saves that have ended, and are about to be published: they stay as
        they are.
        """
        if self._known is None:
            self._known = {_step_of(path) for path in self.complete()}
        return self._known

    def _named(self) -> str:
        """Returns the name in `latest`, if it is one of a checkpoint."""
        try:
            text = content_of(self._folder / _POINTER, _POINTER_NBYTES).decode("ascii").strip()
        except (CheckpointError, ValueError):
            return ""
        name = Path(
            text
        ).name  # it may be edited to the path of the folder, or have a slash behind it
        return name if _STEP.fullmatch(name) else ""

    def _remove_oldest(self, kept: set[Path | None]) -> None:
        ours = [path for path in self.complete() if _step_of(path) in self._known_steps()]
        abandoned_first = [*sorted(self._folder.glob("step_*" + _ABANDONED)), *ours]
        candidates = [path for path in abandoned_first if path not in kept]
        for path in candidates[: max(0, len(abandoned_first) - self._keep)]:
            discard(path)


def _name_of(step: int) -> str:
    return f"step_{step:06d}"


def _step_of(path: Path) -> int:
    found = _STEP.fullmatch(path.name.removesuffix(REPLACED))
    if found is None:
        raise OptionError(
            "only checkpoints of steps can be published",
            expected="a path from `path_of`",
            got=printable(path.name),
            fix="series.publish(series.path_of(step))",
        )
    return int(found[1])


def _abandon(path: Path) -> None:
    aside = path.with_name(path.name.removesuffix(REPLACED) + _ABANDONED)
    if aside.exists():
        discard(aside)
    path.rename(aside)


def _complete(path: Path) -> Path | None:
    """Returns the path of a complete checkpoint: the given one, or its backup while it is
    replaced.
    """
    for candidate in (path, path.with_name(path.name + REPLACED), path):
        if is_complete(candidate) or (candidate / METADATA).is_file():
            return candidate
    return None
