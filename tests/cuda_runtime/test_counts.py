"""What a step allocates and launches, counted as `python -m benchmarks counts` does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.models import facts_of
from tests.benchmarks.test_programs import assert_spread, smoke

MIB = 2**20


def test_graphs_of_a_pool_take_turns_in_the_memory_of_the_largest() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda_runtime.pool_bytes", "2"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [list(map(int, line.split()[-4:])) for line in done.stdout.splitlines()]
    assert len(rows) == 7
    assert len({pool for pool, *_ in rows}) == 1
    for _, reserved, _, eager_peak in rows:
        assert reserved <= 1.2 * eager_peak  # segments are large beside two layers


def test_a_step_needs_no_more_memory_than_fsdp2_and_the_gradients_that_stay(tmp_path: Path) -> None:
    (case,) = smoke("counts", tmp_path)["summary"].values()
    gradients_nbytes = facts_of("tiny").numel * 4 / 2  # of one of two ranks
    allowed = case["fsdp2"]["peak_allocated_nbytes"] + gradients_nbytes + MIB / 4
    for name in ("shardgrad", "shardgrad, its optimizer", "shardgrad-graphed"):
        of = case[name]
        assert_spread(of["cpu_s"])
        assert of["peak_allocated_nbytes"] < allowed
        assert of["nccl"] <= case["fsdp2"]["nccl"]
    assert case["shardgrad"]["kernels"] > case["shardgrad"]["nccl"] > 0
    assert case["shardgrad"]["allocations"] < case["fsdp2"]["allocations"]
    graphed = case["shardgrad-graphed"]
    assert (graphed["graphs"], graphed["allocations"]) == (1, 0)
    assert graphed["edges"] > graphed["nodes"] > 100
    if "fsdp2-graphed" in case:  # from torch 2.15 on
        assert case["fsdp2-graphed"]["graphs"] == 1
        assert case["fsdp2-graphed"]["nodes"] > 100
