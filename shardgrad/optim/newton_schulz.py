"""The Newton-Schulz iteration: from a matrix to the nearest one whose singular values are all
equal.

With `X = U S V^T`, the odd polynomial `a X + b (X X^T) X + c (X X^T)^2 X` acts on each singular
value as `a s + b s^3 + c s^5` and leaves U and V alone. Repeated, it drives every singular value
towards 1, using nothing but matrix products. The usual coefficients trade the last digits for
speed: they do not converge, but bring singular values of 0.002 and more into 0.68 to 1.21 within
five steps, and bfloat16 suffices.

Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
"""

from __future__ import annotations

import torch

# Jordan et al., 2024: the steepest slope at zero for which five steps stay in a band around 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz_(
    matrices: torch.Tensor,
    *,
    eps: torch.Tensor,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = 5,
) -> None:
    """Orthogonalizes matrices of one shape, in place.

    Args:
        matrices: [count, rows, columns], in the dtype of the iteration; bfloat16 has the range of
            float32, which float16 lacks.
        eps: lower bound of the norm that a matrix is divided by. A device scalar, rounded to the
            dtype of the norm.
        coefficients: a, b and c.
        steps: number of times the polynomial is applied.

    Streams:
        The current stream; three batched products a step.

    Capture:
        Safe: nothing is read back.
    """
    a, b, c = coefficients
    # The smaller Gram matrix makes its powers cheaper. Tall matrices are not transposed: a matmul
    # of strided factors costs no more than one of contiguous factors, but the copy would cost as
    # much as the matmul.
    is_tall = matrices.shape[1] > matrices.shape[2]
    # The Frobenius norm bounds the spectral one, and the polynomial wants singular values of at
    # most 1. It is rounded to the dtype of the iteration, as torch.optim.Muon does, so that results
    # are equal.
    norm = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    # Steps alternate between two buffers. Choose the first so that the last step writes `matrices`.
    x, other = matrices, torch.empty_like(matrices)
    if steps % 2:
        x, other = other, x
    torch.div(matrices, norm.clamp(min=eps), out=x)
    for _ in range(steps):
        gram = torch.bmm(x.mT, x) if is_tall else torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factors = (x, polynomial.mT) if is_tall else (polynomial, x)
        torch.baddbmm(x, *factors, beta=a, out=other)
        x, other = other, x
