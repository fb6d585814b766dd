"""`shardgrad train` as a person meets it: started, stopped, broken, resumed, and compared line by
line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardgrad
from tests.support.processes import FairClock, communicate, orphaned_segments
from tests.support.programs import Program

STEPS, HALF = 6, 3
ROOT = Path(__file__).parents[2]
LIMIT_S = 100  # programs that interpreters start may have to wait for a core
# A short run of the smallest model; every step leaves a line.
MICRO = [
    *f"--device cpu --steps {STEPS} --checkpoint-every {HALF} --log-every 1".split(),
    *f"--seq-len 32 --batch-size 4 --data {argparse.__file__} --sample-bytes 0".split(),
]
TRAIN = [sys.executable, "-m", "shardgrad", "train"]


Started = subprocess.Popen[str] | Program


def start(
    *arguments: str | Path, program: list[str] | None = None, cwd: Path | None = None
) -> Started:
    """The program in a process group of its own: forked, or by interpreters if its command is
    given.
    """
    if program is None:
        return Program(*TRAIN[2:], *arguments, forks=True)
    return subprocess.Popen(
        [*program, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=cwd,
    )


def end(process: Started) -> tuple[int, str, str]:
    """Exit status, output and errors; whatever hangs is killed with its ranks."""
    try:
        if isinstance(process, Program):
            output, errors = process.communicate(timeout=LIMIT_S)
        else:
            output, errors = communicate(process, LIMIT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        pytest.fail(f"still running after {LIMIT_S} s:\n{output}\n{errors}")
    assert process.returncode is not None
    return process.returncode, output, errors


def train(*arguments: str | Path, program: list[str] | None = None) -> str:
    """The output of a run that must succeed."""
    status, output, errors = end(start(*arguments, program=program))
    assert status == 0, errors
    return output


def losses(folder: Path) -> dict[int, float]:
    """The training loss of each step in the run folder."""
    return {event["step"]: event["loss"] for event in events(folder) if event["event"] == "step"}


def events(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def copy_as_of_half(source: Path, target: Path) -> Path:
    """A run folder as if the run had been cut off some time after its first checkpoint."""
    shutil.copytree(source, target)
    (target / "checkpoints" / "latest").write_text(f"step_{HALF:06d}\n")
    return target


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run on two ranks, with traps in the working directory."""
    folder = tmp_path_factory.mktemp("runs") / "two"
    cwd = tmp_path_factory.mktemp("cwd")
    for name in ("threading.py", "random.py"):
        (cwd / name).write_text("open('imported', 'w').close()")
    # As the installed script does, which lies elsewhere.
    script = "import sys; del sys.path[0]; from shardgrad.__main__ import main; main()"
    program = [sys.executable, "-c", script, "train"]
    status, _, errors = end(
        start(*MICRO, "--ranks", "2", "--run-dir", folder, program=program, cwd=cwd)
    )
    assert status == 0, errors
    assert not (cwd / "imported").exists(), "of the working directory, in place of Python's own"
    return folder


def test_a_loss_is_the_mean_since_the_last_line_and_a_sample_comes_with_it(
    two_ranks: Path, tmp_path: Path
) -> None:
    """With all that changes how blocks run, and nothing that changes what they compute."""
    options = [*MICRO, "--ranks", "2", "--run-dir", tmp_path, "--log-every", "4"]
    options += ["--stage", "2", "--activation-checkpointing", "--sample-bytes", "5"]
    output = train(*options)
    each, means = losses(two_ranks), losses(tmp_path)
    assert list(means) == [4, 6]  # and after the last step
    for (step, mean), count in zip(means.items(), (4, 2), strict=True):
        assert mean == pytest.approx(sum(each[step - n] for n in range(count)) / count, rel=1e-5)
    assert "The model writes:" in output


def test_a_run_leaves_its_settings_surroundings_metrics_and_checkpoints(two_ranks: Path) -> None:
    settings = json.loads((two_ranks / "config.json").read_text())
    assert (settings["ranks"], settings["steps"]) == (2, STEPS)
    began = events(two_ranks)[0]
    assert (began["event"], began["world_size"], began["device"]) == ("start", 2, "cpu")
    assert began["shardgrad"].startswith(f"{shardgrad.__version__} (commit ")
    assert list(losses(two_ranks)) == list(range(1, STEPS + 1))
    assert losses(two_ranks)[STEPS] < losses(two_ranks)[1]
    assert {path.name for path in (two_ranks / "checkpoints").iterdir()} == {
        ".lock",
        "latest",
        f"step_{HALF:06d}",
        f"step_{STEPS:06d}",
    }


def test_a_resumed_run_repeats_the_uninterrupted_one_to_the_bit(
    two_ranks: Path, tmp_path: Path
) -> None:
    folder = copy_as_of_half(two_ranks, tmp_path / "resumed")
    status, _, errors = end(start("--resume", folder, "--steps", str(HALF)))
    assert (status, len(errors.splitlines())) == (2, 1), errors
    assert f"already taken {HALF} steps" in errors
    assert (folder / "checkpoints" / f"step_{STEPS:06d}").exists(), "removed for nothing"
    assert f"Resumed after step {HALF}." in train("--resume", folder)
    assert losses(folder) == losses(two_ranks)
    steps = [event["step"] for event in events(folder) if event["event"] == "step"]
    assert steps == list(range(1, STEPS + 1))  # those that were made twice are listed once


