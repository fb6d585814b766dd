"""What is refused before ranks start, and what is said of a rank that cannot speak."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.failure import UsageError
from shardgrad.programs.train.launch import _status_of, launch_ranks, prepare
from shardgrad.programs.train.parallel import choose_device
from tests.support.processes import run

ROOT = Path(__file__).parents[2]


def test_a_run_that_a_launcher_starts_several_times_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="as by torchrun, but this program starts its own ranks"):
        prepare({"run_dir": "nowhere"}, resume=None)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a file system that takes no files")
def test_a_limit_of_files_that_is_too_low_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (24, 24))
    with pytest.raises(UsageError, match="only 24 files: run ulimit -n 1024"):
        prepare({}, resume=None)


def test_a_run_folder_that_cannot_be_written_is_refused_before_ranks_start() -> None:
    for folder in ("/proc", "/proc/run", "/proc/self/run/first"):
        with pytest.raises(
            UsageError, match=f"{folder} cannot be written .*, or choose another --run-dir"
        ):
            prepare({"run_dir": folder}, resume=None)


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="already holds a run"):
        prepare({"run_dir": str(tmp_path)}, resume=None)


@pytest.mark.parametrize("count", [0, 2])
def test_each_rank_has_an_accelerator_and_more_ranks_are_refused(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = torch.device("cuda") if count else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    devices = [str(choose_device("auto", rank)) for rank in range(2)]
    assert devices == (["cuda:0", "cuda:1"] if count else ["cpu", "cpu"])
    assert str(choose_device("cpu", 1)) == "cpu"
    if count:
        with pytest.raises(UsageError, match="more ranks than this machine's 2 accelerators"):
            launch_ranks(TrainConfig(ranks=3), resume=False)


def test_a_run_is_resumed_without_pytorch_in_the_process_that_starts_its_ranks(
    tmp_path: Path,
) -> None:
    (tmp_path / "checkpoints" / "step_000060").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_000060" / ".metadata").touch()
    (tmp_path / "checkpoints" / "latest").write_text("step_000060\n")
    (tmp_path / "config.json").write_text('{"ranks": 2}')
    code = """
import sys
from pathlib import Path
from shardgrad.programs.train.launch import prepare
print(prepare({}, resume=Path(sys.argv[1])).ranks, "torch" in sys.modules)
"""
    done = run(
        [sys.executable, "-c", code, tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout_s=60,
    )
    assert done.stdout == "2 False\n", done.stderr


def test_ctrl_c_before_there_are_ranks_ends_the_run_at_once(tmp_path: Path) -> None:
    """An import may drop the exception that Ctrl-C usually raises."""
    code = """
import os, signal, sys, time
from contextlib import suppress
from torch.distributed.launcher import api
from shardgrad.__main__ import main

def begun(*_):
    with suppress(BaseException):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

api.elastic_launch = lambda *_: begun
main()
"""
    done = run(
        [sys.executable, "-c", code, "train", "--run-dir", tmp_path / "run"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout_s=60,
    )
    assert (done.returncode, done.stderr) == (130, "shardgrad: interrupted.\n")


@pytest.mark.parametrize(
    ("exitcode", "status", "words"),
    [
        (
            -signal.SIGKILL,
            1,
            "Rank 3 was ended by SIGKILL, as when the system runs out of memory.",
        ),
        (-signal.SIGSEGV, 1, "Rank 3 was ended by SIGSEGV."),
        (7, 7, "Rank 3 ended with status 7 without a report."),
        (1, 1, ""),
        (2, 2, ""),
        (130, 130, ""),
    ],
)
def test_what_a_rank_could_not_say_is_said_for_it(
    exitcode: int, status: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = ProcessFailure(3, 4711, exitcode, os.devnull)
    assert _status_of(3, failure, tmp_path) == status
    said = capsys.readouterr().err
    assert said.startswith(f"shardgrad train: {words}" if words else "")
    assert bool(said) == bool(words)
