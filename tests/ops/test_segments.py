"""The table of a segment, and its tiles."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from shardgrad import ops


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


def test_the_kernels_count_in_the_same_tiles() -> None:
    header = (Path(__file__).parents[2] / "csrc" / "segment.h").read_text()
    assert re.findall(r"kTileNumel = (\d+)", header) == [str(ops.TILE_NUMEL)]
    workers = int(re.findall(r"kNormWorkers = (\d+)", header)[0])
    assert 2 * workers + 1 == ops.NORM_SCRATCH_NUMEL
