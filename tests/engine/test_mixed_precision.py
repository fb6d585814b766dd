"""Where dtypes change: at the border of each policy, for whatever crosses it, and on the wire."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardgrad.policies import REDUCES_IN_GRAD_DTYPE
from tests.support.parity import (
    FSDP2,
    SHARDGRAD,
    Engine,
    Tensors,
    as_under_fsdp2,
    assert_same_bits,
    stack,
    token_loss,
    tower,
    train,
    train_squares,
    watching_collectives,
)
from tests.support.ranks import on_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)


# -- what travels between units


@dataclass
class Hidden:
    value: Tensor
    mask: Tensor


@dataclass
class Nested:
    inner: Hidden
    note: str = "kept"


class Named(NamedTuple):
    value: Tensor
    mask: Tensor


STRUCTURES: dict[
    str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]
] = {
    "dataclass": (Hidden, lambda hidden: (hidden.value, hidden.mask)),
    "nested": (
        lambda v, m: Nested(Hidden(v, m)),
        lambda nested: (nested.inner.value, nested.inner.mask),
    ),
    "namedtuple": (Named, lambda named: (named.value, named.mask)),
    "dict": (lambda v, m: {"value": v, "mask": m}, lambda found: (found["value"], found["mask"])),
    "list": (lambda v, m: [v, None, m], lambda found: (found[0], found[2])),
    "tuple": (lambda v, m: (None, v, "text", m), lambda found: (found[1], found[3])),
}


class Passing(nn.Module):
    """Takes and returns a structure of a floating and an integer tensor."""

    def __init__(self, inner: int, outer: int, structure: str, seen: list[torch.dtype]) -> None:
        super().__init__()
        self.linear = nn.Linear(inner, outer)
        self.wrap, self.unwrap = STRUCTURES[structure]
        self.seen = seen

    def forward(self, hidden: Any) -> Any:
        value, mask = self.unwrap(hidden)
        self.seen += [value.dtype, mask.dtype]
        return self.wrap(self.linear(value) * mask, mask)


class Layered(nn.Module):
    """Units with policies of their own; what travels between them is a structure."""

    def __init__(self, structure: str) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []
        self.wrap, self.unwrap = STRUCTURES[structure]
        self.first, self.second, self.third = (
            Passing(5, 5, structure, self.seen)
            for _ in range(3)  # of one size, so that one takes another's staging
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wrap(x, torch.ones(1, dtype=torch.int64))
        for layer in (self.first, self.second, self.third):
            hidden = layer(hidden=hidden)
        value = self.unwrap(hidden)[0]
        self.seen.append(value.dtype)
        return value


POLICIES = {
    "each its own": (BF16, MixedPrecisionPolicy(param_dtype=torch.float32), BF16),
    "outputs cast": (
        BF16,
        BF16,
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32),
    ),
    "float16": (FP16, FP16, BF16),
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", POLICIES)
@on_ranks(2)
@as_under_fsdp2
def test_casts_happen_at_the_border_of_each_policy(
    engine: Engine, name: str, structure: str
) -> Tensors:
    torch.manual_seed(0)
    model = Layered(structure)
    policies = POLICIES[name]
    for inner, policy in zip((model.first, model.second, model.third), policies, strict=True):
        engine.fully_shard(inner, mp_policy=policy)
    engine.fully_shard(model)
    found = train_squares(engine, model, 5)
    computed = [policy.param_dtype for policy in policies]
    assert model.seen[:6:2] == computed
    assert set(model.seen[1:6:2]) == {torch.int64}, "only floating inputs are cast"
    assert model.seen[6] == (policies[-1].output_dtype or computed[-1])
    return found


@on_ranks(2)
@as_under_fsdp2
def test_inputs_are_left_alone_if_the_policy_says_so(engine: Engine) -> Tensors:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    model = stack(5, 7, 3)
    engine.shard(model[0], model[2], model, mp_policy=policy)

    def loss(number: int) -> Tensor:
        with pytest.raises(RuntimeError, match="dtype"):
            model(engine.inputs(number, 5))
        model.reset_iter_state()
        return model(engine.inputs(number, 5, dtype=torch.bfloat16)).float().square().mean()

    return train(engine, model, loss=loss)


# -- on the wire


def dtypes_on_the_wire(
    engine: Engine, policy: MixedPrecisionPolicy
) -> tuple[set[torch.dtype], ...]:
    """Returns what a forward gathers, and what a backward after which nothing is gathered
    reduces.
    """
    model = engine.shard_tower(tower(), mp_policy=policy, reshard_after_forward=False)
    token_loss(model, engine.tokens(0)).backward()
    gathered: set[torch.dtype] = set()
    reduced: set[torch.dtype] = set()
    with watching_collectives(lambda name, chunk: gathered.add(chunk.dtype)):
        loss = token_loss(model, engine.tokens(1))
    with watching_collectives(lambda name, chunk: reduced.add(chunk.dtype)):
        loss.backward()
    return gathered, reduced


@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecisionPolicy(),
        BF16,
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        MixedPrecisionPolicy(param_dtype=torch.float16),
        MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    ],
    ids=["float32", "bf16 and fp32", "bf16", "fp16", "fp32 and bf16"],
)
@on_ranks(2)
def test_parameters_and_gradients_travel_in_the_dtypes_of_the_policy(
    policy: MixedPrecisionPolicy,
) -> None:
    param = policy.param_dtype or torch.float32
    default = torch.float32 if REDUCES_IN_GRAD_DTYPE else param
    expected = ({param}, {policy.reduce_dtype or default})
    assert dtypes_on_the_wire(FSDP2, policy) == expected
    assert dtypes_on_the_wire(SHARDGRAD, policy) == expected


# -- torch's autocast


@on_ranks(2)
def test_an_evaluation_and_micro_batches_may_share_an_autocast_region() -> None:
    """It keeps casts of weights until its end. Under FSDP2, gradients differ."""
    cast, found = partial(torch.autocast, "cpu", torch.bfloat16), []
    for outer, inner in ((cast, nullcontext), (nullcontext, cast)):
        model = SHARDGRAD.shard_stack(stack(5, 7, 3))
        with outer():
            for step in range(3):
                with inner(), torch.set_grad_enabled(step > 0):
                    loss = SHARDGRAD.loss(model, step, 5)
                if step > 0:
                    loss.backward()
        found.append(SHARDGRAD.snapshot(model))
    assert_same_bits(*found)
