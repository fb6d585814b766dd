"""What is left if an engine costs nothing: compute alone, with the same collectives, and as one
plain graph.

| name           | a step is                                                                       |
|----------------|---------------------------------------------------------------------------------|
| `compute`      | the unsharded model, AdamW on this rank's share of it, no communication         |
| `collectives`  | the same compute, and torch's own collectives for the same bytes, one at a time |
| `hand-graphed` | everything of a plain model as one CUDA graph                                   |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.engines.cuda_graph import captured
from benchmarks.engines.program import (
    COMPUTE_DTYPES,
    LR,
    REDUCE_DTYPE,
    MicroBatch,
    Trained,
    adamw,
    mesh_of,
)
from benchmarks.engines.task import Task
from benchmarks.models import build_model
from shardgrad.programs.train.model import Transformer

# torch 2.13 gave these two new names; the old ones warn from then on.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def compute(task: Task, device: torch.device) -> Trained:
    """Nothing is sent."""
    return Trained(_Floor(task, device, sends=False).step)


def collectives(task: Task, device: torch.device) -> Trained:
    """The same, and the collectives of a step."""
    return Trained(_Floor(task, device, sends=True).step)


def hand_graphed(task: Task, device: torch.device) -> Trained:
    """A graph without an engine: of one rank, whose share is all of the model."""
    graph, step = captured(_Floor(task, device, sends=False, capturable=True).step)
    return Trained(step, lambda: graph.pool_nbytes)


class _Floor:
    """Forward and backward of the unsharded model, and the optimizer's work on this rank's share of
    it.

    The share is what a sharding engine would leave to this rank: 1/N of every parameter, in fp32.
    """

    def __init__(
        self, task: Task, device: torch.device, *, sends: bool, capturable: bool = False
    ) -> None:
        mesh = mesh_of(task)
        self._shards, self._mine = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
        self._device, self._clip = device, task.clip
        self._model = build_model(task.preset, device).to(COMPUTE_DTYPES[task.precision])
        self._params = list(self._model.parameters())
        self._rows = [self._share(param.detach()) for param in self._params]
        # In fp32 a share is a view of its parameter, so that updating one updates the other.
        self._shares = [nn.Parameter(rows.float()) for rows in self._rows]
        lr = torch.tensor(LR, device=device) if capturable else LR
        self._optimizer = adamw(self._shares, lr=lr, capturable=capturable)
        self._collectives = _Collectives(self._model, task, mesh) if sends else None

    def step(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        total = torch.zeros((), device=self._device)
        for number, (tokens, targets) in enumerate(micro_batches, start=1):
            if self._collectives:
                self._collectives.forward()
            loss = self._model.loss(tokens, targets) / len(micro_batches)
            loss.backward()
            if self._collectives:
                self._collectives.backward(reduce=number == len(micro_batches))
            total += loss.detach()
        for share, param in zip(self._shares, self._params, strict=True):
            share.grad = None if param.grad is None else self._share(param.grad).float()
            param.grad = None
        if self._clip:
            nn.utils.clip_grad_norm_(self._shares, self._clip)
        self._optimizer.step()
        self._write_back()
        return total

    def _share(self, unsharded: Tensor) -> Tensor:
        return unsharded.tensor_split(self._shards)[self._mine]

    @torch.no_grad()
    def _write_back(self) -> None:
        for rows, share in zip(self._rows, self._shares, strict=True):
            if rows.data_ptr() != share.data_ptr():
                rows.copy_(share)


class _Collectives:
    """The all-gathers and reductions of a step on flat buffers of the right sizes, nothing else.

    Each is waited for, so an engine that overlaps, or sends less, may beat this.
    """

    def __init__(self, model: Transformer, task: Task, mesh: DeviceMesh) -> None:
        blocks = [list(block.parameters()) for block in model.layers]
        inner = {param for params in blocks for param in params}
        root = [param for param in model.parameters() if param not in inner]
        dtype = COMPUTE_DTYPES[task.precision]
        # Root first, as in forward; by default every unit reshards after forward except the root.
        self._root = _UnitBuffers(root, dtype, mesh)
        self._blocks = [_UnitBuffers(params, dtype, mesh) for params in blocks]

    def forward(self) -> None:
        for unit in (self._root, *self._blocks):
            unit.all_gather()

    def backward(self, *, reduce: bool) -> None:
        for unit in self._blocks:
            unit.all_gather()
        if reduce:
            for unit in (self._root, *self._blocks):
                unit.reduce()


class _UnitBuffers:
    """One unit's flat buffers, zeros: what they hold does not matter to a collective."""

    def __init__(
        self, params: Sequence[Tensor], gather_dtype: torch.dtype, mesh: DeviceMesh
    ) -> None:
        self._shard_group = mesh.get_group(mesh.ndim - 1)
        self._replicas = mesh.get_group(0) if mesh.ndim > 1 else None
        shards = self._shard_group.size()
        numel = sum(-(-len(param) // shards) * param[0].numel() for param in params)
        device = params[0].device
        self._chunk = torch.zeros(numel, dtype=gather_dtype, device=device)
        self._unsharded = torch.zeros(shards * numel, dtype=gather_dtype, device=device)
        self._sum = torch.zeros(numel, dtype=REDUCE_DTYPE, device=device)
        self._gradients = torch.zeros(shards * numel, dtype=REDUCE_DTYPE, device=device)

    def all_gather(self) -> None:
        _all_gather(self._unsharded, self._chunk, group=self._shard_group)

    def reduce(self) -> None:
        _reduce_scatter(self._sum, self._gradients, group=self._shard_group)
        if self._replicas is not None:
            dist.all_reduce(self._sum, group=self._replicas)
