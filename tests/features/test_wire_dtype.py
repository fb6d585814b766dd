"""`GradientPolicy(wire_dtype=torch.bfloat16)`: rounded, summed in float32 in rank order, half the
bytes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from shardgrad import GradientPolicy
from shardgrad.errors import (
    CustomCommError,
    OptionError,
    OptionTypeError,
    RankDisagreementError,
)
from shardgrad.features.wire_dtype import ReplicaExchange, refuse_too_many_ranks
from shardgrad.policies import REDUCES_IN_GRAD_DTYPE
from shardgrad.sharding.layout import ALIGNMENT_NBYTES
from tests.support.parity import (
    SHARDGRAD,
    UNSHARDED,
    Tensors,
    Tower,
    assert_same_bits,
    hsdp_mesh,
    stack,
    token_loss,
    tower,
    train,
    watching_collectives,
)
from tests.support.ranks import Ranks, on_ranks

BF16 = torch.bfloat16
WIRE = GradientPolicy(wire_dtype=BF16)


# -- the oracle: plain torch, without communication


def exchanged(parts: list[Tensor]) -> Tensor:
    """Returns the float32 sum, in rank order, of parts that were rounded to travel; a single one
    does not.
    """
    if len(parts) == 1:
        return parts[0].float()
    total = parts[0].to(BF16).float()
    for part in parts[1:]:
        total = total + part.to(BF16).float()
    return total


def reduced_over_shards(parts: list[Tensor], replicas: int) -> list[Tensor]:
    """Returns the sum of each replica, given what each rank has."""
    size = len(parts) // replicas
    return [exchanged(parts[first : first + size]) for first in range(0, len(parts), size)]


def reduced_over_replicas(sums: list[Tensor], ranks: int) -> Tensor:
    total = exchanged(sums)
    if len(sums) > 2:  # the parts that they have added up are gathered
        total = total.to(BF16).float()
    return total / ranks


def grads_of_every_rank(micro: int, dtype: torch.dtype) -> list[Tensors]:
    """Returns the gradients of each rank's batch, of whole towers that compute in `dtype`."""
    ranks = dist.get_world_size()
    tokens, targets = UNSHARDED.tokens(micro)
    found = []
    for batch in zip(tokens.chunk(ranks), targets.chunk(ranks), strict=True):
        model = tower().to(dtype)
        if REDUCES_IN_GRAD_DTYPE:  # what autograd gives, which may be wider than the parameter
            for param in model.parameters():
                param.grad_dtype = None
        token_loss(model, batch).backward()
        found.append(grads_of(model))
    return found


def grads_of(model: nn.Module) -> Tensors:
    return {name: p.grad for name, p in model.named_parameters()}


# -- what is built


@dataclass(frozen=True)
class Case:
    """How a tower is sharded and trained.

    Attributes:
        replicas: above 1 for a mesh of two axes.
        micro_batches: backwards before the gradients are looked at.
        waits: what waits for the last of them: "", "reduce" or "all-reduce".
        computes: `param_dtype`.
        options: of `fully_shard`.
    """

    replicas: int = 1
    micro_batches: int = 1
    waits: str = ""
    computes: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)

    def all_options(self) -> dict[str, Any]:
        options = {"gradient_policy": WIRE, **self.options}
        if self.replicas > 1:
            options["mesh"] = hsdp_mesh(self.replicas, dist.get_world_size() // self.replicas)
        if self.computes != torch.float32:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=self.computes)
        return options

    def shard(self, model: Tower) -> Tower:
        return SHARDGRAD.shard_tower(model, **self.all_options())

    def shard_stack(self, model: nn.Sequential) -> nn.Sequential:
        return SHARDGRAD.shard_stack(model, **self.all_options())

    def run(self, model: Tower) -> None:
        for micro in range(self.micro_batches):
            last = micro == self.micro_batches - 1
            if self.waits == "reduce":
                model.set_requires_gradient_sync(last)
            elif self.waits == "all-reduce":
                model.set_requires_all_reduce(last)
            model.set_is_last_backward(last)
            token_loss(model, SHARDGRAD.tokens(micro)).backward()

    def expected(self) -> Tensors:
        """Returns the gradients that all ranks together have to end with."""
        ranks = dist.get_world_size()
        by_micro = [
            grads_of_every_rank(micro, self.computes) for micro in range(self.micro_batches)
        ]
        right = {}
        for name in by_micro[0][0]:
            parts = [[grads[name] for grads in micro] for micro in by_micro]
            if self.waits == "reduce" or self.options.get("zero_stage") == 1:
                parts = [[sum_in_order(list(of_rank)) for of_rank in zip(*parts, strict=True)]]
            sums = [reduced_over_shards(micro, self.replicas) for micro in parts]
            if self.waits == "all-reduce":
                sums = [[sum_in_order(list(of_replica)) for of_replica in zip(*sums, strict=True)]]
            right[name] = sum_in_order([reduced_over_replicas(each, ranks) for each in sums])
        return right


