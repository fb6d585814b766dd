"""Groups of an optimizer are dictionaries whose numbers live on the device, and refuse what cannot
be.
"""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from numpy import float32
from torch import nn

import shardgrad
from shardgrad.errors import (
    GradientError,
    OptimizerParameterError,
    OptionError,
    ShardgradError,
    UnsupportedError,
)
from shardgrad.optim import SGD, AdamW
from shardgrad.optim.hyper import OptimGroup
from tests.support.parity import stack, unchanged

CPU = torch.device("cpu")


def mirror(optim: torch.optim.Optimizer) -> list[float]:
    return optim.param_groups[0].on(CPU).tolist()


@pytest.mark.parametrize("transposes_grad", [False, True])
@pytest.mark.parametrize("transposes_param", [False, True])
def test_parameters_and_gradients_are_read_by_their_indices_in_whatever_order_of_memory(
    transposes_param: bool, transposes_grad: bool
) -> None:
    def lies(values: torch.Tensor, transposes: bool) -> torch.Tensor:
        return values.t().contiguous().t() if transposes else values.clone()

    values, grad = torch.arange(15.0).view(3, 5), torch.randn(3, 5)
    found = []
    for kind in (SGD, torch.optim.SGD):
        param = nn.Parameter(lies(values, transposes_param))
        optim = kind([param], lr=1.0, momentum=0.9)
        for _ in range(2):
            param.grad = lies(grad, transposes_grad)
            optim.step()
        found.append(param.detach())
    torch.testing.assert_close(*found)


def test_an_assignment_reaches_the_device_at_once() -> None:
    optim = AdamW(
        stack(2, 2).parameters(), lr=0.5, betas=[0.25, 0.75], eps=0.125, weight_decay=0.0625
    )
    assert mirror(optim) == [0.5, 0.25, 0.75, 0.125, 0.0625]
    numbers = optim.param_groups[0].on(CPU)
    optim.param_groups[0]["lr"] = float32(0.75)  # as a schedule's function may compute it
    with pytest.raises(TypeError, match="tuple"):
        optim.param_groups[0]["betas"][0] = 0.5
    optim.param_groups[0]["betas"] = (0.5, 0.875)
    optim.param_groups[0].update(eps=0.25, weight_decay=0.0)
    assert numbers.tolist() == [0.75, 0.5, 0.875, 0.25, 0.0]


BAD = [
    ({"lr": -1.0}, "lr"),
    ({"lr": math.nan}, "lr"),
    ({"lr": math.inf}, "lr"),
    ({"lr": "fast"}, "lr"),
    ({"lr": 10**400}, "lr"),  # a number, and no float
    ({"lr": torch.ones(2)}, "lr"),
    ({"lr": torch.tensor(-1.0)}, "lr"),
    ({"lr": torch.tensor([math.nan])}, "lr"),
    ({"betas": (0.9, 1.0)}, "betas"),
    ({"betas": 0.9}, "betas"),
    ({"eps": -1e-8}, "eps"),
    ({"weight_decay": -0.1}, "weight_decay"),
    ({"moment_dtype": torch.int8}, "moment_dtype"),
    ({"master": "float64"}, "master"),
    ({"master": "float32", "stochastic_rounding": True}, "stochastic"),
]


@pytest.mark.parametrize(("options", "says"), BAD)
def test_bad_options_are_refused_at_construction(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        AdamW(stack(2, 2).parameters(), **options)


@pytest.mark.parametrize(("options", "says"), BAD[:12])
def test_bad_values_are_refused_at_assignment_and_nothing_changes(
    options: dict[str, Any], says: str
) -> None:
    optim = AdamW(stack(2, 2).parameters())
    before = mirror(optim), dict(optim.param_groups[0])
    with pytest.raises(OptionError, match=says):
        optim.param_groups[0].update(options)
    assert (mirror(optim), dict(optim.param_groups[0])) == before


def test_what_is_not_offered_is_refused_by_name() -> None:
    for options in ({"amsgrad": True}, {"differentiable": True}):
        with pytest.raises(UnsupportedError, match=next(iter(options))):
            AdamW(stack(2, 2).parameters(), **options)
    with pytest.raises(UnsupportedError, match="differentiable"):
        SGD(stack(2, 2).parameters(), lr=0.1, differentiable=True)
    AdamW(stack(2, 2).parameters(), fused=True, foreach=False, capturable=True)


def test_momentum_cannot_start_late_and_nesterov_needs_it() -> None:
    params = list(stack(2, 2).parameters())
    optim = SGD(params, lr=0.1)
    with pytest.raises(OptionError, match="built without it"):
        optim.param_groups[0]["momentum"] = 0.9
    with pytest.raises(OptionError, match="Nesterov"):
        SGD(params, lr=0.1, nesterov=True)
    optim = SGD(params, lr=0.1, momentum=0.9, nesterov=True)
    optim.param_groups[0].update(momentum=0.0, nesterov=False)  # the combination counts
    optim.param_groups[0]["dampening"] = 0.5  # with what was assigned before


@pytest.mark.parametrize(
    ("param", "says"),
    [
        (nn.Parameter(torch.zeros(2, dtype=torch.complex64)), "complex"),
        (nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False), "int32"),
        (nn.Parameter(torch.zeros(2).expand(3, 2)), "gaps or overlaps"),
        (nn.Parameter(torch.zeros(2).half()), "bf16 weights"),
    ],
)
def test_parameters_that_cannot_be_updated_are_refused(param: Any, says: str) -> None:
    optim = AdamW(stack(2, 2).parameters(), master="remainder")
    with pytest.raises(ShardgradError, match=says):
        optim.add_param_group({"params": [param]})
    assert len(optim.param_groups) == 1


