"""Every stream late, in every arrangement: results equal those of a run in which nobody is, bit for
bit.

On a machine with a GPU: `make test ARGS="tests/gpu"`. Elsewhere the CPU runs the same programs
without streams, to show that they run; `tests/simulated/test_simulated_upstream_bugs.py` runs them
with streams.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.late_streams import CASES, LATE_CYCLES, Case, differing, train
from tests.support.processes import FairClock

HAS_CUDA = torch.cuda.is_available()
NO_GPU = "no GPU"
NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason=NO_GPU)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    chosen = torch.device(request.param)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield chosen
    dist.destroy_process_group()


# On the CPU nothing is late, and a program would be compared with itself.
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)], indirect=True)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_late_streams_change_no_bit(case: Case, device: torch.device) -> None:
    assert not differing(train(case, device, cycles=LATE_CYCLES), train(case, device))


@pytest.mark.parametrize("case", [c for c in CASES if not (c.low_precision or c.clip)], ids=str)
def test_late_streams_give_what_the_unsharded_model_gives(case: Case, device: torch.device) -> None:
    cycles = LATE_CYCLES if device.type == "cuda" else 0
    assert not differing(train(case, device, cycles=cycles), train(case, device, sharded=False))


# -- programs in processes of their own

_ROOT = Path(__file__).parents[2]
JOINED, EQUAL = "the ranks have met", "equal bit for bit"


def one_of_several() -> None:
    """One rank of several on the same GPU; run by `_several`."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    print(JOINED, flush=True)
    device = torch.device("cuda", 0)
    for case in (Case(side_streams=2), Case(nested=True, micro_batches=2, side_streams=2)):
        late = train(case, device, cycles=LATE_CYCLES)
        # Sums of two equal numbers are exact, so the batch that all ranks share gives the unsharded
        # result.
        for expected in (train(case, device), train(case, device, sharded=False)):
            assert not differing(late, expected), (case, differing(late, expected))
    print(EQUAL, flush=True)
    os._exit(0)  # an experimental communicator may not end; nothing is left to do


def sanitized() -> None:
    """One rank under torch's sanitizer, which raises when it finds something."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    for case in (
        Case(),
        Case(side_streams=2),
        Case(nested=True, micro_batches=2, clip=True, side_streams=2),
    ):
        train(case, torch.device("cuda"))
    torch.cuda.synchronize()
    dist.destroy_process_group()
    print(EQUAL, flush=True)


def _start(function: str, environment: dict[str, str], output: Any) -> subprocess.Popen[bytes]:
    program = f"from tests.gpu.test_gpu_late_streams import {function}; {function}()"
    command = [sys.executable, "-c", program]
    everything = {**os.environ, **environment}
    return subprocess.Popen(
        command,
        cwd=_ROOT,
        env=everything,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _run(
    function: str, environments: list[dict[str, str]], limit_s: float
) -> list[tuple[int | None, str]]:
    """Returns (exit status, output) of each process; the status is None if it had to be ended."""
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in environments]
        started = [
            _start(function, env, out) for env, out in zip(environments, outputs, strict=True)
        ]
        clock = FairClock([process.pid for process in started])
        statuses = [_end(process, clock, limit_s) for process in started]
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read().decode(errors="replace"))
    return list(zip(statuses, texts, strict=True))


def _end(process: subprocess.Popen[bytes], clock: FairClock, limit_s: float) -> int | None:
    while clock.elapsed_s() < limit_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.5)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environments(world_size: int, nccl: tuple[int, ...]) -> list[dict[str, str]]:
    """Returns what lets ranks share a GPU: NCCL can be asked to from 2.30 on; before, they pose as
    hosts.
    """
    port, made = str(_free_port()), []
    for rank in range(world_size):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_MAX_CTAS": "4",
            "NCCL_SOCKET_IFNAME": "lo",
            "TORCH_NCCL_ENABLE_MONITORING": "0",
        }
        if nccl >= (2, 30):
            environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        else:
            environment |= {
                "NCCL_HOSTID": f"host{rank}",
                "NCCL_IB_DISABLE": "1",
                "NCCL_NET": "Socket",
                "NCCL_MNNVL_ENABLE": "0",
            }
        made.append(environment)
    return made


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not HAS_CUDA, reason=NO_GPU)
@pytest.mark.timeout(200)
def test_two_ranks_on_one_device_change_no_bit_when_streams_are_late() -> None:
    found = _run("one_of_several", _environments(2, torch.cuda.nccl.version()), limit_s=150.0)
    tail = "\n".join(text[-1500:] for _, text in found)
    if not all(JOINED in text for _, text in found):
        pytest.skip(f"NCCL does not let ranks share a GPU here:\n{tail}")
    assert all(status == 0 and EQUAL in text for status, text in found), tail


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not HAS_CUDA, reason=NO_GPU)
@pytest.mark.timeout(200)
def test_torchs_own_sanitizer_is_silent() -> None:
    ((status, text),) = _run("sanitized", [{"TORCH_CUDA_SANITIZER": "1"}], limit_s=150.0)
    assert status == 0, text[-5000:]
    assert EQUAL in text
    assert "CSAN detected" not in text


def test_a_process_that_hangs_is_ended_and_its_output_kept(tmp_path: Path) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(tmp_path)}
    (tmp_path / "sitecustomize.py").write_text(
        "import time; print('started', flush=True); time.sleep(60)"
    )
    ((status, text),) = _run("sanitized", [environment], limit_s=3.0)
    assert status is None
    assert text.strip() in ("started", "")  # an environment may have a sitecustomize of its own


def test_ranks_share_a_device_by_what_their_nccl_knows() -> None:
    new, old = _environments(2, (2, 30, 7)), _environments(2, (2, 28, 9))
    assert [env.get("NCCL_MULTI_RANK_GPU_ENABLE") for env in (*new, *old)] == ["1", "1", None, None]
    assert [env.get("NCCL_HOSTID") for env in (*new, *old)] == [None, None, "host0", "host1"]
    assert len({env["MASTER_PORT"] for env in new}) == 1
