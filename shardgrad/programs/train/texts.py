"""The files of a text, and whether they are enough to train on. This module does not import
PyTorch.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.failure import UsageError, reason_of

# Folders of third-party packages, caches and tests.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Text:
    """A text in files.

    Args:
        source: what it is called.
        parts: its files in their order, and how many bytes of each are read.
    """

    source: str
    parts: list[tuple[Path, int]]

    @property
    def nbytes(self) -> int:
        """Number of bytes that are read."""
        return sum(nbytes for _, nbytes in self.parts)


def text_of(config: TrainConfig) -> Text:
    """Returns the text that a run trains on; see :func:`find_text`."""
    limit_nbytes = config.data_limit_mib * 2**20
    return find_text(config.data, limit_nbytes=limit_nbytes, seq_len=config.seq_len)


def find_text(path: str | None, *, limit_nbytes: int, seq_len: int) -> Text:
    """Finds a text, the same one on every rank.

    Args:
        path: a file, or a folder whose visible files are read in the order of their relative paths;
            None for the `*.py` files of Python's standard library.
        limit_nbytes: largest number of bytes to read.
        seq_len: bytes per sequence. The text must hold one sequence and the byte after it.

    Raises:
        UsageError: there is no text at `path`, or not enough.
    """
    library = sysconfig.get_paths()["stdlib"]
    source = f"Python's standard library ({library})" if path is None else path
    try:
        files = _files_of(Path(library if path is None else path), ".py" if path is None else "")
        parts, left = [], limit_nbytes
        for file in files:
            if not left:
                break
            parts.append((file, min(left, file.stat().st_size)))
            left -= parts[-1][1]
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        raise UsageError(f"{path} cannot be read ({reason_of(error)}): correct --data.") from error
    text = Text(source, parts)
    if text.nbytes <= seq_len:
        raise UsageError(
            f"{source} holds {text.nbytes} bytes, too few for sequences of {seq_len}: give more "
            "text with --data, or lower --seq-len."
        )
    return text


def _files_of(root: Path, suffix: str) -> Iterator[Path]:
    """Yields a file, or the files below a folder in a fixed order, without hidden and skipped
    ones.
    """
    if root.is_file():
        yield root
        return
    if not root.exists():
        raise UsageError(
            f"There is no file or folder at {root}: correct --data, or leave it out of a new run "
            "to train on the source of Python's standard library."
        )
    if not root.is_dir():
        raise UsageError(
            f"{root} is a pipe or a device, which cannot be read on every rank: save the text to a "
            "file, and give that to --data."
        )
    for folder, subfolders, names in os.walk(root):
        # Assigned in place: os.walk visits the folders of this list, in its order.
        subfolders[:] = sorted(
            s for s in subfolders if s not in _SKIPPED_FOLDERS and not s.startswith(".")
        )
        for name in sorted(names):
            # Regular files: opening a named pipe waits for a writer, and a device has no end.
            if name.endswith(suffix) and not name.startswith(".") and Path(folder, name).is_file():
                yield Path(folder, name)
