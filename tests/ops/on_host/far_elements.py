"""The kernels on more than 2^31 elements, in memory that is lent but not there: a few blocks touch
it.

`test_kernels_on_the_host.py` runs this with the plugin. An index of 32 bits would leave the memory,
which kills the process, or come out at its beginning.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shardgrad.ops.norm import NORM_SCRATCH_NUMEL
from shardgrad.ops.segments import segment_rows
from tests.ops import on_host
from tests.support.segments import Segment, assert_same_bits, run_adam, run_norm, run_sgd

FAR = 2**31
MAP_NORESERVE = 0x4000  # Linux's, which not every Python's mmap has
TILE = 4096  # elements of a block's turn, in pack and unpack
MOST_BLOCKS = 2048
OP = torch.ops.shardgrad


@pytest.fixture(autouse=True)
def all_blocks() -> Iterator[None]:
    yield
    on_host.only_blocks([])


def sparse(numel: int, dtype: torch.dtype) -> Tensor:
    """Returns zeros of which only the pages that are written need memory."""
    lent = mmap.mmap(
        -1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    )
    lent.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(lent, dtype=dtype)


def ends(tensor: Tensor, numel: int) -> list[Tensor]:
    """Returns the first and the last elements."""
    return [tensor[:numel], tensor[-numel:]]


def assert_same_ends(ours: Tensor, theirs: Tensor, numel: int, divisor: float = 1.0) -> None:
    for end, right in zip(ends(ours, numel), ends(theirs, numel), strict=True):
        assert_same_bits(end, right / divisor)


def fill(tensor: Tensor, numel: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for end in ends(tensor, numel):
        end.copy_(torch.randn(numel, generator=generator))


def test_pack_and_unpack_move_what_lies_behind_2_to_31() -> None:
    piece, ranks = FAR + 3001, 2
    table = torch.tensor([[2 * piece - 7, piece, piece + 40, 5, 3]])
    chunk_numel = piece + 50
    grad, slot = sparse(2 * piece - 7, torch.bfloat16), sparse(ranks * chunk_numel, torch.bfloat16)
    pieces = [grad[:piece], grad[piece:]]
    for rank, each in enumerate(pieces):
        fill(each, 2900, seed=rank)
    slot.view(ranks, -1)[:, 5 + piece - 20 : 5 + piece + 40] = 9.0
    last_tile = (piece + 40 - 1) // TILE
    on_host.only_blocks([0, last_tile % (MOST_BLOCKS // ranks)])
    OP.pack([grad], slot, table, chunk_numel, 2.0, False)
    chunks = list(slot.view(ranks, -1))
    for chunk, each in zip(chunks, pieces, strict=True):
        assert_same_ends(chunk[5 : 5 + each.numel()], each, 2900, 2.0)
        assert (chunk[5 + each.numel() : 5 + piece + 40] == 0).all()
        assert not chunk[5 + TILE : 5 + TILE + 9].any()  # of a block that did not run

    unsharded = sparse(2 * piece, torch.bfloat16)
    last_tile = (piece - 1) // TILE
    on_host.only_blocks([0, last_tile % (MOST_BLOCKS // ranks)])
    OP.unpack(slot, unsharded, table, slot.numel() // ranks)
    whole = unsharded[3 : 3 + grad.numel()]
    for ours, theirs in zip([whole[:piece], whole[piece:]], pieces, strict=True):
        assert_same_ends(ours, theirs, 2900, 2.0)
    assert not unsharded[-4:].any()


@pytest.mark.parametrize("start", [0, 3], ids=["aligned", "unaligned"])
def test_chunks_of_more_than_2_to_31_elements_are_added_to_their_ends(start: int) -> None:
    numel = FAR + 8 * 2000 + 5
    chunks = [sparse(numel + start, torch.bfloat16)[start:] for _ in range(2)]
    out = sparse(numel + start, torch.bfloat16)[start:]
    for seed, each in enumerate([*chunks, out]):
        fill(each, 2000, seed)
    expected = [
        (c.float() + (a.float() + b.float()) / 2).bfloat16()
        for a, b, c in zip(*(ends(each, 2000) for each in (*chunks, out)), strict=True)
    ]
    per_thread = 1 if start else 8
    first, last = (numel - 2000) // per_thread // 256, (numel - 1) // per_thread // 256
    on_host.only_blocks([*range(8), *(block % MOST_BLOCKS for block in range(first, last + 1))])
    OP.sum_chunks(chunks, out, 2.0, True)
    for ours, theirs in zip(ends(out, 2000), expected, strict=True):
        assert_same_bits(ours, theirs)


def far_segment(pieces: list[tuple[int, int, int, int, int, int]], small: Segment) -> Segment:
    """Returns a segment whose rows begin and end with a row of a small one, at these places."""
    rows, tiles = segment_rows(pieces)
    flats = []
    for flat, column in ((small.param, 0), (small.grad, 1), (small.first, 2), (small.second, 2)):
        numel = max(piece[column] + piece[3] for piece in pieces)
        far = sparse(numel, flat.dtype)
        for piece, near in zip(pieces, small.cut(flat, column), strict=True):
            row, half = far[piece[column] : piece[column] + piece[3]], near.numel() // 2
            row[:half], row[-half:] = near[:half], near[-half:]
        flats.append(far)
    return Segment(
        small.sizes, tuple(pieces), *flats, None, small.steps.clone(), small.ticket.clone(),
        small.touched.clone(), rows, tiles,
    )  # fmt: skip


# A row of more than 2^31 elements, and one behind it; what they begin and end like has two tiles
# each.
SMALL = (2 * 2048, 2 * 2048)
LONG = FAR + 2 * 2048
PIECES = [(3, 0, 5, LONG, 1, 1), (3 + LONG + 5, LONG + 4, 5 + LONG, 2 * 2048, 0, 2)]
LAST_OF_LONG = LONG // 2048 - 1
TILES = (0, LAST_OF_LONG, LAST_OF_LONG + 1, LAST_OF_LONG + 2)


@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_updates_reach_rows_and_elements_behind_2_to_31(rule: str) -> None:
    grid = 1024
    on_host.processors(grid)
    run = {"adam": run_adam, "sgd": run_sgd}[rule]
    small = Segment.of(SMALL, param=torch.bfloat16, grad=torch.bfloat16, state=torch.bfloat16)
    far = far_segment(PIECES, small)
    blocks = sorted({tile % grid for tile in TILES})
    on_host.only_blocks(blocks)
    far.ticket.fill_(grid - len(blocks))  # the others have been
    run("compiled", far)
    run("reference", small)
    assert far.ticket.item() == 0
    assert_same_bits(far.steps, small.steps)
    for flat, near, column in (
        (far.param, small.param, 0),
        (far.first, small.first, 2),
        (far.second, small.second, 2),
    ):
        for ours, theirs in zip(far.cut(flat, column), small.cut(near, column), strict=True):
            assert_same_ends(ours, theirs, 2048)


def test_norms_read_rows_and_elements_behind_2_to_31() -> None:
    workers = 1024
    small = Segment.of(SMALL, grad=torch.bfloat16)
    far = far_segment(PIECES, small)
    blocks = sorted({tile % workers for tile in TILES})
    on_host.only_blocks(blocks)
    far.grads()[1][-1] = torch.inf
    small.grads()[1][-1] = torch.inf
    out = torch.zeros(2, dtype=torch.float64)
    scratch = torch.zeros(NORM_SCRATCH_NUMEL, dtype=torch.float64)
    scratch[-1:].view(torch.int32)[0] = workers - len(blocks)  # the others have found nothing
    OP.norm_(out, scratch, far.grad, far.touched, far.rows, far.tiles, 1.0)
    assert out.tolist() == [torch.inf, 1.0]
    far.touched[2] = small.touched[2] = 0
    out.zero_()
    scratch[-1:].view(torch.int32)[0] = workers - len(blocks)
    OP.norm_(out, scratch, far.grad, far.touched, far.rows, far.tiles, 1.0)
    assert out[0].item() == pytest.approx(run_norm("reference", small, 1.0)[0], rel=1e-12)
