"""The marks of tests that need a GPU."""

from __future__ import annotations

import pytest
import torch

ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
ON_ONE_RANK = [*ON_A_GPU, pytest.mark.usefixtures("one_rank")]
