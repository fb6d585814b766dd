"""apex's FusedAdam on our parameters: the numbers that it has on plain ones, or an error in words.

A stand-in has its contract, gaps included; the real one runs where it is installed.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

import shardgrad
from shardgrad import GradientPolicy
from shardgrad.errors import (
    DeepcopyError,
    OptimizerParameterError,
    OptimizerStateError,
    OptionError,
    PartnerUnavailableError,
    UnsupportedError,
)
from shardgrad.integrations import apex
from tests.support.parity import FSDP2, Tensors, assert_same_bits
from tests.support.ranks import Ranks, on_ranks
from tests.support.stand_ins import apex_fused_adam

HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-2, "weight_decay": 0.1}
SHAPES = ((5, 3), (4,), (2, 2), (1,))  # on two ranks the last has no row on rank 1


class Plane(nn.Module):
    """A loss that is linear in the parameters, so gradients do not depend on them."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(
            torch.randn(shape, generator=generator).to(dtype) for shape in shapes or SHAPES
        )

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        slopes = [torch.randn(tuple(w.shape), generator=generator) for w in self.weights]
        return sum((w * s.to(w)).sum() for w, s in zip(self.weights, slopes, strict=True))


def plane(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, **options: Any) -> Plane:
    return shardgrad.fully_shard(Plane(*shapes, dtype=dtype), **options)


@contextmanager
def stand_in() -> Iterator[None]:
    """Installs the stand-in, which runs on the CPU."""
    apex._DEVICES.append("cpu")
    try:
        with apex_fused_adam.installed():
            yield
    finally:
        apex._DEVICES.remove("cpu")


def descend(model: nn.Module, optimizer: Optimizer, steps: range = range(3)) -> None:
    for step in steps:
        model(step).backward()
        for param in model.parameters():
            if param.grad is not None and not isinstance(param, DTensor):
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> Tensors:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def moments(optimizer: Optimizer) -> Tensors:
    found = optimizer.state_dict()["state"].items()
    return {f"{n}.{key}": value.full_tensor() for n, entry in found for key, value in entry.items()}


@pytest.mark.parametrize("capturable", [False, True])
@on_ranks(2)
def test_it_trains_as_on_plain_parameters(capturable: bool) -> None:
    with stand_in():
        ours, plain = plane(), Plane()
        # Groups, of which one has no element on rank 1, and a schedule.
        split = [[*model.weights[:3]] for model in (ours, plain)]
        groups, plain_groups = (
            [{"params": first}, {"params": [model.weights[3]], "lr": 1e-3}]
            for first, model in zip(split, (ours, plain), strict=True)
        )
        optimizers = (
            apex.FusedAdam(groups, **HYPER, capturable=capturable),
            apex_fused_adam.FusedAdam(plain_groups, **HYPER),
        )
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            for step in range(3):
                descend(model, optimizer, range(step, step + 1))
                schedule.step()
    if capturable:  # the learning rate is rounded to float32
        for key, value in weights(plain).items():
            torch.testing.assert_close(weights(ours)[key], value, rtol=2**-21, atol=2**-24)
    else:
        assert_same_bits(weights(ours), weights(plain))
    assert [int(g["step"]) for g in optimizers[0].state_dict()["param_groups"]] == [3, 3]


@on_ranks(1)
def test_a_parameter_that_no_unit_shards_is_trained_beside_the_others() -> None:
    outer = nn.Parameter(torch.ones(3))
    model = plane()
    with stand_in():
        optimizer = apex.FusedAdam([*model.parameters(), outer], **HYPER)
        before = weights(model)
        (model(0) + outer.sum()).backward()
        model.weights[1].grad = None
        optimizer.step()
    after = weights(model)
    assert [torch.equal(after[key], before[key]) for key in before] == [False, True, False, False]
    assert not torch.equal(outer, torch.ones(3))
    assert all(local.grad is None for local in optimizer._locals.values())  # they would keep memory
    optimizer.zero_grad()
    assert outer.grad is None
    assert type(optimizer.state_dict()["state"][4]["exp_avg"]) is Tensor


