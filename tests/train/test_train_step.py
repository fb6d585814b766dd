"""One optimizer step, without ranks: what is reduced when, what is clipped, and what is noticed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from shardgrad.programs.train import loop
from shardgrad.programs.train.checkpoint import TrainState
from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.corpus import Sampler
from shardgrad.programs.train.failure import TrainingError
from shardgrad.programs.train.model import Transformer, materialise
from shardgrad.programs.train.parallel import World
from shardgrad.programs.train.presets import TransformerConfig
from shardgrad.programs.train.step import TrainStep, build_optimizer, lr_ratio

CPU = torch.device("cpu")


class Alone(World):
    """A place whose only rank answers itself."""

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values.unsqueeze(0)


ALONE = Alone(0, 1, CPU)


class SyncRecorder(Transformer):
    """A transformer that writes down when it was told to reduce gradients."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.wishes: list[bool] = []

    def set_requires_gradient_sync(self, wanted: bool) -> None:
        self.wishes.append(wanted)


def state_for(config: TrainConfig) -> TrainState:
    with torch.device("meta"):
        model = SyncRecorder(TransformerConfig(width=16, layers=1, heads=2, kv_heads=2, hidden=16))
    materialise(model, model, device=CPU, seed=0)
    return TrainState(model, build_optimizer(model, config))


def config_of(**settings: Any) -> TrainConfig:
    return TrainConfig(**{"steps": 9, "seq_len": 8, "batch_size": 4, "lr": 1e-2, **settings})


def sampler() -> Sampler:
    return Sampler(
        torch.randint(256, (500,), dtype=torch.uint8, generator=torch.manual_seed(1)), 8, seed=0
    )


def test_gradients_are_reduced_with_the_last_micro_batch() -> None:
    config = config_of(accumulate=3)
    state = state_for(config)
    TrainStep(state, sampler(), config, ALONE)()
    assert cast(SyncRecorder, state.model).wishes == [False, False, True]


def test_each_step_has_its_rate() -> None:
    config = config_of()
    state = state_for(config)
    step, seen = TrainStep(state, sampler(), config, ALONE), []
    for _ in range(3):
        step()
        seen.append(state.optimizer.param_groups[0]["lr"])
    assert seen == [config.lr * lr_ratio(step, steps=9) for step in range(3)]


def test_micro_batches_together_are_the_whole_batch() -> None:
    text = sampler()
    results = []
    for batch_size, accumulate in ((4, 1), (2, 2), (1, 4)):
        config = config_of(batch_size=batch_size, accumulate=accumulate)
        state = state_for(config)
        result = TrainStep(state, text, config, ALONE)()
        results.append((result, state))
    (whole, whole_state), *others = results
    for part, state in others:
        torch.testing.assert_close(part, whole)
        # Adam divides by the size of a gradient, and so amplifies roundings of small ones.
        ours, theirs = state.model.state_dict(), whole_state.model.state_dict()
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.01 * config.lr)
        assert (state.step, state.samples) == (whole_state.step, whole_state.samples) == (1, 4)


@pytest.mark.parametrize(
    ("loss", "norm"),
    [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("nan")), (1.0, float("inf"))],
)
def test_the_first_step_that_is_not_finite_is_named(loss: float, norm: float) -> None:
    run = object.__new__(loop.Run)
    run.__dict__.update(world=ALONE, state=SimpleNamespace(step=7), _results=[])
    run._results.append(torch.tensor([3.0, 1.0]))
    assert run._gather_results().tolist() == [[[3.0, 1.0]]]
    run.state.step = 10
    run._results += map(torch.tensor, [[loss, norm], [math.nan, math.nan], [1.0, 1.0]])
    with pytest.raises(TrainingError, match="finite at step 8") as caught:
        run._gather_results()
    where = "the norm of the gradients" if math.isfinite(loss) else "the loss of rank 0"
    assert where in str(caught.value)
