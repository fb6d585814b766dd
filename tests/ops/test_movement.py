"""pack, unpack and sum_chunks, in both backends, against plain torch written out here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.support.segments import DTYPES, UNTOUCHED, Op, assert_same_bits, operator

Backend = Callable[[str], Op]  # gives its operators by their names
WORLD_SIZES = (1, 2, 3, 4, 7)

# Even, uneven, fewer rows than ranks, one row, nothing at all.
SHAPES = ((8, 3), (7, 5), (2, 3), (1,), (0, 4), (13,))


@pytest.fixture
def backend(backend: str) -> Backend:
    return partial(operator, backend)


@dataclass(frozen=True)
class Group:
    """A layout written out independently of `sharding/layout.py`, with odd gaps so that nothing is
    aligned."""

    shapes: tuple[tuple[int, ...], ...]
    world_size: int
    lead: int = 3  # elements before the first reservation
    pad: int = 2  # reserved behind each piece
    gap: int = 1  # between reservations, and between whole parameters
    tail: int = 5

    @property
    def rows(self) -> list[tuple[int, int, int, int, int]]:
        rows, at, whole_at = [], self.lead, self.lead
        for shape in self.shapes:
            shard_numel = math.ceil(shape[0] / self.world_size) * math.prod(shape[1:])
            rows.append((math.prod(shape), shard_numel, shard_numel + self.pad, at, whole_at))
            at += shard_numel + self.pad + self.gap
            whole_at += math.prod(shape) + self.gap
        return rows

    @property
    def table(self) -> Tensor:
        return torch.tensor(self.rows, dtype=torch.int64).reshape(-1, 5)

    @property
    def chunk_numel(self) -> int:
        return self.lead + sum(span + self.gap for _, _, span, _, _ in self.rows) + self.tail

    @property
    def unsharded_numel(self) -> int:
        return self.lead + sum(row[0] + self.gap for row in self.rows) + self.tail

    def slot(self, dtype: torch.dtype) -> Tensor:
        return torch.full((self.world_size * self.chunk_numel,), UNTOUCHED, dtype=dtype)

    def pieces(self, whole: Tensor) -> list[Tensor]:
        """One flat tensor per rank, cut as `torch.chunk` cuts; ranks past the last chunk get
        nothing.
        """
        parts = [part.reshape(-1) for part in whole.chunk(self.world_size)] if whole.numel() else []
        return parts + [whole.new_empty(0)] * (self.world_size - len(parts))


def gradients(
    shapes: Sequence[tuple[int, ...]], *dtypes: torch.dtype, seed: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    cycle = itertools.cycle(dtypes)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(next(cycle))
        for shape in shapes
    ]


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def expected_pack(
    group: Group, grads: Sequence[Tensor], before: Tensor, divisor: float, accumulate: bool
) -> Tensor:
    after = before.clone()
    chunks = after.view(group.world_size, group.chunk_numel)
    for grad, (numel, _, span, offset, _) in zip(grads, group.rows, strict=True):
        missing = grad.numel() != numel
        if not accumulate:
            chunks[:, offset : offset + span] = 0
        if missing:
            continue
        for chunk, piece in zip(chunks, group.pieces(grad), strict=True):
            to = chunk[offset : offset + piece.numel()]
            compute = compute_dtype(grad.dtype, before.dtype)
            value = piece.to(compute) / divisor
            to.copy_(to.to(compute) + value if accumulate else value)
    return after


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("accumulate", [False, True], ids=["overwriting", "accumulating"])
@pytest.mark.parametrize("slot_dtype", DTYPES, ids=str)
def test_pack_puts_every_piece_where_torch_chunk_cuts_it(
    backend: Backend, slot_dtype: torch.dtype, accumulate: bool, world_size: int
) -> None:
    """A missing gradient adds nothing, or leaves zeros in its own reservations."""
    group = Group(SHAPES, world_size)
    dtypes_of_gradients = (*((each,) for each in DTYPES), DTYPES)
    for dtypes, divisor, missing in itertools.product(
        dtypes_of_gradients, (1.0, 3.0), (False, True)
    ):
        grads = gradients(SHAPES, *dtypes)
        if missing:
            grads[1] = torch.empty(0)
        slot = group.slot(slot_dtype)
        expected = expected_pack(group, grads, slot, divisor, accumulate)
        backend("pack")(grads, slot, group.table, group.chunk_numel, divisor, accumulate)
        assert_same_bits(slot, expected)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("to_dtype", DTYPES, ids=str)
def test_unpack_puts_the_pieces_of_all_ranks_back_together(
    backend: Backend, to_dtype: torch.dtype, world_size: int
) -> None:
    group = Group(SHAPES, world_size)
    for from_dtype in DTYPES:
        wholes = gradients(SHAPES, from_dtype)
        gathered = torch.full((world_size * group.chunk_numel,), math.nan, dtype=from_dtype)
        chunks = gathered.view(world_size, -1)
        expected = torch.full((group.unsharded_numel,), UNTOUCHED, dtype=to_dtype)
        for whole, (numel, _, _, offset, unsharded_offset) in zip(wholes, group.rows, strict=True):
            for chunk, piece in zip(chunks, group.pieces(whole), strict=True):
                chunk[offset : offset + piece.numel()] = piece
            expected[unsharded_offset : unsharded_offset + numel] = whole.flatten()
        unsharded = torch.full_like(expected, UNTOUCHED)
        backend("unpack")(gathered, unsharded, group.table, group.chunk_numel)
        assert_same_bits(unsharded, expected)


@pytest.mark.parametrize("count", WORLD_SIZES)
@pytest.mark.parametrize("accumulate", [False, True], ids=["overwriting", "accumulating"])
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_sum_chunks_adds_from_left_to_right_and_rounds_once(
    backend: Backend, out_dtype: torch.dtype, accumulate: bool, count: int
) -> None:
    for chunk_dtype, divisor in itertools.product(DTYPES, (1.0, 3.0)):
        compute = compute_dtype(chunk_dtype, out_dtype)
        chunks = gradients([(1029,)] * count, chunk_dtype, seed=count)
        out = gradients([(1029,)], out_dtype, seed=99)[0]
        total = chunks[0].to(compute)
        for chunk in chunks[1:]:
            total = total + chunk.to(compute)
        total = total / divisor
        expected = (out.to(compute) + total if accumulate else total).to(out_dtype)
        backend("sum_chunks")(chunks, out, divisor, accumulate)
        assert_same_bits(out, expected)


def floats_of_every_kind(*shape: int) -> Tensor:
    """Returns float32 of random bits, subnormals and NaNs included."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, shape, generator=generator)
    return bits.to(torch.int32).view(torch.float32)


