"""`GradientPolicy(wire_dtype=torch.float8_e4m3fn)`: a quarter of the bytes; what they lose is sent
later.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

import shardgrad
from shardgrad import GradientPolicy
from shardgrad.engine.buffers import Chunks
from shardgrad.engine.unit import units_under
from shardgrad.features.float8_wire import ErrorFeedback, _quantize, error_feedback_of
from shardgrad.sharding import zero_copy
from shardgrad.sharding.layout import ShardLayout
from tests.features.test_wire_dtype import (
    Case,
    bytes_of_a_backward,
    grads_of_every_rank,
    sum_in_order,
    whole_gradients,
)
from tests.support.float8_blocks import Sender
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
)
from tests.support.ranks import Ranks

FLOAT8 = torch.float8_e4m3fn
WIRE = GradientPolicy(wire_dtype=FLOAT8)
BF16 = torch.bfloat16


# -- the oracle: plain torch and a table of codes, without communication
# ------------------------------------


class Oracle:
    """What each step of a case ends with, given what all messages before have lost."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._senders: dict[tuple[object, ...], Sender] = {}

    def _send(self, values: Tensor, *who: object) -> Tensor:
        return self._senders.setdefault(who, Sender()).send(values)

    def _exchanged(self, parts: list[Tensor], *who: object) -> Tensor:
        """Returns the float32 sum, in rank order, of what ranks send; a single one sends
        nothing.
        """
        if len(parts) == 1:
            return parts[0].float()
        return sum_in_order([self._send(part.float(), *who, i) for i, part in enumerate(parts)])

    def _over_shards(self, name: str, parts: list[Tensor]) -> list[Tensor]:
        """Returns the sum of each replica, or of each outer rank, given what each rank has."""
        size = len(parts) // self.case.replicas
        firsts = range(0, len(parts), size)
        return [self._exchanged(parts[i : i + size], name, "shards", i) for i in firsts]

    def _over_replicas(self, name: str, sums: list[Tensor], ranks: int) -> Tensor:
        total = self._exchanged(sums, name, "replicas")
        if len(sums) > 2:  # the parts that they have added up are gathered
            total = self._send(total, name, "parts")
        return total / ranks

    def step(self) -> Tensors:
        """Returns the gradients of the next step."""
        case, ranks = self.case, dist.get_world_size()
        by_micro = [
            grads_of_every_rank(micro, case.computes) for micro in range(case.micro_batches)
        ]
        pieces = ranks if case.options.get("zero_stage") == "hfsdp" else ranks // case.replicas
        right = {}
        for name in by_micro[0][0]:
            whole = [[grads[name] for grads in micro] for micro in by_micro]
            if case.waits == "reduce" or case.options.get("zero_stage") == 1:
                whole = [[sum_in_order(list(of_rank)) for of_rank in zip(*whole, strict=True)]]
            found = []
            for piece in range(pieces):
                cut = [[chunk_of(grad, pieces, piece) for grad in micro] for micro in whole]
                place = f"{name} {piece}"
                sums = [self._over_shards(place, micro) for micro in cut]
                if case.waits == "all-reduce":
                    sums = [
                        [sum_in_order(list(of_replica)) for of_replica in zip(*sums, strict=True)]
                    ]
                found.append(
                    sum_in_order([self._over_replicas(place, each, ranks) for each in sums])
                )
            right[name] = torch.cat(found)
        return right


