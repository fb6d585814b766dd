"""Tensor subclasses with `fsdp_pre_all_gather` and `fsdp_post_all_gather`: the same bits as under
FSDP2.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import shardgrad
from shardgrad import errors
from shardgrad.engine.lazy_init import lazy_init
from shardgrad.engine.unit import unit_of
from tests.support.parity import (
    FSDP2,
    SHARDGRAD,
    Engine,
    Tensors,
    as_under_fsdp2,
    assert_close,
    hsdp_mesh,
    same_bits_as_fsdp2,
    stack,
)
from tests.support.ranks import Ranks, on_ranks
from tests.support.tensor_extensions import (
    Chunked,
    Half,
    Narrowed,
    Quantized,
    extended,
    train,
    unwrapped,
)

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("kind", "sizes", "options"),
    [
        (Narrowed, (6, 8, 4), {}),
        (Narrowed, (5, 7, 3), {}),
        (Narrowed, (6, 8, 4), {"reshard_after_forward": False}),
        (Narrowed, (6, 8, 4), {"mp_policy": BF16}),
        (Narrowed, (6, 8, 4), {"micro_batches": 2, "sync_each": False}),
        (Narrowed, (6, 8, 4), {"optimizer": "fused adamw"}),
        (Quantized, (6, 8, 4), {}),
        (Chunked, (6, 8, 4), {}),
    ],
    ids=["bf16", "uneven", "kept", "bf16_policy", "sync_last", "fused", "int8_and_scales", "nf4"],
)
def test_extensions_train_bit_for_bit_like_under_fsdp2(
    two_ranks: Ranks, kind: type[Narrowed], sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    two_ranks.run(same_bits_as_fsdp2, train, kind, sizes, **options)


@on_ranks(2)
def test_extensions_are_told_mesh_shape_module_and_policy() -> None:
    model = extended(Narrowed, 5, 7)
    shardgrad.fully_shard(model, mp_policy=BF16, mesh=hsdp_mesh(2, 1))
    weight = model[0].weight
    assert isinstance(weight, DTensor)
    assert isinstance(weight.to_local(), Narrowed)
    model(torch.ones(2, 5)).sum().backward()
    assert Narrowed.calls["mesh"].ndim == 1
    assert Narrowed.calls["mesh"].size() == 1
    assert (Narrowed.calls["size"], Narrowed.calls["stride"]) == ((7, 5), (5, 1))
    assert Narrowed.calls["module"] is model[0]
    assert Narrowed.calls["policy"] == BF16
    assert model[0].weight is weight  # shown again, as the object it was
    assert type(weight.grad.to_local()) is Tensor


@on_ranks(2)
def test_the_unsharded_tensor_is_one_object_without_memory_between_uses() -> None:
    """What autograd saved in forward must be what backward reads: one unsharded tensor, filled
    again.
    """
    model = extended(Narrowed, 6, 8)
    shardgrad.fully_shard(model)
    seen = []
    for _ in range(3):
        model.unshard()
        seen.append(model[0].weight)
        assert seen[-1].shape == (8, 6)
        model.reshard()
        assert seen[-1].untyped_storage().nbytes() == 0
    assert seen[0] is seen[1] is seen[2]


@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16}], ids=["", "bf16_policy"])
@on_ranks(2)
@as_under_fsdp2
def test_extensions_come_from_the_meta_device(engine: Engine, options: dict[str, Any]) -> Tensors:
    model = extended(Narrowed, 5, 7, on_meta=True)
    engine.fully_shard(model, **options)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for i, param in enumerate(model.parameters()):
            local = param.to_local()
            (local._data if isinstance(local, Narrowed) else local).fill_(0.25 + i)
    model(engine.inputs(0, 5)).float().square().mean().backward()
    return unwrapped(engine.snapshot(model))


@on_ranks(4)
def test_extensions_train_on_replicas() -> None:
    mesh = hsdp_mesh(2, 2)
    ours, theirs = (train(each, Narrowed, (6, 8, 4), mesh=mesh) for each in (SHARDGRAD, FSDP2))
    assert_close(ours, theirs, tolerance=1e-6)


def pre_on_the_way(self: Tensor, mesh: Any) -> Any:
    return (self.to(torch.bfloat16),), {"scale": 1}


post_on_the_way = Narrowed.fsdp_post_all_gather


def put_methods_on(weight: Any) -> None:
    """Puts both methods on a sharded parameter's local tensor, which is an ordinary one."""
    local = weight._local_tensor
    local.fsdp_pre_all_gather = MethodType(pre_on_the_way, local)
    local.fsdp_post_all_gather = MethodType(post_on_the_way, local)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": False},
        {"mp_policy": BF16},
        {"settings": True},
        {"optimizer_first": True},
    ],
    ids=["", "kept", "bf16_policy", "settings_before", "optimizer_before"],
)
@on_ranks(2)
@as_under_fsdp2
def test_methods_put_on_local_tensors_later_train_bit_for_bit_like_fsdp2(
    engine: Engine, options: dict[str, Any]
) -> Tensors:
    options = dict(options)
    settings = options.pop("settings", False)
    optimizer_first = options.pop("optimizer_first", False)
    model = stack(6, 8, 4).to("meta")
    engine.shard_stack(model, **options)
    model.to_empty(device="cpu")
    params = list(model.parameters())
    with torch.no_grad():
        for i, param in enumerate(params):
            local = param._local_tensor
            local.copy_(torch.linspace(-1, 1 + i, local.numel()).view(local.shape))
    if settings:
        model.set_requires_gradient_sync(False)
    optim = torch.optim.AdamW(params, lr=1e-2) if optimizer_first else None
    for param in params[::2]:
        put_methods_on(param)
    found: Tensors = {}
    for step in range(3):
        if settings:
            engine.loss(model, step + 5, 6).backward()
            model.set_requires_gradient_sync(True)
        loss = engine.loss(model, step, 6)
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        optim = optim or torch.optim.AdamW(params, lr=1e-2)
        optim.step()
        if step == 2:
            found |= unwrapped(engine.snapshot(model))
        optim.zero_grad()
    return found


