"""Models of `shardgrad bench`, and the arithmetic that stands for them where there is no torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from shardgrad.bench.models import Experts, Mixture, build_model, facts_of
from shardgrad.bench.rates import flops_per_step, peak_of
from shardgrad.bench.shapes import SHAPES, MixtureConfig, numel_of
from shardgrad.bench.task import Task
from shardgrad.train.model import Transformer, count_parameters


@pytest.mark.parametrize("preset", SHAPES)
def test_parameters_are_counted_as_the_model_has_them(preset: str) -> None:
    shape = SHAPES[preset]
    with torch.device("meta"):
        model = Mixture(shape) if isinstance(shape, MixtureConfig) else Transformer(shape)
    assert numel_of(shape) == count_parameters(model) == facts_of(Task(preset=preset)).numel


def test_each_token_visits_the_expert_of_its_place() -> None:
    config = MixtureConfig(width=8, layers=1, heads=2, kv_heads=2, hidden=16, experts=4)
    experts = Experts(config)
    inputs = torch.randn(2, 6, 8)
    outputs = experts(inputs).reshape(12, 8)
    for place, token in enumerate(inputs.reshape(12, 8)):
        gate, up, down = (weight[place % 4] for weight in (experts.gate, experts.up, experts.down))
        expected = (torch.nn.functional.silu(token @ gate) * (token @ up)) @ down
        torch.testing.assert_close(outputs[place], expected)


def test_initial_values_depend_neither_on_parts_nor_on_who_wraps_them() -> None:
    wrapped: list[torch.nn.Module] = []
    task, device = Task(preset="wide-moe"), torch.device("cpu")
    one = build_model(task, device)
    other = build_model(task, device, wrap=wrapped.append)
    assert [*other.layers, other] == wrapped
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_flops_are_those_of_the_palm_paper() -> None:
    # Its own example, table 21: PaLM 540B, 118 layers of 48 heads of 256, 2,048 tokens.
    model = {"active_numel": 540_350_000_000, "attention_numel": 118 * 48 * 256}
    per_token = flops_per_step(model, tokens=1, seq_len=2048)
    assert per_token == pytest.approx(6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048)
    # 238.3 thousand tokens/s on 6,144 chips of 275 TFLOP/s: 46.2 % with attention.
    assert per_token * 238.3e3 / (6144 * 275e12) == pytest.approx(0.462, abs=0.002)


def test_only_active_experts_count() -> None:
    shape = SHAPES["wide-moe"]
    assert isinstance(shape, MixtureConfig)
    assert numel_of(shape, active=True) == numel_of(dataclasses.replace(shape, experts=1))


def test_the_peak_is_published_or_measured() -> None:
    assert peak_of({"device_name": "NVIDIA H200"}, "bf16").flops_per_s == 989e12
    assert peak_of({"device_name": "NVIDIA H100 PCIe"}, "bf16").flops_per_s == 756e12
    assert peak_of({"matmul_flops_per_s": 5e9}, "fp32").words.startswith("measured")