@pytest.mark.parametrize("scaler_kind", ["none", "torch", "ours"])
@on_ranks(2)
def test_an_infinity_on_one_rank_makes_all_ranks_skip(scaler_kind: str) -> None:
    model = plane()
    scaler: Any = None
    if scaler_kind == "torch":
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    elif scaler_kind == "ours":
        scaler = shardgrad.GradScaler(init_scale=4.0)
    with stand_in():
        optimizer = apex.FusedAdam(model, **HYPER, capturable=True)
        before = weights(model)
        for step in range(2):
            loss = model(step)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if dist.get_rank() == step == 0:
                model.weights[0].grad.to_local()[0] = float("inf")  # rank 1 sees finite ones only
            if scaler is None:
                shardgrad.clip_grad_norm_(model, 100.0)
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            if step == 0:
                assert_same_bits(weights(model), before)
    # A skipped step leaves no trace in the moments, and the scale was taken out of the gradients.
    slopes = [torch.randn((5, 3), generator=torch.Generator().manual_seed(10 + r)) for r in (0, 1)]
    torch.testing.assert_close(
        moments(optimizer)["0.exp_avg"], 0.1 * (slopes[0] + slopes[1]) / 2, rtol=2**-21, atol=2**-23
    )


@pytest.mark.parametrize("bad", [0, 1])
@on_ranks(1)
def test_units_that_are_clipped_one_by_one_are_skipped_together(bad: int) -> None:
    units = nn.ModuleList([plane(), plane()])
    with stand_in():
        optimizer = apex.FusedAdam(units.parameters(), **HYPER, capturable=True)
        before = weights(units)
        for number, unit in enumerate(units):
            unit(0).backward()
            if number == bad:
                unit.weights[0].grad.to_local()[0] = float("inf")
            shardgrad.clip_grad_norm_(unit, 1.0)
        optimizer.step()
    assert_same_bits(weights(units), before)


def addresses(optimizer: Any) -> list[int]:
    """Returns where a graph finds states, and the numbers of groups that are on the device."""
    entries = *optimizer.state.values(), *optimizer.param_groups, *optimizer._apex.state.values()
    found = [value for each in entries for value in each.values() if isinstance(value, Tensor)]
    return [getattr(value, "to_local", lambda v=value: v)().data_ptr() for value in found]


@pytest.mark.parametrize("capturable", [False, True])
@on_ranks(2)
def test_training_goes_on_bit_for_bit_from_a_state_dict(capturable: bool) -> None:
    straight, first, second, third = (plane() for _ in range(4))
    options = {**HYPER, "capturable": capturable}
    with stand_in():
        descend(straight, apex.FusedAdam(straight, **options), range(4))
        saving = apex.FusedAdam(first, **options)
        descend(first, saving, range(2))
        resumed = apex.FusedAdam(second, **{**options, "lr": 1.0})
        with torch.no_grad():
            for model in (second, third):
                for into, value in zip(model.parameters(), first.parameters(), strict=True):
                    into.copy_(value)
        resumed.state_dict()  # begins the state
        before = addresses(resumed)
        resumed.load_state_dict(saving.state_dict())
        descend(second, resumed, range(2, 4))
        assert addresses(resumed) == before
        # And through torch's checkpoints, which name parameters.
        saved = dcp.get_optimizer_state_dict(first, saving)
        assert isinstance(saved["state"]["weights.3"]["exp_avg"], DTensor)
        loading = apex.FusedAdam(third, **options)
        dcp.set_optimizer_state_dict(third, loading, saved)
        descend(third, loading, range(2, 4))
    assert_same_bits(weights(second), weights(straight))
    assert_same_bits(weights(third), weights(straight))


# -- refused in words, before anything is changed


def test_another_project_called_apex_is_refused_with_what_to_build() -> None:
    code = "import sys, shardgrad.integrations.apex; assert 'apex' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    for options in ({"stranger": True}, {"with_extension": False}):
        with (
            apex_fused_adam.installed(**options),
            pytest.raises(PartnerUnavailableError, match=r"(?s)amp_C.*NVIDIA/apex") as raised,
        ):
            apex.FusedAdam([nn.Parameter(torch.ones(1))])
        assert isinstance(raised.value, ImportError)


