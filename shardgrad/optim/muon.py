"""`Muon` over sharded matrices: one rank orthogonalizes each matrix.

A step processes the buckets of [Note: Owned matrices] in `ownership.py`. For each bucket it updates
the momentum of this rank's pieces, sends pieces to the matrices' owners, runs Newton-Schulz there
in batches of one shape, sends the results back, and applies weight decay and the update to this
rank's pieces. The pieces of one bucket travel while another is orthogonalized.

Values that change from step to step are read from device memory. Parameters without a gradient and
skipped steps are masked on the device, without a branch on the host.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardgrad.engine.param_group import FSDPParam, managed_by
from shardgrad.engine.streams import is_capturing
from shardgrad.engine.transports import backend_for
from shardgrad.errors import OptimizerParameterError, OptionError, unsupported
from shardgrad.optim.flat import FlatOptimizer, Update
from shardgrad.optim.hyper import Hyper, at_least_zero
from shardgrad.optim.muon_bucket import Bucket, in_turn, matrices_of, mesh_of
from shardgrad.optim.newton_schulz import COEFFICIENTS
from shardgrad.optim.ownership import buckets
from shardgrad.optim.precision import Master, Precision
from shardgrad.optim.segment import Segment
from shardgrad.sharding.param_sharding import ParamSharding

# Limit of cached plans, one for each set of segments with gradients. Models with unused units need
# fewer.
_MOST_PLANS = 16

_ITERATION_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class Muon(FlatOptimizer):
    """Muon over sharded matrices, with the arguments of `torch.optim.Muon` and precision options.

    Use it for matrices, in practice the weights of hidden layers, and for stacks of matrices, such
    as experts, along the first dim. Give embeddings, the output head, norms and biases to `AdamW`.
    A matrix that is whole on one rank is not sent. Under HSDP, every replica does the same work
    inside its shard group, and replicas exchange nothing. Before a step is captured, run an eager
    step with gradients for the same parameters, which creates the memory that the graph addresses.

    For example:

        matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
        optimizer = shardgrad.optim.Muon(matrices, lr=0.02)

    Args:
        params: see `FlatOptimizer`; each has two or three dims.
        lr: learning rate, a number or a one-element tensor.
        weight_decay: each step subtracts `lr * weight_decay` times the weight.
        momentum: factor of the momentum.
        nesterov: use Nesterov momentum.
        ns_coefficients: a, b and c of `a X + b (X X^T) X + c (X X^T)^2 X`.
        eps: lower bound of the norm by which a matrix is divided.
        ns_steps: number of Newton-Schulz iterations, below 100.
        adjust_lr_fn: factor of lr by shape: "original" or None, `max(1, rows / columns) ** 0.5`; or
            "match_rms_adamw", `0.2 * max(rows, columns) ** 0.5`.
        num_heads: number of equal parts into which the rows of each matrix are split, such as
            attention heads; each is orthogonalized separately. Usually set per group.
        ns_dtype: dtype in which matrices are sent and orthogonalized: bfloat16, float32 or float64;
            always float64 for float64 parameters.
        momentum_dtype: dtype of the momentum; None for the dtype of the gradients.
        master: "float32" keeps a float32 copy of 16-bit weights; "remainder", for bfloat16, keeps
            the 16 bits of that copy that the weight lacks; None keeps neither.
        check_finite: see `FlatOptimizer`.
        states_on_host: see `FlatOptimizer`.

    Raises:
        OptionError, OptimizerParameterError, UnsupportedError.

    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; the
    second adjustment: Liu et al., "Muon is scalable for LLM training", 2025.
    """

    hypers: ClassVar[Sequence[Hyper]] = (
        Hyper("lr", at_least_zero, may_be_tensor=True),
        Hyper("momentum", at_least_zero),
        Hyper("eps", at_least_zero),  # in the slot in which `sgd_` reads the dampening
        Hyper("weight_decay", at_least_zero),
    )
    fixed: ClassVar[Sequence[str]] = (
        "nesterov",
        "ns_coefficients",
        "ns_steps",
        "adjust_lr_fn",
        "num_heads",
    )

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        num_heads: int = 1,
        ns_dtype: torch.dtype = torch.bfloat16,
        momentum_dtype: torch.dtype | None = None,
        master: Master = None,
        check_finite: bool = False,
        states_on_host: bool = False,
    ) -> None:
        if ns_dtype not in _ITERATION_DTYPES:
            raise OptionError(
                "matrices cannot be orthogonalized in this dtype",
                expected="torch.bfloat16, torch.float32 or torch.float64",
                got=repr(ns_dtype),
                fix="ns_dtype=torch.bfloat16",
            )
        self._ns_dtype = ns_dtype
        self._plans: dict[Hashable, list[Bucket]] = {}
        self._is_in_graphs = False
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "num_heads": num_heads,
        }
        precision = Precision(momentum_dtype, master)
        super().__init__(
            params,
            defaults,
            precision,
            check_finite=check_finite,
            states_on_host=states_on_host,
        )

    def _validate_param(self, param: torch.Tensor, name: str, managed: FSDPParam | None) -> None:
        super()._validate_param(param, name, managed)
        if param.ndim not in (2, 3) or (param.ndim == 3 and not param.is_contiguous()):
            raise OptimizerParameterError(
                f"Muon was given parameter {name}, which is not a matrix",
                expected="parameters with two dimensions, or contiguous ones with three",
                got=f"shape {tuple(param.shape)} with strides {param.stride()}",
                fix="use a second optimizer for it, such as shardgrad.optim.AdamW",
            )
        if managed is not None and not _is_cut_by_rows(managed.sharding):
            raise OptimizerParameterError(
                f"Muon was given parameter {name}, whose rows are split",
                expected="matrices that are sharded along dim 0 by data parallelism only, or a "
                "stack that is sharded along dim 0",
                got=f"a DTensor with placements {managed.sharding.placements}",
                fix="use shardgrad.optim.AdamW, or torch.optim.Muon, for this parameter",
            )
        if managed is None and isinstance(param, DTensor):
            raise OptimizerParameterError(
                f"Muon was given parameter {name}, which another engine shards",
                expected="matrices that shardgrad.fully_shard shards, or plain tensors",
                got=f"a DTensor with placements {param.placements}",
                fix="shardgrad.fully_shard, or torch.optim.Muon for this parameter",
            )
        if managed is None:
            return
        device = managed.group.shard_memory.device
        if backend_for(managed.group.mesh.shard_group, device) is None:
            raise unsupported(
                f"Muon under CPUOffloadPolicy without a backend for {device}",
                instead='init_process_group("cpu:gloo,cuda:nccl"): matrices are sent between hosts',
            )

    def validate_group(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Refuses options that `torch.optim.Muon` refuses, and a `num_heads` that does not fit."""
        steps, coefficients, heads = new["ns_steps"], new["ns_coefficients"], new["num_heads"]
        is_triple = isinstance(coefficients, tuple | list) and len(coefficients) == 3
        rules = {
            "adjust_lr_fn": (
                new["adjust_lr_fn"] in (None, "original", "match_rms_adamw"),
                'None, "original" or "match_rms_adamw"',
            ),
            "ns_steps": (
                isinstance(steps, int) and 0 <= steps < 100,
                "a whole number below 100",
            ),
            "ns_coefficients": (
                is_triple and all(isinstance(value, int | float) for value in coefficients),
                "three numbers",
            ),
            "num_heads": (
                isinstance(heads, int)
                and heads > 0
                and (heads == 1 or all(_has_heads(param, heads) for param in new["params"])),
                "a number that divides the rows of every parameter, in contiguous memory",
            ),
        }
        for key, (is_right, expected) in rules.items():
            if not is_right:
                raise OptionError(
                    f"the optimizer's {key} is outside its range",
                    expected=expected,
                    got=repr(new[key]),
                    fix=f"{key}=..., or group[{key!r}] = ... later",
                )

    def state_dtypes(self, segment: Segment, group: Mapping[str, Any]) -> Mapping[str, torch.dtype]:
        """See `FlatOptimizer`: momentum in the gradients' dtype, and the precision's master
        copy.
        """
        dtypes = dict(self._precision.dtypes(segment.dtype, ("momentum_buffer",)))
        if self._precision.moment_dtype is None:
            managed = managed_by(segment.params[0])
            dtypes["momentum_buffer"] = (
                segment.dtype if managed is None else managed.group.gradient_dtype
            )
        return dtypes

    def guards(self) -> Hashable:
        """See `FlatOptimizer`. From now on no plan is dropped: the graph that is captured next may
        need that of any earlier eager call.
        """
        self._is_in_graphs = True
        return super().guards()

    # -- a step

    def update_all(self, updates: Sequence[Update]) -> None:
        """Updates the buckets in turn. All ranks have the same buckets.

        A segment is updated if one of its parameters has a gradient. The engine binds gradients by
        flags that the reduction has summed over ranks ([Note: Live flags] in
        `engine/grad_shard.py`), so every rank has the same segments and joins the same exchanges.
        """
        left = iter(updates)
        self._is_in_graphs |= bool(updates) and is_capturing(updates[0].segment.device)
        in_turn(
            bucket.run(list(islice(left, len(bucket.segments))), self.with_states)
            for bucket in self._buckets(updates)
        )

    def _buckets(self, updates: Sequence[Update]) -> list[Bucket]:
        # A table's id identifies everything that it was made from. Buckets keep the tables alive.
        # All segments of a bucket use the options of one group.
        read = itemgetter("adjust_lr_fn", "num_heads")
        key = tuple(
            [
                (id(each.launch.rows), each.segment.options.number, read(each.segment.options))
                for each in updates
            ]
        )
        known = self._plans.get(key)
        if known is not None:
            return known
        found: list[Bucket] = []
        for _, group in groupby(updates, key=_what_goes_together):
            same = list(group)
            mesh = mesh_of(same[0].segment)
            matrices = [list(chain.from_iterable(matrices_of(update))) for update in same]
            for indices, owner_of in buckets(matrices, 1 if mesh is None else mesh.shard_size):
                found.append(Bucket([same[i] for i in indices], owner_of, self._ns_dtype))
        if len(self._plans) >= _MOST_PLANS and not self._is_in_graphs:
            self._plans.clear()
        self._plans[key] = found
        return found


def _what_goes_together(update: Update) -> tuple[Hashable, ...]:
    """Returns the key that all segments of a bucket have in common."""
    segment, mesh = update.segment, mesh_of(update.segment)
    group = None if mesh is None else mesh.shard_group
    return id(segment.options), id(group), segment.device, segment.dtype


def _has_heads(param: torch.Tensor, heads: int) -> bool:
    return param.ndim > 1 and param.shape[-2] % heads == 0 and param.is_contiguous()


def _is_cut_by_rows(sharding: ParamSharding) -> bool:
    """Returns whether every rank has full rows of matrices, or whole matrices."""
    cut = (each for each in sharding.placements if isinstance(each, Shard | _StridedShard))
    is_stack = len(sharding.shape) == 3
    return all(each.dim == 0 for each in cut) and (is_stack or not sharding.came_as_dtensor)
