"""Gathers by symmetric memory on two devices: torch's own, with the bits of collectives in every
order of work.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.cuda_runtime import inspection
from tests.cuda_runtime.test_graph_evidence import ranks, step_on_a_device  # noqa: F401
from tests.support.ranks import Ranks


def losses(comm: str, order: str) -> list[float]:
    """Returns the losses of eager steps and of replays."""
    warnings.simplefilter("error", UserWarning)  # of a fallback
    torch.manual_seed(0)
    step = step_on_a_device(lambda: {"comm": comm})
    x = torch.randn(4, 64, device="cuda")
    with inspection.order(order):
        values = torch.stack([step(x).clone() for _ in range(8)]).tolist()
    assert step.replays > 3
    step.close()
    return values


@pytest.mark.parametrize("order", ["host", "late", "3"])
def test_windows_have_the_bits_of_collectives_in_every_order(ranks: Ranks, order: str) -> None:  # noqa: F811
    of_collectives, of_windows = (
        ranks.run(losses, comm, order) for comm in ("collectives", "symmetric_memory")
    )
    assert of_windows == of_collectives
