"""The checkpoints of a run: one folder for each step, which is the newest, and how many are kept."""

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
    """Checkpoints `step_000200/` and so on in one folder, and `latest`, which names the one to go on from.

    `latest` may be edited to go back to an older one.

    Args:
        folder: of the checkpoints.
        keep: how many are kept.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self._folder = folder
        self._keep = keep

    def path_of(self, step: int) -> Path:
        """Returns where the checkpoint of a step is, or will be."""
        return self._folder / f"step_{step:06d}"

    def complete(self) -> list[Path]:
        """Returns every checkpoint whose writing was finished, oldest step first."""
        names = {path.name.removesuffix(REPLACED) for path in self._folder.glob("step_*")}
        steps = sorted(int(name[1]) for text in names if (name := _STEP.fullmatch(text)))
        return [whole for step in steps if (whole := _whole(self.path_of(step))) is not None]

    def latest(self) -> Path | None:
        """Returns the checkpoint that `latest` names, or the newest step's if that is not there.

        It is not there if an interruption came between the publication of a checkpoint and its naming.
        """
        try:
            text = (self._folder / _POINTER).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            text = ""
        name = Path(text).name  # whoever edits it may write the path of the folder, or a slash behind it
        named = _whole(self._folder / name) if _STEP.fullmatch(name) else None
        return named or next(reversed(self.complete()), None)

    def publish(self, path: Path) -> None:
        """Names a checkpoint the newest, and removes those there is no room for.

        Raises:
            OSError: `latest` could not be written, and is what it was.
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
        """Puts right what an interruption left behind; one process calls it while nobody saves."""
        recover(self._folder)


def _whole(path: Path) -> Path | None:
    """Returns where the checkpoint of that name is: there, or beside it if a replacement was interrupted."""
    for place in (path, path.with_name(path.name + REPLACED)):
        if is_complete(place) or (place / METADATA).is_file():
            return place
    return None
