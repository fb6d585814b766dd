"""Training steps of several engines on two ranks of this machine: what is measured, written and
said.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.launched import Launch, launch_of
from tests.support import programs
from tests.support.ranks import free_port

TIMEOUT_S = 280  # many times what a smoke run takes: others may be using the machine
pytestmark = pytest.mark.timeout(300)

NAMES = ["fsdp2", "shardgrad", "shardgrad-graphed", "ddp", "unsharded", "compute", "collectives"]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return programs.run("benchmarks", *options, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A smoke run's folder, its record, and what it printed."""
    folder = tmp_path_factory.mktemp("bench")
    engines = [f"--engine={name}" for name in (*NAMES, "deepspeed-1")]
    options = ["--smoke", "--device=cpu", "--accumulate=2", "--clip=1", f"--out={folder}"]
    done = run("training_step", *options, *engines)
    assert done.returncode == 0, done.stderr + done.stdout
    (line,) = (folder / "training_step.jsonl").read_text(encoding="utf-8").splitlines()
    return folder, json.loads(line), done.stdout


def test_every_engine_has_its_numbers(measured: tuple[Path, dict[str, Any], str]) -> None:
    _, record, _ = measured
    assert list(record["summary"]) == NAMES
    for name, of in record["summary"].items():
        low, high = of["wall_s"]["quartiles"]
        assert 0 < low <= of["wall_s"]["median"] <= high
        assert of["ratio_to_base"]["median"] > 0
        assert of["peak_rss_nbytes"] > of["peak_rss_beyond_imports_nbytes"] > 0
        assert of["tokens_per_s"] > 0
        assert of["mfu"] > 0
        assert len(record["samples"][name]["wall_s"]) == record["config"]["rounds"] == 2
        assert record["timelines"][name]["spans"]
    assert record["summary"]["fsdp2"]["ratio_to_base"]["median"] == 1
    assert {"git", "torch", "cpu", "cores", "versions", "ops_backend"} <= set(record["environment"])


def test_collectives_are_counted_as_the_units_have_them(
    measured: tuple[Path, dict[str, Any], str],
) -> None:
    _, record, _ = measured
    collectives = {name: of["collectives"] for name, of in record["summary"].items()}
    # Two blocks and the root: three reductions at the end, whatever is accumulated before.
    for name in ("fsdp2", "shardgrad", "shardgrad-graphed", "collectives"):
        assert collectives[name]["reduce-scatter"]["count"] == 3
    assert collectives["compute"] == collectives["unsharded"] == {}
    nbytes = 4 * record["environment"]["model"]["numel"]
    assert collectives["ddp"]["all-reduce"]["nbytes"] == pytest.approx(nbytes + 4, rel=0.02)
    for name in ("fsdp2", "shardgrad"):
        assert collectives[name]["reduce-scatter"]["nbytes"] == pytest.approx(nbytes / 2, rel=0.05)


def test_the_engine_constructs_no_dtensor_in_a_steady_step(
    measured: tuple[Path, dict[str, Any], str],
) -> None:
    _, record, _ = measured
    assert record["summary"]["shardgrad"]["dtensors"] == 0
    assert record["summary"]["fsdp2"]["dtensors"] > 0


def test_one_process_agrees_with_all_ranks_together(
    measured: tuple[Path, dict[str, Any], str],
) -> None:
    _, record, _ = measured
    assert record["disagreed"] == []
    assert record["summary"]["unsharded"]["loss_difference"] < 1e-5


def test_an_engine_that_is_not_installed_is_a_row(
    measured: tuple[Path, dict[str, Any], str],
) -> None:
    from importlib.util import find_spec

    if find_spec("deepspeed") is not None:
        pytest.skip("deepspeed is installed")
    _, record, printed = measured
    assert record["left_out"] == {"deepspeed-1": "not installed: pip install deepspeed"}
    assert "deepspeed-1: not installed" in printed
    assert "A smoke run: the numbers mean nothing." in printed


def test_ranks_that_torchrun_started_on_two_machines_are_measured_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each machine is a torchrun of its own here, with processes and a folder of its own."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    port = free_port()
    machines = [
        programs.Program(
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc-per-node=1",
            f"--node-rank={machine}",
            "--master-addr=127.0.0.1",
            f"--master-port={port}",
            *("-m", "benchmarks", "training_step", "--smoke", "--device=cpu"),
            *("--engine=shardgrad", "--engine=ddp", "--engine=unsharded"),
            f"--out={tmp_path / str(machine)}",
        )
        for machine in range(2)
    ]
    printed = ["".join(machine.communicate(timeout=TIMEOUT_S)) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(printed)
    assert not (tmp_path / "1" / "training_step.jsonl").exists()
    (line,) = (tmp_path / "0" / "training_step.jsonl").read_text(encoding="utf-8").splitlines()
    record = json.loads(line)
    assert (record["config"]["ranks"], record["config"]["hosts"]) == (2, 2)
    assert list(record["summary"]) == ["fsdp2", "shardgrad", "ddp", "unsharded"]
    assert not {**record["left_out"], **record["unobserved"]}
    assert record["summary"]["shardgrad"]["loss_difference"] == 0
    assert "2 machines of" in printed[0]


def test_processes_without_an_address_and_other_benchmarks_are_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    done = run("kernels")
    assert done.returncode == 2
    assert "only training_step takes those of torchrun" in done.stderr
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = run("training_step")
    assert done.returncode == 2
    assert "MASTER_ADDR is not set" in done.stderr
    assert "scontrol show hostnames" in done.stderr


def test_what_srun_sets_says_which_process_this_is() -> None:
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}
    address = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert launch_of(slurm | address | {"SLURM_LOCALID": "1"}) == Launch(5, 8, 1, 2)
    assert launch_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None  # the batch file of a job