@on_ranks(2)
def test_parameters_with_methods_leave_their_group_and_its_memory() -> None:
    model = shardgrad.fully_shard(stack(6, 8))
    weight, bias = model[0].weight, model[0].bias
    whole = weight.full_tensor().detach().clone()
    local = weight._local_tensor
    put_methods_on(weight)
    model.set_gradient_divide_factor(1.0)
    model.set_all_reduce_hook(lambda chunk: chunk.mul_(3.0))
    model.unshard()
    assert torch.equal(model[0].weight, whole.to(torch.bfloat16).float())  # they were asked
    model.reshard()
    assert model[0].weight is weight
    assert weight._local_tensor is local
    assert torch.equal(weight.full_tensor(), whole)
    flat, extended = unit_of(model).groups
    assert [p.name for p in flat.params] == ["0.bias"]
    assert [p.name for p in extended.params] == ["0.weight"]
    assert local.untyped_storage().nbytes() == local.nbytes  # nobody keeps the former flat shard
    assert bias._local_tensor.data_ptr() == flat.shard.data_ptr()
    model(torch.ones(2, 6)).sum().backward()
    # Two rows on two ranks: a sum, as set before, and what the hook makes of it.
    assert weight.grad.full_tensor().unique().item() == 3 * 4.0
    assert bias.grad.full_tensor().unique().item() == 3 * 4.0


def load_extensions(*, first: bool) -> Tensors:
    """Loads wrapped weights into a plain model, or the same weights into one that had the class all
    along.
    """
    with torch.random.fork_rng():
        torch.manual_seed(3)
        source = shardgrad.fully_shard(extended(Narrowed, 6, 8, 4))
    if first:
        model = source
    else:
        model = shardgrad.fully_shard(stack(6, 8, 4).to("meta"))
        model.load_state_dict(source.state_dict(), assign=True)
        assert all(isinstance(model[i].weight.to_local(), Narrowed) for i in (0, 2))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for step in range(2):
        SHARDGRAD.loss(model, step, 6).backward()
        optim.step()
    with pytest.raises(errors.OptimizerParameterError, match="tensor subclass"):
        shardgrad.optim.AdamW(model.parameters())
    return unwrapped(SHARDGRAD.snapshot(model))


