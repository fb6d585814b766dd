"""The iteration is torch's, whatever the shape and however many matrices share a launch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from shardgrad.optim.newton_schulz import COEFFICIENTS, newton_schulz_

SHAPES = [(1, 1), (5, 1), (7, 11), (11, 7), (64, 64), (33, 130), (130, 33)]


def some(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(count + sum(shape))
    return torch.randn(count, *shape, generator=generator, dtype=torch.float64).to(dtype)


def orthogonal(matrices: Tensor) -> Tensor:
    result = matrices.clone()
    newton_schulz_(result, eps=torch.tensor(1e-7, dtype=torch.float64))
    return result


@pytest.mark.parametrize("shape", SHAPES)
def test_in_bfloat16_it_equals_torchs_bit_for_bit(shape: tuple[int, int]) -> None:
    matrices = some(3, *shape)
    for result, matrix in zip(orthogonal(matrices.bfloat16()), matrices, strict=True):
        assert torch.equal(result, _zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7))


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_however_many_steps_the_result_is_in_the_place_of_the_matrices(steps: int) -> None:
    matrices = some(2, 8, 8, dtype=torch.float64)
    x = matrices / matrices.square().sum((1, 2), keepdim=True).sqrt()
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    newton_schulz_(matrices, eps=torch.tensor(1e-7), steps=steps)
    torch.testing.assert_close(matrices, x, rtol=0, atol=1e-13)


def test_a_matrix_of_zeros_stays_zero_and_nan_stays_with_its_matrix() -> None:
    matrices = some(3, 6, 9)
    right = orthogonal(matrices)
    matrices[0] = 0
    matrices[1, 2, 3] = torch.nan
    result = orthogonal(matrices)
    assert torch.equal(result[0], torch.zeros(6, 9))
    assert result[1].isnan().any()
    assert torch.equal(result[2], right[2])
