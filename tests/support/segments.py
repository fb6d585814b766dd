"""Segments: flat tensors with rows in them, in both backends, that tests of updates and norms are
made of.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from shardgrad import ops
from shardgrad.ops import movement, norm, update
from shardgrad.ops.norm import NORM_SCRATCH_NUMEL
from shardgrad.ops.segments import TILE_NUMEL, segment_rows

needs_library = pytest.mark.skipif(
    ops.backend() != "compiled", reason="shardgrad/_C.so was not built"
)
BACKENDS = ["reference", pytest.param("compiled", marks=needs_library)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
UNTOUCHED = -77.0

# Nothing, one element, less than a tile, exactly one, a little more, several; in odd places.
SIZES = (5, 0, 1, TILE_NUMEL, 3 * TILE_NUMEL + 7, 0, 1000)

Op = Callable[..., None]


REFERENCES: dict[str, Op] = {
    "pack": movement.pack_reference,
    "unpack": movement.unpack_reference,
    "sum_chunks": movement.sum_chunks_reference,
    "norm_": norm.norm_reference,
    "adam_": update.adam_reference,
    "sgd_": update.sgd_reference,
}


def operator(backend: str, name: str) -> Op:
    compiled: Op = getattr(torch.ops.shardgrad, name).default
    return REFERENCES[name] if backend == "reference" else compiled


@dataclass(frozen=True)
class Segment:
    """Parameters with gaps of different widths in each flat tensor, so that nothing is aligned.

    What lies in the gaps is `UNTOUCHED`. All rows are live, and in their `taken`-th step.
    """

    sizes: tuple[int, ...]
    pieces: tuple[tuple[int, int, int, int, int, int], ...]
    param: Tensor
    grad: Tensor
    first: Tensor  # exp_avg, or momentum_buffer
    second: Tensor
    master: Tensor | None
    steps: Tensor
    ticket: Tensor
    touched: Tensor
    rows: Tensor
    tiles: int

    @classmethod
    def of(
        cls,
        sizes: Sequence[int] = SIZES,
        *,
        param: torch.dtype = torch.float32,
        grad: torch.dtype = torch.float32,
        state: torch.dtype = torch.float32,
        master: torch.dtype | None = None,
        taken: int = 3,
        seed: int = 0,
    ) -> Segment:
        count = len(sizes)
        at = list(itertools.accumulate(sizes, initial=0))
        # Steps lie in reverse, and flags behind one that belongs to nobody.
        pieces = tuple(
            (3 + at[i] + i, 1 + at[i] + 2 * i, 2 + at[i] + 3 * i, n, count - 1 - i, i + 1)
            for i, n in enumerate(sizes)
        )
        rows, tiles = segment_rows(pieces)
        generator = torch.Generator().manual_seed(seed)

        def flat(column: int, dtype: torch.dtype, fill: Callable[[int], Tensor]) -> Tensor:
            values = torch.full((sum(sizes) + 4 * count + 5,), UNTOUCHED, dtype=torch.float64)
            for piece in pieces:
                values[piece[column] : piece[column] + piece[3]] = fill(piece[3])
            return values.to(dtype)

        def normal(n: int) -> Tensor:
            return torch.randn(n, generator=generator, dtype=torch.float64)

        whole = flat(0, param, normal)
        exact = None
        if master is not None:
            exact = torch.zeros(whole.numel(), dtype=master)
            if master == torch.float32:  # the parameter's place in the states is another one
                for param_at, _, state_at, n, _, _ in pieces:
                    exact[state_at : state_at + n] = whole[param_at : param_at + n]
        return cls(
            tuple(sizes),
            pieces,
            whole,
            flat(1, grad, normal),
            flat(2, state, lambda n: 0.1 * normal(n) if taken else torch.zeros(n)),
            flat(2, state, lambda n: 0.1 * normal(n).square() if taken else torch.zeros(n)),
            exact,
            torch.full((count,), float(taken)),
            torch.zeros(1, dtype=torch.int32),
            torch.ones(count + 1),
            rows,
            tiles,
        )

    def clone(self) -> Segment:
        return self.map(Tensor.clone)

    def to(self, device: torch.device) -> Segment:
        return self.map(lambda tensor: tensor.to(device))

    def map(self, function: Callable[[Tensor], Tensor]) -> Segment:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{k: function(v) for k, v in values.items() if isinstance(v, Tensor)})

    def with_gradients(self, seed: int, deviation: float = 1.0) -> Segment:
        """New gradients in the same places; everything else is shared."""
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(self.grad.numel(), generator=generator, dtype=torch.float64) * deviation
        return replace(self, grad=noise.to(self.grad.dtype).to(self.grad.device))

    def cut(self, flat: Tensor, column: int) -> list[Tensor]:
        """The parameters' pieces of a flat tensor whose offsets are in `column` of the table."""
        return [flat[piece[column] : piece[column] + piece[3]] for piece in self.pieces]

    def params(self) -> list[Tensor]:
        return self.cut(self.param, 0)

    def grads(self) -> list[Tensor]:
        return self.cut(self.grad, 1)

    def states(self, flat: Tensor) -> list[Tensor]:
        return self.cut(flat, 2)

    def exact(self) -> list[Tensor]:
        """The parameters' exact values, put together from whatever holds them."""
        if self.master is None:
            return [param.clone() for param in self.params()]
        masters = self.states(self.master)
        if self.master.dtype == torch.float32:
            return [master.clone() for master in masters]
        return [
            ((param.view(torch.int16).int() << 16) + master.int()).view(torch.float32)
            for param, master in zip(self.params(), masters, strict=True)
        ]

    def written(self) -> dict[str, Tensor]:
        names = ("param", "first", "second", "master", "steps", "ticket")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def hyper(*values: float, device: torch.device | None = None) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)


