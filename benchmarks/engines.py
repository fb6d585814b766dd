"""The contestants: two engines, and two floors that say what is left when an engine costs nothing.

| name          | a step is                                                                          |
|---------------|------------------------------------------------------------------------------------|
| `shardgrad`   | `shardgrad.fully_shard` around each block and the model                            |
| `fsdp2`       | `torch.distributed.fsdp.fully_shard` in the same places                            |
| `compute`     | whole model, AdamW on this rank's share of it, no communication                    |
| `collectives` | the same compute, and torch's own collectives for the same bytes, one at a time    |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.task import Task
from shardgrad.training.model import Transformer, materialise
from shardgrad.training.presets import PRESETS
from shardgrad.training.sharding import set_gradient_sync

Batch = tuple[Tensor, Tensor]

_COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_REDUCE_DTYPE = torch.float32
_SEED = 0
_LR = 1e-3


class Contestant(Protocol):
    """Something that trains."""

    def step(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Makes one optimizer step; returns the sum of the micro-batches' losses on this rank."""


def build(name: str, task: Task) -> Contestant:
    """Makes a contestant, with the same initial weights as every other."""
    if name == "shardgrad":
        import shardgrad

        return _Sharded(task, shardgrad.fully_shard)
    if name == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        return _Sharded(task, fully_shard)
    return _Floor(task, _Collectives if name == "collectives" else None)


def make_batches(task: Task, steps: int) -> list[list[Batch]]:
    """This rank's micro-batches for `steps` steps; random tokens, the same at every call."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (steps, task.accumulate, task.batch_size, task.seq_len + 1)
    text = torch.randint(PRESETS[task.preset].vocab_size, shape, generator=generator)
    return [[(micro[:, :-1], micro[:, 1:]) for micro in step] for step in text]


def _whole_model(task: Task) -> Transformer:
    with torch.device("meta"):
        model = Transformer(PRESETS[task.preset])
    materialise(model, model, device=torch.device("cpu"), seed=_SEED)
    return model


def _adamw(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=_LR, fused=True)


class _Sharded:
    """An engine with FSDP2's interface."""

    def __init__(self, task: Task, fully_shard: Callable[..., Any]) -> None:
        self._model = _whole_model(task)
        policy = MixedPrecisionPolicy()
        if task.precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=_REDUCE_DTYPE)
        for unit in (*self._model.layers, self._model):
            fully_shard(unit, mp_policy=policy, reshard_after_forward=task.reshard)
        self._optimizer = _adamw(list(self._model.parameters()))

    def step(self, micro_batches: Sequence[Batch]) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for i, (tokens, targets) in enumerate(micro_batches):
            set_gradient_sync(self._model, i == len(micro_batches) - 1)
            loss = self._model.loss(tokens, targets)
            loss.backward()
            total += loss.detach()
        self._optimizer.step()
        return total


class _Floor:
    """Forward and backward of the whole model, and the optimizer's work on this rank's share of it.

    The share is what a sharding engine would leave to this rank: 1/N of every parameter, in fp32.
    """

    def __init__(self, task: Task, collectives: Callable[[Transformer, Task], _Collectives] | None) -> None:
        self._model = _whole_model(task).to(_COMPUTE_DTYPES[task.precision])
        self._params = list(self._model.parameters())
        self._rows = [_share(param.detach()) for param in self._params]
        # In fp32 a share is a view of its parameter, so that updating one updates the other.
        self._shares = [nn.Parameter(rows.float()) for rows in self._rows]
        self._optimizer = _adamw(self._shares)
        self._collectives = collectives and collectives(self._model, task)

    def step(self, micro_batches: Sequence[Batch]) -> Tensor:
        for param in self._params:
            param.grad = None
        total = torch.zeros(())
        for i, (tokens, targets) in enumerate(micro_batches):
            if self._collectives:
                self._collectives.forward()
            loss = self._model.loss(tokens, targets)
            loss.backward()
            if self._collectives:
                self._collectives.backward(reduce=i == len(micro_batches) - 1)
            total += loss.detach()
        for share, param in zip(self._shares, self._params, strict=True):
            share.grad = None if param.grad is None else _share(param.grad).float()
        self._optimizer.step()
        self._write_back()
        return total

    @torch.no_grad()
    def _write_back(self) -> None:
        for rows, share in zip(self._rows, self._shares, strict=True):
            if rows.data_ptr() != share.data_ptr():
                rows.copy_(share)


def _share(whole: Tensor) -> Tensor:
    return whole.tensor_split(dist.get_world_size())[dist.get_rank()]


class _Collectives:
    """The all-gathers and reduce-scatters of a step on flat buffers of the right sizes, nothing else.

    Each is waited for, so an engine that overlaps, or sends less, may beat this.
    """

    def __init__(self, model: Transformer, task: Task) -> None:
        blocks = [list(block.parameters()) for block in model.layers]
        inner = {param for params in blocks for param in params}
        root = [param for param in model.parameters() if param not in inner]
        gather_dtype = _COMPUTE_DTYPES[task.precision]
        # Root first, as in forward. By default every unit reshards after forward except the root.
        reshards = [bool(task.reshard), *(task.reshard is not False for _ in blocks)]
        self._units = [_UnitBuffers(params, gather_dtype) for params in (root, *blocks)]
        self._again = [unit for unit, flag in zip(self._units, reshards, strict=True) if flag]

    def forward(self) -> None:
        for unit in self._units:
            unit.all_gather()

    def backward(self, *, reduce: bool) -> None:
        for unit in self._again:
            unit.all_gather()
        if reduce:
            for unit in self._units:
                unit.reduce_scatter()


class _UnitBuffers:
    """One unit's flat buffers, zeros: what they hold does not matter to a collective."""

    def __init__(self, params: Sequence[Tensor], gather_dtype: torch.dtype) -> None:
        ranks = dist.get_world_size()
        chunk_numel = sum(-(-len(param) // ranks) * param[0].numel() for param in params)
        self._chunk = torch.zeros(chunk_numel, dtype=gather_dtype)
        self._whole = torch.zeros(ranks * chunk_numel, dtype=gather_dtype)
        self._sum = torch.zeros(chunk_numel, dtype=_REDUCE_DTYPE)
        self._gradients = torch.zeros(ranks * chunk_numel, dtype=_REDUCE_DTYPE)

    def all_gather(self) -> None:
        dist.all_gather_into_tensor(self._whole, self._chunk)

    def reduce_scatter(self) -> None:
        dist.reduce_scatter_tensor(self._sum, self._gradients)