def sum_in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def whole_gradients(model: nn.Module) -> Tensors:
    return {
        name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None
    }


def gradients_are_right(case: Case) -> None:
    model = case.shard(tower())
    for _ in range(2):  # in the second, all memory is there already
        case.run(model)
        assert_same_bits(whole_gradients(model), case.expected())
        model.zero_grad()


# -- gradients

ON_TWO = {
    "float32": Case(),
    "computed in bfloat16": Case(computes=BF16),
    "each micro-batch reduced": Case(micro_batches=3),
    "micro-batches summed first": Case(micro_batches=3, waits="reduce"),
    "micro-batches summed first, computed in bfloat16": Case(
        micro_batches=2, waits="reduce", computes=BF16
    ),
    "parameters whole from step to step": Case(micro_batches=2, options={"zero_stage": 2}),
    "gradients whole until the last backward": Case(micro_batches=3, options={"zero_stage": 1}),
    "offloaded": Case(micro_batches=2, options={"offload_policy": CPUOffloadPolicy()}),
    "replicas only": Case(replicas=2, micro_batches=2),
}
ON_FOUR = {
    "float32": Case(micro_batches=2, waits="reduce"),
    "resharded to two of four": Case(computes=BF16, options={"reshard_after_forward": 2}),
    "replicas": Case(replicas=2, micro_batches=2),
    "replicas, micro-batches summed first": Case(replicas=2, micro_batches=2, waits="reduce"),
    "replicas that wait for the last micro-batch": Case(
        replicas=2, micro_batches=2, waits="all-reduce"
    ),
    "four replicas": Case(replicas=4, micro_batches=2),
    "both axes": Case(replicas=2, micro_batches=2, options={"zero_stage": "hfsdp"}),
}


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_sum_in_float32_what_was_rounded_once(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(gradients_are_right, ON_TWO[name])


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_sum_in_rank_order_what_was_rounded_once(four_ranks: Ranks, name: str) -> None:
    four_ranks.run(gradients_are_right, ON_FOUR[name])


def trains_to(policy: GradientPolicy) -> Tensors:
    return train(SHARDGRAD, SHARDGRAD.shard_tower(tower(), gradient_policy=policy), micro_batches=2)


@on_ranks(1)
def test_one_rank_sends_nothing_and_rounds_nothing() -> None:
    assert_same_bits(trains_to(WIRE), trains_to(GradientPolicy()))


@pytest.mark.parametrize("replicas", [1, 2])
@on_ranks(4)
def test_a_hook_sees_the_average_in_float32(replicas: int) -> None:
    case = Case(replicas=replicas)
    model = case.shard(tower())
    seen: list[Tensor] = []
    for module in (*model.layers, model.embedding, model):
        module.set_all_reduce_hook(lambda chunk: seen.append(chunk.mul_(2.0)))
    case.run(model)
    assert {chunk.dtype for chunk in seen} == {torch.float32}
    assert_same_bits(
        whole_gradients(model), {name: 2 * grad for name, grad in case.expected().items()}
    )


def test_parts_that_replicas_add_up_are_aligned_and_cover_the_chunk() -> None:
    for size, numel in product(range(3, 9), range(64, 5_000, 96)):
        replicas: Any = SimpleNamespace(size=lambda size=size: size)
        count, floats = ReplicaExchange(replicas, BF16).room(None, numel)
        part_nbytes, rest = divmod(4 * count * floats, 2 * size)  # all are sent, and all come
        assert rest == part_nbytes % ALIGNMENT_NBYTES == 0
        assert size * part_nbytes >= numel * BF16.itemsize


# -- bytes

SIZES = (256, 512, 256)


def bytes_of_a_backward(policy: GradientPolicy, replicas: int) -> Counter[str]:
    options = {"gradient_policy": policy, "reshard_after_forward": False}
    model = Case(replicas=replicas, options=options).shard_stack(stack(*SIZES))
    sent: Counter[str] = Counter()
    for _ in range(2):
        loss = SHARDGRAD.loss(model, 0, SIZES[0])
        sent.clear()
        with watching_collectives(lambda name, tensor: sent.update({name: tensor.nbytes})):
            loss.backward()
    return sent


@pytest.mark.parametrize("replicas", [1, 2])
@on_ranks(4)
def test_half_of_the_bytes_are_sent_over_both_axes(replicas: int) -> None:
    wide, narrow = (
        bytes_of_a_backward(policy, replicas).total() for policy in (GradientPolicy(), WIRE)
    )
    # The tail of a chunk, with flags and tag, has 128 bytes in either dtype.
    assert 0.5 <= narrow / wide < 0.502


# -- what is refused


@pytest.mark.parametrize(
    ("wire_dtype", "reduce_dtype", "says"),
    [
        (torch.float16, None, r"(?s)expected: torch.bfloat16, or None.*wire_dtype=torch.float16"),
        ("bf16", None, "wire_dtype must be a torch.dtype"),
        (torch.float8_e8m0fnu, None, "wire_dtype must be a torch.dtype that gradients can have"),
        *((BF16, dtype, f"reduce_dtype={dtype}") for dtype in (BF16, torch.float16, torch.float64)),
    ],
)
@on_ranks(1)
def test_dtypes_that_are_not_summed_in_float32_are_refused_by_name(
    wire_dtype: Any, reduce_dtype: torch.dtype | None, says: str
) -> None:
    model = stack(4, 4)
    policy, mixed = GradientPolicy(wire_dtype=wire_dtype), MixedPrecisionPolicy(BF16, reduce_dtype)
    with pytest.raises((OptionError, OptionTypeError), match=says):
        SHARDGRAD.fully_shard(model, gradient_policy=policy, mp_policy=mixed)
    assert type(model) is nn.Sequential, "the module is no longer as it was"


@pytest.mark.parametrize("axis", ["gather_group", "replicate_group", "levels.outer"])
def test_an_axis_of_more_ranks_than_one_sum_takes_is_refused(axis: str) -> None:
    def mesh(ranks: int) -> Any:
        sizes = {"gather_group": 2, "replicate_group": 2, "levels.outer": 2, axis: ranks}
        groups = {name: SimpleNamespace(size=lambda n=n: n) for name, n in sizes.items()}
        return SimpleNamespace(levels=SimpleNamespace(outer=groups.pop("levels.outer")), **groups)

    refuse_too_many_ranks(mesh(1024))
    with pytest.raises(OptionError, match=r"(?s)at most 1,024 ranks.*1,025.*two axes"):
        refuse_too_many_ranks(mesh(1025))


@on_ranks(1)
def test_a_reduce_scatter_of_the_program_is_refused() -> None:
    model = SHARDGRAD.fully_shard(stack(4, 4), gradient_policy=WIRE)
    with pytest.raises(CustomCommError, match=r"(?s)wire_dtype.*parameter 0.weight"):
        model.set_custom_reduce_scatter(object())


@on_ranks(2)
def test_ranks_with_different_wire_dtypes_are_told() -> None:
    policy = (GradientPolicy(), WIRE)[dist.get_rank()]
    model = SHARDGRAD.fully_shard(stack(4, 4), gradient_policy=policy)
    with pytest.raises(RankDisagreementError, match="wire_dtype"):
        model(torch.ones(2, 4))
