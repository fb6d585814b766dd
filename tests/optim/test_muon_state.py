"""`shardgrad.optim.Muon`: state that goes to torch and back, groups, dtypes, what travels,
refusals.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardgrad
from shardgrad.errors import (
    CaptureError,
    CollectiveError,
    OptimizerParameterError,
    OptionError,
)
from shardgrad.optim import muon_bucket, ownership
from tests.support.muon import (
    TIGHT,
    exactly,
    muon,
)
from tests.support.parity import (
    GATHERED,
    SHARDGRAD,
    UNSHARDED,
    Engine,
    Tensors,
    assert_close,
    stack,
    token_loss,
    tower,
    unchanged,
)
from tests.support.ranks import Ranks, on_ranks

# -- groups


def train_in_groups(engine: Engine) -> Tensors:
    """A second group in the same units, added later, with every option of its own; lr is a
    tensor.
    """
    model = engine.shard_tower(tower())
    matrices = [p for p in model.parameters() if p.ndim == 2]
    lr = torch.tensor(0.02)
    optim = muon(engine, matrices[::2], lr=lr)
    for step in range(4):
        if step == 1:
            optim.add_param_group(
                {
                    "params": matrices[1::2],
                    "lr": 0.01,
                    "nesterov": False,
                    "adjust_lr_fn": "match_rms_adamw",
                }
            )
        if step == 2:
            lr.fill_(0.03)
            optim.param_groups[0]["adjust_lr_fn"] = "match_rms_adamw"
        token_loss(model, engine.tokens(step)).backward()
        optim.step(lambda: torch.zeros(()))
        model.zero_grad()
    return engine.snapshot(model)


@on_ranks(2)
def test_groups_added_later_and_a_tensor_as_learning_rate() -> None:
    with exactly():
        assert_close(train_in_groups(GATHERED), train_in_groups(UNSHARDED), tolerance=TIGHT)


# -- parameters that are not sharded, and those of 16 bits


def test_plain_matrices_follow_torch_where_columns_lie_together_and_groups_are_replaced() -> None:
    found = []
    for home in (torch.optim, shardgrad.optim):
        with exactly(), mock.patch.object(ownership, "_LEAST_NUMEL", 100):  # in one bucket
            torch.manual_seed(0)
            params = [nn.Parameter(torch.randn(9, 4)), nn.Parameter(torch.randn(9, 4).t())]
            assert not params[1].is_contiguous()
            optim = home.Muon(params, lr=0.1)
            for _ in range(3):
                (params[0] @ params[1]).square().mean().backward()
                optim.step()
                optim.zero_grad()
                group = {**optim.param_groups[0], "params": params[:1]}
                optim.param_groups[:] = [group, {**group, "params": params[1:], "momentum": 0.2}]
            found.append({str(i): p.detach() for i, p in enumerate(params)})
    assert_close(*found, tolerance=TIGHT)


@on_ranks(2)
def test_momentum_has_the_dtype_of_the_gradients_or_the_one_asked_for() -> None:
    model = stack(6, 6).to(torch.bfloat16)
    shardgrad.fully_shard(model, gradient_policy=shardgrad.GradientPolicy(dtype=torch.float32))
    for asked, expected in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
        optim = shardgrad.optim.Muon([model[0].weight], momentum_dtype=asked)
        assert optim.state[model[0].weight]["momentum_buffer"].dtype == expected


# -- what travels


@contextmanager
def exchanges() -> Iterator[tuple[list[int], list[int]]]:
    """Yields the bytes that this rank sends to others, one number for each exchange; and how many
    exchanges are in flight whenever matrices are orthogonalized.
    """
    sent: list[int] = []
    meanwhile: list[int] = []
    in_flight: set[dist.Work] = set()
    original, orthogonalize = dist.all_to_all_single, muon_bucket.newton_schulz_

    def counted(into: Tensor, out: Tensor, received: Any, to: Any, **options: Any) -> Any:
        own = to[dist.get_rank()]
        sent.append((sum(to) - own) * out.itemsize)
        work = original(into, out, received, to, **options)
        in_flight.add(work)

        def wait() -> None:
            in_flight.remove(work)
            work.wait()

        return mock.Mock(wait=wait)

    def noted(*args: Any, **options: Any) -> None:
        meanwhile.append(len(in_flight))
        orthogonalize(*args, **options)

    with (
        mock.patch.object(dist, "all_to_all_single", counted),
        mock.patch.object(muon_bucket, "newton_schulz_", noted),
    ):
        yield sent, meanwhile


def a_step_sends_each_piece_there_and_back_while_others_are_orthogonalized() -> None:
    world_size = dist.get_world_size()
    model = SHARDGRAD.shard_stack(stack(*[64] * 9))
    optim = shardgrad.optim.Muon([p for p in model.parameters() if p.ndim == 2])
    for step in range(3):
        SHARDGRAD.loss(model, step, 64).backward()
        with exchanges() as (sent, meanwhile), mock.patch.object(ownership, "_LEAST_NUMEL", 64**2):
            optim.step()
        optim.zero_grad()
        # Eight units of one matrix: a bucket is as many of them as there are ranks. The next one
        # travels to its owners, and the one before back.
        count = 8 // world_size
        assert len(sent) == 2 * count
        assert meanwhile == [1, *[2] * (count - 2), 1]
        numel = 8 * 64 * 64
        assert sum(sent) == 2 * 2 * numel / world_size * (world_size - 1) / world_size
    assert len(optim._plans) == 1


def test_a_step_sends_two_bytes_there_and_back_for_each_element(
    two_ranks: Ranks, four_ranks: Ranks
) -> None:
    for ranks in (two_ranks, four_ranks):
        ranks.run(a_step_sends_each_piece_there_and_back_while_others_are_orthogonalized)


# -- refusals


def test_what_torch_refuses_is_refused_with_a_typed_error() -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    for options, message in [
        ({"adjust_lr_fn": "other"}, "adjust_lr_fn"),
        ({"ns_steps": 100}, "ns_steps"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients"),
        ({"lr": -1.0}, "lr"),
        ({"momentum": -1.0}, "momentum"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"num_heads": 2}, "num_heads"),
        ({"num_heads": 0}, "num_heads"),
        ({"ns_dtype": torch.float16}, "dtype"),
        ({"momentum_dtype": torch.int32}, "dtype"),
    ]:
        with pytest.raises(OptionError, match=message):
            shardgrad.optim.Muon([weight], **options)


def test_a_vector_is_refused_by_name_and_adamw_is_suggested() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(OptimizerParameterError, match=r"(?s)parameter bias.*AdamW"):
        shardgrad.optim.Muon(model.named_parameters())


@on_ranks(2)
def test_a_failed_exchange_or_norm_is_a_typed_error_and_moves_no_weight() -> None:
    model = SHARDGRAD.fully_shard(stack(6, 5))
    optim = shardgrad.optim.Muon([model[0].weight], lr=0.1)
    SHARDGRAD.loss(model, 0, 6).backward()
    failing = mock.Mock(side_effect=RuntimeError)  # without a text
    with (
        unchanged(model.parameters()),
        mock.patch.multiple(dist, all_to_all_single=failing, all_reduce=failing),
    ):
        with pytest.raises(CollectiveError, match="exchange of matrices"):
            optim.step()
        with pytest.raises(CollectiveError, match="gradients' norm"):
            shardgrad.clip_grad_norm_(model, 1.0)


def test_a_plan_is_not_made_while_a_graph_is_being_captured() -> None:
    weight, other = (nn.Parameter(torch.randn(3, 3)) for _ in range(2))
    weight.grad, other.grad = torch.randn(2, 3, 3)
    optim = shardgrad.optim.Muon([weight, other])
    optim.step()
    other.grad = None  # both have been updated, but not one alone
    with (
        unchanged([weight]),
        mock.patch("shardgrad.optim.segment.is_capturing", return_value=True),
        pytest.raises(CaptureError, match=r"(?s)in a capture.*gradients at new addresses"),
    ):
        optim.step()
