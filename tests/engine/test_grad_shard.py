"""None keeps its meaning: a parameter that no rank uses has no gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.parity import SHARDGRAD, Half, stack
from tests.support.ranks import on_ranks


class First(nn.Linear):
    """Ignores what else it is given."""

    def forward(self, x: Tensor, *ignored: Tensor) -> Tensor:
        return super().forward(x)


@on_ranks(2)
def test_hooks_run_in_the_same_order_on_ranks_that_use_different_parameters() -> None:
    model, seen = SHARDGRAD.shard(stack(5, 5, 5)), []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(seen.append)
    model[2 * dist.get_rank()](torch.ones(1, 5)).sum().backward()
    assert [*map(id, seen)] == [*map(id, model.parameters())]


@on_ranks(2)
def test_a_parameter_no_rank_uses_keeps_none_and_does_not_decay() -> None:
    """FSDP2 makes zeros of None if told so, and for what a unit is given and ignores."""
    torch.manual_seed(0)
    model = Half()
    model.used = First(5, 3)
    model.forward = lambda x: model.used(x.requires_grad_(), model.unused(x))
    SHARDGRAD.shard(model.used, model)
    model.set_reduce_scatter_unused_params(True)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(2):
        SHARDGRAD.loss(model, step, 5).backward()
        assert model.unused.weight.grad is None
        assert model.used.weight.grad is not None
        optim.step()
        optim.zero_grad()
    assert model.unused.weight not in optim.state