def test_sparse_gradients_are_refused_before_anything_changes() -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Embedding(4, 3, sparse=True)])
    optim = AdamW(model.parameters(), lr=0.1)
    model[0](model[1](torch.tensor([1]))).sum().backward()
    with unchanged(model.parameters()), pytest.raises(GradientError, match="SparseAdam"):
        optim.step()


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.ones(4, 3),
        lambda: torch.ones(3, 2),
        lambda: torch.ones(2, 3, dtype=torch.float64),
        lambda: torch.ones(3, 2).t(),  # the moments would belong to other elements
        lambda: torch.ones(2, 6)[:, ::2],  # the kernel would write what lies between
    ],
)
def test_replaced_data_of_another_form_is_refused_before_anything_changes(other: Any) -> None:
    p, q = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))
    optim = AdamW([q, p], lr=0.1)
    for param in (p, q):
        param.grad = torch.ones_like(param)
    p.grad, p.data = None, other()
    p.grad = torch.ones_like(p)
    steps = [optim.state[q]["step"], optim.state[p]["step"]]
    with (
        unchanged([p, q, *steps]),
        pytest.raises(OptimizerParameterError, match="replaced"),
    ):
        optim.step()


def test_replaced_data_of_the_same_form_is_trained() -> None:
    p = nn.Parameter(torch.ones(2, 1))
    optim = SGD([p], lr=0.5)
    p.data = torch.full((1, 2), 3.0).t()
    p.grad = torch.ones(2, 1)
    optim.step()
    assert (p == 2.5).all()


def test_an_optimizer_whose_parameters_to_empty_has_replaced_says_so() -> None:
    with torch.device("meta"):
        model = stack(2, 2)
    optim = AdamW(model.parameters())
    with pytest.raises(OptimizerParameterError, match="on the meta device"):
        optim.load_state_dict(optim.state_dict())
    model.to_empty(device="cpu")
    with pytest.raises(OptimizerParameterError, match="to_empty"):
        optim.step()
    AdamW(model.parameters()).step()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_decoupled_decay_of_sgd_shrinks_the_weight_and_stays_out_of_the_momentum(
    momentum: float,
) -> None:
    p, q = (nn.Parameter(torch.linspace(-1, 1, 7, dtype=torch.float64)) for _ in range(2))
    ours = SGD([p], lr=0.1, momentum=momentum, weight_decay=0.5, decoupled_weight_decay=True)
    theirs = torch.optim.SGD([q], lr=0.1, momentum=momentum)
    for step in range(5):
        for param in (p, q):
            param.grad = torch.full_like(param, step - 2.0)
        with torch.no_grad():
            q.mul_(1 - 0.1 * 0.5)
        ours.step()
        theirs.step()
    torch.testing.assert_close(p, q, rtol=1e-14, atol=1e-15)


def test_a_closure_is_called_with_gradients_enabled_and_its_loss_returned() -> None:
    p = nn.Parameter(torch.ones(3))
    optim = SGD([p], lr=0.5)

    @torch.no_grad()
    def step() -> Any:
        def closure() -> torch.Tensor:
            assert torch.is_grad_enabled()
            loss = p.sum()
            loss.backward()
            return loss

        return optim.step(closure)

    assert step() == 3.0
    assert torch.equal(p, torch.full((3,), 0.5))


def test_a_group_has_names_and_pickles_as_a_dictionary() -> None:
    optim = AdamW(stack(2, 2).named_parameters())
    (pickled,) = pickle.loads(pickle.dumps(optim.state_dict()))["param_groups"]
    assert (type(optim.param_groups[0]), type(pickled)) == (OptimGroup, dict)
    assert optim.param_groups[0]["param_names"] == pickled["param_names"] == ["0.weight", "0.bias"]


def test_gradients_beside_the_parameter_are_used_as_those_of_it_are() -> None:
    p = nn.Parameter(torch.ones(4))
    optim, scaler = SGD([p], lr=1.0), shardgrad.GradScaler(init_scale=8.0)
    scaler.scale(torch.ones(()))
    p.decoupled_grad = torch.full((4,), 16.0)  # type: ignore[attr-defined]
    scaler.unscale_(optim)
    assert shardgrad.clip_grad_norm_([p], 1.0) == 4.0
    optim.step()
    torch.testing.assert_close(p, torch.full((4,), 0.5))
    p.decoupled_grad.fill_(math.inf)  # type: ignore[attr-defined]
    scaler.step(optim)
    assert optim.skipped_steps == 1
    torch.testing.assert_close(p, torch.full((4,), 0.5))
    optim.zero_grad(set_to_none=False)
    assert not p.decoupled_grad.any()  # type: ignore[attr-defined]
    optim.zero_grad()
    assert p.decoupled_grad is None  # type: ignore[attr-defined]
