"""TransformerEngine's and apex' FusedAdam on our parameters: same numbers, or an error in words.

The stand-ins have the contract of each release, gaps included; the real packages run where they are
installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

import shardgrad
from shardgrad import GradientPolicy
from shardgrad.errors import PartnerUnavailableError
from tests.support.parity import (
    FSDP2,
    SHARDGRAD,
    Engine,
    Tensors,
    assert_same_bits,
    many_small,
    token_loss,
    tower,
)
from tests.support.partners import (
    HYPER,
    Plane,
    assert_rounded_alike,
    descend,
    partner,
    plane,
    state,
    weights,
)
from tests.support.ranks import Ranks, on_ranks
from tests.support.stand_ins.te_fused_adam import fused_adam_of

PARTNERS = ["te 2.17.1", "te 2.18.0", "te 2.20.0", "apex"]
BOTH = ["te 2.17.1", "apex"]


# -- the same numbers


def _train(engine: Engine, name: str, capturable: bool, small: bool, **options: Any) -> Tensors:
    """Trains; FSDP2 has the latest TransformerEngine on its DTensors, which is how that is used."""
    if small:
        model: nn.Module = engine.fully_shard(many_small(), **options)
    else:
        model = engine.shard_tower(tower(), **options)
    with partner(name) as fused_adam:
        if engine is FSDP2:
            fused_adam = fused_adam_of((2, 20))
        optimizer = fused_adam(model.parameters(), **HYPER, capturable=capturable)
        history: Tensors = {}
        for step in range(3):
            loss = token_loss(model, engine.tokens(step))
            loss.backward()
            history[f"loss of step {step}"] = loss.detach()
            optimizer.step()
            optimizer.zero_grad()
        return {**history, **engine.snapshot(model)}


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("name", PARTNERS)
@on_ranks(2)
def test_a_partner_trains_as_transformer_engine_does_under_fsdp2(
    name: str, capturable: bool
) -> None:
    for small, options in ((False, {}), (True, {}), (False, {"reshard_after_forward": False})):
        args = (name, capturable, small)
        assert_same_bits(_train(SHARDGRAD, *args, **options), _train(FSDP2, *args, **options))


@pytest.mark.parametrize(
    ("name", "dtype", "capturable"),
    [
        ("te 2.17.1", torch.bfloat16, False),
        ("te 2.17.1", torch.bfloat16, True),
        ("te 2.18.0", torch.float16, False),
    ],
)
@on_ranks(2)
def test_master_weights_are_those_of_our_adamw(
    name: str, dtype: torch.dtype, capturable: bool
) -> None:
    ours, theirs = plane(dtype=dtype), plane(dtype=dtype)
    optimizer = shardgrad.optim.AdamW(ours.parameters(), **HYPER, master="float32")
    descend(ours, optimizer)
    with partner(name) as fused_adam:
        bound = fused_adam(theirs, **HYPER, capturable=capturable, master_weights=True)
        descend(theirs, bound)
    mine = {key.replace(".master", ".master_param"): t for key, t in state(optimizer).items()}
    masters = {key: t for key, t in state(bound).items() if "master" in key}
    assert len(masters) == 4
    assert_rounded_alike(mine, masters)
    assert_rounded_alike(weights(ours), weights(theirs), dtype=dtype)


@pytest.mark.parametrize("name", PARTNERS)
@on_ranks(2)
def test_a_group_that_ends_with_an_empty_shard_is_trained(name: str) -> None:
    model = plane()
    assert (model.weights[3].to_local().numel() == 0) == (dist.get_rank() == 1)
    rows = [p.detach().to_local().clone() for p in model.weights]
    with partner(name) as fused_adam:
        optimizer = fused_adam(model, **HYPER)
        descend(model, optimizer, range(1))
    for param, before_step in zip(model.weights, rows, strict=True):
        assert (param.detach().to_local() != before_step).all()  # on every rank, every element


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("name", BOTH)
@on_ranks(2)
def test_a_group_without_elements_on_a_rank_counts_steps_there(name: str, capturable: bool) -> None:
    model = plane()
    with partner(name) as fused_adam:
        groups = [{"params": list(model.weights[:3])}, {"params": [model.weights[3]], "lr": 1e-3}]
        optimizer = fused_adam(groups, **HYPER, capturable=capturable)
        descend(model, optimizer)
        saved = optimizer.state_dict()
    assert [len(g["params"]) for g in saved["param_groups"]] == [3, 1]
    assert set(saved["state"][3]) == {"exp_avg", "exp_avg_sq"}
    assert [int(group["step"]) for group in saved["param_groups"]] == [3, 3]


@pytest.mark.parametrize("name", BOTH)
@on_ranks(2)
def test_a_parameter_without_gradient_neither_moves_nor_decays(name: str) -> None:
    model = plane()
    with partner(name) as fused_adam:
        optimizer = fused_adam(model, **HYPER)
        before = weights(model)
        model(0).backward()
        model.weights[1].grad = None
        optimizer.step()
    after = weights(model)
    assert [torch.equal(after[key], before[key]) for key in before] == [False, True, False, False]


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("name", BOTH)
@on_ranks(2)
def test_a_schedule_reaches_the_partner(name: str, capturable: bool) -> None:
    def trained(fused: Any, **options: Any) -> Tensors:
        model = plane()
        optimizer = fused(model.parameters(), **HYPER, **options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        for step in range(3):
            descend(model, optimizer, range(step, step + 1))
            schedule.step()
        return weights(model)

    with partner(name) as fused_adam:
        theirs = trained(fused_adam, capturable=capturable)
    assert_rounded_alike(trained(shardgrad.optim.AdamW), theirs)


class _Mixed(nn.Module):
    """A sharded plane, and a parameter that no unit shards."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = plane(**options)
        self.outer = nn.Parameter(torch.ones(3))

    def forward(self, step: int) -> Tensor:
        return self.inner(step) + (self.outer * torch.arange(1.0, 4.0)).sum()


