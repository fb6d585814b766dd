"""Parameters that are gathered from the memory of other ranks. Kept programs compare their numbers
with those of collectives.
"""

from __future__ import annotations

import warnings

import torch

from tests.support.parity import sharded_mlp
from tests.support.ranks import on_ranks


@on_ranks(2)
def test_ranks_without_such_memory_use_collectives_and_say_so_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model = sharded_mlp(comm="symmetric_memory")
            model(torch.ones(2, 6).double()).sum().backward()
    [warned] = [text for each in caught if "symmetric" in (text := str(each.message))]
    assert warned.endswith("SymmetricMemory does not support device type cpu")
