"""The contestants of `graphed`: the same training step, taken by different engines, with graphs and without.

| name                | forward and backward       | clip and optimizer                               |
|---------------------|----------------------------|--------------------------------------------------|
| `fsdp2`             | eager                      | eager: torch's clip, `AdamW(fused=True)`         |
| `fsdp2+compile`     | every block compiled       | eager, the same                                  |
| `fsdp2 graph`       | a plain CUDA graph         | eager, the same                                  |
| `ddp`               | eager, autocast            | eager, the same                                  |
| `shardgrad`         | eager                      | eager: `shardgrad.clip_grad_norm_`, its `AdamW`  |
| `shardgrad graphed` | `shardgrad.graphed_step` around all of it                                     ||
| `hand-written`      | one CUDA graph around all of a plain model, no engine: the limit              ||
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import shardgrad
from benchmarks.graph_task import BASE, HAND_WRITTEN, GraphTask, shape_of
from shardgrad.bench.plain_graph import PlainGraph
from shardgrad.training.model import Transformer, materialise, next_token_loss

_SEED = 0
_LR = 1e-3
_MAX_NORM = 1.0
_WARMUP = 3  # eager steps before a capture, as many as `graphed_step` takes

Step = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Contestant:
    """Something that trains.

    Attributes:
        step: takes tokens and targets on the device, makes an optimizer step, returns the loss.
        pool_nbytes: device memory that graphs reserved; asked after the capture.
        close: gives graphs back.
    """

    step: Step
    pool_nbytes: Callable[[], int] = lambda: 0
    close: Callable[[], None] = lambda: None


def build(name: str, task: GraphTask) -> Contestant:
    """Makes a contestant, with the same initial weights as every other."""
    if name == HAND_WRITTEN:
        whole = PlainGraph(_plain_step(task))
        return Contestant(whole, lambda: whole.pool_nbytes, whole.close)
    if name == "ddp":
        return Contestant(_ddp(task).step)
    if name.startswith("shardgrad"):
        program = _sharded(task, shardgrad.fully_shard)
        if name == "shardgrad":
            return Contestant(program.step)
        graphed = shardgrad.graphed_step(program.model, program.optimizer, warmup=_WARMUP)(program.step)
        return Contestant(graphed, lambda: graphed.pool.nbytes, graphed.close)
    from torch.distributed.fsdp import fully_shard

    if name == BASE:
        return Contestant(_sharded(task, fully_shard).step)
    if name == "fsdp2+compile":
        return Contestant(_sharded(task, fully_shard, compiled=True).step, close=torch.compiler.reset)
    return _half_graphed(_sharded(task, fully_shard))


@dataclass
class Program:
    """A model and an optimizer, and what a step of them consists of."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[..., Any]
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """All of it."""
        loss = self.forward_and_backward(tokens, targets)
        self.update()
        self.optimizer.zero_grad()
        return loss

    def forward_and_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self.precision():
            loss = next_token_loss(self.model(tokens), targets)
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.clip(self.model.parameters(), _MAX_NORM)
        self.optimizer.step()


def _whole_model(task: GraphTask) -> Transformer:
    with torch.device("meta"):
        model = Transformer(shape_of(task.preset))
    materialise(model, model, device=torch.device(task.device), seed=_SEED)
    return model


def _sharded(task: GraphTask, fully_shard: Callable[..., Any], *, compiled: bool = False) -> Program:
    model = _whole_model(task)
    if compiled:
        for block in model.layers:
            block.compile()
    policy = MixedPrecisionPolicy()
    if task.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(task.device, (1,))
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    if fully_shard is shardgrad.fully_shard:
        return Program(model, shardgrad.optim.AdamW(model.parameters(), lr=_LR), shardgrad.clip_grad_norm_)
    return Program(model, _adamw(model.parameters()), nn.utils.clip_grad_norm_)


def _ddp(task: GraphTask) -> Program:
    model = DistributedDataParallel(_whole_model(task))
    program = Program(model, _adamw(model.parameters()), nn.utils.clip_grad_norm_)
    if task.precision == "bf16":
        program.precision = lambda: torch.autocast(task.device, torch.bfloat16)
    return program


def _adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{"lr": _LR, "fused": True, **options})


def _half_graphed(program: Program) -> Contestant:
    """What trainers do that capture: forward and backward are a graph, clip and optimizer are not."""
    captured = PlainGraph(program.forward_and_backward)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = captured(tokens, targets)
        program.update()
        if not captured.is_captured:  # from then on, replays write the same gradients anew
            program.optimizer.zero_grad()
        return loss

    return Contestant(step, lambda: captured.pool_nbytes, captured.close)


def _plain_step(task: GraphTask) -> Step:
    """A step of a plain model; in bf16, with exact weights and gradients in fp32 beside it."""
    model = _whole_model(task)
    params = list(model.parameters())
    exact = params
    if task.precision == "bf16":
        exact = [nn.Parameter(param.detach().clone()) for param in params]
        model.to(torch.bfloat16)
        for param in exact:
            param.grad = torch.zeros_like(param)
    lr = torch.tensor(_LR, device=task.device)
    optimizer = _adamw(exact, lr=lr, capturable=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = next_token_loss(model(tokens), targets)
        loss.backward()
        if exact is not params:
            torch._foreach_copy_([p.grad for p in exact], [p.grad for p in params])
        nn.utils.clip_grad_norm_(exact, _MAX_NORM)
        optimizer.step()
        if exact is not params:
            with torch.no_grad():
                torch._foreach_copy_(params, exact)
        for param in params:
            param.grad = None
        return loss.detach()

    return step