@pytest.mark.parametrize("decoupled", [False, True])
@on_ranks(1)
def test_a_parameter_that_no_unit_shards_is_trained_beside_the_others(decoupled: bool) -> None:
    model = _Mixed(gradient_policy=GradientPolicy(decoupled=decoupled))
    with partner("te 2.17.1") as fused_adam:
        optimizer = fused_adam(model, **HYPER)
        before = weights(model)
        descend(model, optimizer)
        assert optimizer.partner.use_decoupled_grad == decoupled
        assert model.outer.grad is None
        assert type(optimizer.state_dict()["state"][0]["exp_avg"]) is Tensor
    assert all(not torch.equal(t, before[key]) for key, t in weights(model).items())


# -- gradients: where they are, and their scale


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize(("version", "capturable"), [("2.17.1", False), ("2.20.0", True)])
@on_ranks(2)
def test_float32_gradients_of_bfloat16_weights(
    version: str, capturable: bool, decoupled: bool
) -> None:
    policy = GradientPolicy(dtype=torch.float32, decoupled=decoupled)
    ours = plane(dtype=torch.bfloat16, gradient_policy=policy)
    theirs = plane(dtype=torch.bfloat16, gradient_policy=policy)
    descend(ours, shardgrad.optim.AdamW(ours.parameters(), **HYPER, master="float32"))
    with partner(f"te {version}") as fused_adam:
        optimizer = fused_adam(theirs, **HYPER, capturable=capturable, master_weights=True)
        descend(theirs, optimizer)
    assert_rounded_alike(weights(ours), weights(theirs), dtype=torch.bfloat16)


def _clipped(name: str, scaled: bool, capturable: bool) -> Tensors:
    model = plane()
    with partner(name) as fused_adam:
        optimizer = fused_adam(model, **HYPER, capturable=capturable)
        for step in range(2):
            model(step).backward()
            norm = shardgrad.clip_grad_norm_(model, 0.01 if scaled else float("inf"))
            if not scaled:
                for param in model.parameters():
                    param.grad.mul_((0.01 / (norm + 1e-6)).clamp(max=1.0))
            optimizer.step()
            optimizer.zero_grad()
            for alias in optimizer._aliases:  # they would keep memory
                assert alias.local.grad is None
                assert getattr(alias.local, "decoupled_grad", None) is None
    return weights(model)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("name", BOTH)
