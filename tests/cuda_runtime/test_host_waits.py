"""In an eager step the host waits for nothing, but once a backward is launched, for flags it has to
know; and for gradients that come to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import shardgrad
from tests.cuda_runtime import inspection

UNITS = 3
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


class Partly(nn.Linear):
    """A layer with a parameter that no rank ever uses."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.spare = nn.Parameter(torch.ones(3))


def waits_during(call: Callable[[], object]) -> dict[str, int]:
    """What the host waits for in a call, by the function that waits."""
    before = Counter(inspection.calls())
    call()
    waits = Counter(inspection.calls()) - before
    return {name: waits[name] for name in WAITS if name in waits}


def the_learning_rate(device: str) -> float | torch.Tensor:
    return 1e-2 if device == "number" else torch.tensor(1e-2, device=device)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("lr", ["number", "cpu", "cuda"])
@pytest.mark.parametrize(
    ("layer", "in_backward"),
    [(Partly, {"cudaEventSynchronize": UNITS}), (lambda: nn.Linear(8, 8), {})],
    ids=["missed", "all"],
)
def test_a_steady_eager_step_waits_for_flags_of_missed_parameters_alone(
    layer: Callable[[], nn.Module], in_backward: dict[str, int], lr: str
) -> None:
    model = nn.Sequential(*(layer() for _ in range(UNITS))).cuda()
    for child in model:
        shardgrad.fully_shard(child)
    shardgrad.fully_shard(model)
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=the_learning_rate(lr))
    inputs = torch.randn(4, 8, device="cuda")
    for number in range(4):
        loss = model(inputs).square().mean()
        backward = waits_during(loss.backward)
        assert all(
            (param.grad is None) == name.endswith("spare")
            for name, param in model.named_parameters()
        )
        rest = waits_during(lambda: (optimizer.step(), optimizer.zero_grad(), model(inputs)))
        if number == 3:
            assert backward == in_backward
            assert not rest


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("by_hook", [False, True])
def test_gradients_on_the_host_have_arrived_where_they_are_read(by_hook: bool) -> None:
    model = shardgrad.fully_shard(nn.Linear(8, 8), offload_policy=CPUOffloadPolicy())
    inputs, seen = torch.ones(4, 8, device="cuda"), []

    def read(param: torch.Tensor) -> None:
        seen.append(param.grad.to_local().clone())

    model(inputs).sum().backward()
    model.zero_grad()
    if by_hook:
        model.weight.register_post_accumulate_grad_hook(read)
    with inspection.order("late"):
        model(2 * inputs).sum().backward()
        if not by_hook:
            read(model.weight)
    assert len(seen) == 1
    assert (seen[0] == 8).all()


@pytest.mark.usefixtures("one_rank")
def test_what_is_computed_before_a_reshard_does_not_see_what_is_written_after_it() -> None:
    model = shardgrad.fully_shard(nn.Linear(8, 8), offload_policy=CPUOffloadPolicy())
    before = model.weight.to_local().sum()
    with inspection.order("late"), torch.no_grad():
        model.unshard()
        found = model.weight.sum()
        model.reshard()
        model.weight.to_local().zero_()
    torch.testing.assert_close(found.cpu(), before)
