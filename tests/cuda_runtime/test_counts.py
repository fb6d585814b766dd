"""What a step allocates and launches, counted as `python -m benchmarks counts` does."""

from __future__ import annotations

from pathlib import Path

from benchmarks.models import facts_of
from tests.benchmarks.test_programs import assert_spread, smoke

MIB = 2**20


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
