"""The checkpoints of a run: one folder per step, the newest one, and how many are kept."""

from __future__ import annotations

import os
import re
from pathlib import Path

from shardgrad.checkpoint.files import sync
from shardgrad.checkpoint.publish import REPLACED, discard, recover
from shardgrad.checkpoint.source import is_complete
from shardgrad.checkpoint.torch_format import METADATA

__all__ = ["Series"]

_POINTER = "latest"
_STEP = re.compile(r"step_([0-9]{6,18})")


class Series:
    """Checkpoints `step_000200/` and so on in one folder, and the file `latest`, which names one of them.

    A run resumes from the checkpoint in `latest`, which may be edited to return to an older one.

    Args:
        folder: folder of the checkpoints.
        keep: number of checkpoints to keep.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self._folder = folder
        self._keep = keep

    def path_of(self, step: int) -> Path:
        """Returns the path of the checkpoint of a step."""
        return self._folder / f"step_{step:06d}"

    def complete(self) -> list[Path]:
        """Returns every complete checkpoint, oldest step first."""
        names = {path.name.removesuffix(REPLACED) for path in self._folder.glob("step_*")}
        steps = sorted(int(name[1]) for text in names if (name := _STEP.fullmatch(text)))
        return [found for step in steps if (found := _complete(self.path_of(step))) is not None]

    def latest(self) -> Path | None:
        """Returns the checkpoint that `latest` names, else that of the newest step; None if there is none.

        The named checkpoint may be missing if a save was interrupted before it updated `latest`.
        """
        try:
            text = (self._folder / _POINTER).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            text = ""
        name = Path(text).name  # an edited file may have the path of the folder, or a trailing slash
        named = _complete(self._folder / name) if _STEP.fullmatch(name) else None
        return named or next(reversed(self.complete()), None)

    def publish(self, path: Path) -> None:
        """Writes a checkpoint's name into `latest`, and removes the oldest ones beyond `keep`.

        Raises:
            OSError: `latest` could not be written and is unchanged.
        """
        fresh = self._folder / (_POINTER + ".new")
        with fresh.open("w", encoding="ascii") as stream:
            stream.write(path.name + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        fresh.replace(self._folder / _POINTER)
        sync(self._folder)
        others = [other for other in self.complete() if other != path]
        for old in others[: max(0, len(others) - (self._keep - 1))]:
            discard(old)

    def recover(self) -> None:
        """Completes or removes what an interrupted save left; call it on one process, while no save runs."""
        recover(self._folder)


def _complete(path: Path) -> Path | None:
    """Returns the path of a complete checkpoint: the given one, or its backup after an interrupted save."""
    for candidate in (path, path.with_name(path.name + REPLACED)):
        if is_complete(candidate) or (candidate / METADATA).is_file():
            return candidate
    return None
