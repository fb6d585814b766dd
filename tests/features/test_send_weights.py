"""Weights sent from a sharded trainer to a tensor-parallel receiver."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

import shardgrad
from shardgrad.errors import CollectiveError, OptionError, OptionTypeError
from shardgrad.features import send_weights
from shardgrad.features.export_table import ExportedParameter
from tests.support.apart import heard_apart
from tests.support.ranks import Ranks, on_ranks

HIDDEN, HEADS, KV_HEADS, HEAD = 14, 4, 2, 3


class Layer(nn.Module):
    """The projections of an attention, as a checkpoint names them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD)
        self.o_proj = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)
        self.norm = nn.RMSNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.q_proj(x) + self.k_proj(x).repeat(1, 2) + self.v_proj(x).repeat(1, 2)
        return self.norm(x + self.o_proj(heads))


# As vLLM and SGLang have them: heads over ranks, fused where read together.
LAYOUT = {
    "qkv_proj.weight": [("q_proj.weight", 0), ("k_proj.weight", 0), ("v_proj.weight", 0)],
    "qkv_proj.bias": [("q_proj.bias", 0), ("k_proj.bias", 0), ("v_proj.bias", 0)],
    "o_proj.weight": [("o_proj.weight", 1)],
    "norm.weight": [("norm.weight", None)],
}


def layer() -> Layer:
    torch.manual_seed(0)
    return Layer()


def shard_of_receiver(whole: dict[str, Tensor], place: int, size: int) -> dict[str, Tensor]:
    """The oracle: cuts whole parameters as the receiver's own loader would."""
    return {
        target: torch.cat(
            [
                whole[name] if dim is None else whole[name].chunk(size, dim)[place]
                for name, dim in cuts
            ]
        )
        for target, cuts in LAYOUT.items()
    }


