"""Where parameters lie: what a receiver may register once."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import shardgrad
from shardgrad.errors import (
    MetaParameterError,
    OptionTypeError,
    RootError,
    UnsupportedParameterError,
)
from tests.support.parity import SHARDGRAD, hsdp_mesh, stack, token_loss, tower
from tests.support.ranks import on_ranks
from tests.support.tensor_extensions import Narrowed, extended
from tests.support.under_patch import whole


def read(row: Any) -> torch.Tensor:
    """Reads what a row points at, as a receiver would that has nothing but the row."""
    found = torch.frombuffer(
        bytearray(ctypes.string_at(row.data_ptr, row.nbytes)) or bytearray(1), dtype=torch.uint8
    )
    shape = list(row.shape)
    shape[row.dim] = row.rows[1] - row.rows[0]
    return found[: row.nbytes].view(row.dtype).view(shape)


def assert_is(model: nn.Module, right: dict[str, torch.Tensor]) -> None:
    table = shardgrad.export_table(model)
    assert list(table) == list(right)
    for name, row in table.items():
        value, (begin, end) = right[name], row.rows
        assert row.shape == value.shape
        assert torch.equal(read(row), value.narrow(row.dim, begin, end - begin)), name
        assert torch.equal(row.local, read(row))
        having = [rows for rows, ranks in row.holders.items() if dist.get_rank() in ranks]
        assert having == [row.rows]
        assert sum(end - begin for begin, end in row.holders) == value.shape[row.dim]


def whole_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize("replicas", [1, 2])
@on_ranks(4)
def test_every_address_is_that_of_its_rows(replicas: int) -> None:
    model = SHARDGRAD.shard_tower(tower(), mesh=hsdp_mesh(replicas, 4 // replicas))
    assert_is(model, dict(tower().named_parameters()))


@on_ranks(4)
def test_a_parameter_sharded_by_columns_says_so_and_ranks_without_rows_are_holders() -> None:
    model = stack(4, 1)
    right = whole_of(model)
    SHARDGRAD.fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)
    assert_is(model, right)
    assert shardgrad.export_table(model)["0.weight"].dim == 1


@on_ranks(2)
def test_addresses_stay_over_steps_evaluations_and_loads(tmp_path: Path) -> None:
    model = SHARDGRAD.shard_tower(tower().bfloat16())
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2, master="float32")
    table = shardgrad.export_table(model)

    def step(number: int) -> None:
        token_loss(model, SHARDGRAD.tokens(number)).backward()
        shardgrad.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    assert shardgrad.export_table(model) == table
    assert all(row.dtype is torch.bfloat16 for row in table.values())  # and not the masters
    assert_is(model, whole_of(model))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    shardgrad.checkpoint.save(state, tmp_path)
    with torch.no_grad():
        model(SHARDGRAD.tokens(1)[0])
    step(1)
    shardgrad.checkpoint.load(state, tmp_path)
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    loss = token_loss(model, SHARDGRAD.tokens(2))
    assert shardgrad.export_table(model) == table  # also while parameters are unsharded
    loss.backward()
    optimizer.step()
    assert shardgrad.export_table(model) == table
    assert_is(model, whole_of(model))


@on_ranks(2)
def test_a_replaced_parameter_makes_another_table() -> None:
    model = SHARDGRAD.fully_shard(stack(4, 6))
    table = shardgrad.export_table(model)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    replaced = shardgrad.export_table(model)
    assert replaced != table
    model[0].weight = nn.Parameter(2.0 * model[0].weight.detach())
    assert_is(model, whole_of(model))
    model.to(torch.float64)
    assert shardgrad.export_table(model) != replaced
    assert_is(model, whole_of(model))


@on_ranks(2)
def test_what_was_written_while_unsharded_is_there_too() -> None:
    model = SHARDGRAD.fully_shard(stack(4, 6))
    model.unshard()
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    assert_is(model, whole_of(model))
    model.reshard()
    assert_is(model, whole_of(model))


@on_ranks(1)
def test_names_are_those_of_a_checkpoint() -> None:
    plain = tower(depth=1)
    names = [name for name, _ in plain.named_parameters()]
    plain.layers[0] = checkpoint_wrapper(plain.layers[0])
    plain.head = torch.compile(plain.head)
    model = SHARDGRAD.fully_shard(plain)
    assert list(shardgrad.export_table(model)) == names


@on_ranks(2)
def test_tied_parameters_are_there_once_and_ignored_ones_on_the_ranks_of_the_model() -> None:
    mesh = DeviceMesh("cpu", [0])
    if dist.get_rank():
        return
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ignored = {tied[1].bias}
    model = SHARDGRAD.fully_shard(tied, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    table = shardgrad.export_table(model)
    assert list(table) == ["0.weight", "0.bias", "1.bias"]
    assert {row.dtype for row in table.values()} == {torch.float32}  # what is kept, not computed
    assert table["1.bias"].holders == {(0, 4): (0,)}


@on_ranks(1)
def test_what_has_no_rows_in_memory_is_refused() -> None:
    model = SHARDGRAD.fully_shard(stack(4, 4, 4))
    with pytest.raises(RootError, match=r"(?s)must be called with the root.*Linear"):
        shardgrad.export_table(model[0])
    with pytest.raises(RootError, match=r"(?s)must be called with the root.*int"):
        shardgrad.export_table(3)  # type: ignore[arg-type]
    with pytest.raises(OptionTypeError, match="'bf16'"):
        shardgrad.plan_weights({}, {}, [1], dtype="bf16")  # type: ignore[arg-type]
    with torch.device("meta"):
        model = stack(4, 4)
    SHARDGRAD.fully_shard(model)
    with pytest.raises(MetaParameterError, match=r"0\.weight"):
        shardgrad.export_table(model)
    model = SHARDGRAD.fully_shard(extended(Narrowed, 4, 4))
    with pytest.raises(UnsupportedParameterError, match=r"(?s)0\.weight.*all-gather extension"):
        shardgrad.export_table(model)
