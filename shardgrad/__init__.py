"""shardgrad: a fully-sharded data-parallel engine for PyTorch, with FSDP2's interface."""

from .diagnostics import gradient_report
from .errors import ShardgradError
from .fully_shard import fully_shard
from .module import FSDPModule, register_fsdp_forward_method
from .participation import participate
from .policies import CPUOffloadPolicy, GradientPolicy, MixedPrecisionPolicy, OffloadPolicy

__version__ = "0.1.0"

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "GradientPolicy",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardgradError",
    "__version__",
    "fully_shard",
    "gradient_report",
    "participate",
    "register_fsdp_forward_method",
]
