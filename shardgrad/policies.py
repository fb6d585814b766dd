"""Policies: torch's own, re-exported so that one import serves both engines, and this engine's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
)

__all__ = [
    "REDUCES_IN_GRAD_DTYPE",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "GradientPolicy",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParamDtypes",
    "SleepPolicy",
    "UnshardHandle",
]

# Since torch 2.15, `reduce_dtype=None` means the parameter's `grad_dtype` instead of `param_dtype`.
REDUCES_IN_GRAD_DTYPE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)

# None if the installed torch does not have it yet.
DataParallelMeshDims = getattr(torch_fsdp, "DataParallelMeshDims", None)


if not TYPE_CHECKING and hasattr(torch_fsdp, "GradientReductionHandle"):  # from torch 2.15 on
    GradientReductionHandle = torch_fsdp.GradientReductionHandle
else:

    class GradientReductionHandle:
        """The handle that `finalize_backward(async_op=True)` returns."""

        def wait(self) -> None:
            """Makes the current stream wait for the gradients."""


@dataclass
class SleepPolicy(OffloadPolicy):
    """Keeps shards, gradients and states of `shardgrad.optim` in memory that can be released
    and allocated again at the same addresses; see `shardgrad.sleep`. Gradients keep their memory
    between steps.

    Pass it as the offload policy of every unit:

        shardgrad.fully_shard(model, offload_policy=shardgrad.SleepPolicy())
    """


@dataclass(frozen=True)
class GradientPolicy:
    """Sets the attribute and dtype of reduced gradients, and the dtype in which they are sent.

    With a `wire_dtype`, this rank rounds a gradient to it when it packs the gradient for the
    reduction, unless autograd already produced that dtype. Ranks exchange the pieces (an
    all-to-all), and each adds those of its shard in float32, in a fixed order; the sum is divided
    and stored in `dtype`. Gradients that accumulate on this rank (micro-batches without
    synchronization, ZeRO stage 1, HSDP's partial sums) are summed in float32, and rounded once when
    they are sent. Across replicas, or the outer axis of `zero_stage="hfsdp"`, the sum over the
    first axis is also rounded and exchanged; with more than two replicas, their sum is rounded once
    more. A group of one rank sends nothing and rounds nothing.

    For example, to send gradients in half the bytes:

        policy = shardgrad.GradientPolicy(wire_dtype=torch.bfloat16)
        shardgrad.fully_shard(model, gradient_policy=policy)

    Attributes:
        dtype: dtype of the persistent gradient shard; None means the dtype of the sharded
            parameter.
        decoupled: bind the gradient to `param.decoupled_grad` instead of `param.grad`, for
            optimizers that read a gradient whose dtype differs from the parameter's.
        wire_dtype: `torch.bfloat16`, or None to send gradients in the reduce dtype. With a wire
            dtype, `MixedPrecisionPolicy.reduce_dtype` must be float32, which is then also the
            meaning of None.
        persistent: keep gradients at one address from the first reduction on, for programs that
            hold `data_ptr()`, as long as the same parameters require grad and are not replaced.
            The gradients' memory then adds to the peak at the loss, and a gradient that the program
            keeps (`g = p.grad; p.grad = None`) is overwritten by the next reduction.
    """

    dtype: torch.dtype | None = None
    decoupled: bool = False
    wire_dtype: torch.dtype | None = None
    persistent: bool = False

    @property
    def attribute(self) -> str:
        """Name of the parameter attribute that holds the gradient."""
        return "decoupled_grad" if self.decoupled else "grad"


@dataclass(frozen=True)
class ParamDtypes:
    """The dtypes in which one parameter is computed, reduced and stored.

    Attributes:
        mp_policy: the unit's, without an override function.
        gradient_policy: the call's, with the dtype that the parameter asks for.
    """

    mp_policy: MixedPrecisionPolicy
    gradient_policy: GradientPolicy
