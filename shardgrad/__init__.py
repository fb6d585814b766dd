"""shardgrad: a fully-sharded data-parallel engine for PyTorch, with FSDP2's interface."""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardgrad import optim
    from shardgrad.checks.padding import PaddingWarning
    from shardgrad.checks.unowned_params import UnownedParameterWarning
    from shardgrad.checks.untrained_params import UntrainedParameterWarning
    from shardgrad.diagnosis.watchdog import WaitingRanksWarning
    from shardgrad.errors import ShardgradError
    from shardgrad.features.export_table import export_table
    from shardgrad.features.participation import participate
    from shardgrad.features.send_weights import plan_weights, receive_weights, send_weights
    from shardgrad.features.sleep import sleep, wake
    from shardgrad.fully_shard import fully_shard
    from shardgrad.graphs import GraphPool, UncapturableStepWarning, graphed_step
    from shardgrad.module import FSDPModule, register_fsdp_forward_method, share_comm_ctx
    from shardgrad.optim.clip import clip_grad_norm_
    from shardgrad.optim.grad_scaler import GradScaler
    from shardgrad.patch import patch
    from shardgrad.policies import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        GradientPolicy,
        GradientReductionHandle,
        MixedPrecisionPolicy,
        OffloadPolicy,
        SleepPolicy,
        UnshardHandle,
    )
    from shardgrad.programs import checkpoint
    from shardgrad.version import __version__


__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradScaler",
    "GradientPolicy",
    "GradientReductionHandle",
    "GraphPool",
    "LostWorkWarning",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PaddingWarning",
    "ShardgradError",
    "SleepPolicy",
    "UncapturableStepWarning",
    "UnownedParameterWarning",
    "UnshardHandle",
    "UntrainedParameterWarning",
    "WaitingRanksWarning",
    "__version__",
    "checkpoint",
    "clip_grad_norm_",
    "export_table",
    "fully_shard",
    "graphed_step",
    "optim",
    "participate",
    "patch",
    "plan_weights",
    "receive_weights",
    "register_fsdp_forward_method",
    "send_weights",
    "share_comm_ctx",
    "sleep",
    "wake",
]

# The module that defines each public name. It is imported when the name is first used, so that the
# command line answers `--help` and usage errors without importing PyTorch.
_DEFINED_IN = {
    "CPUOffloadPolicy": "policies",
    "DataParallelMeshDims": "policies",
    "FSDPModule": "module",
    "GradScaler": "optim.grad_scaler",
    "GradientPolicy": "policies",
    "GradientReductionHandle": "policies",
    "GraphPool": "graphs",
    "LostWorkWarning": "errors",
    "MixedPrecisionPolicy": "policies",
    "OffloadPolicy": "policies",
    "PaddingWarning": "checks.padding",
    "ShardgradError": "errors",
    "SleepPolicy": "policies",
    "UncapturableStepWarning": "graphs",
    "UnownedParameterWarning": "checks.unowned_params",
    "UnshardHandle": "policies",
    "UntrainedParameterWarning": "checks.untrained_params",
    "WaitingRanksWarning": "diagnosis.watchdog",
    "__version__": "version",
    "clip_grad_norm_": "optim.clip",
    "export_table": "features.export_table",
    "fully_shard": "fully_shard",
    "graphed_step": "graphs",
    "participate": "features.participation",
    "patch": "patch",
    "plan_weights": "features.send_weights",
    "receive_weights": "features.send_weights",
    "register_fsdp_forward_method": "module",
    "send_weights": "features.send_weights",
    "share_comm_ctx": "module",
    "sleep": "features.sleep",
    "wake": "features.sleep",
}

if not TYPE_CHECKING:  # mypy sees the imports above, and reports other names

    def __getattr__(name: str) -> Any:
        if name in _DEFINED_IN:
            value = getattr(import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
            globals()[name] = value
            return value
        if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `shardgrad.fully_shard` and `shardgrad.patch` functions.

    Importing the submodule of the same name would replace them by the module.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in _DEFINED_IN):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