class Copies(TorchDispatchMode):
    """Counts the bytes that operations write to memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("clone", "copy_", "_to_copy", "cat", "contiguous"):
            self.nbytes += out.numel() * out.itemsize
        return out


@contextmanager
def counting_sent() -> Iterator[list[int]]:
    """Yields a list, which has the bytes of every message that this rank has sent in the end."""
    sent: list[int] = []
    with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as spy:
        yield sent
    ops = [op for call in spy.call_args_list for op in call.args[0]]
    sent += [op.tensor.nbytes for op in ops if op.op is dist.isend]


def from_rank_0(value: Any = None) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def trainer_mesh(trainers: int, mesh: str) -> DeviceMesh:
    """Every rank of the world has to call it, the receivers too."""
    if mesh == "hsdp":
        return DeviceMesh("cpu", torch.arange(2).view(2, 1), mesh_dim_names=("replicate", "shard"))
    return DeviceMesh("cpu", list(range(trainers)))


def train_and_send(
    trainers: int = 2,
    mesh: str = "fsdp",
    dtype: torch.dtype | None = None,
    by_columns: bool = False,
) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    receivers = list(range(trainers, size))
    devices = trainer_mesh(trainers, mesh)
    if rank >= trainers:
        plan, place = from_rank_0(), rank - trainers
        wanted = shard_of_receiver(layer().state_dict(), place, len(receivers))
        wire = dtype or torch.float32
        tensors = {name: torch.full_like(t, torch.nan) for name, t in wanted.items()}
        addresses = {name: t.data_ptr() for name, t in tensors.items()}
        for _ in range(2):
            with counting_sent() as said:
                shardgrad.receive_weights(tensors, plan)
            senders = {m.sender for m in plan.messages if m.receiver == rank}
            assert said == [1] * len(senders)  # a byte, that all is there
            for name, t in shard_of_receiver(from_rank_0(), place, len(receivers)).items():
                assert torch.equal(tensors[name], t.to(wire).float()), name
        assert all(t._version for t in tensors.values())
        assert addresses == {name: t.data_ptr() for name, t in tensors.items()}
        own = sum(t.numel() * wire.itemsize for t in tensors.values())
        received = [m.nbytes for m in plan.messages if m.receiver == rank]
        assert sum(received) == own  # and no byte twice
        return
    model = layer()
    options = (
        {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None} if by_columns else {}
    )
    shardgrad.fully_shard(model, mesh=devices, **options)
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=0.1)
    table = shardgrad.export_table(model)
    plan = from_rank_0(shardgrad.plan_weights(table, LAYOUT, receivers, dtype=dtype))
    mine = [m for m in plan.messages if m.sender == rank]
    assert mine
    columns = sum(m.nbytes for m in mine if m.name == "o_proj.weight")
    columns *= len(receivers) > 1  # else it is cut by nobody
    for step in range(2):
        model(torch.full((2, HIDDEN), 1.0 + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with Copies() as copies, counting_sent() as sent:
            shardgrad.send_weights(model, plan)
        assert sum(sent) == sum(m.nbytes for m in mine)
        if dtype is None and not by_columns:
            assert copies.nbytes == columns  # rows are sent from where they are
        from_rank_0({name: param.full_tensor() for name, param in model.named_parameters()})


@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_a_tensor_parallel_receiver_gets_its_own_pieces(four_ranks: Ranks, trainers: int) -> None:
    four_ranks.run(train_and_send, trainers)


@pytest.mark.parametrize(
    "options", [{"mesh": "hsdp"}, {"dtype": torch.bfloat16}, {"by_columns": True}], ids=str
)
def test_replicas_other_dtypes_and_columns_are_sent_too(
    four_ranks: Ranks, options: dict[str, Any]
) -> None:
    four_ranks.run(train_and_send, **options)


@on_ranks(4)
def test_messages_in_flight_are_bounded_without_a_deadlock() -> None:
    with mock.patch.object(send_weights, "BATCH_NBYTES", 100):
        train_and_send()


# -- plans, which need no ranks


@pytest.mark.parametrize("limit", [1, 100, 10_000])
def test_no_rank_has_more_in_flight_than_the_limit_or_one_message(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(send_weights, "BATCH_NBYTES", limit)
    layout = {"q": [("q", 0)], "o": [("o", 1)], "n": [("n", None)]}
    plan = shardgrad.plan_weights(table_of(2, q=(8, 3), o=(6, 16), n=(5,)), layout, [2, 3])
    numbers = [message.batch for message in plan.messages]
    assert numbers == sorted(numbers)

    def nbytes(rank: int, *batches: int) -> list[int]:
        return [
            message.nbytes
            for message in plan.messages
            if message.batch in batches and rank in (message.sender, message.receiver)
        ]

    for batch, rank in itertools.product(set(numbers), range(4)):
        own = nbytes(rank, batch)
        assert len(own) <= 1 or sum(own) <= limit
    for batch in range(max(numbers)):  # none is smaller than it has to be
        assert any(sum(nbytes(rank, batch, batch + 1)) > limit for rank in range(4))


def table_of(ranks: int, **shapes: tuple[int, ...]) -> dict[str, ExportedParameter]:
    """The table of a model that is sharded over some ranks, without them."""
    table = {}
    for name, shape in shapes.items():
        size = (*shape, 1)[0]  # a scalar is one row
        step = -(-size // ranks)
        rows = [(min(r * step, size), min((r + 1) * step, size)) for r in range(ranks)]
        holders = {each: (rank,) for rank, each in enumerate(rows)}
        table[name] = ExportedParameter(
            torch.float32, shape, 0, rows[0], 0, 0, holders, torch.empty(0)
        )
    return table


def test_key_and_value_heads_may_be_fewer_than_receivers() -> None:
    table = table_of(2, k=(6, 5))
    plan = shardgrad.plan_weights(table, {"k": [("k", 0, 2)]}, [2, 3, 4, 5])
    rows: dict[int, list[tuple[int, int]]] = {}
    for m in plan.messages:
        begin = m.sender * 3
        first = begin + m.sent[0]
        rows.setdefault(m.receiver, []).append((first, first + m.shape[0]))
    assert rows == {2: [(0, 3)], 3: [(0, 3)], 4: [(3, 6)], 5: [(3, 6)]}
    assert plan.shapes == {"k": (3, 5)}


def test_scalars_are_concatenated_into_a_vector() -> None:
    cut = ("scale", None)
    plan = shardgrad.plan_weights(
        table_of(1, scale=()), {"one": [cut], "both": [cut, cut]}, receivers=[1]
    )
    assert plan.shapes == {"one": (), "both": (2,)}


@pytest.mark.parametrize(
    ("cuts", "receivers", "says"),
    [
        ([("k", 2)], [2, 3], r"(?s)along dim 2.*shape \(6, 5\)"),
        ([("k", 1)], [2, 3], r"(?s)cut into equal pieces.*2 pieces"),
        ([("k", 0, 3)], [2, 3], r"(?s)cannot be cut.*3 pieces"),
        ([("k", 0, -2)], [2, 3], r"(?s)cannot be cut.*-2 pieces"),
        (("k", 0), [2, 3], r"(?s)no parameter 'k' .*\(name, dim\)"),
        ([("k", 0, 1.5)], [2, 3], "a whole number"),
        ([("k", 0)], ["2", -1], "each rank once"),
        ([("k", 0), ("o", 0)], [2, 3], r"(?s)cannot be concatenated along dim 0.*dim"),
        ([("k", 0)], [1, 2], r"(?s)distinct ranks.*trainers \[0, 1\]"),
        ([("k", 0)], [], "each rank once"),
    ],
)
def test_what_cannot_be_cut_is_refused(cuts: Any, receivers: list[int], says: str) -> None:
    table = table_of(2, k=(6, 5), o=(6, 7))
    with pytest.raises(OptionError, match=says):
        shardgrad.plan_weights(table, {"fused": cuts}, receivers)
    odd: Any
    for odd in ((table, {"fused": None}, [2]), (table, {}, 2), ({"k": 1}, {}, [2])):
        with pytest.raises(OptionTypeError, match="needs a table, a layout, receivers"):
            shardgrad.plan_weights(*odd)


@on_ranks(2)
def test_another_model_and_another_receiver_are_refused() -> None:
    mesh = trainer_mesh(1, "fsdp")
    if dist.get_rank() == 0:
        model = shardgrad.fully_shard(layer(), mesh=mesh)
        plan = shardgrad.plan_weights(shardgrad.export_table(model), LAYOUT, [1])
        other = shardgrad.fully_shard(nn.Linear(3, 3), mesh=mesh)
        shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
        of_two = shardgrad.plan_weights(table_of(2, **shapes), LAYOUT, [2])
        for trained, made in ((other, plan), (model, of_two)):
            with pytest.raises(OptionError, match="plan does not match the model"):
                shardgrad.send_weights(trained, made)
        for wrong in (torch.empty(3, 3), torch.empty(24, 14, dtype=torch.int64), [3.0]):
            got = r"torch\.\w+, shape \(" if isinstance(wrong, torch.Tensor) else "no tensor"
            says = rf"(?s)tensor qkv_proj.weight is missing.*floating.*\(24, 14\).*{got}"
            with pytest.raises(OptionError, match=says):
                shardgrad.receive_weights({"qkv_proj.weight": wrong}, plan)
        with pytest.raises(OptionError, match=r"(?s)lacks ranks \[1\].*group of ranks \[0\]"):
            shardgrad.send_weights(model, plan, mesh.get_group())
        for odd_plan, timeout_s in ((None, 1.0), (plan, math.nan), (plan, "1"), (plan, math.inf)):
            with pytest.raises(OptionTypeError, match="needs a plan and a timeout"):
                shardgrad.send_weights(model, odd_plan, timeout_s=timeout_s)  # type: ignore[arg-type]


# -- receivers that are gone

LIMIT_S = 2.0


def trainer_outlives_its_receiver(tell: Any, rank: int, folder: str, way: str) -> None:
    mesh = trainer_mesh(1, "fsdp")
    group = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    dist.barrier(group)
    if rank == 1:
        time.sleep(100 if way == "sleeps" else 0)
        os._exit(0)
    model = shardgrad.fully_shard(layer(), mesh=mesh)
    plan = shardgrad.plan_weights(shardgrad.export_table(model), LAYOUT, [1])
    begin = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        shardgrad.send_weights(model, plan, group, timeout_s=LIMIT_S)
    took = time.monotonic() - begin
    model(torch.ones(2, HIDDEN)).sum().backward()  # its own group is as it was
    trains = all(p.grad is not None for p in model.parameters())
    tell((str(caught.value), took, trains))


@pytest.mark.parametrize("way", ["exits", "sleeps"])
def test_a_receiver_that_is_gone_is_an_error_within_the_time_limit(way: str) -> None:
    with closing(heard_apart(trainer_outlives_its_receiver, way)) as heard:
        for rank, told, after_s in heard:
            assert after_s < 90, "the trainer hangs"
            if rank == 0 and isinstance(told, tuple | int):  # what it tells, or its exit status
                break
    error, took, trains = told
    assert "the transfer of weights failed: rank 1 is late or has exited" in error
    assert f"within {LIMIT_S:g} s" in error
    assert took < LIMIT_S + 20  # of which a busy machine takes its part
    assert trains
