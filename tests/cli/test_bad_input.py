"""Input that makes no sense: a sentence and exit status 2 within a second, before PyTorch is
imported.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

from tests.support.processes import run

ROOT = Path(__file__).parents[2]
# In a folder with what `in_folder` puts there.
LINES = [
    *("nothing", "--nothing", "train --nothing", "checkpoint nothing", "doctor --nothing"),
    *(
        "train --steps x",
        "train --steps 0",
        "train --lr nan",
        "train --lr 1e400",
        "train --batch-size 1.5",
    ),
    *("train --ranks 0", "train --ranks 100000"),
    *("train --preset huge", "train --engine fsdp2", "train --precision fp8", "train --stage 7"),
    *("train --data missing", "train --data empty", "train --data text --seq-len 1000000"),
    *("train --lr -1", "train --timeout 1e300", f"train --seed {10**40}"),
    *("train --batch-size 3298534883328", "train --data ''"),
    *("plan --mesh 2x1000000000000", "plan --mesh 2x999999"),
    *("train --precision fp16", "train --optimizer adamw", "train --graph on"),
    *("plan --mesh 3x4 --ranks 8", "plan --mesh 2x2x2", "plan --reshard-to 4 --stage 2"),
    *(
        "plan --precision bf16",
        "plan --accumulate 2000",
        "plan --batch-size 0",
        "plan --ranks 2000000",
        "plan --mfu 40",
    ),
    *("train --override layers=2", "train --mesh 2x2", "train --config run.json"),
    *(
        "train --resume",
        "train --resume missing",
        "train --resume started",
        "train --resume wrong",
        "train --resume broken",
        "train --ranks 2 --run-dir text/run",
    ),
    *(
        "train --run-dir text/run",
        "train --resume ran --preset small",
    ),
    *("train --resume ran --steps 99 --ranks 3", "train --resume ran --steps 99 --run-dir other"),
    *(
        "plan --preset nothing",
        "plan --ranks 0",
        "plan --mesh 0x4",
        "plan --device a10000",
        "plan --tp 2",
    ),
    *("plan --network pigeon", "plan --mfu 0", "plan --stage hfsdp", "plan --reshard-to 3"),
    *(
        "plan --model nothing:f",
        "plan --model json",
    ),
    *("plan --model build:with_arguments", "plan --model raises:f", "plan --model build:"),
    "plan --preset tiny --model build:number",
    "plan --stage auto",
    *("train --run-dir /proc/x", "train --run-dir text/run --ranks 2"),
    *(
        "checkpoint export ran text",
        "checkpoint export ran folder",
        "checkpoint export ran exported",
    ),
    *("checkpoint export ran missing/out", "checkpoint export ran /proc/x"),
    "doctor --ranks 3",
    *("doctor --audit nothing", "doctor --audit nothing:f", "doctor --audit build:missing"),
    *(
        "doctor --audit build:with_arguments",
        "doctor --audit build:number",
        "doctor --audit raises:f",
    ),
    *("doctor --audit exits:f", "doctor --audit broken:f"),
    *(
        "checkpoint verify started",
        "checkpoint verify missing",
        "checkpoint verify text",
        "checkpoint export missing out",
    ),
]
CALL = """
import json, shlex, sys, time
from click.testing import CliRunner
from shardgrad.programs.cli import main
for line in json.loads(sys.argv[1]):
    began_s = time.process_time()
    done = CliRunner().invoke(main, shlex.split(line), prog_name="shardgrad")
    took_s = time.process_time() - began_s
    print(json.dumps([line, done.exit_code, done.output, took_s, "torch" in sys.modules]))
"""


def in_folder(folder: Path) -> None:
    (folder / "text").write_text("words " * 2000)
    (folder / "empty").touch()
    (folder / "exported").mkdir()
    (folder / "exported" / "model.safetensors").touch()
    (folder / "folder").mkdir()
    (folder / "folder" / "notes").touch()
    (folder / "build.py").write_text("number = 3\ndef with_arguments(x): ...\n")
    (folder / "raises.py").write_text("raise RuntimeError('while it is imported')\n")
    (folder / "exits.py").write_text("raise SystemExit(3)\n")
    (folder / "broken.py").write_text("def build(:\n")
    (folder / "started").mkdir()
    (folder / "started" / "config.json").write_text("{}")
    (folder / "ran" / "checkpoints" / "step_000060").mkdir(parents=True)
    (folder / "ran" / "config.json").write_text('{"ranks": 2}')
    (folder / "ran" / "checkpoints" / "latest").write_text("step_000060\n")
    (folder / "ran" / "checkpoints" / "step_000060" / ".metadata").touch()
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{")
    (folder / "wrong").mkdir()
    (folder / "wrong" / "config.json").write_text('{"steps": "many"}')


def test_bad_input_is_refused_in_a_sentence_within_a_second(tmp_path: Path) -> None:
    in_folder(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = run(
        [sys.executable, "-c", CALL, json.dumps(LINES)], cwd=tmp_path, env=environment, timeout_s=90
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert [row[0] for row in rows] == LINES
    for line, status, output, took_s, has_torch in rows:
        said = output.strip().splitlines()
        assert status == 2, (line, status, output)
        assert 1 <= len(said) <= 4, (line, output)  # click says how to use the command, too
        assert "Traceback" not in output, (line, output)
        assert took_s < 1, (line, took_s)
        assert not has_torch, line


def written_to(output: str, *command: str) -> tuple[int, str]:
    """Runs a command with its output somewhere; returns its exit status, and its standard error."""
    line = shlex.join([sys.executable, "-m", "shardgrad", *command])
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    # Whoever is not going to read has gone before the command writes, however busy the machine is.
    done = run(
        ["bash", "-c", f"set -o pipefail; (sleep 0.5; {line}) {output}"],
        cwd=ROOT,
        env=buffered,
        timeout_s=60,
    )
    return done.returncode, done.stderr


def test_output_that_nothing_reads_ends_a_command_in_silence() -> None:
    assert written_to("| true", "train", "--help") == (1, "")


def test_a_closed_output_changes_nothing() -> None:
    status, said = written_to(">&-", "train", "--data", "missing")
    assert (status, said.count("\n")) == (2, 1), said
    assert "There is no regular file at missing" in said


def test_output_that_cannot_be_written_is_a_sentence() -> None:
    status, said = written_to("> /dev/full", "doctor")
    assert (status, said.count("\n")) == (1, 1), said
    assert "No space left on device: standard output" in said
