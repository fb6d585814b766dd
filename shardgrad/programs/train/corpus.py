"""The training data: the mapping from sample numbers to sequences of a text."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampler:
    """Sequences drawn from a text, with replacement.

    The start of sample number n depends only on `seed` and n. Ranks, micro-batches and steps decide
    which rank reads which numbers, so a global batch is the same data on any number of ranks, and
    the position of a resumed run is one integer.

    Args:
        text: uint8 `[bytes]`.
        seq_len: bytes per sequence.
        seed: seed of the order of sequences.
    """

    text: Tensor
    seq_len: int
    seed: int

    def batch(self, first_sample: int, count: int) -> tuple[Tensor, Tensor]:
        """Returns samples `first_sample` to `first_sample + count` as tokens and targets, which
        start one byte later.

        Returns:
            Two int64 tensors `[count, seq_len]` on the host.
        """
        # A generator of its own: the n-th value takes constant time, and is the same in every
        # PyTorch release.
        starts = [
            Random(f"{self.seed}/{number}").randrange(len(self.text) - self.seq_len)
            for number in range(first_sample, first_sample + count)
        ]
        positions = torch.tensor(starts).unsqueeze(1) + torch.arange(self.seq_len + 1)
        sequences = self.text[positions].long()
        return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
