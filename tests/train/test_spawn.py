"""Ranks that this machine starts: what their exit status tells, and that none outlives the
launcher.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from shardgrad.programs.train import spawn
from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.rank import Job

FORK = multiprocessing.get_context("fork")


def job_in(folder: Path) -> Job:
    return Job(TrainConfig(), folder, resume=False, debug=False)


def child(rank: int, work: Any) -> spawn._Child:
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=work, daemon=True)
    process.start()
    theirs.close()
    return spawn._Child(rank, process, ours)


def killed_by(number: int) -> None:
    faulthandler.disable()  # of pytest, which would print where
    os.kill(os.getpid(), number)
    time.sleep(60)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "Rank 3 was ended by SIGKILL, as the system does when memory runs out."),
        (signal.SIGABRT, "Rank 3 was ended by SIGABRT, as gloo does to a rank that is sent more"),
        (signal.SIGSEGV, "Rank 3 was ended by SIGSEGV."),
    ],
)
def test_the_signal_that_ended_a_rank_is_named_with_what_sends_it(
    number: int, words: str, tmp_path: Path
) -> None:
    rank = child(3, lambda: killed_by(number))
    rank.process.join()
    report = rank.report(job_in(tmp_path), is_stopping=False)
    assert report.exit_status == 1
    assert report.what.startswith(words)


def test_a_rank_that_goes_on_when_another_has_failed_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = [child(0, lambda: os._exit(7)), child(1, lambda: time.sleep(10))]
    monkeypatch.setattr(spawn, "_GRACE_S", 0.1)
    monkeypatch.setattr(spawn, "_start", lambda job, rank, *_: children[rank])
    former = signal.getsignal(signal.SIGTERM)
    try:
        report = spawn.spawn(job_in(tmp_path), 2)
        assert report.exit_status == 7
        assert "Rank 0 ended with status 7 without a report." in report.sentence
        assert children[1].process.exitcode == -signal.SIGKILL
        assert signal.getsignal(signal.SIGTERM) is former
    finally:
        children[1].process.kill()


def test_a_rank_imports_the_standard_library_and_no_file_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "threading.py").write_text("open('imported', 'w').close()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    process = multiprocessing.get_context("spawn").Process
    monkeypatch.setattr(
        type(multiprocessing.get_context("spawn")), "Process", lambda *_, **__: process(target=int)
    )
    child = spawn._start(job_in(tmp_path), 0, 1, "")
    child.process.join()
    assert child.process.exitcode == 0
    assert not (tmp_path / "imported").exists()