@on_ranks(2)
def test_extensions_that_are_loaded_train_like_those_that_were_sharded() -> None:
    assert_close(load_extensions(first=False), load_extensions(first=True), tolerance=0)


@on_ranks(2)
def test_methods_that_come_too_late_or_to_some_ranks_are_refused() -> None:
    x = torch.ones(1, 4)
    model = shardgrad.fully_shard(stack(4, 4))
    model[0].weight._local_tensor.fsdp_post_all_gather = post_on_the_way
    with pytest.raises(
        errors.ExtensionError, match="Both fsdp_pre_all_gather and fsdp_post_all_gather"
    ):
        model(x)
    model = shardgrad.fully_shard(stack(4, 4))
    model(x)
    model.reshard()
    put_methods_on(model[0].weight)
    with pytest.raises(errors.ExtensionError, match=r"^0\.weight got fsdp_pre_all_gather"):
        model(x)
    model = shardgrad.fully_shard(stack(4, 4))
    optim = shardgrad.optim.AdamW(model.parameters())
    put_methods_on(model[0].weight)
    model(x).sum().backward()
    with pytest.raises(errors.OptimizerParameterError, match=r"0\.bias shared a flat shard"):
        optim.step()
    model = shardgrad.fully_shard(stack(4, 4), mesh=hsdp_mesh(2, 1), zero_stage="hfsdp")
    put_methods_on(model[0].weight)
    with pytest.raises(errors.UnsupportedError, match=r'zero_stage="hfsdp" for 0\.weight'):
        model(x)
    model = shardgrad.fully_shard(stack(4, 4))
    if torch.distributed.get_rank() == 0:
        put_methods_on(model[0].weight)
    with pytest.raises(errors.RankDisagreementError, match="ranks built different models"):
        model(x)


@on_ranks(4)
def test_methods_put_there_later_exclude_an_int_reshard() -> None:
    model = shardgrad.fully_shard(stack(4, 4), reshard_after_forward=2)
    put_methods_on(model[0].weight)
    with pytest.raises(errors.UnsupportedError, match=r"as an int for 0\.weight"):
        model(torch.ones(1, 4))


class Closed(Narrowed):
    """Does not say what it consists of."""

    @property
    def __tensor_flatten__(self) -> Any:  # type: ignore[override]
        raise AttributeError


class Unpadded(Narrowed):
    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        return (self._data,), None


class Odd(Narrowed):
    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any) -> Any:  # type: ignore[override]
        return (self._data,), None


@on_ranks(2)
def test_what_is_not_the_protocol_is_refused() -> None:
    model = stack(4, 4)
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Half))
    with pytest.raises(
        errors.ExtensionError, match="Both fsdp_pre_all_gather and fsdp_post_all_gather"
    ):
        shardgrad.fully_shard(model)
    model = shardgrad.fully_shard(extended(Odd, 4, 4))
    with pytest.raises(errors.ExtensionError, match="Invalid fsdp_pre_all_gather"):
        model(torch.ones(1, 4))
    model = shardgrad.fully_shard(extended(Narrowed, 4, 4))
    with pytest.raises(errors.OptimizerParameterError, match=r"torch.optim for it"):
        shardgrad.optim.AdamW(model.parameters())
    model = shardgrad.fully_shard(extended(Closed, 4, 4))
    with pytest.raises(errors.CaptureError, match="weight is a tensor whose memory is unknown"):
        shardgrad.graphed_step(model)


def refuse_unpadded() -> str:
    model = shardgrad.fully_shard(extended(Unpadded, 4, 3))
    unit = unit_of(model)
    assert unit is not None
    lazy_init(unit)  # which compares the ranks' models
    if torch.distributed.get_rank() == 0:
        return ""  # it has nothing to pad, and would wait for the other
    with pytest.raises(errors.ExtensionError, match="padded sharded size") as caught:
        model.unshard()
    return str(caught.value)


def test_a_short_piece_that_is_not_padded_is_refused_where_it_is_short(two_ranks: Ranks) -> None:
    two_ranks.stop()
    assert "parameter 0.weight" in two_ranks.run(refuse_unpadded)[1]
    two_ranks.stop()
