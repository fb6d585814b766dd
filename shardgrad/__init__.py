"""shardgrad: a fully-sharded data-parallel engine for PyTorch, with FSDP2's interface."""

from . import optim
from .clip import clip_grad_norm_
from .diagnostics import gradient_report
from .errors import ShardgradError
from .first_step import UntrainedParameterWarning
from .fully_shard import fully_shard
from .grad_scaler import GradScaler
from .graphs import GraphPool, UncapturableStepWarning, graphed_step
from .module import FSDPModule, register_fsdp_forward_method, share_comm_ctx
from .participation import participate
from .patch import patch
from .policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    GradientPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
)
from .replicas import replica_report

__version__ = "0.1.0"

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradScaler",
    "GradientPolicy",
    "GraphPool",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardgradError",
    "UncapturableStepWarning",
    "UnshardHandle",
    "UntrainedParameterWarning",
    "__version__",
    "clip_grad_norm_",
    "fully_shard",
    "gradient_report",
    "graphed_step",
    "optim",
    "participate",
    "patch",
    "register_fsdp_forward_method",
    "replica_report",
    "share_comm_ctx",
]
