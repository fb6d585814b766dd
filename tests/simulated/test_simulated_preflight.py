"""The preflight on a device: reads in autograd's thread, copies across, numbers that travel with a
launch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardgrad
from shardgrad.graphs.preflight import differences, watch
from shardgrad.graphs.preflight.environment import environment_issues
from shardgrad.graphs.preflight.issues import Issue, explain
from tests.simulated.accelerator.device import NAME, checked
from tests.simulated.accelerator.virtual_ranks import VirtualRanks, one_at_a_time

HOST = torch.arange(3.0)


def place_in(function: Callable[..., Any], line: int = 1) -> str:
    return f"{__file__}:{inspect.getsourcelines(function)[1] + line} in {function.__name__}"


class Layer(nn.Module):
    def __init__(self, work: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.work = work

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        self.work(y.detach())
        return y


def issues_of(work: Callable[[torch.Tensor], Any]) -> tuple[Issue, ...]:
    model = nn.Sequential(Layer(work)).to(NAME)
    x = torch.ones(2, 3, device=NAME)
    _, trace = watch(lambda: model(x).sum().backward(), {"net": model}, torch.device(NAME, 0))
    return trace.issues


def item(y: torch.Tensor) -> Any:
    return y.sum().item()


def tolist(y: torch.Tensor) -> Any:
    return y.tolist()


def printed(y: torch.Tensor) -> Any:
    print(y)


def to_host(y: torch.Tensor) -> Any:
    return y.to("cpu")


def written_to_host(y: torch.Tensor) -> Any:
    return torch.empty(2, 3).copy_(y)


def moved_here(y: torch.Tensor) -> Any:
    return y + HOST.to(y.device)


def moved_here_without_waiting(y: torch.Tensor) -> Any:
    return y + HOST.to(y.device, non_blocking=True)  # the memory is not pinned


def made_here(y: torch.Tensor) -> Any:
    return y * torch.tensor(2.0, device=y.device)


def written_here(y: torch.Tensor) -> Any:
    return y.copy_(HOST.expand(2, 3))


def picked_by_the_host(y: torch.Tensor) -> Any:
    return y[torch.tensor([0, 1])]


def picked_by_a_list(y: torch.Tensor) -> Any:
    return y[[0, 1]]


def selected(y: torch.Tensor) -> Any:
    return y[y > 0]


def synchronised(y: torch.Tensor) -> Any:
    torch.accelerator.synchronize()


@pytest.mark.parametrize(
    ("work", "kind"),
    [
        (item, "host read"),
        (tolist, "host read"),
        (printed, "host read"),
        (to_host, "host read"),
        (written_to_host, "host read"),
        (moved_here, "copy from the host"),
        (moved_here_without_waiting, "copy from the host"),
        (made_here, "copy from the host"),
        (written_here, "copy from the host"),
        (picked_by_the_host, "copy from the host"),
        (picked_by_a_list, "copy from the host"),
        (selected, "data-dependent shape"),
        (synchronised, "synchronisation"),
    ],
)
def test_an_obstacle_in_forward_is_named_with_its_line_and_module(
    work: Callable[[torch.Tensor], Any], kind: str
) -> None:
    (found,) = issues_of(work)
    assert (found.kind, found.module, found.location) == (kind, "net.0", place_in(work))


def host_work(y: torch.Tensor) -> Any:
    return sum(HOST.tolist()) + HOST.sum().item() + len(HOST.nonzero())


def scaled_by_a_number_of_the_host(y: torch.Tensor) -> Any:
    return y * HOST[1]


@pytest.mark.parametrize("work", [host_work, scaled_by_a_number_of_the_host])
def test_what_the_host_does_with_its_own_tensors_is_no_obstacle(
    work: Callable[[torch.Tensor], Any],
) -> None:
    assert issues_of(work) == ()


def pinned_and_not_waiting(y: torch.Tensor) -> Any:
    with mock.patch.object(torch.Tensor, "is_pinned", return_value=True):
        torch.empty(2, 3).copy_(y, non_blocking=True)
        return y + HOST.to(y.device, non_blocking=True)


def test_a_copy_that_a_graph_can_hold_is_no_obstacle() -> None:
    assert issues_of(pinned_and_not_waiting) == ()


def logged(grad: torch.Tensor) -> None:
    grad.norm().item()


def printed_gradient(grad: torch.Tensor) -> None:
    print(grad)


@pytest.mark.parametrize("hook", [logged, printed_gradient])
@pytest.mark.parametrize("on_parameter", [False, True])
def test_a_read_in_a_backward_hook_is_found_in_autograds_thread(
    hook: Callable[[torch.Tensor], None], on_parameter: bool
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3)).to(NAME)
    x = torch.ones(2, 3, device=NAME)
    if on_parameter:
        model[0].weight.register_hook(hook)
    else:
        model[0].register_forward_hook(lambda module, args, y: y.register_hook(hook) and None)
    _, trace = watch(lambda: model(x).sum().backward(), {"net": model}, torch.device(NAME, 0))
    (found,) = trace.issues
    assert (found.kind, found.module, found.location) == ("host read", "net.0", place_in(hook))


def test_operations_of_autograds_thread_have_the_module_they_belong_to() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(NAME)
    x = torch.ones(2, 3, device=NAME)
    _, trace = watch(lambda: model(x).sum().backward(), {"net": model}, torch.device(NAME, 0))
    products = [issued for issued in trace.ops if issued.op == "aten.mm.default"]
    assert [issued.module for issued in products] == ["net.1", "net.1", "net.0"]
    assert {issued.location for issued in products} == {"backward of AddmmBackward0"}


def test_a_number_in_a_cpu_tensor_that_changes_is_named() -> None:
    factor, x = torch.ones(()), torch.ones(3, device=NAME)

    def step() -> None:
        x.mul_(factor)

    def recorded() -> Any:
        factor.add_(1)
        return watch(step, {}, torch.device(NAME, 0))[1]

    (found,) = differences(recorded(), recorded())
    assert (found.kind, found.location) == ("changed number", place_in(step))
    assert found.what == (
        "a number in a CPU tensor of aten.mul_.Tensor was 2.0 in the first step and 3.0 in the "
        "second"
    )


# -- the engine


def training() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    mesh = init_device_mesh(NAME, (dist.get_world_size(),))
    with one_at_a_time():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    model = model.to(NAME)
    for module in (model[0], model):
        shardgrad.fully_shard(module, mesh=mesh)
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.linspace(-1, 1, 24).reshape(4, 6).to(NAME)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        shardgrad.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def a_clean_step() -> None:
    device = torch.device(NAME, dist.get_rank())
    model, optimizer, step = training()
    step()
    step()
    _, first = watch(step, {"net": model}, device)
    _, second = watch(step, {"net": model}, device)
    assert explain([*first.issues, *differences(first, second)]) == ""
    assert environment_issues(device, [optimizer]) == []
    assert any("backward of" in issued.location for issued in first.ops)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_clean_step_of_the_engine_has_no_obstacle(world_size: int) -> None:
    with checked():
        VirtualRanks(world_size).run(a_clean_step)


def losses_and_weights(*, watched: bool) -> list[torch.Tensor]:
    device = torch.device(NAME, dist.get_rank())
    model, _, step = training()
    losses = [watch(step, {"net": model}, device)[0] if watched else step() for _ in range(4)]
    return [t.cpu() for t in (*losses, *(p.to_local().detach() for p in model.parameters()))]


def test_a_watched_step_has_the_same_numbers_bit_for_bit() -> None:
    for plain, seen in zip(
        VirtualRanks(2).run(losses_and_weights, watched=False),
        VirtualRanks(2).run(losses_and_weights, watched=True),
        strict=True,
    ):
        assert all(map(torch.equal, plain, seen))


def a_read_on_one_rank() -> tuple[Issue, ...]:
    device = torch.device(NAME, dist.get_rank())
    model, _, step = training()
    model.unshard()
    if dist.get_rank() == 1:
        model[2].weight.register_hook(printed_gradient)
    return watch(step, {"net": model}, device)[1].issues


def test_each_rank_finds_its_own_issues() -> None:
    none, one = VirtualRanks(2).run(a_read_on_one_rank)
    assert none == ()
    assert [(o.kind, o.module, o.location) for o in one] == [
        ("host read", "net.2", place_in(printed_gradient))
    ]
