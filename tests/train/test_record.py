"""What a run leaves behind is read again, whatever has happened to it meanwhile."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.parallel import World
from shardgrad.programs.train.record import RunRecord

WORLD = World(0, 1, torch.device("cpu"), None)  # type: ignore[arg-type]  # it has nobody to talk to
FACTS = {"digest": "abc"}


def begun(folder: Path) -> RunRecord:
    """A record with a step, a validation and a checkpoint."""
    record = RunRecord(folder)
    record.begin(TrainConfig(ranks=1), WORLD, step=0, facts=FACTS)
    record.write("step", step=1, loss=2.5, grad_norm=float("nan"))
    record.write("validation", step=1, loss=2.0)
    record.write("checkpoint", step=1, path="somewhere")
    return record


def resume(record: RunRecord, *, step: int = 1) -> None:
    record.begin(TrainConfig(ranks=1), WORLD, step=step, facts=FACTS)


def kinds(record: RunRecord) -> list[str]:
    return [event["event"] for event in record.events()]


def test_a_resumed_run_keeps_the_metrics_of_the_steps_that_it_has_made(tmp_path: Path) -> None:
    record = begun(tmp_path)
    record.write("step", step=2, loss=1.0)
    resume(record)
    assert kinds(record) == ["start", "step", "validation", "checkpoint", "start"]


def test_no_flipped_bit_of_the_metrics_keeps_a_run_from_going_on(tmp_path: Path) -> None:
    record = begun(tmp_path)
    path = tmp_path / "metrics.jsonl"
    right = path.read_bytes()
    left_out = 0
    for at in range(len(right)):
        for bit in (0, 5, 7):
            damaged = bytearray(right)
            damaged[at] ^= 1 << bit
            path.write_bytes(damaged)
            lines = damaged.decode("utf-8", "backslashreplace").splitlines()
            resume(record)
            record.draw(unigram_entropy=1.0) if at % 40 == 0 else None
            assert kinds(record)[-1] == "start"
            kept = path.read_text().splitlines()[:-1]
            later = [json.loads(line) for line in lines if line not in kept]
            assert all(event["step"] > 1 for event in later), "nothing else is lost"
            left_out += len(kinds(record)) < 5
    assert left_out > len(right)


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    record = begun(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    resume(record)
    assert kinds(record) == ["start", "step", "validation", "start"]


@pytest.mark.parametrize("kind", ["pipe", "link to nothing"])
def test_metrics_that_are_no_file_are_begun_again(tmp_path: Path, kind: str) -> None:
    record = begun(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("nothing")
    resume(record)
    assert kinds(record) == ["start"]
