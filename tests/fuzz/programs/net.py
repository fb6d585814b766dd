"""The model of a program. It is the same class under every engine, and knows none of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.programs.program import Block, Model, Program
from tests.fuzz.programs.streams import NoStreams

_one_at_a_time = threading.Lock()
ROWS = 3
LARGE = 16  # a block with more inside has it in its last side, too


class TrapError(Exception):
    """Raised on purpose in a forward or a backward."""


class Plan:
    """What the next forward does; shared by all blocks of a model.

    Attributes:
        rank: of this process.
        routes: the experts that blocks use: 0 or 1.
        fails: ("forward" | "backward", position in the order), or None.
        skipped: blocks that do not run.
        streams: of a device; plain torch has none.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.micro = 0
        self.by_rank = False  # which expert runs depends on the rank, though experts are units
        self.fails: tuple[str, int] | None = None
        self.skipped: set[int] = set()
        self.streams = NoStreams()

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
        elif block.kind == "buffer":
            self.register_buffer("mean", torch.zeros(width))
        self.places = block.sides or ((0,) if block.kind == "branch" else ())
        self.sides = nn.ModuleList(nn.Linear(width, width) for _ in self.places)
        if self.sides and block.hidden > LARGE:
            sizes = (width, block.hidden), (block.hidden, width)
            self.sides[-1] = nn.Sequential(*(nn.Linear(*each) for each in sizes))
        if block.frozen:
            next(iter(self.parameters())).requires_grad_(False)

    def forward(self, x: Tensor, again: bool = True) -> Any:
        for block in self.inner:
            x = run(block, x)
        inputs = [x] * len(self.sides)
        if self.block.kind == "branch":
            inputs[-1] = x.detach()
        calls = [partial(_side, *each) for each in zip(self.sides, inputs, strict=True)]
        out = around(x) + 0.5 * torch.tanh(self._body(x, again))
        outs = self.plan.streams.all(self.places, calls, *inputs)
        return (out, *outs) if self.block.apart else sum(outs, out)

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
        if kind == "shrinks" and self.training:
            with torch.no_grad():
                self.lin.weight.mul_(0.9)
        if kind == "buffer":
            if self.training:
                with torch.no_grad():
                    self.mean.lerp_(x.detach().mean(0), 0.1)
            return self.lin(x - self.mean)
        if kind == "again" and again:
            x = x + 0.1 * whole(self(x, again=False))
        return self.lin(x)


def around(x: Tensor) -> Tensor:
    """Returns what goes around layers, with a gradient of its own.

    Torch adds to a gradient in place once nobody holds it, even if a backward on another stream,
    such as that of a detached side, which nobody waits for, still reads it.
    """
    return x * 1.0


def _side(layer: nn.Module, x: Tensor) -> Tensor:
    return 0.5 * torch.tanh(layer(x))


def whole(out: Any) -> Tensor:
    """Returns what a block computes, of which it may give parts."""
    return sum(out[1:], out[0]) if isinstance(out, tuple) else out


def run_all(blocks: Sequence[FuzzBlock], x: Tensor) -> list[Tensor]:
    """Runs blocks side by side as they say: recomputed or not, each in its stream."""

    def call(block: FuzzBlock) -> Any:
        kind = block.block.recompute
        if not kind:
            return block(x)
        return checkpoint(block, x, use_reentrant=kind == "reentrant", preserve_rng_state=False)

    if not blocks:
        return []
    places, calls = [b.block.stream for b in blocks], [partial(call, b) for b in blocks]
    return [whole(out) for out in blocks[0].plan.streams.all(places, calls, x)]


def run(block: FuzzBlock, x: Tensor) -> Tensor:
    """Runs one."""
    return run_all([block], x)[0]


class Part(nn.Linear):
    """A layer of the root.

    Attributes:
        inside: what its next call runs first.
    """

    inside: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        inside, self.inside = self.inside, None
        return super().forward(x if inside is None else x + 0.1 * inside(x))


class Net(nn.Module):
    """See `program.Model`."""

    def __init__(self, model: Model, plan: Plan) -> None:
        super().__init__()
        self.model, self.plan = model, plan
        self.stem = Part(model.width, model.width)
        self.blocks = nn.ModuleList(FuzzBlock(model.width, block, plan) for block in model.blocks)
        self.head = Part(model.width, model.outputs)
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
        x = self.plan.streams.call(self.model.stem, lambda x: torch.tanh(self.stem(x)), x)
        middle = x
        fails = self.plan.fails if again else None
        running = [index for index in self.model.order if index not in self.plan.skipped]
        if self.model.parallel:
            x = sum(run_all([self.blocks[index] for index in running], x), around(x))
        for place, index in enumerate(running):
            if not self.model.parallel:
                x = run(self.blocks[index], x)
            if place == 0:
                middle = x
            if fails == ("forward", place):
                raise TrapError
            if fails == ("backward", place) and x.requires_grad:
                x.register_hook(_trap)
        out = self.head(x)
        return (out, self.aux(middle)) if self.model.aux else out

    def parts(self, x: Tensor, how: str) -> Tensor:
        """Calls stem and head, not forward: twice, recomputed, around a block, or one call in
        another.
        """

        def of_trap(x: Tensor) -> Tensor:
            self.head.inside = _trap
            with suppress(TrapError):
                self.head(x)
            return x

        inside: dict[str, Callable[[Tensor], Tensor]] = {
            "itself": self.stem,
            "layer": next(m for m in self.blocks[0].modules() if isinstance(m, nn.Linear)),
            "trap": of_trap,
            "fails": _trap,
        }
        self.stem.inside = next((inside[word] for word in how.split() if word in inside), None)
        stem = partial(checkpoint, self.stem, use_reentrant=False) if "saved" in how else self.stem
        x = torch.tanh(stem(x))
        x = x + stem(x) if "twice" in how else x
        if "between" in how:
            x = run(self.blocks[0], x)
        return self.head(x)


def _trap(_: Tensor) -> NoReturn:
    raise TrapError


def build(program: Program, plan: Plan) -> Net:
    """Returns the model with weights in float64, the same on all ranks, which may be threads that
    share random numbers.
    """
    with _one_at_a_time:
        torch.default_generator.manual_seed(program.seed)
        return Net(program.model, plan).double()


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
