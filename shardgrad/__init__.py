"""shardgrad: a fully-sharded data-parallel engine for PyTorch, with FSDP2's interface."""

from shardgrad import optim
from shardgrad.checks.gradient_report import gradient_report
from shardgrad.checks.replica_report import replica_report
from shardgrad.checks.untrained_params import UntrainedParameterWarning
from shardgrad.errors import ShardgradError
from shardgrad.features.participation import participate
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
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
)

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
