"""Tensor subclasses with `fsdp_pre_all_gather` and `fsdp_post_all_gather`: the same bits as under FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import shardgrad
from shardgrad import errors
from shardgrad.roots import establish_context, unit_of
from tests.parity.extensions import Half, Narrowed, Quantized
from tests.parity.programs import (
    FSDP2,
    SHARDGRAD,
    Engine,
    Tensors,
    assert_close,
    hsdp_mesh,
    same_bits_as_fsdp2,
    stack,
)
from tests.ranks import Ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def extended(kind: type[Narrowed], *sizes: int, on_meta: bool = False) -> nn.Sequential:
    """Returns linear layers whose weights, but not their biases, are of `kind`."""
    model = stack(*sizes)
    if on_meta:
        model = model.to("meta")
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return model


def values(engine: Engine, model: nn.Module) -> Tensors:
    found: Tensors = {}
    for module in model.modules():
        if isinstance(module, shardgrad.FSDPModule | torch.distributed.fsdp.FSDPModule):
            module.reshard()
    for name, param in model.named_parameters():
        local = param.to_local()
        found[name] = (local._data if isinstance(local, Narrowed) else local).detach().clone()
        if param.grad is not None:
            found[f"{name}.grad"] = engine.read(param.grad)
    return found


def train(
    engine: Engine,
    kind: type[Narrowed],
    sizes: tuple[int, ...],
    *,
    fused: bool = False,
    micro_batches: int = 1,
    sync: bool = True,
    **options: Any,
) -> Tensors:
    model = extended(kind, *sizes)
    for layer in model:
        if isinstance(layer, nn.Linear):
            engine.fully_shard(layer, **options)
    engine.fully_shard(model, **options)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False, fused=fused)
    found: Tensors = {}
    for step in range(3):
        for micro in range(micro_batches):
            engine.sync(model, sync or micro == micro_batches - 1)
            loss = model(engine.inputs(step, sizes[0])).square().mean()
            loss.backward()
            found[f"loss {step}.{micro}"] = loss.detach()
        optim.step()
        if step == 2:
            found |= values(engine, model)
        optim.zero_grad()
    return found


@pytest.mark.parametrize(
    ("kind", "sizes", "options"),
    [
        (Narrowed, (6, 8, 4), {}),
        (Narrowed, (5, 7, 3), {}),
        (Narrowed, (6, 8, 4), {"reshard_after_forward": False}),
        (Narrowed, (6, 8, 4), {"mp_policy": BF16}),
        (Narrowed, (6, 8, 4), {"micro_batches": 2, "sync": False}),
        (Narrowed, (6, 8, 4), {"fused": True}),
        (Quantized, (6, 8, 4), {}),
    ],
    ids=["bf16", "uneven", "kept", "bf16_policy", "sync_last", "fused", "int8_and_scales"],
)
def test_extensions_train_bit_for_bit_like_under_fsdp2(
    two_ranks: Ranks, kind: type[Narrowed], sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    two_ranks.run(same_bits_as_fsdp2, train, kind, sizes, **options)


def look_at_what_was_passed() -> None:
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


def test_extensions_are_told_mesh_shape_module_and_policy(two_ranks: Ranks) -> None:
    two_ranks.run(look_at_what_was_passed)


def refill_the_same_tensor() -> None:
    """What autograd saved in forward must be what backward reads: one unsharded tensor, filled again."""
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


def test_the_unsharded_tensor_is_one_object_without_memory_between_uses(two_ranks: Ranks) -> None:
    two_ranks.run(refill_the_same_tensor)


def from_meta(engine: Engine, **options: Any) -> Tensors:
    model = extended(Narrowed, 5, 7, on_meta=True)
    engine.fully_shard(model, **options)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for i, param in enumerate(model.parameters()):
            local = param.to_local()
            (local._data if isinstance(local, Narrowed) else local).fill_(0.25 + i)
    model(engine.inputs(0, 5)).float().square().mean().backward()
    return values(engine, model)


@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16}], ids=["", "bf16_policy"])
def test_extensions_come_from_the_meta_device(two_ranks: Ranks, options: dict[str, Any]) -> None:
    two_ranks.run(same_bits_as_fsdp2, from_meta, **options)


def train_on_replicas(engine: Engine) -> Tensors:
    return train(engine, Narrowed, (6, 8, 4), mesh=hsdp_mesh(2, 2))


def replicas_agree() -> None:
    assert_close(train_on_replicas(SHARDGRAD), train_on_replicas(FSDP2), tolerance=1e-6)


def test_extensions_train_on_replicas(four_ranks: Ranks) -> None:
    four_ranks.run(replicas_agree)


class Unpadded(Narrowed):
    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        return (self._data,), None


class Odd(Narrowed):
    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any) -> Any:  # type: ignore[override]
        return (self._data,), None


def refuse() -> None:
    model = stack(4, 4)
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Half))
    with pytest.raises(errors.ExtensionError, match="Both fsdp_pre_all_gather and fsdp_post_all_gather"):
        shardgrad.fully_shard(model)
    with pytest.raises(errors.UnsupportedError, match="as an int"):
        shardgrad.fully_shard(extended(Narrowed, 4, 4), reshard_after_forward=1)
    model = shardgrad.fully_shard(extended(Odd, 4, 4))
    with pytest.raises(errors.ExtensionError, match="Invalid fsdp_pre_all_gather"):
        model(torch.ones(1, 4))
    model = shardgrad.fully_shard(extended(Narrowed, 4, 4))
    with pytest.raises(errors.OptimizerParameterError, match=r"torch.optim for it"):
        shardgrad.optim.AdamW(model.parameters())
    with pytest.raises(errors.CaptureError, match=r"fsdp_pre_all_gather cannot be in a graphed step"):
        shardgrad.graphed_step(model)(lambda: None)


def test_what_is_not_the_protocol_is_refused(two_ranks: Ranks) -> None:
    two_ranks.run(refuse)


def refuse_unpadded() -> str:
    model = shardgrad.fully_shard(extended(Unpadded, 4, 3))
    unit = unit_of(model)
    assert unit is not None
    establish_context(unit)  # which compares the ranks' models
    if torch.distributed.get_rank() == 0:
        return ""  # it has nothing to pad, and would wait for the other
    with pytest.raises(errors.ExtensionError, match="padded sharded size") as caught:
        model.unshard()
    return str(caught.value)


def test_a_short_piece_that_is_not_padded_is_refused_where_it_is_short(two_ranks: Ranks) -> None:
    two_ranks.stop()
    assert "parameter 0.weight" in two_ranks.run(refuse_unpadded)[1]
    two_ranks.stop()
