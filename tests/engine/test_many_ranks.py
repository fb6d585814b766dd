"""What one rank keeps, and what it makes in a step, does not grow with the number of ranks."""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardgrad import fully_shard
from shardgrad.diagnosis.same_lines import require_same_lines
from shardgrad.engine.unit import units_under
from shardgrad.features.hfsdp import _inner_shard_table
from shardgrad.programs.plan.world import fake_world


def tensors() -> list[Any]:
    gc.collect()
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


def tensors_after_steps(ranks: int) -> int:
    """Returns how many tensors two training steps of two units make that live on."""
    before = tensors()
    with fake_world((ranks,)) as mesh:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for unit in (model[0], model):
            fully_shard(unit, mesh=mesh)
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            model.zero_grad()
        return len(tensors()) - len(before)


@pytest.mark.filterwarnings("ignore::shardgrad.checks.padding.PaddingWarning")
def test_a_rank_among_16384_keeps_as_many_tensors_as_one_among_8() -> None:
    assert tensors_after_steps(16_384) == tensors_after_steps(8)


class _Sent(TorchDispatchMode):
    """Counts the elements of all tensors that collectives are given."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.numels.append(sum(tensor.numel() for tensor in tensors))
        return func(*args, **(kwargs or {}))


def sent_to_compare(ranks: int) -> list[int]:
    """Returns the elements of each collective in which ranks compare some lines."""
    with fake_world((ranks,)) as mesh, _Sent() as sent:
        require_same_lines(["one", "two"], 0, mesh.get_group())
    return sent.numels


def test_16384_ranks_compare_their_models_in_as_many_and_as_large_messages_as_8() -> None:
    assert sent_to_compare(16_384) == sent_to_compare(8) != []


def nbytes_of_tables(units: int) -> int:
    """Returns the bytes of tables after a step of alike units over 2,048 machines of 8 ranks."""
    before = tensors()  # the objects, so that no new one has the id of one that is gone
    known = set(map(id, before))
    with fake_world((2048, 8)) as mesh:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(units)))
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh, zero_stage="hfsdp")
        model(torch.ones(1, 4)).sum().backward()
        tables = [t for t in tensors() if t.dtype == torch.int64 and id(t) not in known]
        return sum({each.data_ptr(): each.nbytes for each in tables}.values())


@pytest.mark.filterwarnings("ignore::shardgrad.checks.padding.PaddingWarning")
def test_units_that_are_alike_share_the_large_tables_of_two_levels() -> None:
    _inner_shard_table.cache_clear()
    few = nbytes_of_tables(2)
    _inner_shard_table.cache_clear()
    assert few > 0.1e6
    assert nbytes_of_tables(12) < 1.1 * few


@pytest.mark.filterwarnings("ignore::shardgrad.checks.padding.PaddingWarning")
def test_groups_that_are_alike_pack_the_same_tail_and_tails_for_16384_ranks_take_few_bytes() -> (
    None
):
    with fake_world((16_384,)) as mesh:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
        model(torch.ones(1, 4)).sum().backward()
        context: Any = units_under(model)[0].context
    with_bias, without = (tail.nbytes for tail in context.comm_ctx.tails.values())
    assert 0 < with_bias + without < 10e6
