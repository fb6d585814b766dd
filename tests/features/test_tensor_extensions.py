"""Tensor subclasses with `fsdp_pre_all_gather` and `fsdp_post_all_gather`: the same bits as under
FSDP2.
"""

from __future__ import annotations

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
    last_dim,
    same_bits_as_fsdp2,
    stack,
)
from tests.support.ranks import Ranks, on_ranks
from tests.support.tensor_extensions import (
    Blocked,
    Chunked,
    Half,
    Narrowed,
    Quantized,
    Scaled,
    extended,
    train,
    unwrapped,
)

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("kind", "sizes", "options"),
    [
        (Narrowed, (6, 8, 4), {}),
        (Narrowed, (5, 7, 1), {}),
        (Narrowed, (6, 8, 4), {"reshard_after_forward": False}),
        (Narrowed, (6, 8, 4), {"mp_policy": BF16}),
        (Narrowed, (6, 8, 4), {"micro_batches": 2, "sync_each": False}),
        (Narrowed, (6, 8, 4), {"optimizer": "fused adamw"}),
        (Quantized, (6, 8, 4), {}),
        (Scaled, (6, 8, 4), {"shard_placement_fn": last_dim}),
        (Blocked, (32, 4, 32), {}),
        (Chunked, (6, 8, 4), {}),
    ],
    ids=[
        *("bf16", "uneven_and_no_rows", "kept", "bf16_policy", "sync_last", "fused"),
        *("int8_and_scales", "float8_by_columns", "mxfp8", "nf4"),
    ],
)
def test_extensions_train_bit_for_bit_like_under_fsdp2(
    two_ranks: Ranks, kind: type[Narrowed], sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    two_ranks.run(same_bits_as_fsdp2, train, kind, sizes, **options)


@on_ranks(2)
def test_extensions_are_told_mesh_shape_module_and_policy() -> None:
    model = extended(Narrowed, 5, 7)
    model[0].weight.is_expert = True
    shardgrad.fully_shard(model, mp_policy=BF16, mesh=hsdp_mesh(2, 1))
    weight = model[0].weight
    assert weight.is_expert  # what a program has set stays
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
def test_what_has_no_elements_for_each_of_a_shard_of_columns_comes_in_the_order_of_ranks() -> None:
    """FSDP2 refuses it."""
    model = extended(Quantized, 6, 8)
    columns = model[0].weight.detach()._data.chunk(2, dim=1)
    shardgrad.fully_shard(model, shard_placement_fn=last_dim)
    model.unshard()
    expected = torch.stack([each.abs().amax() for each in columns]) / 127
    assert torch.equal(Narrowed.calls["scales"], expected)


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


@on_ranks(2)
def test_parameters_that_become_extensions_after_fully_shard_are_refused() -> None:
    model = shardgrad.fully_shard(stack(4, 4))
    model[0].weight._local_tensor.fsdp_post_all_gather = Narrowed.fsdp_post_all_gather
    with pytest.raises(errors.ExtensionError, match=r"^0\.weight got fsdp_pre_all_gather"):
        model(torch.ones(1, 4))
    source = shardgrad.fully_shard(extended(Narrowed, 4, 4))
    model = shardgrad.fully_shard(stack(4, 4).to("meta"))
    with pytest.raises(errors.ExtensionError, match="weight got fsdp_pre_all_gather"):
        model.load_state_dict(source.state_dict(), assign=True)


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
