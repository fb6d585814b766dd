"""The command line's own answers: what has moved, what is missing, and a program run inside the
patch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from click.testing import CliRunner

from shardgrad import version
from shardgrad.__main__ import main as entry
from shardgrad.errors import CaptureError
from shardgrad.graphs import preflight
from shardgrad.patch.__main__ import main as patched
from shardgrad.programs.cli import main
from tests.support.processes import run


def test_without_the_extra_the_command_line_names_it_and_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with mock.patch.dict(sys.modules, {"rich": None}), pytest.raises(SystemExit) as ended:
        entry()
    assert ended.value.code == 2
    assert "pip install" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["-m"], ["--unknown"], ["no.py"], ["-m", "no.such"]])
def test_patch_without_a_script_says_so_in_a_line(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        patched(command)
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_patch_needs_no_package_but_torch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('ran')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['click', 'rich', 'numpy'])); "
        "import runpy; runpy.run_module('shardgrad.patch', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, script],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert done.stdout == "ran\n"


def test_the_version_comes_with_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "shardgrad"
    package.mkdir()
    (package / "_commit.txt").write_text("0123456789ab\n")
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", "")  # there is no git
    monkeypatch.setattr(version, "_PACKAGE", package)
    monkeypatch.setattr(version, "commit", version.commit.__wrapped__)  # nothing is cached
    done = CliRunner().invoke(main, ["--version"])
    assert (done.exit_code, done.output) == (
        0,
        f"shardgrad {version.__version__} (commit 0123456789ab)\n",
    )
    (package / "_commit.txt").unlink()
    assert version.described().endswith("(commit unknown)")


@pytest.mark.parametrize("issues", [[], [CaptureError("what", fix="how")]], ids=["none", "one"])
def test_doctor_counts_what_prevents_a_graph_and_fails_if_anything_does(
    issues: list[CaptureError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "environment_issues", lambda *_: issues)
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == len(issues)
    count = "1 issue" if issues else "No issues"
    assert f"{count} that would prevent a graph" in done.output
    assert "not in this build of torch" in done.output or torch.version.cuda is not None


def test_doctor_says_that_there_is_no_gpu_where_torch_is_built_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "environment_issues", lambda *_: [])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for is_there, row in ((False, "13.0, and no GPU was found"), (True, "13.0")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        output = CliRunner().invoke(main, ["doctor"]).output
        (line,) = (line for line in output.splitlines() if line.startswith("CUDA "))
        assert line.split(maxsplit=1)[1].strip() == row


def test_a_command_that_is_interrupted_says_so_in_a_line_and_in_its_status(tmp_path: Path) -> None:
    """As while PyTorch is imported, before a run has started."""
    arguments = ["train", "--run-dir", str(tmp_path / "run")]
    with mock.patch("shardgrad.programs.train.launch.launch_ranks", side_effect=KeyboardInterrupt):
        result = CliRunner().invoke(main, [*arguments, "--ranks", "1"])
    assert (result.exit_code, result.stderr.strip()) == (130, "shardgrad: interrupted.")


def test_an_error_that_was_not_expected_comes_with_its_traceback(tmp_path: Path) -> None:
    arguments = ["train", "--run-dir", str(tmp_path / "run")]
    failing = mock.patch(
        "shardgrad.programs.train.launch.launch_ranks",
        side_effect=ValueError("a bug \x1b\nof ours"),
    )
    with failing:
        result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("Traceback")
    assert "\x1b" not in result.stderr
    assert result.stderr.endswith("\nshardgrad: ValueError: a bug \\x1b\n")


def test_what_a_terminal_cannot_show_is_escaped() -> None:
    script = (
        "from shardgrad import __main__; import sys\n"
        "__main__._write_what_can_be_written(); print(chr(0x2603), flush=True)\n"
        "import subprocess; subprocess.run([sys.executable, '-c', 'print(chr(0x2603))'])"
    )
    done = run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
        timeout_s=60,
    )
    assert (done.returncode, done.stdout) == (0, "\\u2603\n" * 2), done.stderr
