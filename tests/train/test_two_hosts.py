"""Two machines train together, one is lost and comes back, and the weights are those of a run on
one process.

A machine is a torchrun of its own on this one. They share the files, as machines of a cluster do.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support import processes
from tests.support.processes import FairClock

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "multi_node"
PATIENCE_S = 180.0  # of which the time is left out in which a core is waited for


@dataclass
class Host:
    """A machine: its environment, and what runs on it."""

    log: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Runs `launch.sh`, as its documentation says to."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["bash", str(EXAMPLE / "launch.sh"), "--steps", "100000"],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def lose(self) -> None:
        """Ends everything on it at once, without a word to anybody."""
        if self.process is not None:
            for pid in _descendants(self.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait(10)


def _descendants(pid: int) -> list[int]:
    """Returns a process and all below it; torchrun puts its workers into sessions of their own."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += _descendants(int(child))
    return found


def environment(folder: Path, port: int, **more: str) -> dict[str, str]:
    """Returns the environment of a launcher on this machine."""
    return {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "OMP_NUM_THREADS": "1",
        "ADDRESS": "127.0.0.1",
        "PORT": str(port + os.getpid() % 500),
        "FOLDER": str(folder),
        **more,
    }


@contextmanager
def two_hosts(folder: Path) -> Iterator[list[Host]]:
    network = {"GLOO_SOCKET_IFNAME": "lo", "HEAD": "127.0.0.1"}
    hosts = [
        Host(folder / f"host{i}.log", environment(folder, 29_400, **network, IS_HOST=is_host))
        for i, is_host in enumerate("10")
    ]
    try:
        yield hosts
    finally:
        for host in hosts:
            host.lose()


def lines(host: Host) -> list[str]:
    text = host.log.read_text(errors="replace") if host.log.exists() else ""
    return [
        line.removeprefix("[default0]:") for line in text.splitlines() if " ranks: loss" in line
    ]


def wait_for_steps(host: Host, ranks: int, count: int = 3) -> None:
    """Waits until the newest `count` steps were made on so many ranks."""
    assert host.process is not None
    clock = FairClock([host.process.pid])
    while True:
        newest = lines(host)[-count:]
        if len(newest) == count and all(f" on {ranks} ranks" in line for line in newest):
            return
        if clock.elapsed_s() > PATIENCE_S:
            tail = host.log.read_text(errors="replace")[-4000:]
            pytest.fail(f"no {count} steps on {ranks} ranks within {PATIENCE_S:.0f} s:\n{tail}")
        time.sleep(0.2)


def trained_by_one_process(steps: int) -> dict[str, torch.Tensor]:
    example = runpy.run_path(str(EXAMPLE / "train.py"))
    model = example["build"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        example["loss_of"](model, example["batch"](step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


@pytest.mark.long
@pytest.mark.timeout(4 * PATIENCE_S)
def test_a_machine_is_lost_and_regained_and_the_weights_are_those_of_one_process(
    tmp_path: Path,
) -> None:
    with two_hosts(tmp_path) as (stays, leaves):
        stays.launch()
        leaves.launch()
        wait_for_steps(stays, ranks=4)
        leaves.lose()
        wait_for_steps(stays, ranks=2)
        leaves.launch()
        wait_for_steps(stays, ranks=4)
        (tmp_path / "stop").touch()
        for host in (stays, leaves):
            assert host.process is not None
            assert host.process.wait() == 0, host.log.read_text()[-4000:]
    newest = (tmp_path / "newest").read_text()
    expected = trained_by_one_process(int(newest))
    found = {"model": {name: torch.empty_like(tensor) for name, tensor in expected.items()}}
    dcp.load(found, checkpoint_id=tmp_path / newest, no_dist=True)
    for name, tensor in expected.items():
        # Sums over ranks have another order than those over rows: some roundings of float64 a step.
        torch.testing.assert_close(found["model"][name], tensor, rtol=1e-9, atol=1e-9)


SCONTROL = """#!/bin/sh
test "$*" = "show hostnames node[1]" && echo 127.0.0.1
"""
SRUN = """#!/bin/sh
test "$1" = "--kill-on-bad-exit=0" && shift && exec "$@"
"""


@pytest.mark.timeout(200)
def test_the_slurm_file_trains_where_its_commands_are_stand_ins(tmp_path: Path) -> None:
    """One node, one rank: what the file makes of Slurm's variables, and that `launch.sh`
    understands it.
    """
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    folder = tmp_path / "run"
    slurm = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "IS_HOST": "1",
        "SLURM_JOB_NODELIST": "node[1]",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    ran = processes.run(
        ["bash", str(EXAMPLE / "job.sbatch"), "--steps", "2"],
        env=environment(folder, 28_900, **slurm),
        timeout_s=PATIENCE_S,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "step 2 on 1 ranks" in ran.stdout
    assert (folder / "newest").read_text() == "000002"
