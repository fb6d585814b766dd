"""What a run leaves behind is read again, whatever has happened to it meanwhile."""

from __future__ import annotations

from pathlib import Path

from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.record import RunRecord


def begun(folder: Path) -> RunRecord:
    """A record with a step and a checkpoint."""
    record = RunRecord(folder)
    record.begin(TrainConfig(ranks=1), step=0)
    record.write("step", step=1, loss=2.5, grad_norm=float("nan"))
    record.write("checkpoint", step=1, path="somewhere")
    return record


def resume(record: RunRecord) -> None:
    record.begin(TrainConfig(ranks=1), step=1)


def kinds(record: RunRecord) -> list[str]:
    return [event["event"] for event in record.events()]


def test_a_resumed_run_keeps_the_metrics_of_the_steps_that_it_has_made(tmp_path: Path) -> None:
    record = begun(tmp_path)
    record.write("step", step=2, loss=1.0)
    resume(record)
    assert kinds(record) == ["start", "step", "checkpoint", "start"]


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    record = begun(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    resume(record)
    assert kinds(record) == ["start", "step", "start"]
