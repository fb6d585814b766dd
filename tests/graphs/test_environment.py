"""What is known without a step: settings."""

from __future__ import annotations

import pytest
import torch

from shardgrad.graphs import preflight
from shardgrad.graphs.preflight import environment_issues, harmful_settings

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "has_kernels", lambda device_type: True)
    allocator(monkeypatch)


def allocator(
    monkeypatch: pytest.MonkeyPatch, *, backend: str = "native", expandable: bool = False
) -> None:
    """Makes CUDA's allocator say that it has these settings."""
    settings = {"allocator_settings": {"expandable_segments": expandable}}
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: settings)


def test_kernels_that_were_not_built_are_named_with_how_to_build_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "has_kernels", lambda device_type: False)
    (found,) = environment_issues(CUDA)
    assert found.what.startswith("shardgrad's CUDA kernels were not built")
    assert found.fix.startswith("pip install --no-build-isolation")
    assert list(environment_issues(CPU)) == []


def test_expandable_segments_clash_with_registration_unless_that_is_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    allocator(monkeypatch, expandable=True)
    (found,) = harmful_settings(CUDA)
    assert found.fix == "export NCCL_GRAPH_REGISTER=0, before Python starts"
    assert list(environment_issues(CPU)) == []
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    assert list(environment_issues(CUDA)) == []


def test_an_allocator_that_is_not_torchs_own_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocator(monkeypatch, backend="cudaMallocAsync")
    (found,) = harmful_settings(CUDA)
    assert "with the cudaMallocAsync allocator" in found.what
    assert (found.fix or "").startswith("remove backend: from PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize(
    "name", ["CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT", "PYTORCH_NO_CUDA_MEMORY_CACHING"]
)
def test_settings_that_block_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    (found,) = environment_issues(CUDA)
    assert found.what.startswith(f"{name}=1 ")
    assert found.fix == f"unset {name}, before Python starts"
    monkeypatch.setenv(name, "0")
    assert list(environment_issues(CUDA)) == []


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_is_an_obstacle_only_if_it_looks_for_nans() -> None:
    with torch.autograd.detect_anomaly():
        (found,) = environment_issues(CPU)
        assert found.what.startswith("anomaly detection reads every gradient")
    with torch.autograd.detect_anomaly(check_nan=False):
        assert list(environment_issues(CPU)) == []
