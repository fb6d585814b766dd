"""Training steps of several engines on two ranks of this machine: what is measured, written and
said.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.launched import Launch, launch_of
from tests.benchmarks.test_programs import assert_spread
from tests.support import programs
from tests.support.ranks import free_port

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 280  # many times what a smoke run takes: others may be using the machine
pytestmark = pytest.mark.timeout(300)

NAMES = ["fsdp2", "shardgrad", "shardgrad-graphed", "ddp", "compute", "collectives"]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return programs.run("benchmarks", *options, timeout=TIMEOUT_S)


Measured = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """A smoke run's folder and its record."""
    folder = tmp_path_factory.mktemp("bench")
    engines = [f"--engine={name}" for name in (*NAMES, "deepspeed-1")]
    options = ["--smoke", "--device=cpu", "--accumulate=2", "--clip=1", f"--out={folder}"]
    done = run("training_step", *options, *engines)
    assert done.returncode == 0, done.stderr + done.stdout
    (line,) = (folder / "training_step.jsonl").read_text(encoding="utf-8").splitlines()
    return folder, json.loads(line)


def test_every_engine_has_its_numbers(measured: Measured) -> None:
    _, record = measured
    assert list(record["summary"]) == NAMES
    for name, of in record["summary"].items():
        assert_spread(of["wall_s"])
        for field in ("peak_rss_beyond_imports_nbytes", "tokens_per_s"):
            assert of[field] > 0
        assert of["mfu"] is None or 0 < of["mfu"] <= 1
        assert len(record["samples"][name]["wall_s"]) == record["config"]["rounds"] == 2
    assert record["summary"]["fsdp2"]["ratio_to_base"]["median"] == 1


def test_collectives_are_counted_as_the_units_have_them(measured: Measured) -> None:
    _, record = measured
    collectives = {name: of["collectives"] for name, of in record["summary"].items()}
    # Two blocks and the root: three reductions at the end, whatever is accumulated before.
    for name in ("fsdp2", "shardgrad", "shardgrad-graphed", "collectives"):
        assert collectives[name]["reduce-scatter"]["count"] == 3
    assert collectives["compute"] == {}
    nbytes = 4 * record["environment"]["model"]["numel"]
    assert collectives["ddp"]["all-reduce"]["nbytes"] == pytest.approx(nbytes + 4, rel=0.02)
    for name in ("fsdp2", "shardgrad"):
        assert collectives[name]["reduce-scatter"]["nbytes"] == pytest.approx(nbytes / 2, rel=0.05)


def test_engines_of_other_kinds_agree(measured: Measured) -> None:
    folder, record = measured
    assert record["disagreed"] == []
    assert record["summary"]["ddp"]["loss_difference"] < 1e-5
    # One step of each, for Perfetto.
    assert {path.name for path in (folder / "logs").glob("*.trace.json")} == {
        f"{name}.trace.json" for name in NAMES
    }


@pytest.mark.long
def test_one_command_measures_on_two_machines_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each machine is a call of gpu.sh here, with processes and a folder of its own."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHON", sys.executable)
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--smoke", "--nnodes", "2"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    machines = [
        subprocess.Popen(
            [*command, "--out", str(tmp_path / str(machine))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for machine in range(2)
    ]
    printed = [machine.communicate(timeout=TIMEOUT_S)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(printed)
    (path,) = tmp_path.glob("*/steps-tiny/training_step.jsonl")  # the first process writes
    record = json.loads(path.read_text(encoding="utf-8"))
    assert (record["config"]["ranks"], record["config"]["hosts"]) == (2, 2)
    assert list(record["summary"]) == ["fsdp2", "shardgrad", "shardgrad-graphed"]
    assert not {**record["left_out"], **record["unobserved"]}
    assert record["summary"]["shardgrad"]["loss_difference"] == 0
    assert (path.parents[1] / "report.html").exists()
    assert "2 machines of" in "".join(printed)
    again = subprocess.check_output([*command, "--out", str(path.parents[1])], text=True)
    assert "done before" in again


def test_each_file_of_gpu_tests_is_a_part_of_the_command_for_gpus() -> None:
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--list"]
    environment = {**os.environ, "PYTHON": sys.executable}
    listed = subprocess.check_output(command, text=True, env=environment)
    named = set(re.findall(r"tests/gpu/\w+\.py", listed))
    assert named == {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/gpu/test_*.py")}


def test_what_srun_sets_says_which_process_this_is() -> None:
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}
    address = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert launch_of(slurm | address | {"SLURM_LOCALID": "1"}) == Launch(5, 8, 1, 2)
    assert launch_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None  # the batch file of a job
