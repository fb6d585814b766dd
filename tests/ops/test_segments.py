"""The table of a segment: its tiles, and what is refused as a table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from shardgrad import ops
from shardgrad.errors import OptionError


def test_segment_rows_counts_tiles() -> None:
    rows, tiles = ops.segment_rows(
        [(0, 1, 2, 2049, 0, 3), (5, 6, 7, 0, 1, 2), (8, 9, 10, 2048, 2, 1)]
    )
    assert rows.tolist() == [
        [0, 1, 2, 2049, 0, 3, 0],
        [5, 6, 7, 0, 1, 2, 2],
        [8, 9, 10, 2048, 2, 1, 2],
    ]
    assert (rows.dtype, rows.device.type, tiles) == (torch.int64, "cpu", 3)


def test_a_segment_without_parameters_has_a_table_too() -> None:
    rows, tiles = ops.segment_rows([])
    assert (rows.shape, tiles) == ((0, 7), 0)
    ops.check_rows(rows, tiles, param_numel=0)


def test_the_kernels_count_in_the_same_tiles() -> None:
    header = (Path(__file__).parents[2] / "csrc" / "segment.h").read_text()
    assert re.findall(r"kTileNumel = (\d+)", header) == [str(ops.TILE_NUMEL)]
    workers = int(re.findall(r"kNormWorkers = (\d+)", header)[0])
    assert 2 * workers + 1 == ops.NORM_SCRATCH_NUMEL


GOOD = ((0, 0, 0, 8, 0, 0), (8, 8, 8, 4, 1, 1))
LIMITS = {
    "param_numel": 12,
    "grad_numel": 12,
    "state_numel": 12,
    "steps_numel": 2,
    "touched_numel": 2,
}


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (((0, 0, 0, 8, 0, 0), (9, 8, 8, 4, 1, 1)), "row 1 .* reaches outside"),
        (((0, 0, 0, 8, 0, 0), (8, 9, 8, 4, 1, 1)), "row 1 .* reaches outside"),
        (((0, 0, 0, 8, 0, 0), (8, 8, 9, 4, 1, 1)), "row 1 .* reaches outside"),
        (((0, 0, 0, 8, 2, 0), (8, 8, 8, 4, 1, 1)), "row 0 .* reaches outside"),
        (((0, 0, 0, 8, 0, 0), (8, 8, 8, 4, 1, 2)), "row 1 .* reaches outside"),
        (((-1, 0, 0, 8, 0, 0), (8, 8, 8, 4, 1, 1)), "row 0 .* reaches outside"),
        (((0, 0, 0, 8, 0, 0), (7, 8, 8, 4, 1, 1)), "share elements"),
        (((0, 0, 0, 8, 0, 0), (8, 8, 5, 4, 1, 1)), "share elements"),
        (((0, 0, 0, 8, 1, 0), (8, 8, 8, 4, 1, 1)), "share elements"),
        (((0, 0, 0, 4, 1, 1), (4, 4, 4, 4, 0, 0), (8, 8, 8, 4, 1, 1)), "share elements"),
    ],
)
def test_check_rows_refuses_a_table_that_would_leave_its_memory_or_race(
    pieces: tuple[tuple[int, int, int, int, int, int], ...], message: str
) -> None:
    for good in (GOOD, ((0, 0, 0, 4, 0, 0), (4, 4, 4, 4, 0, 0), (8, 8, 8, 4, 1, 1))):
        ops.check_rows(*ops.segment_rows(good), **LIMITS)
    with pytest.raises(OptionError, match=message):
        ops.check_rows(*ops.segment_rows(pieces), **LIMITS)


def test_check_rows_refuses_what_is_no_table() -> None:
    rows, tiles = ops.segment_rows(GOOD)
    with pytest.raises(OptionError, match="do not add up"):
        ops.check_rows(rows, tiles + 1)
    with pytest.raises(OptionError, match="do not add up"):
        ops.check_rows(rows.flip(0).contiguous(), tiles)
    with pytest.raises(OptionError, match="not the table of a segment"):
        ops.check_rows(rows.int(), tiles)
    with pytest.raises(OptionError, match="not the table of a segment"):
        ops.check_rows(rows[:, :6], tiles)
