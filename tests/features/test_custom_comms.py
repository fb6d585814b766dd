"""How programs steer collectives: every call does here what it does under FSDP2, on two ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import UnshardHandle
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import DTensor

import shardgrad
from shardgrad.engine.unit import unit_of
from tests.support.parity import (
    FSDP2,
    SHARDGRAD,
    Engine,
    Tensors,
    Tower,
    as_under_fsdp2,
    assert_same_bits,
    hsdp_mesh,
    stack,
    tower,
    train,
    train_squares,
)
from tests.support.ranks import on_ranks


class CountedGather(DefaultAllGather):
    def __init__(self, counts: Counter[str], *, keeps_buffer: bool) -> None:
        self.counts, self.memory = counts, torch.empty(4096) if keeps_buffer else None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.counts["allocated for gathers"] += 1
        if self.memory is None:
            return super().allocate(size, dtype=dtype, device=device)
        return self.memory.view(dtype)[: size[0]]

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,
    ) -> Any:
        self.counts["gathered"] += 1
        begin = input_tensor.numel() * group.rank()
        assert output_tensor[begin:].data_ptr() == input_tensor.data_ptr()  # as under FSDP2
        return super().__call__(output_tensor, input_tensor, group, async_op)


class CountedScatter(DefaultReduceScatter):
    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts

    def allocate(self, size: Any, **options: Any) -> torch.Tensor:
        self.counts["allocated for reductions"] += 1
        return super().allocate(size, **options)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.counts["reduced"] += 1
        return super().__call__(*args, **options)


def train_through_own_collectives(engine: Engine, *, keeps_buffer: bool = False) -> Tensors:
    model = engine.shard_tower(tower())
    counts: Counter[str] = Counter()
    gather, scatter = CountedGather(counts, keeps_buffer=keeps_buffer), CountedScatter(counts)
    for layer in model.layers:
        layer.set_custom_all_gather(gather)
        layer.set_custom_reduce_scatter(scatter)
    found = train(engine, model, micro_batches=2)
    assert counts["allocated for gathers"]
    assert counts["allocated for reductions"]
    assert counts["reduced"] == 3 * 2 * len(model.layers)
    assert counts["gathered"] >= 3 * 2 * len(model.layers)
    return found


@pytest.mark.parametrize("keeps_buffer", [False, True])
@on_ranks(2)
def test_own_collectives_train_bit_for_bit_like_fsdp2_even_with_one_buffer_for_all(
    *, keeps_buffer: bool
) -> None:
    """A program's `allocate` may return one buffer again and again."""
    ours = train_through_own_collectives(SHARDGRAD, keeps_buffer=keeps_buffer)
    assert_same_bits(ours, train_through_own_collectives(FSDP2))