def test_another_number_of_ranks_makes_the_same_curve_from_the_start_and_resumed(
    two_ranks: Path, tmp_path: Path
) -> None:
    one_rank = tmp_path / "one"
    train(*MICRO, "--ranks", "1", "--accumulate", "2", "--run-dir", one_rank)
    for source, ranks in ((two_ranks, "1"), (one_rank, "2")):
        assert losses(source) == pytest.approx(losses(two_ranks), rel=1e-5)
        folder = copy_as_of_half(source, tmp_path / ranks)
        train("--resume", folder, "--ranks", ranks)
        assert losses(folder) == pytest.approx(losses(two_ranks), rel=1e-5)


def wait_for_steps(folder: Path, count: int, process: Started) -> None:
    """Return when the run has logged so many steps."""
    clock = FairClock([process.pid])
    while clock.elapsed_s() < LIMIT_S and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and len(losses(folder)) >= count:
            return
        time.sleep(0.05)
    end(process)
    pytest.fail("the run did not get that far")


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[object]]:
    """Lists the temporary files and the shared memory that runs since then have left."""
    temporary, segments = tmp_path / "temporary", orphaned_segments()
    running = set(os.listdir("/proc"))  # of them, other tests may end some meanwhile
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))

    def listed() -> list[object]:
        # Where torch's compiler keeps what it has compiled, if anything has imported it.
        files = [path for path in temporary.iterdir() if "torchinductor" not in path.name]
        found = orphaned_segments() - segments
        return [*files, *(each for each in found if each.split("_")[1] not in running)]

    return listed


@pytest.mark.parametrize(
    ("heard_by", "number"),
    [
        ("all", signal.SIGINT),  # as a terminal does
        ("launcher", signal.SIGTERM),
        ("a rank", signal.SIGTERM),
        pytest.param("launcher", signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_a_stop_saves_the_step_and_says_how_to_go_on(
    heard_by: str, number: int, tmp_path: Path, left: Callable[[], list[object]]
) -> None:
    """Ranks whose launcher was killed stop as if asked to; so do those of which one was."""
    folder = tmp_path / "run"
    process = start(
        *MICRO,
        *["--steps", "100000", "--checkpoint-every", "100000", "--run-dir"],
        folder,
        program=TRAIN,
    )
    wait_for_steps(folder, 2, process)
    is_launcher_killed = number == signal.SIGKILL
    if heard_by == "all":
        os.killpg(process.pid, number)
    else:
        os.kill(ranks_of(process)[1] if heard_by == "a rank" else process.pid, number)
    status, _, errors = end(process)  # when no rank holds the other end of its output any more
    assert left() == []
    assert status == (-signal.SIGKILL if is_launcher_killed else 130)
    assert is_launcher_killed or f"resume with: shardgrad train --resume {folder}" in errors
    assert "Traceback" not in errors
    done = max(losses(folder))
    assert (folder / "checkpoints" / "latest").read_text() == f"step_{done:06d}\n"
    assert f"Resumed after step {done}." in train("--resume", folder, "--steps", str(done + 1))


def test_the_death_of_one_rank_ends_the_others_and_is_named(
    tmp_path: Path, left: Callable[[], list[object]]
) -> None:
    folder = tmp_path / "run"
    process = start(*MICRO, "--steps", "100000", "--run-dir", folder, program=TRAIN)
    wait_for_steps(folder, HALF + 1, process)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    status, _, errors = end(process)
    assert left() == []
    assert status == 1
    assert "Rank 1 was ended by SIGKILL" in errors
    assert "resume with: shardgrad train --resume" in errors


def ranks_of(process: Started) -> list[int]:
    """Process ids of the ranks, in order, which is the order in which they were started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes()
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == process.pid and b"spawn_main" in words:
            found.append(int(entry.name))
    return sorted(found)


def test_a_loss_that_is_not_finite_stops_before_it_is_saved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["--ranks", "1", "--lr", "1e30", "--log-every", "100"]
    status, _, errors = end(start(*MICRO, *options, "--run-dir", folder))
    assert status == 1
    assert "became non-finite at step 2" in errors
    assert not (folder / "checkpoints" / "latest").exists()


def test_a_disk_that_fills_up_leaves_the_last_whole_checkpoint(tmp_path: Path) -> None:
    """A file that may not grow is to the system like a full disk. PyTorch's archive writer hides
    the reason of larger tensors: ours does not.
    """
    folder = tmp_path / "run"
    process = start(*MICRO, "--steps", "100000", "--run-dir", folder, program=TRAIN)
    wait_for_steps(folder, HALF + 1, process)
    for rank in ranks_of(process):
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (100_000, 100_000))
    status, _, errors = end(process)
    assert status == 1
    assert ", checkpoint: The disk is full or a quota is exceeded" in errors
    assert "metrics.jsonl" not in errors, "the save was to fail, which comes first"
    assert "Traceback" not in errors
    newest = (folder / "checkpoints" / "latest").read_text().strip()
    assert f"The newest checkpoint is {newest}" in errors
    steps = {path.name for path in (folder / "checkpoints").glob("step_*")}
    assert max(steps) == newest
    assert len(steps) <= 2  # those to keep, and nothing of the one that failed
    done = int(newest[5:])
    assert f"Resumed after step {done}." in train("--resume", folder, "--steps", str(done + 1))
