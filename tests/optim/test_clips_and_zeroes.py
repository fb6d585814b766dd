"""Whatever is clipped, zeroed and stepped in any order: the numbers of plain torch, and no step
on what a clip has found not to be finite.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardgrad
from tests.support.parity import SHARDGRAD, UNSHARDED, route
from tests.support.ranks import on_ranks

OPERATIONS = ("backward", "clip", "assign", "hide", "poison", "step", "zero")
OPERATIONS += ("clip", "poison", "step")  # twice as often
PROGRAMS, LENGTH, LR = 60, 14, 0.1
RANKS, WIDTH = 2, 4
LAYERS, ROOT = 4, {2, 3}  # layers, and those that are not units of their own


def mine(whole: Tensor) -> Tensor:
    """Returns this rank's rows of a parameter or a gradient."""
    return whole.detach().chunk(RANKS)[dist.get_rank()]


class Both:
    """A sharded model and a plain one, two optimizers of which share units, and what torch says.

    Attributes:
        poisoned: parameters of which a clip has found a gradient that is not finite.
        spoiled: those that were clipped by such a norm, so that torch would have lost them, too,
            and their neighbors in a unit, whose step may be skipped.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.ours, self.plain = (route(WIDTH, LAYERS).double() for _ in range(2))
        SHARDGRAD.shard(self.ours.layers[0], self.ours.layers[1], self.ours)
        self.params, self.right = list(self.ours.parameters()), list(self.plain.parameters())
        owners = [rng.randrange(2) for _ in self.params[:-2]] + [0, 1]
        self.of = [[i for i, owner in enumerate(owners) if owner == k] for k in range(2)]
        self.optims = [
            shardgrad.optim.SGD([{"params": [self.params[i]]} for i in own], lr=LR)
            for own in self.of
        ]
        self.skipped, self.poisoned, self.spoiled = [0, 0], set[int](), set[int]()

    def some(self) -> list[int]:
        return sorted(self.rng.sample(range(LAYERS), self.rng.randint(1, LAYERS)))

    def backward(self) -> None:
        while self.spoiled:  # a verdict is about the gradients that were there
            self.zero()
        used, number = self.some(), self.rng.randrange(100)
        for model, engine in ((self.ours, SHARDGRAD), (self.plain, UNSHARDED)):
            x = engine.inputs(number, WIDTH, dtype=torch.float64)
            model(x, *used).square().mean().backward()

    def clip(self, must: tuple[int, ...] = ()) -> None:
        places = sorted({*self.some(), *must})
        limit = self.rng.choice((math.inf, 1.0, 0.01))
        norm = shardgrad.clip_grad_norm_([self.params[i] for i in places], limit)
        found = {i for i in places if self.right[i].grad is not None}
        bad = {i for i in found if not self.right[i].grad.isfinite().all()}
        if bad or found & self.spoiled:
            assert not (bad and math.isfinite(norm))
            self.poisoned |= bad
            self.spoiled |= found
            if found & ROOT:  # what is found is remembered by the unit
                self.spoiled |= {i for i in ROOT if self.right[i].grad is not None}
        else:
            right = nn.utils.clip_grad_norm_([self.right[i] for i in places], limit)
            torch.testing.assert_close(norm.double(), right.double())

    def poison(self) -> None:
        there = [i for i in range(LAYERS) if self.right[i].grad is not None]
        if there:
            bad, value = self.rng.choice(there), self.rng.choice((math.inf, math.nan))
            row = self.rng.randrange(WIDTH)
            self.right[bad].grad[row, 0] = value
            rank, row = divmod(row, WIDTH // RANKS)
            if rank == dist.get_rank():
                self.params[bad].grad.to_local()[row, 0] = value
            self.clip(must=(bad,))
            self.rng.choice((self.clip, self.zero))()
            self.clip()  # perhaps of others: what was found is not forgotten

    def assign(self) -> None:
        place = self.rng.randrange(LAYERS)
        if place not in self.spoiled & ROOT:  # what was found was of the former gradient
            self.poisoned.discard(place)
            self.spoiled.discard(place)
            ours, right = self.params[place], self.right[place]
            if right.grad is None or self.rng.random() < 0.4:
                ours.grad, right.grad = torch.ones_like(ours), torch.ones_like(right)
            else:
                right.grad.fill_(1.0)
                (ours.grad if self.rng.random() < 0.5 else ours.grad.to_local()).fill_(1.0)

    def hide(self) -> None:
        """A gradient is away while all the others are clipped, and comes back as it was."""
        place = self.rng.randrange(LAYERS)
        if not self.spoiled:
            pair = self.params[place], self.right[place]
            kept = [param.grad for param in pair]
            for param in pair:
                param.grad = None
            self.clip(must=tuple(range(LAYERS)))
            for param, grad in zip(pair, kept, strict=True):
                param.grad = grad

    def step(self) -> None:
        k = self.rng.randrange(2)
        before = [p.to_local().clone() for p in self.params]
        self.optims[k].step()
        own = {i for i in self.of[k] if self.right[i].grad is not None}
        if own & self.poisoned:
            self.skipped[k] += 1
        elif not own & self.spoiled:
            torch.optim.SGD([self.right[i] for i in self.of[k]], lr=LR).step()
        for i, (param, right, old) in enumerate(zip(self.params, self.right, before, strict=True)):
            if own & self.spoiled and i in own:  # no number of torch's to compare with
                assert param.to_local().isfinite().all()
                assert not own & self.poisoned or torch.equal(param.to_local(), old)
                right.data.copy_(param.full_tensor())
            torch.testing.assert_close(param.to_local(), mine(right))

    def zero(self) -> None:
        k, to_none = self.rng.randrange(3), self.rng.random() < 0.5
        places = range(LAYERS) if k == 2 else self.of[k]
        (self.ours if k == 2 else self.optims[k]).zero_grad(set_to_none=to_none)
        for i in places:
            grad = self.right[i].grad
            self.right[i].grad = None if to_none or grad is None else torch.zeros_like(grad)
        self.poisoned.difference_update(places)
        self.spoiled.difference_update(places)

    def compare_gradients(self) -> None:
        for i, (param, right) in enumerate(zip(self.params, self.right, strict=True)):
            assert (param.grad is None) == (right.grad is None)
            if right.grad is not None and i not in self.spoiled:
                torch.testing.assert_close(param.grad.to_local(), mine(right.grad))


@pytest.mark.filterwarnings("ignore::shardgrad.UntrainedParameterWarning")
@on_ranks(RANKS)
def test_clips_zeroes_and_steps_in_any_order_are_torchs_and_skip_what_is_not_finite() -> None:
    for seed in range(200, 200 + PROGRAMS):
        rng = random.Random(seed)
        both = Both(rng)
        both.backward()
        done = []
        for _ in range(LENGTH):
            done.append(rng.choice(OPERATIONS))
            try:
                getattr(both, done[-1])()
                if rng.random() < 0.3:
                    both.compare_gradients()  # which takes a factor that is owed
            except Exception as error:
                error.add_note(f"seed {seed}: {done}")
                raise
        for optim, skipped in zip(both.optims, both.skipped, strict=True):
            assert optim.skipped_steps.item() >= skipped, f"seed {seed}: {done}"