@on_ranks(4)
def test_own_collectives_run_in_the_group_of_each_unit() -> None:
    model, comm = stack(5, 4, 3), DefaultAllGather()
    right = [param.clone() for param in model.parameters()]
    for layer, replicas in (model[0], 2), (model[2], 1):
        SHARDGRAD.fully_shard(layer, mesh=hsdp_mesh(replicas, 4 // replicas))
        layer.set_custom_all_gather(comm)
    SHARDGRAD.fully_shard(model)(torch.ones(2, 5))
    model[0].unshard()
    model[2].unshard()
    assert all(map(torch.equal, model.parameters(), right))


@on_ranks(4)
def test_the_latest_collective_gathers_shards_over_fewer_ranks_too() -> None:
    counts: Counter[str] = Counter()
    model = stack(5, 4)
    SHARDGRAD.shard(model[0], model, reshard_after_forward=2)
    for gathers in (0, 2):
        model(torch.ones(2, 5)).sum().backward()
        assert counts["gathered"] == gathers
        model[0].set_custom_all_gather(CountedGather(counts, keeps_buffer=False))


@pytest.mark.parametrize(("forced", "replicas"), [(False, 1), (True, 1), (True, 2)])
@on_ranks(2)
@as_under_fsdp2
def test_an_all_reduce_hook_sees_what_it_sees_under_fsdp2(
    engine: Engine, *, forced: bool, replicas: int
) -> Tensors:
    options = (
        {} if replicas == 1 else {"mesh": hsdp_mesh(replicas, dist.get_world_size() // replicas)}
    )
    model = engine.shard_tower(tower(), **options)
    norms: list[torch.Tensor] = []
    train(engine, model, steps=1)  # the hook comes later

    def hook(chunk: torch.Tensor) -> None:
        assert chunk.ndim == 1
        norms.append(chunk.square().sum())
        chunk.mul_(3.0)

    for layer in model.layers:
        layer.set_all_reduce_hook(hook)
        layer.set_force_sum_reduction_for_comms(forced)
    found = train(engine, model, micro_batches=2, optimizer="sgd")
    assert len(norms) == 3 * 2 * len(model.layers)
    # Squares are added up in another order, since padding lies elsewhere.
    return found | {f"norm {i}": norm.double().round(decimals=4) for i, norm in enumerate(norms)}


@on_ranks(2)
def test_a_hook_has_no_stream_of_its_own_under_hsdp() -> None:
    model = SHARDGRAD.shard_tower(tower(), mesh=hsdp_mesh(2, 1))
    with pytest.raises(ValueError, match="stream cannot be set when using native HSDP"):
        model.set_all_reduce_hook(print, stream=object())


def separate(model: Tower) -> None:
    model.set_separate_reduce_scatter_group()
    groups = set(dist.distributed_c10d._world.pg_map)
    model.set_separate_reduce_scatter_group()  # once is enough
    assert set(dist.distributed_c10d._world.pg_map) == groups
    model.layers[0].set_separate_reduce_scatter_group(False)


def other_divisor(model: Tower) -> None:
    # Gloo cannot scale, and torch then refuses.
    model.layers[1].set_force_sum_reduction_for_comms(True)
    model.layers[1].set_gradient_divide_factor(4.0)


def from_process_group(model: Tower) -> None:
    for module in (model, *model.layers):
        module.set_allocate_memory_from_process_group_for_comm(True)
    model.layers[1].set_allocate_memory_from_process_group_for_comm(False)


@pytest.mark.parametrize("setting", [separate, other_divisor, from_process_group])
@on_ranks(2)
@as_under_fsdp2
def test_settings_of_collectives_train_bit_for_bit_like_fsdp2(
    engine: Engine, setting: Callable[[Tower], None]
) -> Tensors:
    model = engine.shard_tower(tower())
    setting(model)
    return train(engine, model, micro_batches=2)


@on_ranks(2)
def test_reductions_of_units_that_ask_for_it_have_a_group_of_their_own() -> None:
    dist.new_group([0])  # ranks may be in different numbers of groups, where FSDP2 hangs
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    model = SHARDGRAD.shard_tower(tower())
    separate(model)
    with patch.object(dist, "all_to_all_single", side_effect=dist.all_to_all_single) as sent:
        train(SHARDGRAD, model, steps=1)
    groups = Counter(call.kwargs["group"] for call in sent.call_args_list)
    assert sorted(groups.values()) == [4, 10]  # reductions of four of five units, and all else


@pytest.mark.parametrize("early", [True, False], ids=["before the first forward", "between steps"])
@on_ranks(2)
@as_under_fsdp2
def test_roots_that_share_streams_train_bit_for_bit_like_fsdp2(
    engine: Engine, *, early: bool
) -> Tensors:
    """Two stages, each a root, run one after the other as in a pipeline."""
    share = fsdp.share_comm_ctx if engine is FSDP2 else shardgrad.share_comm_ctx
    share([])
    first, second = (stack(5, 7, 7, seed=0), stack(7, 7, 3, seed=1))
    for root in (first, second):
        engine.shard(root[0], root)
    if early:
        share([first, second])
    found: Tensors = {}
    for step in range(3):
        if step == 1 and not early and engine is SHARDGRAD:
            second.set_reduce_scatter_max_input_buffers(3)
            second[0].set_reduce_scatter_max_input_buffers(1)
            share([first, second])
        loss = second(first(engine.inputs(step, 5))).square().mean()
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        for root in (first, second):
            for param in root.parameters():
                param.data.add_(param.grad, alpha=-0.1)
                param.grad = None
    if engine is SHARDGRAD:
        runtimes = [unit_of(root).context.comm_ctx for root in (first, second)]
        assert runtimes[0].reduce_ring is runtimes[1].reduce_ring
        assert runtimes[0].reduce_ring.depth == (2 if early else 3)
        assert runtimes[0].streams is runtimes[1].streams
    return found


class Wrapper(nn.Module):
    """Has no parameters but its layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, inputs: tuple[torch.Tensor, str]) -> torch.Tensor:
        x, text = inputs
        assert text == "kept"
        return torch.relu(self.layer(x))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.Tanh()
        self.wrapper = Wrapper()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.wrapper((x, "kept")))


@on_ranks(2)
@as_under_fsdp2
def test_units_without_parameters_train_bit_for_bit_like_fsdp2(engine: Engine) -> Tensors:
    torch.manual_seed(0)
    model = Nested()
    engine.shard(model.activation, model.wrapper.layer, model.wrapper, model)
    handle = model.activation.unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    handle.wait()
    assert model.wrapper.unshard() is None
    assert isinstance(model.wrapper.layer.weight, DTensor), "unshard is not recursive"
    model.wrapper.reshard()
    found = train_squares(engine, model, 5)
    ignored = nn.Linear(3, 3)
    engine.fully_shard(ignored, ignored_params=set(ignored.parameters()))
    assert type(ignored.weight) is nn.Parameter
    ignored(torch.ones(2, 3)).sum().backward()
    return found


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch for CUDA has the backend")
@on_ranks(2)
def test_symmetric_memory_without_a_backend_is_the_same_error_as_under_fsdp2() -> None:
    """torch for CPUs has no such memory; on a device the same call would succeed."""
    texts = set()
    for engine in (SHARDGRAD, FSDP2):
        with pytest.raises(RuntimeError) as caught:
            engine.fully_shard(nn.Linear(2, 2)).set_symm_mem_for_comm()
        texts.add(str(caught.value))
    assert len(texts) == 1