@on_ranks(2)
def test_a_clipping_factor_is_paid_before_a_kernel_reads_the_address(
    name: str, capturable: bool
) -> None:
    assert_same_bits(_clipped(name, True, capturable), _clipped(name, False, capturable))


def _slope(step: int, rank: int) -> Tensor:
    return torch.randn((5, 3), generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("scaler_kind", ["none", "torch", "ours"])
@pytest.mark.parametrize("name", BOTH)
@on_ranks(2)
def test_an_infinity_on_one_rank_makes_all_ranks_skip(name: str, scaler_kind: str) -> None:
    model = plane()
    scaler: Any = None
    if scaler_kind == "torch":
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    elif scaler_kind == "ours":
        scaler = shardgrad.GradScaler(init_scale=4.0)
    with partner(name) as fused_adam:
        optimizer = fused_adam(model, **HYPER, capturable=True)
        before = weights(model)
        loss = model(0)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if dist.get_rank() == 0:
            model.weights[0].grad.to_local()[0] = float("inf")  # rank 1 sees finite numbers only
        if scaler is None:
            shardgrad.clip_grad_norm_(model, 1.0)
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        assert_same_bits(weights(model), before)
        optimizer.zero_grad()
        loss = model(1)
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step() if scaler is None else scaler.step(optimizer)
        after = weights(model)
    assert all(not torch.equal(after[key], before[key]) for key in before)
    # A skipped step leaves no trace in the moments, and the scale was taken out of the other one's
    # gradients.
    moments = {key: t for key, t in state(optimizer).items() if key.endswith("exp_avg")}
    slope = torch.stack([_slope(1, rank) for rank in range(dist.get_world_size())]).mean(0)
    # A mean of two, a product, and a scale that is a power of two: fewer than four roundings.
    torch.testing.assert_close(
        moments["0.exp_avg"], 0.1 * slope, rtol=4 * 2.0**-24, atol=4 * 2.0**-26
    )


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("name", BOTH)
@on_ranks(1)
def test_units_that_are_clipped_one_by_one_are_skipped_together(name: str, bad: int) -> None:
    units = nn.ModuleList([plane(), plane()])
    with partner(name) as fused_adam:
        optimizer = fused_adam(units.parameters(), **HYPER, capturable=True)
        before = weights(units)
        for number, unit in enumerate(units):
            unit(0).backward()
            if number == bad:
                unit.weights[0].grad.to_local()[0] = float("inf")
            shardgrad.clip_grad_norm_(unit, 1.0)
        optimizer.step()
    assert_same_bits(weights(units), before)


# -- state


def addresses(optimizer: Any) -> list[int]:
    """Returns where a graph finds states, and the numbers of groups that are on the device."""
    entries = *optimizer.state.values(), *optimizer.param_groups, *optimizer.partner.param_groups
    found = [value for each in entries for value in each.values() if isinstance(value, Tensor)]
    return [getattr(value, "to_local", lambda v=value: v)().data_ptr() for value in found]


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("te 2.17.1", torch.float32, {}),
        ("te 2.17.1", torch.float32, {"capturable": True}),
        ("te 2.18.0", torch.bfloat16, {"master_weights": True}),
        ("te 2.18.0", torch.bfloat16, {"master_weights": True, "store_param_remainders": True}),
        (
            "te 2.18.0",
            torch.bfloat16,
            {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
        ),
        ("te 2.18.0", torch.float32, {"exp_avg_dtype": torch.float16}),
        ("apex", torch.float32, {}),
    ],
)
@on_ranks(2)
def test_training_goes_on_bit_for_bit_from_a_state_dict(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    straight, first, second = (plane(dtype=dtype) for _ in range(3))
    with partner(name) as fused_adam:
        descend(straight, fused_adam(straight, **HYPER, **options), range(4))
        saving = fused_adam(first, **HYPER, **options)
        descend(first, saving, range(2))
        saved = saving.state_dict()
        assert all(
            isinstance(v, DTensor) for entry in saved["state"].values() for v in entry.values()
        )
        # Built before the weights are loaded, as programs do.
        resumed = fused_adam(second, **{**HYPER, "lr": 1.0}, **options)
        with torch.no_grad():
            for into, value in zip(second.parameters(), first.parameters(), strict=True):
                into.copy_(value)
        resumed.state_dict()  # begins the state
        before = addresses(resumed)
        resumed.load_state_dict(saved)
        descend(second, resumed, range(2, 4))
        assert addresses(resumed) == before
    assert_same_bits(weights(second), weights(straight))


@on_ranks(2)
def test_state_comes_from_fsdp2_and_goes_back() -> None:
    ours, theirs = plane(), FSDP2.fully_shard(Plane())
    other = fused_adam_of((2, 20))(theirs.parameters(), **HYPER)
    descend(theirs, other, range(2))
    with partner("te 2.17.1") as fused_adam:
        optimizer = fused_adam(ours, **HYPER)
        with torch.no_grad():
            for into, value in zip(ours.parameters(), theirs.parameters(), strict=True):
                into.to_local().copy_(value.to_local())
        optimizer.load_state_dict(other.state_dict())
        descend(ours, optimizer, range(2, 3))
    descend(theirs, other, range(2, 3))
    assert_same_bits(weights(ours), weights(theirs))
    other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("name", BOTH)
@on_ranks(2)
def test_distributed_checkpoints_hold_the_state(name: str) -> None:
    first, second = plane(), plane()
    with partner(name) as fused_adam:
        saving = fused_adam(first, **HYPER)
        descend(first, saving, range(2))
        saved = dcp.get_optimizer_state_dict(first, saving)
        assert "weights.3" in saved["state"]
        loading = fused_adam(second, **HYPER)
        fresh = dcp.get_optimizer_state_dict(second, loading)
        assert fresh["state"].keys() == saved["state"].keys()
        dcp.set_optimizer_state_dict(second, loading, saved)
        assert_same_bits(state(loading), state(saving))
        assert loading.state_dict()["param_groups"] == saving.state_dict()["param_groups"]


@on_ranks(1)
def test_weights_loaded_after_the_optimizer_was_built_are_not_undone() -> None:
    model = plane(dtype=torch.bfloat16)
    with partner("te 2.17.1") as fused_adam:
        optimizer = fused_adam(model, **HYPER, master_weights=True, capturable=True)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(7.0)
        descend(model, optimizer, range(1))
    assert all((w.float() - 7).abs().max() < 0.1 for w in weights(model).values())


@on_ranks(1)
def test_master_copies_that_nothing_updates_are_not_saved() -> None:
    with partner("te 2.17.1") as fused_adam:
        model = plane()
        optimizer = fused_adam(model, **HYPER, master_weights=True)
        assert all(
            set(entry) == {"exp_avg", "exp_avg_sq"}
            for entry in optimizer.state_dict()["state"].values()
        )


# -- the real ones


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["transformer_engine", "apex"])
def test_the_installed_package_agrees_with_our_adamw(worlds: dict[int, Ranks], name: str) -> None:
    try:
        package(name).FusedAdam.find()
    except PartnerUnavailableError as error:
        pytest.skip(str(error))
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    worlds[1].run(_installed_package, name)


def package(name: str) -> Any:
    return import_module(f"shardgrad.integrations.{name}")


def _installed_package(name: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cuda", (1,))
    for capturable in (False, True):
        ours, theirs = plane(mesh=mesh), plane(mesh=mesh)
        descend(ours, shardgrad.optim.AdamW(ours.parameters(), **HYPER))
        optimizer: Optimizer = package(name).FusedAdam(theirs, **HYPER, capturable=capturable)
        descend(theirs, optimizer)
        assert_rounded_alike(weights(ours), weights(theirs))
