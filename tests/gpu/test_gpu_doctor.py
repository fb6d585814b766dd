"""What `shardgrad doctor` says of a device."""

from __future__ import annotations

import pytest
import torch

from shardgrad import ops
from shardgrad.programs.cli.doctor import _facts
from tests.support.gpu import ON_A_GPU

pytestmark = ON_A_GPU


def test_the_doctor_says_where_references_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "has_kernels", lambda device_type: False)
    found = dict(_facts(torch.device("cuda")))["shardgrad ops"]
    assert found == ops.backend() + "; reference on cuda"
