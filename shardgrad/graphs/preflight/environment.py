"""Issues of the environment: optimizers, settings and process groups that no graph can hold."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

import shardgrad.optim
from shardgrad.checks.capturable_optimizers import why_not_capturable
from shardgrad.graphs.preflight.issues import Issue
from shardgrad.ops.library import build_command, has_kernels
from shardgrad.optim.flat import FlatOptimizer

__all__ = ["environment_issues"]

_BLOCKING = {
    "CUDA_LAUNCH_BLOCKING": "makes the host wait at every launch, a setting for debugging",
    "TORCH_NCCL_BLOCKING_WAIT": "makes the host wait for every collective",
    "NCCL_BLOCKING_WAIT": "makes the host wait for every collective",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "allocates from the driver, which a capture forbids",
}
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def environment_issues(device: torch.device, optimizers: Sequence[Optimizer]) -> list[Issue]:
    """Returns the issues that can be known without running a step.

    Args:
        device: of the step. Kernels are looked for, and environment variables read, on CUDA only.
        optimizers: that the step uses.

    Capture: called before a capture; it reads nothing from the device.
    """
    found = [issue for optimizer in optimizers for issue in _of_optimizer(optimizer, device)]
    if device.type == "cuda":
        found += _of_kernels()
        found += _of_environment()
    if device.type != "cpu":
        found += _of_process_groups(device)
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        found.append(
            Issue(
                "anomaly mode",
                "anomaly detection is on, and reads every gradient on the host to look for NaNs",
                fix="torch.autograd.set_detect_anomaly(False), or its check_nan=False",
            )
        )
    return found


def _of_optimizer(optimizer: Optimizer, device: torch.device) -> Iterator[Issue]:
    if isinstance(optimizer, FlatOptimizer):
        return  # what its step depends on is in device memory
    name = type(optimizer).__name__
    ours = (
        f"shardgrad.optim.{name}"
        if hasattr(shardgrad.optim, name)
        else "an optimizer of shardgrad.optim"
    )
    why = why_not_capturable(optimizer)
    if why is not None:
        yield Issue(
            "uncapturable optimizer",
            f"a step of {name} cannot be recorded: {why}",
            fix=f"{ours}; or capturable=True where {name} has it; or take one step first, if that "
            f"makes "
            "its momentum",
        )
    else:
        numbers = [
            group["lr"]
            for group in optimizer.param_groups
            if isinstance(group.get("lr"), int | float)
        ]
        if numbers:
            with_tensor = f"; or lr=torch.tensor({numbers[0]}, device={str(device)!r})"
            yield Issue(
                "frozen hyperparameter",
                f"the learning rate of {name} is the Python number {numbers[0]}, and stays that in "
                f"a graph",
                fix=f"{ours}, whose hyperparameters can change between replays"
                # SGD reads a tensor on the host, for alpha=.
                + ("" if isinstance(optimizer, torch.optim.SGD) else with_tensor),
            )


def _of_kernels() -> Iterator[Issue]:
    if not has_kernels("cuda"):
        yield Issue(
            "missing kernels",
            "shardgrad's kernels for CUDA were not built, and the references of norms and updates, "
            "which run "
            "in their place, wait for the device",
            fix=f"{build_command()}, with an nvcc of CUDA {torch.version.cuda} on PATH",
        )


def _of_environment() -> Iterator[Issue]:
    for name, effect in _BLOCKING.items():
        if os.environ.get(name, "0") not in ("", "0"):
            yield _setting(f"{name}={os.environ[name]} {effect}", f"unset {name}")
    expandable = [name for name in _ALLOCATOR if _is_expandable(os.environ.get(name, ""))]
    if expandable and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        yield _setting(
            f"{expandable[0]} has expandable_segments:True, memory that NCCL tries to register for "
            f"graphs",
            "export NCCL_GRAPH_REGISTER=0",
        )


def _is_expandable(settings: str) -> bool:
    return "expandable_segments:true" in settings.lower().replace(" ", "")


def _setting(what: str, fix: str) -> Issue:
    return Issue("environment", what, fix=f"{fix}, before Python starts")


def _of_process_groups(device: torch.device) -> Iterator[Issue]:
    """Checks that a communicator exists: the first collective makes it, which a capture forbids."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    backends = [_backend(group, device) for group in dist.distributed_c10d._world.pg_map]
    states = [
        backend._is_initialized() for backend in backends if hasattr(backend, "_is_initialized")
    ]
    if states and not any(states):
        yield Issue(
            "unused process group",
            f"no collective has run on {device} yet, and the first makes the communicator",
            fix="one eager step before the capture",
        )


def _backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Returns the backend of a group for a device; None if it has none."""
    try:
        return group._get_backend(device)
    except RuntimeError:
        return None
