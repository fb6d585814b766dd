"""Every stream late, in every arrangement: results equal those of a run in which nobody is, bit for
bit.

On a machine with a GPU: `make test ARGS="tests/gpu"`. Elsewhere the CPU runs the same programs
without streams, to show that they run; `tests/simulated/test_simulated_upstream_bugs.py` runs them
with streams.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.support.late_streams import CASES, LATE_CYCLES, Case, differing, train

HAS_CUDA = torch.cuda.is_available()
NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="no GPU")]


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
