"""The learning rate rises in a line, falls in half a cosine, and decays only matrices."""

from __future__ import annotations

import pytest
from torch import nn

from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.step import build_optimizer, lr_ratio


def test_the_rise_takes_a_tenth_of_a_run_and_the_fall_is_half_a_cosine_to_a_tenth() -> None:
    rates = [lr_ratio(step, steps=111) for step in range(111)]  # 11 of which rise
    assert rates[:12] == pytest.approx([n / 12 for n in range(1, 13)])
    fall = rates[11:]
    assert fall[-1] == pytest.approx(0.1)
    assert fall == sorted(fall, reverse=True)
    assert fall[33] == pytest.approx(0.1 + 0.9 * 0.75)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.Linear(3, 3)
    optimizer = build_optimizer(model, TrainConfig(lr=1.0))
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert decay == {id(model.weight): 0.1, id(model.bias): 0.0}
