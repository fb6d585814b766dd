"""One optimizer step, without ranks: what is reduced when, what is clipped, and what is noticed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from shardgrad.graphs import GraphedStep
from shardgrad.programs.train import loop
from shardgrad.programs.train.checkpoint import TrainState
from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.corpus import Sampler
from shardgrad.programs.train.failure import TrainingError
from shardgrad.programs.train.model import Transformer, materialise
from shardgrad.programs.train.optimizer import build_optimizer, build_schedule
from shardgrad.programs.train.parallel import World
from shardgrad.programs.train.presets import TransformerConfig
from shardgrad.programs.train.step import StepResult, TrainStep

CPU = torch.device("cpu")
ALONE = cast(World, SimpleNamespace(rank=0, world_size=1, device=CPU))


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
    optimizer = build_optimizer(model, config)
    return TrainState(model, optimizer, build_schedule(optimizer, config))


def config_of(**settings: Any) -> TrainConfig:
    return TrainConfig(
        **{"steps": 9, "seq_len": 8, "batch_size": 4, "optimizer": "sgd", "lr": 1.0, **settings}
    )


def sampler() -> Sampler:
    return Sampler(
        torch.randint(256, (500,), dtype=torch.uint8, generator=torch.manual_seed(1)), 8, seed=0
    )


def test_gradients_are_reduced_with_the_last_micro_batch() -> None:
    config = config_of(accumulate=3)
    state = state_for(config)
    TrainStep(state, sampler(), config, ALONE)()
    assert cast(SyncRecorder, state.model).wishes == [False, False, True]


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
        torch.testing.assert_close(part.loss, whole.loss)
        torch.testing.assert_close(part.grad_norm, whole.grad_norm)
        torch.testing.assert_close(state.model.state_dict(), whole_state.model.state_dict())
        assert (state.step, state.samples) == (whole_state.step, whole_state.samples) == (1, 4)


@pytest.mark.parametrize(("clip", "length"), [(0.01, 0.01), (0.0, None)])
def test_the_update_is_no_longer_than_the_clip_allows(clip: float, length: float | None) -> None:
    config = config_of(clip=clip, weight_decay=0.0, warmup_steps=0)
    state = state_for(config)
    before = torch.nn.utils.parameters_to_vector(state.model.parameters()).detach().clone()
    result = TrainStep(state, sampler(), config, ALONE)()
    moved = torch.nn.utils.parameters_to_vector(state.model.parameters()).detach() - before
    assert result.grad_norm > 0.01
    assert moved.norm().item() == pytest.approx(length or result.grad_norm.item(), rel=1e-3)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_graphed_step_trains_bit_for_bit_as_one_without(optimizer: str, accumulate: int) -> None:
    runs = []
    for graph in ("off", "on"):
        config = config_of(
            graph=graph,
            optimizer=optimizer,
            accumulate=accumulate,
            batch_size=2,
            clip=0.1,
            warmup_steps=3,
            lr=0.1,
        )
        state = state_for(config)
        step = TrainStep(state, sampler(), config, ALONE)
        seen = [(r.loss.item(), r.grad_norm.item(), r.lr) for r in (step() for _ in range(6))]
        runs.append((seen, state))
    (right, plain), (ours, graphed) = runs
    assert right == ours
    assert len({rate for _, _, rate in right}) == 6, "the schedule went on"
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, graphed.model.state_dict()[name]), name
    assert (graphed.step, graphed.samples) == (plain.step, plain.samples) == (6, 12 * accumulate)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, False),  # a CPU has no graphs
        ({"graph": "on"}, True),
        ({"graph": "off"}, False),
    ],
)
def test_the_setting_decides_who_takes_the_step(settings: dict[str, Any], wanted: bool) -> None:
    config = config_of(**settings)
    step = TrainStep(state_for(config), sampler(), config, ALONE)
    assert isinstance(step.update, GraphedStep) == wanted


@pytest.mark.parametrize(
    ("loss", "norm"),
    [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("nan")), (1.0, float("inf"))],
)
def test_the_first_step_that_is_not_finite_is_remembered(loss: float, norm: float) -> None:
    run = object.__new__(loop.Run)
    run.__dict__.update(
        world=alone(),
        state=SimpleNamespace(step=0),
        _loss_sum=torch.zeros(()),
        _bad_steps=torch.full((2,), loop._NEVER),
        _unreported_steps=0,
    )
    for step, numbers in enumerate([(1.0, 1.0), (loss, norm), (math.nan, math.nan), (1.0, 1.0)]):
        if step == 1:
            run._require_finite()
        run.state.step = step + 1
        run._watch(result(*numbers))
    with pytest.raises(TrainingError, match="finite at step 2") as caught:
        run._require_finite()
    where = "the norm of the gradients" if math.isfinite(loss) else "the loss of rank 0"
    assert where in str(caught.value)


def result(loss: float, norm: float) -> StepResult:
    return StepResult(torch.tensor(loss), torch.tensor(norm), lr=0.1)


class Alone(World):
    """A place whose only rank answers itself."""

    def gather(self, values: list[float]) -> list[list[float]]:
        return [values]


def alone() -> Alone:
    return Alone(0, 1, CPU, cast(dist.ProcessGroup, None))