ADAM = (1e-2, 0.9, 0.999, 1e-8, 0.1)
SGD = (1e-2, 0.9, 0.3, 0.1)


def run_adam(
    backend: str,
    s: Segment,
    values: Sequence[float] = ADAM,
    *,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    decoupled: bool = True,
    maximize: bool = False,
    stochastic_rounding: bool = False,
    seed: int = 0,
) -> None:
    operator(backend, "adam_")(
        s.param, s.grad, s.first, s.second, s.master, s.steps, s.ticket, s.touched, s.rows, s.tiles,
        hyper(*values, device=s.param.device), scale, found_inf, decoupled, maximize,
        stochastic_rounding,
        seed,
    )  # fmt: skip


def run_sgd(
    backend: str,
    s: Segment,
    values: Sequence[float] = SGD,
    *,
    momentum: bool = True,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    nesterov: bool = False,
    decoupled: bool = False,
    maximize: bool = False,
    stochastic_rounding: bool = False,
    seed: int = 0,
) -> None:
    buffer = s.first if momentum else None
    operator(backend, "sgd_")(
        s.param, s.grad, buffer, s.master, s.steps, s.ticket, s.touched, s.rows, s.tiles,
        hyper(*values, device=s.param.device), scale, found_inf, nesterov, decoupled, maximize,
        stochastic_rounding, seed,
    )  # fmt: skip


def run_norm(
    backend: str, s: Segment, norm_type: float = 2.0, so_far: float = 0.0
) -> tuple[float, float]:
    start = [math.inf if norm_type == -math.inf else so_far, 5.0]
    scratch = torch.zeros(NORM_SCRATCH_NUMEL, dtype=torch.float64, device=s.grad.device)
    for _ in range(2):  # which takes the scratch as the first one leaves it
        out = torch.tensor(start, dtype=torch.float64, device=s.grad.device)
        operator(backend, "norm_")(out, scratch, s.grad, s.touched, s.rows, s.tiles, norm_type)
    assert scratch[-1] == 0, "the ticket was not given back"
    value, not_finite = out.tolist()
    return value, not_finite - 5.0


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Equal bit for bit, signed zeros included; any NaN equals any NaN."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.itemsize]
    nan = actual.isnan()
    assert actual.dtype == expected.dtype
    assert torch.equal(nan, expected.isnan()), what
    different = (actual.view(integers) != expected.view(integers)) & ~nan
    assert not different.any(), f"{what} differ at {different.nonzero().flatten()[:8].tolist()}"


def assert_same(actual: Segment, expected: Segment) -> None:
    for name, tensor in actual.written().items():
        assert_same_bits(tensor.cpu(), expected.written()[name].cpu(), name)
