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
from collections.abc import Callable, Iterator
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
    *(
        "--device",
        "cpu",
        "--steps",
        str(STEPS),
        "--checkpoint-every",
        str(HALF),
    ),
    *(
        "--seq-len",
        "32",
        "--batch-size",
        "4",
        "--log-every",
        "1",
    ),
    *("--data", argparse.__file__, "--sample-bytes", "0"),
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


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one rank, with the same global batch."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    train(*MICRO, "--ranks", "1", "--accumulate", "2", "--run-dir", folder)
    return folder


def test_a_loss_is_the_mean_since_the_last_line_and_a_sample_comes_with_it(
    two_ranks: Path, tmp_path: Path
) -> None:
    """With all that changes how blocks run, and nothing that changes what they compute."""
    options = [*MICRO, "--ranks", "2", "--run-dir", tmp_path, "--log-every", "3"]
    options += ["--stage", "2", "--activation-checkpointing", "--sample-bytes", "5"]
    output = train(*options)
    each, means = losses(two_ranks), losses(tmp_path)
    assert list(means) == [3, 6]
    for step, mean in means.items():
        assert mean == pytest.approx(sum(each[step - n] for n in range(3)) / 3, rel=1e-5)
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


@pytest.mark.parametrize(("source", "ranks"), [("two_ranks", 1), ("one_rank", 2)])
def test_a_run_resumed_on_other_ranks_keeps_its_curve(
    source: str, ranks: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    original: Path = request.getfixturevalue(source)
    folder = copy_as_of_half(original, tmp_path / "resumed")
    train("--resume", folder, "--ranks", str(ranks))
    assert losses(folder) == pytest.approx(losses(original), rel=1e-5)


def test_one_and_two_ranks_make_the_same_curve(one_rank: Path, two_ranks: Path) -> None:
    assert losses(one_rank) == pytest.approx(losses(two_ranks), rel=1e-5)


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
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))

    def listed() -> list[object]:
        # Where torch's compiler keeps what it has compiled, if anything has imported it.
        files = [path for path in temporary.iterdir() if "torchinductor" not in path.name]
        return [*files, *(orphaned_segments() - segments)]

    return listed


@pytest.mark.parametrize("is_launcher_killed", [False, True], ids=["Ctrl-C", "launcher killed"])
def test_a_stop_saves_the_step_and_says_how_to_go_on(
    is_launcher_killed: bool, tmp_path: Path, left: Callable[[], list[object]]
) -> None:
    """Ranks whose launcher was killed stop as if asked to."""
    folder = tmp_path / "run"
    process = start(
        *MICRO,
        "--steps",
        "100000",
        "--checkpoint-every",
        "100000",
        "--run-dir",
        folder,
        program=TRAIN,
    )
    wait_for_steps(folder, 2, process)
    if is_launcher_killed:
        os.kill(process.pid, signal.SIGKILL)
    else:  # to the whole group, as a terminal does: the launcher and each rank hear it
        os.killpg(process.pid, signal.SIGINT)
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


def test_a_run_whose_text_has_moved_goes_on_when_told_where(
    two_ranks: Path, tmp_path: Path
) -> None:
    folder = copy_as_of_half(two_ranks, tmp_path / "resumed")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"data": str(tmp_path / "gone")}))
    status, _, errors = end(start("--resume", folder))
    assert (status, len(errors.splitlines())) == (2, 1)
    moved = tmp_path / "moved"
    moved.write_bytes(Path(argparse.__file__).read_bytes() + b"# and more")
    assert "Resumed after" in train("--resume", folder, "--data", moved, "--ranks", "1")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint and a half."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=18m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_the_last_whole_checkpoint(small_disk: Path) -> None:
    folder = small_disk / "run"
    status, _, errors = end(start(*MICRO, "--ranks", "2", "--run-dir", folder))
    assert status == 1
    assert "The disk is full" in errors
    assert f"The newest checkpoint is step_{HALF:06d}" in errors
    assert "Traceback" not in errors
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        ".lock",
        "latest",
        f"step_{HALF:06d}",
    }
    # Given room, it goes on:
    subprocess.run(["mount", "-o", "remount,size=60m", str(small_disk)], check=True)
    assert f"Resumed after step {HALF}." in train("--resume", folder)


def test_a_file_that_may_not_grow_is_reported_like_a_full_disk(tmp_path: Path) -> None:
    # With tensors larger than a stream's buffer, PyTorch's archive writer hides the reason: ours
    # does not.
    process = start(*MICRO, "--ranks", "2", "--run-dir", tmp_path / "run")
    # Inherited by the ranks.
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    status, _, errors = end(process)
    assert status == 1
    assert "The disk is full or a quota is exceeded" in errors
    assert "No checkpoint had been written yet" in errors
    assert "Traceback" not in errors
