"""Programs edit an optimizer's groups and state by hand; the flat optimizers follow as torch's
do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import deepcopy
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from shardgrad.errors import CaptureError, OptimizerParameterError, OptimizerStateError
from shardgrad.optim import AdamW
from tests.support.parity import GATHERED, UNSHARDED, stack, unchanged
from tests.support.ranks import on_ranks

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "adam": ("Adam", {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "adam_maximize": ("Adam", {"maximize": True}),
    "sgd": ("SGD", {"weight_decay": 0.01}),
    "sgd_momentum": ("SGD", {"momentum": 0.9, "dampening": 0.5}),
    "sgd_nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
}


def model() -> nn.Sequential:
    first, _, second = stack(5, 7, 3)
    return nn.Sequential(first, second)


def in_two_groups(m: nn.Sequential) -> list[dict[str, Any]]:
    return [
        {"params": list(m[0].parameters()), "momentum": 0.0, "nesterov": False},
        {"params": list(m[1].parameters()), "lr": 0.01},
    ]


def train(m: nn.Sequential, optim: Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(m[0].weight.dtype)
        m.zero_grad()
        m(x).square().mean().backward()
        optim.step()


class Edited(NamedTuple):
    optim: Optimizer
    random: Random
    removed: list[dict[str, Any]]

    def group(self) -> dict[str, Any]:
        return self.random.choice(self.optim.param_groups)


def deletes_a_group(of: Edited) -> None:
    if len(of.optim.param_groups) > 1:
        of.removed.append(of.optim.param_groups.pop(of.random.randrange(2)))


def moves_a_parameter(of: Edited) -> None:
    one, other = of.group(), of.group()
    other["params"] = [*other["params"], *one["params"][:1]]
    one["params"] = one["params"][1:]


def replaces_a_group(of: Edited) -> None:
    of.optim.param_groups[0] = {**of.optim.param_groups[0], "lr": 0.05, "momentum": 0.9}


def moments(of: Edited) -> Iterator[tuple[dict[str, Any], str]]:
    for entry in of.optim.state.values():
        for name in entry.keys() & {"exp_avg", "momentum_buffer"}:
            yield entry, name


def replaces_moments(of: Edited) -> None:
    for entry, name in moments(of):
        entry[name] = entry[name] * 0.5


def adds_entries(of: Edited) -> None:
    of.optim.state["own"] = {}
    for entry, _ in moments(of):
        entry["seen"] = 3


def loads_a_state_in_place_of_none(of: Edited) -> None:
    saved = deepcopy(of.optim.state_dict())
    of.optim.state.clear()
    of.optim.load_state_dict(saved)


EDITS: Sequence[Callable[[Edited], object]] = (
    lambda of: of.optim.state.clear(),
    lambda of: [of.optim.state.pop(param, None) for param in of.group()["params"][:1]],
    lambda of: of.random.shuffle(of.group()["params"]),
    lambda of: of.group().update(lr=of.random.random(), betas=(of.random.random(), 0.99)),
    lambda of: of.group().update(weight_decay=of.random.random()),
    lambda of: setattr(of.optim, "state", defaultdict(dict)),
    deletes_a_group,
    lambda of: of.removed and of.optim.add_param_group(dict(of.removed.pop())),
    moves_a_parameter,
    replaces_a_group,
    replaces_moments,
    adds_entries,
    lambda of: of.removed or loads_a_state_in_place_of_none(of),
)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_an_edited_optimizer_trains_as_torchs_does(kind: str, seed: int) -> None:
    ends, (name, options) = [], KINDS[kind]
    for engine in (GATHERED, UNSHARDED):
        m = model().double()
        if seed % 3:
            engine.shard(*m, m)
        where = {"states_on_host": seed > 9} if engine is GATHERED else {}
        optim = getattr(engine.optim, name)(in_two_groups(m), lr=0.1, **options, **where)
        of = Edited(optim, Random(seed), [])
        for step in range(12):
            train(m, optim, range(step, step + 1))
            of.random.choice(EDITS)(of)
        own = "own" in optim.state, sum("seen" in entry for entry in optim.state.values())
        ends.append({**engine.snapshot(m), "own": torch.tensor(own)})
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-11)


def test_zero_grad_leaves_the_parameters_of_a_deleted_group_alone() -> None:
    m = model()
    optim = AdamW(in_two_groups(m), lr=0.1)
    m(torch.ones(2, 5)).sum().backward()
    del optim.param_groups[1]
    optim.zero_grad()
    assert (m[0].weight.grad, m[1].weight.grad is None) == (None, False)
    assert len(optim.state_dict()["state"]) == 2


@pytest.mark.parametrize(
    ("edit", "refusal"),
    [
        (lambda optim, p: optim.param_groups[1].update(params=[p]), "twice"),
        (lambda optim, p: optim.state[p].update(exp_avg=torch.zeros(3)), "shape"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(
    edit: Callable[[Optimizer, nn.Parameter], None], refusal: str
) -> None:
    m = model()
    optim = AdamW(in_two_groups(m), lr=0.1)
    train(m, optim, range(2))
    edit(optim, m[0].weight)
    refused = pytest.raises((OptimizerParameterError, OptimizerStateError), match=refusal)
    with unchanged(m.parameters()), refused:
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
