"""The iteration is torch's, whatever the shape and however many matrices share a launch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from shardgrad.optim.newton_schulz import COEFFICIENTS, newton_schulz

SHAPES = [(1, 1), (5, 1), (7, 11), (11, 7), (64, 64), (33, 130), (130, 33)]


def some(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(count + sum(shape))
    return torch.randn(count, *shape, generator=generator, dtype=torch.float64).to(dtype)


def with_singular_values(values: Tensor, rows: int, columns: int) -> Tensor:
    left = torch.linalg.qr(some(1, rows, len(values), dtype=torch.float64)[0]).Q
    right = torch.linalg.qr(some(1, columns, len(values), dtype=torch.float64)[0]).Q
    return left @ torch.diag(values) @ right.T


@pytest.mark.parametrize("shape", SHAPES)
def test_in_bfloat16_it_equals_torchs_bit_for_bit(shape: tuple[int, int]) -> None:
    matrices = some(3, *shape)
    ours = newton_schulz(matrices.bfloat16(), eps=torch.tensor(1e-7, dtype=torch.float64))
    for result, matrix in zip(ours, matrices, strict=True):
        assert torch.equal(result, _zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_batch_equals_its_matrices_one_by_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrices = some(4, *shape, dtype=dtype)
    together = newton_schulz(matrices)
    alone = torch.cat([newton_schulz(matrix.unsqueeze(0)) for matrix in matrices])
    # Products of one matrix may be summed in another order than those of many.
    torch.testing.assert_close(together, alone, rtol=0, atol=32 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(("rows", "columns"), [(40, 40), (40, 90), (90, 40)])
def test_singular_values_end_in_the_band_the_coefficients_promise(rows: int, columns: int) -> None:
    """From 0.002 of the Frobenius norm upwards, five steps lead into [0.681, 1.203]."""
    values = torch.logspace(0, -2.35, 40, dtype=torch.float64)
    matrix = with_singular_values(values, rows, columns)
    assert values.min() / matrix.norm() > 0.002
    (result,) = newton_schulz(matrix.unsqueeze(0))
    found = torch.linalg.svdvals(result)
    assert found.min() > 0.681
    assert found.max() < 1.203
    (rounded,) = newton_schulz(matrix.unsqueeze(0).bfloat16())
    # Each of 15 products, rounded to 8 bits, may move a singular value by a few times 2**-8.
    assert (torch.linalg.svdvals(rounded.double()) - 1).abs().max() < 0.32 + 15 * 2**-8


def test_singular_vectors_stay_what_they_are() -> None:
    matrix = with_singular_values(torch.linspace(0.2, 1, 6, dtype=torch.float64), 6, 9)
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    (result,) = newton_schulz(matrix.unsqueeze(0))
    inside = u.T @ result @ vt.T
    torch.testing.assert_close(inside, torch.diag(inside.diag()), rtol=0, atol=1e-13)


def test_converging_coefficients_give_the_nearest_orthogonal_matrix() -> None:
    """(15, -10, 3) / 8 has slope zero at 1, to second order: the polar factor, to the last
    digits.
    """
    matrix = with_singular_values(torch.linspace(0.2, 1, 6, dtype=torch.float64), 6, 9)
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    (result,) = newton_schulz(matrix.unsqueeze(0), coefficients=(15 / 8, -10 / 8, 3 / 8), steps=20)
    torch.testing.assert_close(result, u @ vt, rtol=0, atol=1e-13)


def test_the_transpose_of_a_matrix_gives_the_transpose_of_the_result() -> None:
    matrices = some(2, 7, 30)
    assert torch.equal(newton_schulz(matrices.mT), newton_schulz(matrices).mT)


def test_scaling_the_input_changes_nothing() -> None:
    matrices = some(2, 8, 12)
    assert torch.equal(newton_schulz(matrices), newton_schulz(matrices * 2.0**20))


def test_the_input_is_left_alone() -> None:
    matrices = some(2, 8, 8)
    before = matrices.clone()
    newton_schulz(matrices, steps=0)
    newton_schulz(matrices)
    assert torch.equal(matrices, before)


def test_a_matrix_of_zeros_stays_zero_and_nan_stays_with_its_matrix() -> None:
    matrices = some(3, 6, 9)
    right = newton_schulz(matrices)
    matrices[0] = 0
    matrices[1, 2, 3] = torch.nan
    result = newton_schulz(matrices)
    assert torch.equal(result[0], torch.zeros(6, 9))
    assert result[1].isnan().any()
    assert torch.equal(result[2], right[2])
