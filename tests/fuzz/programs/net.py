"""The model of a program. It is the same class under every engine, and knows none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.programs.program import Block, Model

ROWS = 3


class TrapError(Exception):
    """Raised on purpose in a forward or a backward."""


class Plan:
    """What the next forward does; shared by all blocks of a model.

    Attributes:
        rank: of this process.
        routes: the experts that blocks use: 0 or 1.
        fails: ("forward" | "backward", position in the order), or None.
        call: runs a function in a stream; plain torch has none.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.micro = 0
        self.by_rank = False  # which expert runs depends on the rank, though experts are units
        self.fails: tuple[str, int] | None = None
        self.call: Callable[..., Any] = lambda place, function, *args: function(*args)

    def expert(self, *, are_units: bool) -> int:
        return (self.micro + (self.rank if self.by_rank or not are_units else 0)) % 2


class FuzzBlock(nn.Module):
    """See `program.Block`."""

    def __init__(self, width: int, block: Block, plan: Plan) -> None:
        super().__init__()
        self.block, self.plan = block, plan
        self.inner = nn.ModuleList(FuzzBlock(width, inner, plan) for inner in block.inner)
        if block.kind == "mlp":
            self.up, self.down = (
                nn.Linear(width, block.hidden),
                nn.Linear(block.hidden, width, block.bias),
            )
        elif block.kind == "experts":
            self.experts = nn.ModuleList(nn.Linear(width, width, block.bias) for _ in range(2))
        else:
            self.lin = nn.Linear(width, width, block.bias)
        if block.kind == "norm":
            self.norm = nn.LayerNorm(width)
        elif block.kind == "gain":
            self.gain = nn.Parameter(torch.ones(1))
        elif block.kind == "spare":
            self.spare = nn.Parameter(torch.ones(block.hidden))
        elif block.kind == "table":
            self.table = nn.Embedding(block.hidden, width)
        elif block.kind == "branch":
            self.side = nn.Linear(width, width)
        elif block.kind == "buffer":
            self.register_buffer("mean", torch.zeros(width))
        if block.frozen:
            next(iter(self.parameters())).requires_grad_(False)

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        for block in self.inner:
            x = run(block, x)
        return x + 0.5 * torch.tanh(self._body(x, again))

    def _body(self, x: Tensor, again: bool) -> Tensor:
        kind = self.block.kind
        if kind == "mlp":
            return self.down(F.gelu(self.up(x)))
        if kind == "experts":
            return self.experts[self.plan.expert(are_units=self.block.expert_units)](x)
        if kind == "norm":
            return self.lin(self.norm(x))
        if kind == "gain":
            return self.lin(x) * self.gain
        if kind == "table":
            return self.lin(x) + self.table(
                torch.arange(len(x), device=x.device) % self.block.hidden
            )
        if kind == "branch":
            return self.lin(x) + self.side(x.detach())
        if kind == "buffer":
            if self.training:
                with torch.no_grad():
                    self.mean.lerp_(x.detach().mean(0), 0.1)
            return self.lin(x - self.mean)
        if kind == "again" and again:
            x = x + 0.1 * self(x, again=False)
        return self.lin(x)


def run(block: FuzzBlock, x: Tensor) -> Tensor:
    """Runs a block as its description says: recomputed or not, in its stream."""
    kind = block.block.recompute

    def call(x: Tensor) -> Tensor:
        if not kind:
            return block(x)
        return checkpoint(block, x, use_reentrant=kind == "reentrant", preserve_rng_state=False)

    return block.plan.call(block.block.stream, call, x)


class Net(nn.Module):
    """See `program.Model`."""

    def __init__(self, model: Model, plan: Plan) -> None:
        super().__init__()
        self.model, self.plan = model, plan
        self.stem = nn.Linear(model.width, model.width)
        self.blocks = nn.ModuleList(FuzzBlock(model.width, block, plan) for block in model.blocks)
        self.head = nn.Linear(model.width, model.outputs)
        if model.aux:
            self.aux = nn.Linear(model.width, model.outputs)
        self.tie()

    def tie(self) -> None:
        """Makes blocks share weights; moving a module to another kind of device separates them."""
        for first, second in self.model.ties:
            self.blocks[second].lin.weight = self.blocks[first].lin.weight

    def forward(self, x: Tensor, again: bool = True) -> Any:
        if self.model.guess and again:
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.model.guess == "grad"):
                guess = self(x, again=False)
            out = guess[0] if self.model.aux else guess
            x = x + 0.1 * out.sum(1, keepdim=True)
        x = torch.tanh(self.stem(x))
        middle = x
        fails = self.plan.fails if again else None
        for place, index in enumerate(self.model.order):
            x = run(self.blocks[index], x)
            if place == 0:
                middle = x
            if fails == ("forward", place):
                raise TrapError
            if fails == ("backward", place) and x.requires_grad:
                x.register_hook(_trap)
        out = self.head(x)
        return (out, self.aux(middle)) if self.model.aux else out


def _trap(grad: Tensor) -> None:
    raise TrapError


def build(model: Model, plan: Plan, seed: int) -> Net:
    """Returns the model with weights in float64, the same on all ranks. Uses the process's random
    numbers.
    """
    torch.default_generator.manual_seed(seed)
    return Net(model, plan).double()


def units(net: Net) -> Iterator[list[nn.Module]]:
    """Yields what is to be sharded, innermost first; the root is the last."""
    together = [net.blocks[index] for index in net.model.several]
    for block in net.blocks:
        yield from _units_in(block, together)
    if together:
        yield together
    yield [net]


def _units_in(block: FuzzBlock, together: list[nn.Module]) -> Iterator[list[nn.Module]]:
    for inner in block.inner:
        yield from _units_in(inner, together)
    if block.block.expert_units:
        for expert in block.experts:
            yield [expert]
    if block.block.unit and block not in together:
        yield [block]


def batch(seed: int, micro: int, rank: int, width: int) -> Tensor:
    """Returns a rank's rows of a micro-batch."""
    generator = torch.Generator().manual_seed(1_000_003 * (seed % 100_003) + 1_009 * micro + rank)
    return torch.randn(ROWS, width, generator=generator, dtype=torch.float64)


def loss_of(out: Any, which: int) -> Tensor:
    """Returns a scalar of one output, or of both if `which` is 2."""
    outs = out if isinstance(out, tuple) else (out,)
    chosen = outs if which == 2 else (outs[which % len(outs)],)
    return sum(
        (o.double().square().mean() for o in chosen), torch.zeros((), device=chosen[0].device)
    )
