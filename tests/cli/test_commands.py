"""The command line's own answers: what has moved, what is missing, and a program run inside the patch."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner

from shardgrad.__main__ import main as entry
from shardgrad.cli import main
from shardgrad.patch.__main__ import main as patched


def test_bench_says_where_it_has_moved_and_fails() -> None:
    done = CliRunner().invoke(main, ["bench", "--steps", "3"])
    assert done.exit_code == 2
    assert "python -m benchmarks" in done.output


def test_without_the_extra_the_command_line_names_it_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.dict(sys.modules, {"rich": None}), pytest.raises(SystemExit) as ended:
        entry()
    assert ended.value.code == 2
    assert "pip install" in capsys.readouterr().err


def test_a_patched_script_finds_what_lies_next_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "next_to_it.py").write_text("NUMBER = 7\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "import torch.distributed.fsdp as fsdp\n"
        "from next_to_it import NUMBER\n"
        "print(NUMBER, sys.argv[1:], fsdp.fully_shard.__module__)\n"
    )
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", [])
    done = CliRunner().invoke(patched, [str(script), "--lr", "3"])
    assert done.output == "7 ['--lr', '3'] shardgrad.fully_shard\n", done.exception
