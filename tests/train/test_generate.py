"""Text from a model and from a run, and the other places for metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardgrad.programs.train.generate import continued
from shardgrad.programs.train.record import RunRecord

CPU = torch.device("cpu")


class Next(nn.Module):
    """Expects the byte after the last one, and keeps what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.append(tokens[0].tolist())
        return torch.nn.functional.one_hot((tokens + 1) % 256, 300).float() * 100


def test_a_text_is_continued_by_what_is_likely_in_a_window() -> None:
    model = Next()
    text = continued(model, b"ab", count=4, window=3, seed=0, device=CPU)
    assert text == b"abcdef"
    assert model.seen == [[97, 98], [97, 98, 99], [98, 99, 100], [99, 100, 101]]


def test_tensorboard_reads_what_a_run_has_written(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    RunRecord(tmp_path, tensorboard=True).write("step", step=3, loss=2.5, memory=(1, 2))
    read = events.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(scalar.step, scalar.value) for scalar in read.Scalars("step/loss")] == [(3, 2.5)]
