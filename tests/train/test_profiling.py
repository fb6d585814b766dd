"""What `shardgrad train --profile` writes."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity

from shardgrad.programs.train import profiling


@pytest.mark.parametrize(("device", "kinds"), [("cpu", {"CPU"}), ("cuda", {"CPU", "CUDA"})])
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_profile_has_the_host_and_the_device_and_no_other_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, kinds: set[str]
) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    with (
        mock.patch.object(profiling, "profile", wraps=profiling.profile) as profile,
        profiling.profiled(tmp_path, torch.device(device)),
    ):
        torch.ones(3).sum()
    assert set(profile.call_args.kwargs["activities"]) == {
        getattr(ProfilerActivity, kind) for kind in kinds
    }
    assert waited == ([] if device == "cpu" else [torch.device(device)] * 2), "before and after"
    assert "aten::sum" in (tmp_path / "trace.json").read_text()
