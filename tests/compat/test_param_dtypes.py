"""Dtypes of single parameters, and what `reduce_dtype=None` means: as in the FSDP2 that is
installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardgrad
from shardgrad.errors import OptionError, UnsupportedError, UnsupportedParameterError
from shardgrad.policies import REDUCES_IN_GRAD_DTYPE
from tests.support.parity import (
    FSDP2,
    SHARDGRAD,
    Engine,
    Tensors,
    as_under_fsdp2,
    same_bits_as_fsdp2,
    stack,
    tower,
    train,
)
from tests.support.ranks import Ranks, on_ranks

BF16, FP32 = torch.bfloat16, torch.float32
Prepare = Callable[[nn.Module], None]
from_2_15 = pytest.mark.skipif(not REDUCES_IN_GRAD_DTYPE, reason="torch has it from 2.15 on")


def scalars_in_full(param: nn.Parameter) -> torch.dtype | None:
    return param.dtype if param.numel() == 1 else None


def nothing(model: nn.Module) -> None:
    """Leaves a model as it is."""


def with_grad_dtype(
    dtype: torch.dtype | None, model: nn.Module, *, only_matrices: bool = False
) -> None:
    for param in model.parameters():
        if param.ndim > 1 or not only_matrices:
            param.grad_dtype = dtype


narrow = partial(with_grad_dtype, BF16)
wide = partial(with_grad_dtype, FP32)
any_dtype = partial(with_grad_dtype, None)
narrow_matrices = partial(narrow, only_matrices=True)


def train_tower(
    engine: Engine,
    policy: MixedPrecisionPolicy,
    prepare: Prepare = nothing,
    cast: Callable[[nn.Module], object] = nothing,
    **options: Any,
) -> Tensors:
    model = tower()
    prepare(model)
    engine.shard_tower(model, mp_policy=policy)
    cast(model)
    return train(engine, model, optimizer="sgd", **options)


def same_bits(policy: MixedPrecisionPolicy, *args: Any, **options: Any) -> None:
    same_bits_as_fsdp2(train_tower, policy, *args, **options)


def same_but_for_rounding(policy: MixedPrecisionPolicy, *args: Any, **options: Any) -> None:
    """Sums of two ranks, or of micro-batches, that FSDP2 rounds to 16 bits are wider here: 2^-9
    each.
    """
    ours = train_tower(SHARDGRAD, policy, *args, steps=1, **options)
    theirs = train_tower(FSDP2, policy, *args, steps=1, **options)
    assert list(ours) == list(theirs)
    for name, right in theirs.items():
        assert ours[name].dtype == right.dtype, name
        assert (ours[name] - right).norm() <= 2**-6 * right.norm(), name


@pytest.mark.parametrize(
    "accumulation", [{}, {"micro_batches": 2, "sync_each": False}], ids=["one", "two"]
)
def test_without_a_reduce_dtype_gradients_are_reduced_as_under_fsdp2(
    two_ranks: Ranks, accumulation: dict[str, Any]
) -> None:
    exact = REDUCES_IN_GRAD_DTYPE  # in 32 bits
    run = same_bits if exact else same_but_for_rounding
    two_ranks.run(run, MixedPrecisionPolicy(param_dtype=BF16), **accumulation)


@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.double])
def test_a_model_cast_after_sharding_is_reduced_as_under_fsdp2(
    two_ranks: Ranks, cast: Callable[[nn.Module], object]
) -> None:
    two_ranks.run(same_but_for_rounding, MixedPrecisionPolicy(param_dtype=FP32), nothing, cast)


@from_2_15
@pytest.mark.parametrize(
    "policy", [{}, {"param_dtype": BF16}, {"param_dtype": BF16, "reduce_dtype": FP32}]
)
def test_gradients_of_several_dtypes_in_one_unit_are_reduced_in_one_that_holds_all(
    two_ranks: Ranks, policy: dict[str, torch.dtype]
) -> None:
    if policy:  # else FSDP2 rounds each rank's 32 bits to 16, too
        two_ranks.run(same_bits, MixedPrecisionPolicy(**policy), narrow_matrices)
    two_ranks.run(
        same_but_for_rounding, MixedPrecisionPolicy(**policy), narrow_matrices, micro_batches=2
    )


@from_2_15
@pytest.mark.parametrize("prepare", [narrow, wide], ids=["narrow", "wide"])
def test_gradients_have_the_dtype_that_their_parameter_asks_for(
    two_ranks: Ranks, prepare: Prepare
) -> None:
    two_ranks.run(same_but_for_rounding, MixedPrecisionPolicy(), prepare)
    two_ranks.run(
        same_but_for_rounding, MixedPrecisionPolicy(param_dtype=BF16), prepare, micro_batches=2
    )


@from_2_15
def test_a_parameter_that_takes_any_dtype_gets_that_of_the_reduction(two_ranks: Ranks) -> None:
    two_ranks.run(same_bits, MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32), any_dtype)


@from_2_15
@pytest.mark.parametrize("reduce_dtype", [None, FP32])
def test_single_parameters_keep_their_dtype(
    two_ranks: Ranks, reduce_dtype: torch.dtype | None
) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=BF16, reduce_dtype=reduce_dtype, param_dtype_override_fn=scalars_in_full
    )
    two_ranks.run(same_bits, policy, micro_batches=2)


def computes_in(policy: MixedPrecisionPolicy) -> dict[str, torch.dtype]:
    model = shardgrad.fully_shard(stack(4, 1), mp_policy=policy)
    model.unshard()
    return {name: param.dtype for name, param in model.named_parameters()}


@from_2_15
@on_ranks(2)
def test_the_override_is_asked_once_and_decides_what_computes() -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, param_dtype_override_fn=scalars_in_full)
    assert computes_in(policy) == {"0.weight": BF16, "0.bias": FP32}
    asked: list[nn.Parameter] = []
    model = stack(4, 4)
    params = list(model.parameters())
    shardgrad.fully_shard(
        model, mp_policy=MixedPrecisionPolicy(param_dtype_override_fn=asked.append)
    )
    assert list(map(id, asked)) == list(map(id, params))


class _Wide(torch.autograd.Function):
    """A product whose gradient of the weight is in 32 bits, as kernels that accumulate in place
    give it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.float().t() @ x.float()


class WideLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return _Wide.apply(x, self.weight)


@from_2_15
@on_ranks(2)
@as_under_fsdp2
def test_gradients_wider_than_their_parameter_are_not_narrowed(engine: Engine) -> Tensors:
    model = engine.fully_shard(WideLinear(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    model(engine.inputs(0, 4)).float().square().sum().backward()
    return engine.snapshot(model)


@dataclass(frozen=True)
class LaterPolicy(MixedPrecisionPolicy):
    """As a later torch may have it."""

    rounding: str = "nearest"


@on_ranks(2)
def test_a_field_of_a_policy_that_we_do_not_know_is_refused_by_name() -> None:
    shardgrad.fully_shard(stack(4, 4), mp_policy=LaterPolicy())
    with pytest.raises(UnsupportedError, match=r"LaterPolicy\(rounding='stochastic'\)"):
        shardgrad.fully_shard(stack(4, 4), mp_policy=LaterPolicy(rounding="stochastic"))


@from_2_15
@on_ranks(2)
def test_dtypes_that_cannot_be_followed_are_refused_by_name() -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=BF16, param_dtype_override_fn=lambda param: torch.float16
    )
    with pytest.raises(
        OptionError, match=r"must return None, param_dtype, or the parameter's original"
    ):
        shardgrad.fully_shard(stack(4, 4), mp_policy=policy)
    model = stack(4, 4)
    any_dtype(model)
    with pytest.raises(UnsupportedParameterError, match=r"0\.weight has grad_dtype=None"):
        shardgrad.fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    model = shardgrad.fully_shard(stack(4, 4))
    narrow(model)
    with pytest.raises(
        UnsupportedParameterError, match=r"grad_dtype of parameter 0\.weight was set after"
    ):
        model(torch.ones(1, 4))
