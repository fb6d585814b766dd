"""What the programs in `cases/` are written against: one interface, and an engine behind it.

A program is written as its author would have written it for any of these engines. What differs
between them is here: how a model is wrapped, when gradients are averaged, how parameters are read
as a whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class NotOffered(Exception):
    """The engine has nothing that the program asks for, so it has no verdict."""


def mlp(outputs: int = 3) -> nn.Sequential:
    """Returns a model for the batches of an engine."""
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, outputs))


class Engine:
    """Plain torch: every rank has rank 0's model, and gradients are averaged by hand. It is the
    oracle.

    Args:
        folder: empty, and the same for all ranks.
    """

    name = "torch"

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.rank = dist.get_rank()
        self._hooks: list[Callable[[Tensor], None]] = []

    def batch(self, step: int, rows: int = 4, columns: int = 8) -> Tensor:
        """Returns what this rank trains on in a step: normal numbers, other ones for each rank and
        step.
        """
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        return torch.randn(rows, columns, generator=generator)

    def squares(self, model: nn.Module, step: int) -> Tensor:
        """Returns the loss that most programs have."""
        return model(self.batch(step)).square().mean()

    def of_tokens(self, model: nn.Module, step: int, vocabulary: int) -> Tensor:
        """Returns the loss of a model of tokens, which ranks do not have in common."""
        tokens = torch.arange(self.rank + step, self.rank + step + 3) % vocabulary
        return nn.functional.cross_entropy(model(tokens), tokens)

    def train(
        self,
        model: nn.Module,
        loss: Callable[[int], Tensor | None] | None = None,
        *,
        steps: int = 3,
        optimizer: Any = None,
        then: Callable[[], object] = lambda: None,
        after: Callable[[int], object] = lambda step: None,
    ) -> nn.Module:
        """Trains as people do, and returns the model.

        Args:
            model: is returned.
            loss: of each step; by default that of `squares`.
            steps: how many.
            optimizer: by default the engine's, of the model.
            then: called between the backward and the optimizer's step.
            after: called with the number of a step, after it.
        """
        optimizer = optimizer or self.optimizer(model)
        for step in range(steps):
            self.backward(self.squares(model, step) if loss is None else loss(step), model)
            then()
            optimizer.step()
            optimizer.zero_grad()
            after(step)
        return model

    def resumed(self, owner: Any, step: int) -> None:
        """After step 1, saves a model or an optimizer on rank 0, and loads the file on all."""
        if step == 1:
            state, file = owner.state_dict(), f"{self.folder}/state.pt"
            if self.rank == 0:
                torch.save(state, file)
            dist.barrier()
            owner.load_state_dict(torch.load(file, weights_only=False))

    def wrap(
        self,
        model: nn.Module,
        *,
        units: Sequence[nn.Module] | None = None,
        keep: bool = False,
        mesh: tuple[int, int] | None = None,
    ) -> nn.Module:
        """Returns the model, ready to be trained by all ranks together.

        Args:
            model: the same on every rank, unless that is what a program is about.
            units: what an engine that shards gathers at once; without it, every child, and the
                root.
            keep: whether parameters stay whole between forward and backward.
            mesh: replicas and ranks that share one (HSDP).
        """
        for _, tensor in sorted((*model.named_parameters(), *model.named_buffers())):
            dist.broadcast(tensor.detach(), 0)
        return model

    def inner(self, model: nn.Module) -> Any:
        """Returns the module that was wrapped."""
        return model

    def optimizer(self, model: nn.Module, kind: Any = torch.optim.SGD, **options: Any) -> Any:
        """Returns an optimizer of a class, over all parameters; or one that exists, made to fit."""
        return (
            kind
            if isinstance(kind, Optimizer)
            else kind(model.parameters(), **{"lr": 0.1, **options})
        )

    def backward(self, loss: Tensor | None, model: nn.Module, **options: Any) -> None:
        """Runs a backward, after which gradients are averages; without a loss, takes part in it."""
        if loss is not None:
            loss.backward(**options)
        self._average(model)

    def no_sync(self, model: nn.Module, *, replicas: bool = False) -> AbstractContextManager[None]:
        """Says that gradients need not be averaged yet; with `replicas`, not between replicas."""
        return nullcontext()

    def replayed(self, step: Callable[..., Any], model: nn.Module, optimizer: Any) -> Any:
        """Returns a step as the engine repeats it fastest: as one graph, if it can."""
        return step

    def on_gradient(self, model: nn.Module, hook: Callable[[Tensor], None]) -> None:
        """Calls `hook` with each parameter whose gradient is ready."""
        self._hooks.append(hook)

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        """Makes parameters whole, so that they can be read and written as they are."""
        yield

    def parameters(self, model: nn.Module) -> dict[str, Tensor]:
        """Returns the whole parameters by name; called on every rank."""
        return {name: param.detach().clone() for name, param in model.named_parameters()}

    def _average(self, model: nn.Module) -> None:
        for _, param in sorted(model.named_parameters()):
            has = torch.tensor(float(param.grad is not None))
            dist.all_reduce(has)
            if has:
                total = (
                    torch.zeros_like(param) if param.grad is None else param.grad.detach().clone()
                )
                dist.all_reduce(total)
                param.grad = total.div_(dist.get_world_size())
                for hook in self._hooks:
                    hook(param)


class _Wrapper(Engine):
    """What engines that average by themselves have in common."""

    def backward(self, loss: Tensor | None, model: nn.Module, **options: Any) -> None:
        if loss is not None:
            loss.backward(**options)

    def on_gradient(self, model: nn.Module, hook: Callable[[Tensor], None]) -> None:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(hook)


class DDP(_Wrapper):
    """`DistributedDataParallel`, looking for unused parameters."""

    name = "DDP"

    def wrap(self, model: nn.Module, *, mesh: Any = None, **_: Any) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)

    def inner(self, model: nn.Module) -> Any:
        return model.module

    def no_sync(self, model: nn.Module, *, replicas: bool = False) -> AbstractContextManager[None]:
        return model.no_sync()  # type: ignore[no-any-return, operator]

    def parameters(self, model: nn.Module) -> dict[str, Tensor]:
        return super().parameters(self.inner(model))


class FSDP1(DDP):
    """`FullyShardedDataParallel` with `use_orig_params=True`."""

    name = "FSDP1"

    def wrap(
        self, model: nn.Module, *, units: Any = None, keep: bool = False, mesh: Any = None, **_: Any
    ) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import CustomPolicy

        inside = set(_units(model, units)) - {model}
        strategy = ShardingStrategy.SHARD_GRAD_OP if keep else ShardingStrategy.FULL_SHARD
        if mesh is not None:
            strategy = ShardingStrategy.HYBRID_SHARD
        return FullyShardedDataParallel(
            model,
            sharding_strategy=strategy,
            auto_wrap_policy=CustomPolicy(lambda module: module in inside),
            use_orig_params=True,
            device_id=torch.device("cpu"),
            device_mesh=None if mesh is None else _mesh(mesh),
        )

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(model):
            yield

    def parameters(self, model: nn.Module) -> dict[str, Tensor]:
        with self.whole(model):
            return Engine.parameters(self, model)


class FSDP2(_Wrapper):
    """`torch.distributed.fsdp.fully_shard`."""

    name = "FSDP2"
    module = "torch.distributed.fsdp"

    def wrap(
        self, model: nn.Module, *, units: Any = None, keep: bool = False, mesh: Any = None
    ) -> nn.Module:
        fully_shard = sys.modules[self.module].fully_shard
        options = {} if mesh is None else {"mesh": _mesh(mesh)}
        for unit in _units(model, units):
            fully_shard(unit, reshard_after_forward=False if keep else None, **options)
        return model

    @contextmanager
    def no_sync(self, model: Any, *, replicas: bool = False) -> Iterator[None]:
        switch = model.set_requires_all_reduce if replicas else model.set_requires_gradient_sync
        switch(False)
        yield
        switch(True)

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        units = [module for module in model.modules() if hasattr(module, "unshard")]
        for unit in units:
            unit.unshard()
        yield
        for unit in units:
            unit.reshard()

    def parameters(self, model: nn.Module) -> dict[str, Tensor]:
        for unit in [module for module in model.modules() if hasattr(module, "reshard")]:
            unit.reshard()
        return {name: whole(param).clone() for name, param in model.named_parameters()}


class Shardgrad(FSDP2):
    """This project."""

    name = "shardgrad"
    module = "shardgrad"

    def replayed(self, step: Callable[..., Any], model: nn.Module, optimizer: Any) -> Any:
        return sys.modules[self.module].graphed_step(model, optimizer)(step)


class DeepSpeed(_Wrapper):
    """DeepSpeed's ZeRO-3."""

    name = "ZeRO-3"

    def wrap(self, model: nn.Module, *, mesh: Any = None, **_: Any) -> nn.Module:
        if mesh is not None:
            raise NotOffered("a mesh of replicas")
        return _Later(model)

    def inner(self, model: nn.Module) -> Any:
        return model.model  # type: ignore[union-attr]

    def optimizer(self, model: Any, kind: Any = torch.optim.SGD, **options: Any) -> Any:
        import deepspeed

        # A faster all-reduce for ranks of one machine, which would be compiled now.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if not isinstance(model, _Later):
            raise NotOffered("several engines in one model")
        inner = super().optimizer(model.model, kind, **options)
        model.engine, optimizer, _, _ = deepspeed.initialize(
            model=model.model,
            optimizer=inner,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "gradient_clipping": 0.0,  # 1.0 if nothing is said
            },
        )
        return _Step(model.engine, optimizer)

    def backward(self, loss: Tensor | None, model: Any, **options: Any) -> None:
        if loss is not None:
            model.engine.backward(loss, **options)

    @contextmanager
    def no_sync(self, model: Any, *, replicas: bool = False) -> Iterator[None]:
        model.engine.set_gradient_accumulation_boundary(False)
        yield
        model.engine.set_gradient_accumulation_boundary(True)

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            yield

    def parameters(self, model: nn.Module) -> dict[str, Tensor]:
        with self.whole(model):
            return Engine.parameters(self, self.inner(model))


class _Later(nn.Module):
    """A model whose DeepSpeed engine is made once its optimizer is known."""

    engine: Any = None

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        return (self.model if self.__dict__.get("engine") is None else self.engine)(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "engine":
            self.__dict__[name] = value  # not a submodule: its parameters are the model's
        else:
            super().__setattr__(name, value)


class _Step:
    """DeepSpeed's engine as an optimizer."""

    def __init__(self, engine: Any, optimizer: Any) -> None:
        self._engine = engine
        self._optimizer = optimizer

    def step(self) -> None:
        self._engine.step()

    def zero_grad(self) -> None:
        """The engine's step has done it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


ENGINES: dict[str, Callable[[str], Engine]] = {
    engine.name: engine for engine in (Engine, DDP, FSDP1, FSDP2, DeepSpeed, Shardgrad)
}


def whole(tensor: Tensor) -> Tensor:
    """Returns a tensor as one process would hold it."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _units(model: nn.Module, units: Sequence[nn.Module] | None) -> list[nn.Module]:
    inside = [child for child in model.children() if next(child.parameters(), None) is not None]
    return [*(inside if units is None else units), model]


def _mesh(shape: tuple[int, int]) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