def chunk_of(grad: Tensor, pieces: int, piece: int) -> Tensor:
    """Returns the rows that a rank holds, which may be none."""
    rows = -(-grad.shape[0] // pieces)
    return grad[piece * rows : (piece + 1) * rows]


# -- gradients
# ----------------------------------------------------------------------------------------------


def of_case(case: Case) -> Case:
    """Returns the same with float8 on the wire."""
    return replace(case, options={"gradient_policy": WIRE, **case.options})


def gradients_are_right(case: Case) -> None:
    oracle, model = Oracle(case), of_case(case).shard(tower())
    for _ in range(
        3
    ):  # in the second, what the first has lost comes along, and in the third its own loss
        of_case(case).run(model)
        assert_same_bits(whole_gradients(model), oracle.step())
        model.zero_grad()


ON_TWO = {
    "float32": Case(),
    "computed in bfloat16": Case(computes=BF16),
    "each micro-batch reduced": Case(micro_batches=3),
    "micro-batches summed first": Case(micro_batches=3, waits="reduce"),
    "gradients whole until the last backward": Case(micro_batches=3, options={"zero_stage": 1}),
    "offloaded": Case(micro_batches=2, options={"offload_policy": CPUOffloadPolicy()}),
    "replicas only": Case(replicas=2, micro_batches=2),
}
ON_FOUR = {
    "resharded to two of four": Case(computes=BF16, options={"reshard_after_forward": 2}),
    "replicas": Case(replicas=2, micro_batches=2),
    "replicas that wait for the last micro-batch": Case(
        replicas=2, micro_batches=2, waits="all-reduce"
    ),
    "four replicas": Case(replicas=4, micro_batches=2),
    "both axes": Case(replicas=2, micro_batches=2, options={"zero_stage": "hfsdp"}),
}


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_sum_what_was_sent_in_float8_and_send_later_what_that_has_lost(
    two_ranks: Ranks, name: str
) -> None:
    two_ranks.run(gradients_are_right, ON_TWO[name])


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_sum_what_was_sent_in_float8_and_send_later_what_that_has_lost(
    four_ranks: Ranks, name: str
) -> None:
    four_ranks.run(gradients_are_right, ON_FOUR[name])


def hook_sees_float32(replicas: int) -> None:
    case = of_case(Case(replicas=replicas))
    oracle, model = Oracle(case), case.shard(tower())
    seen: list[Tensor] = []
    for module in (*model.layers, model.embedding, model):
        module.set_all_reduce_hook(lambda chunk: seen.append(chunk.mul_(2.0)))
    case.run(model)
    assert {chunk.dtype for chunk in seen} == {torch.float32}
    assert_same_bits(
        whole_gradients(model), {name: 2 * grad for name, grad in oracle.step().items()}
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_hook_sees_the_average_in_float32(four_ranks: Ranks, replicas: int) -> None:
    four_ranks.run(hook_sees_float32, replicas)


def through_settings() -> None:
    case = of_case(Case())
    oracle, model = Oracle(case), case.shard(tower())
    model.set_separate_reduce_scatter_group()
    for module in (*model.layers, model.embedding, model):
        module.set_allocate_memory_from_process_group_for_comm(True)
        module.set_gradient_divide_factor(4.0)
    for _ in range(2):
        case.run(model)
        assert_same_bits(
            whole_gradients(model), {name: grad / 2 for name, grad in oracle.step().items()}
        )
        model.zero_grad()


def test_settings_of_collectives_keep_the_wire_dtype_and_what_was_lost(two_ranks: Ranks) -> None:
    two_ranks.run(through_settings)


def zero_copy_gradients_are_packed() -> None:
    sizes, ranks = (64, 128, 64), dist.get_world_size()
    case = of_case(Case(options={"reshard_after_forward": False}))
    senders: dict[str, Sender] = {}
    with patch.object(zero_copy, "ZERO_COPY_NBYTES", 2**8):
        model = case.shard_stack(stack(*sizes))
        for _ in range(2):
            model.zero_grad()
            model(SHARDGRAD.inputs(0, sizes[0])).square().mean().backward()
            right = {}
            by_rank = []
            for x in UNSHARDED.inputs(0, sizes[0]).chunk(ranks):
                whole = stack(*sizes)
                whole(x).square().mean().backward()
                by_rank.append({name: p.grad for name, p in whole.named_parameters()})
            for name in by_rank[0]:
                pieces = []
                for piece in range(ranks):
                    sent = [chunk_of(grads[name], ranks, piece) for grads in by_rank]
                    who = [f"{name} {piece} {rank}" for rank in range(ranks)]
                    arrived = [
                        senders.setdefault(w, Sender()).send(s)
                        for w, s in zip(who, sent, strict=True)
                    ]
                    pieces.append(sum_in_order(arrived))
                right[name] = torch.cat(pieces) / ranks
            assert_same_bits(whole_gradients(model), right)


def test_parameters_that_could_be_sent_from_where_they_are_are_packed(two_ranks: Ranks) -> None:
    two_ranks.run(zero_copy_gradients_are_packed)


@pytest.mark.parametrize("begin", [0, 256])
def test_counts_of_many_ranks_lose_nothing_in_a_whole_chunk_or_in_a_part(begin: int) -> None:
    layout = ShardLayout.of([(3 * 128,)], 1, alignment=128, with_flags=True)
    assert (layout.tail_offset, layout.chunk_numel) == (384, 512)
    chunk = torch.linspace(1, 2, 512)
    chunk[384:] = 17.0  # ranks that had a gradient; a code has no room for the last bit
    feedback = ErrorFeedback()
    feedback.belongs_to(layout)
    values = chunk[begin:].clone()
    message = torch.zeros(640, dtype=torch.uint8)
    _quantize(values, Chunks(message, (message,)), values.numel(), feedback, "sums", begin)
    ((_, kept),) = feedback.items()
    codes = kept[: values.numel()]
    assert codes[:-128].any(), "values lose something"
    assert not codes[-128:].any(), "a count that comes back makes a parameter look touched"


# -- what is kept
# -------------------------------------------------------------------------------------------


def kept_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of what this rank keeps, by unit."""
    return {
        unit.name or "root": torch.cat([kept for _, kept in error_feedback_of(grads)])
        for unit in units_under(model)
        for grads in unit.grad_groups
    }


def a_rank_without_a_gradient_keeps_what_it_owes() -> None:
    model = SHARDGRAD.shard_tower(tower(), gradient_policy=WIRE)
    rank, case = dist.get_rank(), Case()
    oracle = Oracle(case)
    token_loss(model, SHARDGRAD.tokens(0)).backward()
    oracle.step()
    model.zero_grad()
    before = kept_of(model)
    assert all(kept.any() for kept in before.values())
    with shardgrad.participate(model):
        if rank == 1:
            token_loss(model, SHARDGRAD.tokens(0)).backward()
    alone = kept_of(model)
    assert all(torch.equal(before[name], alone[name]) == (rank == 0) for name in before)
    right = {}
    for name, grad in grads_of_every_rank(0, torch.float32)[1].items():
        pieces = [
            oracle._send(chunk_of(grad, 2, i), f"{name} {i}", "shards", 0, 1) for i in range(2)
        ]
        right[name] = torch.cat(pieces) / 2
    assert_same_bits(whole_gradients(model), right)
    model.zero_grad()
    token_loss(model, SHARDGRAD.tokens(0)).backward()
    assert_same_bits(whole_gradients(model), oracle.step())


def test_a_rank_without_a_batch_sends_nothing_and_owes_what_it_owed(two_ranks: Ranks) -> None:
    two_ranks.run(a_rank_without_a_gradient_keeps_what_it_owes)


def only_what_is_sent_changes_what_is_kept() -> None:
    model = SHARDGRAD.shard_tower(tower(), gradient_policy=WIRE)
    token_loss(model, SHARDGRAD.tokens(0)).backward()
    before = kept_of(model)
    model.set_requires_gradient_sync(False)
    token_loss(model, SHARDGRAD.tokens(1)).backward()
    model.zero_grad()
    assert all(torch.equal(before[name], kept) for name, kept in kept_of(model).items())


def test_gradients_that_wait_or_are_dropped_unsent_leave_what_is_kept(two_ranks: Ranks) -> None:
    two_ranks.run(only_what_is_sent_changes_what_is_kept)


def infinity_is_seen_and_forgotten(replicas: int) -> None:
    case = of_case(Case(replicas=replicas))
    model, oracle = case.shard(tower()), Oracle(case)
    case.run(model)
    oracle.step()
    model.zero_grad()
    loss = token_loss(model, SHARDGRAD.tokens(0))
    (loss * (math.inf if dist.get_rank() == 0 else 1.0)).backward()
    assert not shardgrad.clip_grad_norm_(model, 1.0).isfinite()
    bad = {name: grad.isfinite().all().item() for name, grad in whole_gradients(model).items()}
    assert not any(bad.values()), bad
    model.zero_grad()
    for _ in range(2):
        case.run(model)
        found = whole_gradients(model)
        model.zero_grad()
        assert all(grad.isfinite().all() for grad in found.values()), "it has come back"
        for name, right in float32_gradients(case).items():
            # What every one of the messages loses, of values as large as the largest that are sent.
            assert (
                found[name] - right
            ).abs().max() <= 2**-3 * right.abs().max() * dist.get_world_size()


def float32_gradients(case: Case) -> Tensors:
    by_rank = grads_of_every_rank(0, case.computes)
    ranks = len(by_rank)
    return {name: sum_in_order([grads[name] for grads in by_rank]) / ranks for name in by_rank[0]}


@pytest.mark.parametrize("replicas", [1, 4])
def test_an_infinity_arrives_and_is_gone_in_the_next_step(four_ranks: Ranks, replicas: int) -> None:
    four_ranks.run(infinity_is_seen_and_forgotten, replicas)


class OnPurposeError(Exception):
    """Raised in a backward."""


def fail(grad: Tensor) -> None:
    raise OnPurposeError


def a_failed_backward_starts_over_what_it_sent(replicas: int) -> None:
    case = of_case(Case(replicas=replicas))
    model: Tower = case.shard(tower())
    case.run(model)
    model.zero_grad()
    before = kept_of(model)
    hidden = model.layers[1].register_forward_hook(
        lambda _, __, out: out.register_hook(fail) and None
    )
    with pytest.raises(OnPurposeError):
        case.run(model)
    hidden.remove()
    with pytest.warns(RuntimeWarning, match="failed half-way"):
        model.reset_iter_state()
    after = kept_of(model)
    sent = {name for name, kept in after.items() if not torch.equal(kept, before[name])}
    assert "layers.0" not in sent, "it had sent nothing"
    assert "embedding" not in sent, "it had sent nothing"
    assert sent, "nothing was sent before the failure"
    assert not any(after[name].any() for name in sent), (
        "a message that nobody reads has left its losses"
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_failed_backward_leaves_no_losses_of_what_it_sent_and_no_others_change(
    two_ranks: Ranks, replicas: int
) -> None:
    two_ranks.run(a_failed_backward_starts_over_what_it_sent, replicas)


def freezing_starts_over() -> None:
    model = SHARDGRAD.shard_tower(tower(), gradient_policy=WIRE)
    token_loss(model, SHARDGRAD.tokens(0)).backward()
    model.zero_grad()
    before = kept_of(model)
    first = next(p for name, p in model.named_parameters() if name.startswith("layers.0"))
    first.requires_grad_(False)
    token_loss(model, SHARDGRAD.tokens(0)).backward()
    model.zero_grad()
    first.requires_grad_(True)
    token_loss(model, SHARDGRAD.tokens(0)).backward()
    # The places are those of before; a unit whose places went was started over, and sends as in a
    # first step.
    after = kept_of(model)
    assert torch.equal(after["layers.0"], before["layers.0"])
    assert not torch.equal(after["layers.1"], before["layers.1"])


def test_when_places_change_what_was_lost_in_the_old_ones_is_forgotten(two_ranks: Ranks) -> None:
    two_ranks.run(freezing_starts_over)


# -- checkpoints
# --------------------------------------------------------------------------------------------


def a_checkpoint_continues_bit_for_bit(folder: Path, replicas: int) -> None:
    def build() -> tuple[Tower, torch.optim.Optimizer]:
        mesh = (
            {"mesh": hsdp_mesh(replicas, dist.get_world_size() // replicas)} if replicas > 1 else {}
        )
        model = SHARDGRAD.shard_tower(tower(), gradient_policy=WIRE, **mesh)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Tower, optimizer: torch.optim.Optimizer, number: int) -> None:
        token_loss(model, SHARDGRAD.tokens(number)).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build()
    for number in range(2):
        step(model, optimizer, number)
    state = {"model": model.state_dict(), "feedback": shardgrad.error_feedback(model)}
    assert any(kept.to_local().any() for kept in state["feedback"].values())
    dcp.save(state, checkpoint_id=folder)
    step(model, optimizer, 2)

    resumed, optimizer = build()
    state = {"model": resumed.state_dict(), "feedback": shardgrad.error_feedback(resumed)}
    assert not any(kept.to_local().any() for kept in state["feedback"].values())
    dcp.load(state, checkpoint_id=folder)
    resumed.load_state_dict(state["model"])
    step(resumed, optimizer, 2)
    assert_same_bits(SHARDGRAD.snapshot(resumed), SHARDGRAD.snapshot(model))
    for name, kept in shardgrad.error_feedback(model).items():
        assert torch.equal(kept.to_local(), shardgrad.error_feedback(resumed)[name].to_local()), (
            name
        )


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_training_goes_on_bit_for_bit_from_a_checkpoint_with_what_was_lost(
    four_ranks: Ranks, tmp_path: Path, replicas: int
) -> None:
    four_ranks.run(a_checkpoint_continues_bit_for_bit, tmp_path / "checkpoint", replicas)


def other_models_have_none() -> None:
    for policy in (GradientPolicy(), GradientPolicy(wire_dtype=BF16)):
        assert (
            shardgrad.error_feedback(SHARDGRAD.shard_tower(tower(), gradient_policy=policy)) == {}
        )


def test_without_float8_there_is_nothing_to_save(two_ranks: Ranks) -> None:
    two_ranks.run(other_models_have_none)


# -- bytes
# --------------------------------------------------------------------------------------------------


def a_quarter_of_the_bytes(replicas: int) -> None:
    wide, narrow = (
        bytes_of_a_backward(policy, replicas).total() for policy in (GradientPolicy(), WIRE)
    )
    print(f"{replicas} x {dist.get_world_size() // replicas} ranks: {wide:,} and {narrow:,} bytes")
    # An exponent for 128 codes. The tail of a chunk has 128 codes, where it had 128 bytes, and a
    # message ends in up to 128 bytes for a tag.
    assert 0.25 <= narrow / wide < 0.25 * (1 + 1 / 128) + 0.003


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_quarter_of_the_bytes_of_float32_are_sent_over_both_axes(
    four_ranks: Ranks, replicas: int
) -> None:
    four_ranks.run(a_quarter_of_the_bytes, replicas)


def memory_per_element(replicas: int) -> None:
    sizes, ranks = (256, 512, 256), dist.get_world_size()
    case = of_case(Case(replicas=replicas))
    model = case.shard_stack(stack(*sizes))
    kept = Counter(
        {name: kept.to_local().numel() for name, kept in shardgrad.error_feedback(model).items()}
    )
    params = sum(p.numel() for p in model.parameters())
    shards = ranks // replicas
    # All gradients where they are sent to shards, a shard of their sums where it is sent to other
    # replicas, and of more than two replicas a part of what they sum.
    elements = (
        params * (shards > 1) + params / shards * (replicas > 1) + params / ranks * (replicas > 2)
    )
    assert elements * 129 / 128 <= kept.total() < elements * 129 / 128 * 1.01 + 129 * 2 * 3 * ranks


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_what_is_kept_is_a_byte_for_each_element_that_is_sent(
    four_ranks: Ranks, replicas: int
) -> None:
    four_ranks.run(memory_per_element, replicas)
