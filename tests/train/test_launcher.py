"""What launchers put into the environment, and what ours says of a rank that cannot speak."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shardgrad.programs.train.failure import UsageError
from shardgrad.programs.train.launch import prepare, start
from shardgrad.programs.train.launcher import _status_of, torchrun_world_size
from tests.support.processes import run

ROOT = Path(__file__).parents[2]

LAUNCHED = {
    **{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
}


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("text", ["zero", "-1", "", "1.0", "9" * 5_000, "²"])
def test_a_launchers_variable_that_is_no_number_is_named(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, right in LAUNCHED.items():
        monkeypatch.setenv(variable, right)
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=f"in the environment .*{name} is .*Correct the launcher"):
        prepare({"run_dir": "nowhere"}, resume=None, debug=False)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a file system that takes no files")
def test_a_run_folder_that_cannot_be_written_is_refused_before_ranks_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("shardgrad.programs.train.launch.run_rank", None)
    for folder in ("/proc", "/proc/run", "/proc/self/run/first"):
        job = prepare({"run_dir": folder}, resume=None, debug=False)
        with pytest.raises(
            UsageError, match=f"{folder} cannot be written .*, or choose another --run-dir"
        ):
            start(job)


def test_a_folder_that_holds_a_run_is_refused_by_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun would wait half a minute for those that another has left alone."""
    (tmp_path / "config.json").write_text("{}")
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="already holds a run"):
        prepare({"run_dir": str(tmp_path)}, resume=None, debug=False)


def stopped_after_60_steps(folder: Path) -> None:
    (folder / "checkpoints" / "step_000060").mkdir(parents=True)
    (folder / "checkpoints" / "step_000060" / ".metadata").touch()
    (folder / "checkpoints" / "latest").write_text("step_000060\n")
    (folder / "config.json").write_text('{"ranks": 2}')


@pytest.mark.parametrize("resumes", [False, True])
def test_torchrun_and_the_command_line_do_not_disagree_about_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumes: bool
) -> None:
    stopped_after_60_steps(tmp_path)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="torchrun started 2 ranks, not the 4 of --ranks"):
        prepare({"ranks": 4}, resume=tmp_path if resumes else None, debug=False)


def test_a_run_is_resumed_without_pytorch_in_the_process_that_starts_its_ranks(
    tmp_path: Path,
) -> None:
    stopped_after_60_steps(tmp_path)
    code = """
import sys
from pathlib import Path
from shardgrad.programs.train.launch import prepare
print(prepare({}, resume=Path(sys.argv[1]), debug=False).config.ranks, "torch" in sys.modules)
"""
    done = run(
        [sys.executable, "-c", code, tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout_s=60,
    )
    assert done.stdout == "2 False\n", done.stderr


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"RANK": "2"},
            {"WORLD_SIZE": "0"},
            {"LOCAL_RANK": "1"},
            {"LOCAL_RANK": "8", "LOCAL_WORLD_SIZE": "8"},
        ),
    ],
    ids=str,
)
def test_ranks_that_cannot_be_are_named(
    changes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (LAUNCHED | changes).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=next(iter(changes))):
        torchrun_world_size()


def test_a_launcher_that_makes_sense_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert torchrun_world_size() == 2


@pytest.mark.parametrize(
    ("exitcode", "status", "words"),
    [
        (
            -signal.SIGKILL,
            1,
            "Rank 3 was ended by SIGKILL, as the system does when memory runs out.",
        ),
        (
            -signal.SIGABRT,
            1,
            "Rank 3 was ended by SIGABRT, as gloo does to a rank that is sent more",
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
