"""Damage to a checkpoint on a disk. Only files and folders are known here, not the format."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

__all__ = ["TAMPERINGS", "newest"]


def newest(run: Path) -> Path:
    """Returns the checkpoint that a resume loads."""
    checkpoints = run / "checkpoints"
    return checkpoints / (checkpoints / "latest").read_text(encoding="ascii").strip()


def _data_file(run: Path) -> Path:
    """The largest file of the newest checkpoint, which holds tensors."""
    return max(
        (p for p in newest(run).rglob("*") if p.is_file()), key=lambda p: (p.stat().st_size, p.name)
    )


def _index_file(run: Path) -> Path:
    """The smallest file of the newest checkpoint, which is its index."""
    return min(
        (p for p in newest(run).rglob("*") if p.is_file()), key=lambda p: (p.stat().st_size, p.name)
    )


def _truncate(run: Path, random: random.Random) -> None:
    path = _data_file(run)
    with path.open("r+b") as stream:
        stream.truncate(random.randrange(path.stat().st_size))


def _flip_bit(run: Path, random: random.Random) -> None:
    path = _data_file(run)
    content = bytearray(path.read_bytes())
    # In the middle half, where the tensors are in any format.
    content[random.randrange(len(content) // 4, 3 * len(content) // 4)] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def _empty(run: Path, random: random.Random) -> None:
    _index_file(run).write_bytes(b"")


def _garble(run: Path, random: random.Random) -> None:
    path = _index_file(run)
    path.write_bytes(random.randbytes(path.stat().st_size))


def _remove_file(run: Path, random: random.Random) -> None:
    random.choice(sorted(p for p in newest(run).rglob("*") if p.is_file())).unlink()


def _remove_all(run: Path, random: random.Random) -> None:
    shutil.rmtree(newest(run))


def _half_written(run: Path, random: random.Random) -> None:
    """Halves every file, as after a power failure during a write without fsync."""
    for path in newest(run).rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _point_nowhere(run: Path, random: random.Random) -> None:
    (run / "checkpoints" / "latest").write_text("step_999999\n", encoding="ascii")


def _point_outside(run: Path, random: random.Random) -> None:
    (run / "checkpoints" / "latest").write_text("../../elsewhere\n", encoding="ascii")


def _another_model(run: Path, random: random.Random) -> None:
    """Changes the model in the run's settings to a wider one."""
    _replace_in_settings(run, '"hidden": 32', '"hidden": 48')


def _another_version(run: Path, random: random.Random) -> None:
    """Adds a setting that this version does not have."""
    _replace_in_settings(run, "{", '{"tomorrow": 1,')


def _replace_in_settings(run: Path, old: str, new: str) -> None:
    path = run / "config.json"
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")


TAMPERINGS: dict[str, Callable[[Path, random.Random], None]] = {
    "truncated": _truncate,
    "with a flipped bit": _flip_bit,
    "with an empty index": _empty,
    "with a garbled index": _garble,
    "with a file missing": _remove_file,
    "missing": _remove_all,
    "half written": _half_written,
    "pointer to nothing": _point_nowhere,
    "pointer out of the folder": _point_outside,
    "of another model": _another_model,
    "of another version": _another_version,
}
