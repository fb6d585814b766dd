"""Text as bytes: what is read, which part is held out, and which sequence is sample number n."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardgrad.train.failure import UsageError

# Not the library's own text, or text about nothing.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Corpus:
    """A text in memory.

    Args:
        train: uint8 `[bytes]`, the first part.
        validation: uint8 `[bytes]`, the contiguous rest, never trained on.
        source: where it was read from, for people.
        file_count: files it was read from.
        digest: SHA-256 of all bytes, by which a resumed run knows that the text is the same.
    """

    train: Tensor
    validation: Tensor
    source: str
    file_count: int
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes in both parts."""
        return len(self.train) + len(self.validation)

    def unigram_entropy(self) -> float:
        """Entropy in nats per byte of the bytes' frequencies: the loss of a model that ignores context."""
        counts = torch.bincount(self.train, minlength=256) + torch.bincount(self.validation, minlength=256)
        shares = counts[counts > 0].double() / counts.sum()
        return float(-(shares * shares.log()).sum())


def load_corpus(path: str | None, *, limit_nbytes: int, validation_fraction: float, seq_len: int) -> Corpus:
    """Read a text, the same bytes in the same order on every rank.

    Args:
        path: a file, or a folder of which every visible file is read, in the order of relative paths; None
            reads the `*.py` files of Python's standard library.
        limit_nbytes: stop after so many bytes.
        validation_fraction: part of the bytes, at the end, to hold out.
        seq_len: bytes per sequence, of which both parts must hold at least one, and the byte after it.

    Raises:
        UsageError: there is nothing at `path`, or too little.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files, source = list(_files_under(root, suffix=".py")), f"Python's standard library ({root})"
    else:
        root, source = Path(path), path
        if not root.exists():
            raise UsageError(f"There is no file or folder at {path}: correct --data.")
        files = [root] if root.is_file() else list(_files_under(root, suffix=""))
    text, file_count = _read(files, limit_nbytes)
    held_out = int(len(text) * validation_fraction)
    if min(held_out, len(text) - held_out) <= seq_len:
        raise UsageError(
            f"{source} holds {len(text)} bytes, {held_out} of them for validation, too few for sequences of "
            f"{seq_len}: give more text with --data, or lower --seq-len."
        )
    whole = torch.frombuffer(text, dtype=torch.uint8)
    train, validation = whole.split([len(text) - held_out, held_out])
    return Corpus(train, validation, source, file_count, hashlib.sha256(text).hexdigest())


def _files_under(root: Path, *, suffix: str) -> Iterator[Path]:
    """Files below `root` in a fixed order, without hidden ones and those of `_SKIPPED_FOLDERS`."""
    for folder, subfolders, names in os.walk(root):
        # In place: this is how os.walk is told where to go, and in which order.
        subfolders[:] = sorted(s for s in subfolders if s not in _SKIPPED_FOLDERS and not s.startswith("."))
        for name in sorted(names):
            if name.endswith(suffix) and not name.startswith("."):
                yield Path(folder, name)


def _read(files: list[Path], limit_nbytes: int) -> tuple[bytearray, int]:
    text = bytearray()
    file_count = 0
    for file in files:
        if len(text) >= limit_nbytes:
            break
        with file.open("rb") as stream:
            text += stream.read(limit_nbytes - len(text))
        file_count += 1
    return text, file_count


@dataclass(frozen=True)
class Sampler:
    """Sequences drawn from a text, with replacement.

    Sample number n starts at a place that depends on `seed` and n alone. Ranks, micro-batches and steps only
    decide who reads which numbers, so the same global batch is the same data on any number of ranks, and the
    position of a resumed run is one integer.

    Args:
        text: uint8 `[bytes]`.
        seq_len: bytes per sequence.
        seed: of the order.
    """

    text: Tensor
    seq_len: int
    seed: int

    def batch(self, first_sample: int, count: int) -> tuple[Tensor, Tensor]:
        """`count` samples from `first_sample` on, as int64 `[count, seq_len]` tokens and targets."""
        starts = [self._start(number) for number in range(first_sample, first_sample + count)]
        return windows(self.text, starts, self.seq_len)

    def _start(self, number: int) -> int:
        # A hash, not a generator: its n-th value costs no n steps and is the same in every PyTorch.
        digest = hashlib.blake2b(f"{self.seed}/{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % (len(self.text) - self.seq_len)


def validation_starts(nbytes: int, *, seq_len: int, count: int) -> list[int]:
    """Starts of at most `count` sequences spread evenly over a held-out text, without overlap."""
    count = min(count, (nbytes - 1) // seq_len)
    return [number * (nbytes - 1) // count for number in range(count)]


def windows(text: Tensor, starts: list[int], seq_len: int) -> tuple[Tensor, Tensor]:
    """The sequences at `starts` and, one byte later, their targets: int64 `[len(starts), seq_len]` each."""
    places = torch.tensor(starts).unsqueeze(1) + torch.arange(seq_len + 1)
    sequences = text[places].long()
    return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
