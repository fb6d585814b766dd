"""Graphed steps on the CPU: eager, with the rules for inputs and outputs, and what a graph would
miss.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._pytree import _deregister_pytree_node, register_pytree_node

import shardgrad
from shardgrad.errors import StepOutputError
from shardgrad.graphs.capturable import OptimizerState, capturable
from shardgrad.graphs.step import _modes
from tests.support.ranks import on_ranks


def training() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)

    @shardgrad.graphed_step(model, optimizer)
    def step(x: Tensor) -> dict[str, Tensor]:
        loss = model(x).square().mean()
        loss.backward()
        norm = shardgrad.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "norm": norm}

    return model, step


def test_a_step_on_the_cpu_trains_as_the_function_itself() -> None:
    ours, step = training()
    plain, other = training()
    inputs = [torch.full((3, 4), float(number)) for number in range(6)]
    with pytest.warns(
        shardgrad.UncapturableStepWarning, match="eagerly on every call, because cpu has no graphs"
    ) as caught:
        losses = [step(x)["loss"].item() for x in inputs]
    assert losses == [other.__wrapped__(x)["loss"].item() for x in inputs]
    for first, second in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(first, second)
    assert [warning.filename for warning in caught] == [__file__]  # it says so once


def test_an_argument_that_an_eager_step_keeps_and_writes_is_as_in_a_plain_call() -> None:
    kept = [torch.zeros(2)]

    @shardgrad.graphed_step(warmup=1)
    def step(x: Tensor) -> Tensor:
        x.requires_grad_(True).detach().add_(1)
        kept.append(x)
        return kept[-2] * 1

    for value, expected in ((1.0, 0.0), (2.0, 2.0), (3.0, 3.0)):
        given = torch.full((2,), value)
        assert step(given).tolist() == [expected] * 2
        assert given.tolist() == [value + 1] * 2
        assert not given.requires_grad


HOST_WORK: dict[str, Callable[[Tensor, Any], object]] = {
    "loss.item": lambda loss, schedule: loss.item(),
    "if loss": lambda loss, schedule: 1 if loss > 3 else 2,
    "format(loss)": lambda loss, schedule: f"{loss:.2f}",
    "schedule.last_epoch changed from 0 to 1": lambda loss, schedule: schedule.step(),
    "": lambda loss, schedule: shardgrad.graphs.outside(loss.item),
}


@pytest.mark.parametrize("named", HOST_WORK)
def test_without_graphs_a_step_names_the_work_of_the_host_that_a_graph_would_not_repeat(
    named: str,
) -> None:
    model = nn.Linear(4, 4)
    optimizer = shardgrad.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)

    @shardgrad.graphed_step(model, optimizer)
    def step(x: Tensor) -> None:
        loss = model(x).sum()
        loss.backward()
        shardgrad.clip_grad_norm_(model, 1.0)
        optimizer.step()
        HOST_WORK[named](loss.detach(), schedule)

    with pytest.warns(shardgrad.UncapturableStepWarning) as caught:
        step(torch.ones(2, 4))
    text = str(caught[0].message)
    assert ("could not repeat" in text) == bool(named)
    assert named.removeprefix("format(") in text
    assert (f"{__file__}:" in text) == (bool(named) and "changed" not in named)
    assert text.removesuffix(".").endswith(step.status().partition("; it ")[2])


def test_seven_new_shapes_in_a_row_are_a_warning_with_the_last() -> None:
    _, step = training()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*cpu has no graphs")
        for rows in (1, 2, 3, 4, 5, 6, 6, *range(7, 13)):
            step(torch.ones(rows, 4))
    with pytest.warns(
        shardgrad.UncapturableStepWarning, match=r"the last 7 calls.*\[12, 4\]\) became.*\[13"
    ) as caught:
        step(torch.ones(13, 4))
    assert caught[0].filename == __file__


def test_a_number_that_a_schedule_changes_before_each_call_is_a_warning_that_names_it() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @shardgrad.graphed_step(model, optimizer)
    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def train() -> None:
        for _ in range(20):
            step(torch.ones(2, 4))
            optimizer.param_groups[0]["lr"] *= 0.9

    with pytest.warns(
        shardgrad.UncapturableStepWarning, match=r"'lr', 0\.\d+.*became.*'lr', 0"
    ) as caught:
        train()
    changing = [warning for warning in caught if "became" in str(warning.message)]
    assert [warning.filename for warning in changing] == [__file__]  # once


def test_a_parameter_in_the_place_of_another_is_another_step_of_an_optimizer() -> None:
    first, second, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = torch.optim.SGD([first, second], lr=0.5)
    state, (group,) = OptimizerState(optimizer), optimizer.param_groups
    seen = {state.guards()}
    for params in ([first], [first, third], [first, second]):
        group["params"] = params
        seen.add(state.guards())
    assert len(seen) == 3


def test_a_block_mask_that_is_registered_is_taken_apart_and_put_together() -> None:
    register_pytree_node(BlockMask, BlockMask._flatten, BlockMask._unflatten)

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    def sliding(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < 64)

    @shardgrad.graphed_step(warmup=1)
    def step(x: Tensor, mask: Any) -> Tensor:
        assert isinstance(mask, BlockMask)
        return x.sum() + mask.kv_num_blocks.sum()

    for rule in (causal, sliding):
        mask = create_block_mask(rule, None, None, 256, 256, device="cpu")
        assert step(torch.ones(2), mask).item() == 2 + mask.kv_num_blocks.sum().item()
    _deregister_pytree_node(BlockMask)


def test_an_input_has_the_layout_that_the_program_gave_it() -> None:
    step = shardgrad.graphed_step()(lambda x: x.as_strided((4,), (1,)).clone())
    x = torch.arange(4.0).view(2, 2)
    for given in (x, x.t()):
        assert step(given).tolist() == [0, 1, 2, 3]


def test_a_step_may_be_evaluated_before_it_trains() -> None:
    model = nn.LazyLinear(1)
    step = shardgrad.graphed_step(model)(lambda x: model(x).sum())
    modes = torch.inference_mode, torch.enable_grad, torch.no_grad
    for number, mode in enumerate(modes):
        x = torch.full((3, 2), float(number))
        with mode():
            assert torch.equal(step(x), model(x).sum())


def test_a_step_says_in_a_sentence_how_its_calls_have_run() -> None:
    step = shardgrad.graphed_step()(partial(torch.add, torch.ones(2)))  # not in its name
    step(torch.ones(2))
    assert step.status() == (
        "partial: 0 graphs captured, 0 calls replayed, 1 eager; it runs eagerly on "
        "every call, because cpu has no graphs. The results are the same"
    )


def test_what_a_step_returned_is_refused_in_place_of_its_function() -> None:
    loss: Any = torch.ones(())
    with pytest.raises(
        shardgrad.ShardgradError, match=r"not graphed_step\(\.\.\.\)\(step\(batch\)\)"
    ):
        shardgrad.graphed_step()(loss)


def yields(x: Tensor) -> Iterator[Tensor]:
    yield x


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda x: (x, {"rows": len(x)}), r"returned a int, output\[1\]\['rows'\]"),
        (yields, "yield or async def cannot be a step"),
    ],
)
def test_what_a_graph_cannot_return_is_refused_with_its_place(step: Any, words: str) -> None:
    with pytest.raises(StepOutputError, match=words):
        shardgrad.graphed_step()(step)(torch.ones(2))


_ATTENTION = (
    SDPBackend.MATH,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
)


@contextmanager
def _set_to(setting: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    setting(value)
    try:
        yield
    finally:
        setting(before)


def test_each_mode_that_changes_what_is_launched_has_graphs_of_its_own() -> None:
    """What `_modes` tells apart is captured apart."""
    cpu, matmul = torch.device("cpu"), torch.backends.cuda.matmul
    seen = [_modes(cpu)]
    for mode in (
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autocast("cpu", torch.float16),
        *(sdpa_kernel(each) for each in _ATTENTION),
        _set_to(torch.set_default_dtype, torch.float64, torch.get_default_dtype()),
        _set_to(partial(setattr, matmul, "fp32_precision"), "tf32", matmul.fp32_precision),
        _set_to(torch.use_deterministic_algorithms, True, False),
    ):
        with mode:
            seen.append(_modes(cpu))
    assert len(set(seen)) == len(seen) == 12
    with torch.autocast("cpu", enabled=False):
        assert _modes(cpu) == seen[0]


def test_another_tensor_in_the_state_of_torchs_optimizer_is_another_graph() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = parameter.detach()
    optimizer = torch.optim.Adam([parameter])
    optimizer.step()
    optimizer.state["count"] = 1  # as other optimizers may have
    state = OptimizerState(optimizer)
    before = state.guards()
    assert state.guards() == before
    optimizer.state[parameter]["exp_avg"] = parameter.detach()
    assert state.guards() != before


@on_ranks(2)
def test_a_gradient_that_is_there_is_another_step_than_one_that_is_none() -> None:
    model = nn.Linear(4, 4)
    shardgrad.fully_shard(model)
    state, seen = capturable(model), []
    model(torch.ones(2, 4)).sum().backward()
    shardgrad.clip_grad_norm_(model, 1.0)
    for absent in ((), (model.bias,), (model.weight,)):
        for param in absent:
            param.grad = None
        state.begin_call()
        seen.append(state.guards())
    assert "tensor" not in repr(seen)  # to print one, the host would wait
    assert len(set(seen)) == 3
