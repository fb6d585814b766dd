"""Programs edit an optimizer's groups and state by hand; the flat optimizers follow as torch's
do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import shardgrad
from shardgrad.errors import CaptureError, OptimizerParameterError, OptimizerStateError
from shardgrad.optim import AdamW
from tests.support.parity import stack, unchanged

KINDS: dict[str, dict[str, Any]] = {"AdamW": {}, "SGD": {"momentum": 0.9, "dampening": 0.5}}
both = pytest.mark.parametrize("kind", KINDS)
Edit = Callable[[nn.Sequential, Optimizer], None]


def model() -> nn.Sequential:
    first, _, second = stack(5, 7, 3)
    return nn.Sequential(first, second)


def in_two_groups(m: nn.Sequential) -> list[dict[str, Any]]:
    return [
        {"params": list(m[0].parameters()), "momentum": 0.0},
        {"params": list(m[1].parameters()), "lr": 0.01},
    ]


def train(m: nn.Sequential, optim: Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        m.zero_grad()
        m(x).square().mean().backward()
        optim.step()


def trained(home: Any, kind: str, edits: Sequence[Edit]) -> nn.Sequential:
    """Trains three steps, and three more after each edit."""
    m = model()
    optim = getattr(home, kind)(in_two_groups(m), lr=0.1, **KINDS[kind])
    train(m, optim, range(3))
    for i, edit in enumerate(edits, start=1):
        edit(m, optim)
        train(m, optim, range(3 * i, 3 * i + 3))
    return m


def assert_follows(kind: str, *edits: Edit) -> None:
    left, right, unedited = (
        list(trained(home, kind, each).parameters())
        for home, each in ((shardgrad.optim, edits), (torch.optim, edits), (torch.optim, ()))
    )
    torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)
    assert not all(map(torch.equal, right, unedited))


def replaces_the_state(m: nn.Sequential, optim: Optimizer) -> None:
    optim.state = defaultdict(dict)


def deletes_a_group(m: nn.Sequential, optim: Optimizer) -> None:
    del optim.param_groups[1]


def deletes_a_group_and_assigns_a_rate(m: nn.Sequential, optim: Optimizer) -> None:
    del optim.param_groups[0]
    optim.param_groups[0]["lr"] = 0.5


def replaces_the_parameters_of_a_group(m: nn.Sequential, optim: Optimizer) -> None:
    optim.param_groups[0]["params"] = [m[0].bias]


def moves_a_parameter_to_another_group(m: nn.Sequential, optim: Optimizer) -> None:
    first, second = optim.param_groups
    second["params"] = [*second["params"], m[0].weight]
    first["params"] = [m[0].bias]


def replaces_a_group(m: nn.Sequential, optim: Optimizer) -> None:
    optim.param_groups[0] = {**optim.param_groups[0], "lr": 0.05, "momentum": 0.9}


EDITS: dict[str, Edit] = {
    "clears the state": lambda m, optim: optim.state.clear(),
    "replaces the state": replaces_the_state,
    "removes the state of a parameter": lambda m, optim: optim.state.pop(m[1].weight) and None,
    "removes a parameter from the list": lambda m, optim: optim.param_groups[0]["params"].pop(),
    "deletes a group": deletes_a_group,
    "deletes a group and assigns a rate": deletes_a_group_and_assigns_a_rate,
    "replaces the parameters of a group": replaces_the_parameters_of_a_group,
    "moves a parameter to another group": moves_a_parameter_to_another_group,
    "replaces a group": replaces_a_group,
    "adds an entry of its own": lambda m, optim: optim.state.update({"seen": 3}),
}


@both
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_optimizer_trains_as_torchs_does(edit: str, kind: str) -> None:
    assert_follows(kind, EDITS[edit])


def test_a_replaced_moment_is_used() -> None:
    def edit(m: nn.Sequential, optim: Optimizer) -> None:
        optim.state[m[0].weight]["exp_avg"] = torch.full_like(m[0].weight, 0.5)

    # Again, too: what was replaced once has been copied, and its place is the optimizer's.
    assert_follows("AdamW", edit, edit)


@both
def test_a_group_that_was_removed_and_added_again_keeps_its_moments(kind: str) -> None:
    removed: dict[int, dict[str, Any]] = {}

    def remove(m: nn.Sequential, optim: Optimizer) -> None:
        removed[id(m)] = dict(optim.param_groups.pop(1))

    def add(m: nn.Sequential, optim: Optimizer) -> None:
        optim.add_param_group(removed[id(m)])

    assert_follows(kind, remove, add)


def test_zero_grad_leaves_the_parameters_of_a_deleted_group_alone() -> None:
    m = model()
    optim = AdamW(in_two_groups(m), lr=0.1)
    m(torch.ones(2, 5)).sum().backward()
    del optim.param_groups[1]
    optim.zero_grad()
    assert (m[0].weight.grad, m[1].weight.grad is None) == (None, False)


def test_a_parameter_in_two_groups_is_refused_before_anything_changes() -> None:
    m = model()
    optim = AdamW(in_two_groups(m), lr=0.1)
    train(m, optim, range(2))
    optim.param_groups[1]["params"] = [m[0].weight]
    with unchanged(m.parameters()), pytest.raises(OptimizerParameterError, match="twice"):
        train(m, optim, range(1))


@pytest.mark.parametrize(("key", "refusal"), [("exp_avg", "shape"), ("mine", "does not keep")])
def test_state_of_another_shape_or_name_is_refused_before_anything_changes(
    key: str, refusal: str
) -> None:
    m = model()
    optim = AdamW(m.parameters(), lr=0.1)
    train(m, optim, range(2))
    optim.state[m[0].weight][key] = torch.zeros(3)
    with unchanged(m.parameters()), pytest.raises(OptimizerStateError, match=refusal):
        train(m, optim, range(1))


def test_state_and_groups_cannot_be_edited_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    m = model()
    optim = AdamW(m.parameters(), lr=0.1)
    train(m, optim, range(1))
    monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: True, raising=False)
    optim.state.clear()
    with pytest.raises(CaptureError, match="between calls"):
        optim.step()


def test_an_edited_optimizer_saves_and_loads() -> None:
    m = model()
    optim = AdamW(in_two_groups(m), lr=0.1)
    train(m, optim, range(3))
    optim.state.clear()
    train(m, optim, range(1))
    again = AdamW(in_two_groups(m), lr=0.1)
    again.load_state_dict(optim.state_dict())
    for p in m.parameters():
        assert optim.state[p]["step"] == again.state[p]["step"] == 1
        assert torch.equal(optim.state[p]["exp_avg"], again.state[p]["exp_avg"])


def test_other_mirrors_or_buffers_are_another_step_to_a_graph() -> None:
    m = model()
    optim = AdamW(in_two_groups(m))
    train(m, optim, range(1))
    where: dict[Hashable, list[int]] = {}

    def is_another() -> bool:
        count, addresses = len(where), [buffer.data_ptr() for _, buffer in optim.buffers()]
        assert where.setdefault(optim.guards(), addresses) == addresses
        return len(where) > count

    assert [is_another(), is_another()] == [True, False]
    for _ in range(3):
        optim.param_groups[0] = dict(optim.param_groups[0])
        assert is_another()
    assert len(set(map(tuple, where.values()))) == 1  # the parameters are the same
    group = optim.param_groups.pop()
    assert is_another()
    optim.param_groups.append(group)
    optim.guards()
    assert is_another()


def test_a_constant_or_a_rate_on_the_device_is_another_step_to_a_graph_and_a_number_is_not() -> (
    None
):
    m = model()
    optim = AdamW(m.parameters(), lr=0.1)
    train(m, optim, range(1))
    (group,) = optim.param_groups
    before = optim.guards()
    group["lr"] = 0.2
    assert optim.guards() == before
    group["maximize"] = True
    seen = {before, optim.guards()}
    for group["lr"] in (torch.tensor(0.2), torch.tensor(0.2)):
        seen.add(optim.guards())
    assert len(seen) == 4
