"""Local tensors over the memory of a flat shard."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardgrad.sharding.dtensor import in_own_storage


@pytest.mark.parametrize("kind", ["cpu", "meta", "fake"])
def test_a_write_into_the_shard_is_not_counted_as_one_into_a_parameter(kind: str) -> None:
    with FakeTensorMode() if kind == "fake" else nullcontext():
        flat = torch.zeros(8, device="meta" if kind == "meta" else "cpu")
        local = in_own_storage(flat[2:6])
        before = local._version
        flat[6:].fill_(1)
        assert local._version == before
        local.fill_(1)
        assert local._version == before + 1
        assert local.shape == (4,)