@pytest.mark.parametrize(
    ("policy", "options", "error", "words"),
    [
        (None, {"amsgrad": True}, OptionError, "AMSGrad"),
        (None, {"nonsense": 1}, OptionError, "nonsense"),
        (None, {"master_weights": True}, OptionError, "does not save its master weights"),
        (GradientPolicy(decoupled=True), {}, OptimizerParameterError, "reads param.grad only"),
        (
            GradientPolicy(dtype=torch.float32),
            {},
            OptimizerParameterError,
            r"weights.0: it would read the gradient, which is torch.float32, as torch.bfloat16",
        ),
    ],
)
@on_ranks(1)
def test_refused_before_anything_is_built(
    policy: GradientPolicy | None, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    given = {} if policy is None else {"gradient_policy": policy}
    with stand_in(), pytest.raises(error, match=words):
        apex.FusedAdam(plane((4,), dtype=torch.bfloat16, **given), **HYPER, **options)


@on_ranks(1)
def test_parameters_it_cannot_reach_are_refused() -> None:
    model = plane()
    with (
        apex_fused_adam.installed(),
        pytest.raises(OptimizerParameterError, match="run on cuda only"),
    ):
        apex.FusedAdam(model)
    with stand_in():
        for param, words in (
            (nn.Parameter(torch.empty(3, device="meta")), "meta device"),
            (FSDP2.fully_shard(Plane()).weights[0], "another engine"),
            (nn.Parameter(torch.zeros(3, 4).t()), "not contiguous"),
            # Memory that nothing touches.
            (nn.Parameter(torch.empty(2**31, dtype=torch.bfloat16)), "32 bits"),
        ):
            with pytest.raises(OptimizerParameterError, match=words):
                apex.FusedAdam([param])
        optimizer = apex.FusedAdam(model, **HYPER)
        with pytest.raises(UnsupportedError, match="add_param_group"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        with pytest.raises(DeepcopyError, match="cannot be copied"):
            copy.deepcopy(optimizer)
        # Parameters that moved are noticed at the step.
        model.to(torch.float64)
        model(1).backward()
        with pytest.raises(OptimizerParameterError, match="replaced or moved"):
            optimizer.step()
        plain = nn.Parameter(torch.ones(3))
        optimizer = apex.FusedAdam([plain], **HYPER)
        plain.data = torch.ones(3)
        with pytest.raises(OptimizerParameterError, match="replaced or moved"):
            optimizer.step()


@on_ranks(1)
def test_a_state_that_does_not_fit_changes_nothing() -> None:
    with stand_in():
        model = plane()
        optimizer = apex.FusedAdam(model, **HYPER)
        descend(model, optimizer, range(1))
        saved, before = optimizer.state_dict(), moments(optimizer)
        with pytest.raises(OptimizerStateError, match="its groups differ"):
            apex.FusedAdam(plane((5, 3)), **HYPER).load_state_dict(saved)
        for entry, words in (
            ({"max_exp_avg_sq": torch.zeros(5, 3)}, "does not keep"),
            ({"exp_avg": torch.zeros(5)}, "the wrong shape"),
        ):
            broken = {**saved, "state": {**saved["state"], 3: entry}}
            with pytest.raises(OptimizerStateError, match=words):
                optimizer.load_state_dict(broken)
        assert_same_bits(moments(optimizer), before)


# -- the real one


@pytest.mark.gpu
def test_the_installed_package_agrees_with_our_adamw(worlds: dict[int, Ranks]) -> None:
    try:
        apex._found()
    except PartnerUnavailableError as error:
        pytest.skip(str(error))
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    worlds[1].run(_installed_package)


def _installed_package() -> None:
    mesh = init_device_mesh("cuda", (1,))
    for capturable in (False, True):
        ours, theirs = plane(mesh=mesh), plane(mesh=mesh)
        descend(ours, shardgrad.optim.AdamW(ours.parameters(), **HYPER))
        descend(theirs, apex.FusedAdam(theirs, **HYPER, capturable=capturable))
        for key, value in weights(ours).items():
            torch.testing.assert_close(weights(theirs)[key], value, rtol=2**-18, atol=2**-20)