def all_values(half: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(half)


def test_the_mean_of_two_float32_chunks_is_torchs_bit_for_bit(backend: Backend) -> None:
    a, b = floats_of_every_kind(2, 100_003)
    a[0], b[0] = -0.0, -0.0
    out = torch.empty_like(a)
    backend("sum_chunks")([a, b], out, 2.0, False)
    assert_same_bits(out, (a + b) / 2)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_sum_chunks_may_write_over_one_of_its_chunks(backend: Backend, which: int) -> None:
    chunks = gradients([(5000,)] * 3, torch.float32)
    expected = (chunks[0] + chunks[1] + chunks[2]) / 3.0
    backend("sum_chunks")(chunks, chunks[which], 3.0, False)
    assert_same_bits(chunks[which], expected)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_half_width_values_are_read_exactly_and_rounding_to_them_is_torchs(
    backend: Backend, half: torch.dtype
) -> None:
    values = all_values(half).float()
    finite = values[values.isfinite()]
    ties = (finite[:-1].double() + finite[1:].double()).div(2).float()  # halfway between neighbors
    limits = torch.tensor(
        [65504.0, 65519.996, 65520.0, 65536.0, 3.4e38, math.inf, -math.inf, math.nan, 1e-45, -0.0]
    )
    beside = [ties.nextafter(ties + 1), ties.nextafter(ties - 1)]
    wide = torch.cat([ties, *beside, floats_of_every_kind(200_000), limits])
    for source, dtype in ((all_values(half), torch.float32), (wide, half)):
        out = torch.empty(source.shape, dtype=dtype)
        backend("sum_chunks")([source], out, 1.0, False)
        assert_same_bits(out, source.to(dtype))


def test_groups_without_parameters_or_elements_do_nothing(backend: Backend) -> None:
    for shapes in ((), ((0, 3), (0,))):
        group = Group(shapes, 2, lead=0, pad=0, gap=0, tail=0)
        grads = gradients(shapes, torch.float32)
        assert group.chunk_numel == 0
        backend("pack")(grads, torch.empty(0), group.table, 0, 2.0, False)
        backend("unpack")(torch.empty(0), torch.empty(0), group.table, 0)
        backend("sum_chunks")([torch.empty(0)], torch.empty(0), 2.0, False)
