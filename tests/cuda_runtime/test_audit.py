"""The engine without one of its waits, on torch.cuda: every removal is noticed."""

from __future__ import annotations

import os
import sys

import pytest

from tests.support.processes import run


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_wait_of_the_engine_is_needed_on_torch_cuda() -> None:
    # In a process of its own: the runtime takes the places of the simulated accelerator there.
    command = [sys.executable, "-W", "ignore", "-m", "tests.cuda_runtime.audit"]
    done = run(command, env={**os.environ, "PYTHONPATH": os.getcwd()}, timeout_s=800)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_the_audit_notices_a_wait_that_is_gone() -> None:
    program, edge = "one stream, two ranks", "GradPacker.pack by Slot.finish_writing"
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.cuda_runtime.audit",
        "--only",
        edge,
        program,
    ]
    done = run(command, env={**os.environ, "PYTHONPATH": os.getcwd()}, timeout_s=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 removals, 2 noticed, 2 of them by wrong losses" in done.stdout
