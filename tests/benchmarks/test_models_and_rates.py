"""The models that are measured, and the arithmetic of rates."""

from __future__ import annotations

import pytest

from benchmarks.engines.comparison import Measured, Outcome
from benchmarks.engines.summary import flops_per_step, peak_of, summarise
from benchmarks.engines.task import Task
from benchmarks.measure import Cost
from benchmarks.models import facts_of
from shardgrad.programs.train.presets import PRESETS, TransformerConfig


def numel_of(config: TransformerConfig) -> int:
    """Numbers in the parameters, by arithmetic."""
    attention = 2 * config.width * (config.width + config.kv_heads * config.head_width)
    feed_forward = 3 * config.width * config.hidden
    block = attention + feed_forward + 2 * config.width
    embeddings = config.vocab_size * config.width * (1 if config.tied else 2)
    return config.layers * block + config.width + embeddings


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_are_counted_as_the_model_has_them(preset: str) -> None:
    assert facts_of(preset).numel == numel_of(PRESETS[preset])


def test_flops_are_those_of_the_palm_paper() -> None:
    # Its own example, table 21: PaLM 540B, 118 layers of 48 heads of 256, 2,048 tokens.
    model = {"numel": 540_350_000_000, "attention_numel": 118 * 48 * 256}
    per_token = flops_per_step(model, tokens=1, seq_len=2048)
    assert per_token == pytest.approx(6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048)
    # 238.3 thousand tokens/s on 6,144 chips of 275 TFLOP/s: 46.2 % with attention.
    assert per_token * 238.3e3 / (6144 * 275e12) == pytest.approx(0.462, abs=0.002)


def test_the_peak_is_published_or_measured() -> None:
    assert peak_of({"device_name": "NVIDIA H200"}, "bf16")[0] == 989e12
    assert peak_of({"device_name": "NVIDIA H100 PCIe"}, "bf16")[0] == 756e12
    assert peak_of({"device_name": "NVIDIA H100 PCIe"}, "fp32")[0] == 51e12
    assert peak_of({"matmul_flops_per_s": 5e9}, "fp32")[0] == 5e9
    assert peak_of({"matmul_flops_per_s": 5e9}, "fp32")[1].startswith("measured")


def test_an_mfu_of_more_than_all_is_not_told() -> None:
    task, model = Task(ranks=1), {"numel": 10, "units": 2, "attention_numel": 0}
    outcome = Outcome({"fsdp2": Measured([Cost(1.0, 1.0)] * 2, rounds=[0, 1])})
    needed = flops_per_step(model, tokens=task.tokens, seq_len=task.seq_len)
    for peak, mfu in ((2 * needed, 0.5), (needed / 2, None)):
        outcome.hardware = {"model": model, "matmul_flops_per_s": peak}
        assert summarise(outcome, task)["fsdp2"]["mfu"] == mfu
