"""Where a rank computes."""

from __future__ import annotations

import pytest
import torch

from shardgrad.programs.train.failure import UsageError
from shardgrad.programs.train.parallel import _choose_device


@pytest.fixture
def accelerators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many of them."""
    count = request.param
    found = torch.device("cuda") if count else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize("accelerators", [2], indirect=True)
@pytest.mark.usefixtures("accelerators")
def test_each_rank_of_a_machine_has_an_accelerator_and_none_too_many_is_started() -> None:
    assert [_choose_device("auto", rank) for rank in (0, 1)] == [
        torch.device("cuda", 0),
        torch.device("cuda", 1),
    ]
    assert _choose_device("cpu", 1) == torch.device("cpu")
    with pytest.raises(
        UsageError, match="more ranks than this machine's 2 accelerators: use --ranks 2"
    ):
        _choose_device("auto", 2)


@pytest.mark.parametrize("accelerators", [0], indirect=True)
@pytest.mark.usefixtures("accelerators")
def test_a_machine_without_an_accelerator_computes_on_its_cpu() -> None:
    assert _choose_device("auto", 0) == torch.device("cpu")
