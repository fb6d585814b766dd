"""The learning rate rises in a line, falls in half a cosine, and decays only matrices."""

from __future__ import annotations

import pytest
from torch import nn

from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.optimizer import build_optimizer, build_schedule, lr_ratio


def ratios(*, steps: int, warmup_steps: int) -> list[float]:
    return [lr_ratio(step, steps=steps, warmup_steps=warmup_steps) for step in range(steps)]


def test_the_fall_is_half_a_cosine_to_a_tenth() -> None:
    fall = ratios(steps=105, warmup_steps=4)[4:]
    assert fall[0] == 1.0
    assert fall[50] == pytest.approx(0.55)
    assert fall[-1] == pytest.approx(0.1)
    assert fall == sorted(fall, reverse=True)


@pytest.mark.parametrize(("steps", "warmup_steps"), [(1, 0), (2, 1), (3, 50), (1, 1)])
def test_runs_shorter_than_the_rise_have_a_rate_for_every_step(
    steps: int, warmup_steps: int
) -> None:
    assert all(0 < ratio <= 1 for ratio in ratios(steps=steps, warmup_steps=warmup_steps))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_optimizer_gets_the_rate_of_each_step(name: str) -> None:
    config = TrainConfig(optimizer=name, steps=10, warmup_steps=3, lr=0.5)
    optimizer = build_optimizer(nn.Linear(3, 3), config)
    schedule = build_schedule(optimizer, config)
    seen = []
    for _ in range(10):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx([0.5 * ratio for ratio in ratios(steps=10, warmup_steps=3)])


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.Linear(3, 3)
    optimizer = build_optimizer(model, TrainConfig(weight_decay=0.25, lr=1.0))
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert decay == {id(model.weight): 0.25, id(model.bias): 0.0}
