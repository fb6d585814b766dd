"""Models, engines and training loops that the parity tests share.

A *program* is a function of an `Engine` that builds, trains and returns named tensors. Running one
program under two engines and comparing what comes back is how most tests here judge.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, wraps
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

import shardgrad
from shardgrad.engine import transports

VOCABULARY = 13
WIDTH = 7
ROWS = 3  # of a rank's batch
BYTE_DTYPES = [torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn]  # without gradients

Tensors = dict[str, Tensor]


# -- models


class Block(nn.Module):
    """A residual block with a norm, biases and prime sizes."""

    def __init__(self, width: int = WIDTH, hidden: int = 11) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    """Tokens in, logits out; the head is registered before the layers, and `gain` has a single
    element.
    """

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.gain = nn.Parameter(torch.ones(1))
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) * self.gain


class Route(nn.Module):
    """Runs the layers that it is told, one after another."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, *used: int) -> Tensor:
        for place in used:
            x = self.layers[place](x)
        return x


def route(width: int, layers: int) -> Route:
    torch.manual_seed(0)
    return Route(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))))


class ManySmall(nn.Module):
    """Forty parameters of one to forty elements around one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 41)
        self.scales = nn.ParameterList(torch.linspace(0.5, 1.5, n) for n in range(1, 41))
        self.head = nn.Linear(41, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for scale in self.scales:
            x = x * F.pad(scale, (0, 41 - scale.numel()), value=1.0)
        return self.head(x)


def tower(seed: int = 0, depth: int = 3) -> Tower:
    """Returns a tower with the same weights on every rank."""
    torch.manual_seed(seed)
    return Tower(depth)


def many_small() -> ManySmall:
    torch.manual_seed(0)
    return ManySmall()


def stack(*sizes: int, seed: int = 0) -> nn.Sequential:
    """Returns linear layers with a tanh between them."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inner, outer in pairwise(sizes):
        layers += [nn.Linear(inner, outer), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def mlp() -> nn.Sequential:
    """Returns four layers of one size, in float64."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()


def sharded_mlp(**options: Any) -> nn.Sequential:
    """Returns an `mlp` whose last layer is the root's; the others are units."""
    model = mlp()
    return SHARDGRAD.shard(*list(model)[:-1], model, **options)


class Half(nn.Module):
    """Uses one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


# -- engines


@dataclass(frozen=True)
class Engine:
    """One way to run a program.

    Attributes:
        fully_shard: shards a module; returns it as it is for the unsharded oracle.
        whole_batch: give every rank the batches of all ranks, concatenated.
        gathers: report whole tensors and mean losses; otherwise what this rank holds, without
            communication.
    """

    name: str
    fully_shard: Callable[..., Any]
    whole_batch: bool = False
    gathers: bool = False

    def shard(self, *modules: Any, **options: Any) -> Any:
        """Shards modules in this order, inner ones first; returns the last."""
        *_, outermost = [self.fully_shard(module, **options) for module in modules]
        return outermost

    def shard_tower(self, model: Tower, **options: Any) -> Tower:
        """Shards every layer, the embedding, and the rest as root."""
        return self.shard(*model.layers, model.embedding, model, **options)

    def shard_stack(self, model: nn.Sequential, **options: Any) -> nn.Sequential:
        """Shards every linear layer, and the rest as root."""
        linear = [layer for layer in model if isinstance(layer, nn.Linear)]
        return self.shard(*linear, model, **options)

    @property
    def optim(self) -> Any:
        """Where a program of this engine has its optimizers from."""
        return shardgrad.optim if self.name == "shardgrad" else torch.optim

    def sync(self, model: nn.Module, flag: bool) -> None:
        if not self.whole_batch:
            model.set_requires_gradient_sync(flag)

    def loss(self, model: nn.Module, step: int, *shape: int, **options: Any) -> Tensor:
        """Returns the mean of the squares of what a model makes of this rank's inputs."""
        loss: Tensor = model(self.inputs(step, *shape, **options)).square().mean()
        return loss

    def read(self, tensor: Tensor) -> Tensor:
        """Returns a copy of a tensor: whole if the engine gathers, else this rank's piece."""
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor() if self.gathers else tensor.to_local()
        return tensor.detach().clone()

    def snapshot(self, model: nn.Module) -> Tensors:
        """Returns parameters and gradients by name; a gradient that is None is left out."""
        if not self.whole_batch:
            for module in model.modules():  # a forward may have left parameters whole
                if isinstance(module, FSDPModule):
                    module.reshard()
        found: Tensors = {}
        for name, param in model.named_parameters():
            found[name] = self.read(param)
            if param.grad is not None:
                found[f"{name}.grad"] = self.read(param.grad)
        return found

    def mean(self, value: Tensor) -> Tensor:
        """Returns the mean over ranks if the engine gathers, else this rank's value."""
        value = value.detach().clone()
        if self.gathers and not self.whole_batch:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        return value

    def mine(self, everything: Tensor) -> Tensor:
        """Cuts this rank's part, along dim 0, out of a batch for all ranks."""
        if self.whole_batch:
            return everything
        return everything.chunk(dist.get_world_size())[dist.get_rank()]

    def tokens(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns this rank's tokens and targets of a step."""
        generator = torch.Generator().manual_seed(1_000 + step)
        shape = (2, ROWS * dist.get_world_size(), 5)
        tokens, targets = torch.randint(VOCABULARY, shape, generator=generator)
        return self.mine(tokens), self.mine(targets)

    def inputs(self, step: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns this rank's random inputs of a step, by default in the default dtype."""
        generator = torch.Generator().manual_seed(2_000 + step)
        rows = ROWS * dist.get_world_size()
        everything = torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
        return self.mine(everything.to(dtype or torch.get_default_dtype()))


def _leave_alone(module: Any, **_: Any) -> Any:
    return module


SHARDGRAD = Engine("shardgrad", shardgrad.fully_shard)
FSDP2 = Engine("fsdp2", fsdp.fully_shard)
GATHERED = replace(SHARDGRAD, gathers=True)
FSDP2_GATHERED = replace(FSDP2, gathers=True)
UNSHARDED = Engine("unsharded", _leave_alone, whole_batch=True, gathers=True)


@cache
def hsdp_mesh(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def last_dim(param: nn.Parameter) -> Shard:
    """A `shard_placement_fn`."""
    return Shard(-1)


# -- loops


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name != "sgd":
        fused = name == "fused adamw" or None
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=fused)
    return torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)


def train(
    engine: Engine,
    model: nn.Module,
    *,
    loss: Callable[[int], Tensor] | None = None,
    steps: int = 3,
    optimizer: str = "adamw",
    micro_batches: int = 1,
    sync_each: bool = True,
    set_to_none: bool = True,
    first_step: int = 0,
    before_step: Callable[[int], Tensors] = lambda step: {},
) -> Tensors:
    """Trains on `loss` of a micro-batch's number, by default that of tokens; returns every step's
    loss, what is there before every step, and the last step's parameters and gradients.
    """
    loss = loss or (lambda number: token_loss(model, engine.tokens(number)))
    optim = make_optimizer(optimizer, model)
    history: Tensors = {}
    for step in range(first_step, first_step + steps):
        total = torch.zeros(())
        for micro in range(micro_batches):
            if micro_batches > 1:
                engine.sync(model, sync_each or micro == micro_batches - 1)
            part = loss(step * micro_batches + micro) / micro_batches
            part.backward()
            total = total + part.detach()
        history[f"loss of step {step}"] = engine.mean(total)
        history |= before_step(step)
        optim.step()
        if step == first_step + steps - 1:
            history.update(engine.snapshot(model))
        optim.zero_grad(set_to_none=set_to_none)
    return history


def train_squares(engine: Engine, model: nn.Module, width: int, **options: Any) -> Tensors:
    """Trains on the squares of a model's outputs, of random inputs of this width."""
    return train(engine, model, loss=lambda number: engine.loss(model, number, width), **options)


@contextmanager
def watching_collectives(act: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Calls `act` with the name and the input of each collective that somebody asks torch for."""
    inputs = {
        (dist, name): 1
        for name in (
            "all_to_all_single",
            *("all_gather_into_tensor", "reduce_scatter_tensor"),
            *("all_gather_single", "reduce_scatter_single"),
        )
        if hasattr(dist, name)
    }
    inputs[dist, "all_reduce"] = 0
    # The engine has bound the names that this torch has.
    inputs |= {(transports, "_all_gather"): 1, (transports, "_reduce_scatter"): 1}
    originals = {(owner, name): getattr(owner, name) for owner, name in inputs}

    def acting(key: tuple[Any, str]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [*args, *(v for v in kwargs.values() if isinstance(v, Tensor))]
            act(key[1].removeprefix("_"), tensors[inputs[key]])
            return originals[key](*args, **kwargs)

        return call

    for owner, name in originals:
        setattr(owner, name, acting((owner, name)))
    try:
        yield
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)


# -- judging


def assert_same_bits(ours: Tensors, theirs: Tensors) -> None:
    """Requires the same names, dtypes and bits."""
    assert list(ours) == list(theirs), f"names differ: {sorted(ours.keys() ^ theirs.keys())}"
    for name, right in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (right.dtype, right.shape), name
        off = (ours[name] - right).abs().max().item() if right.numel() else 0.0
        assert torch.equal(ours[name], right), f"{name} differs by up to {off}"


def assert_close(ours: Tensors, theirs: Tensors, *, tolerance: float = 1e-10) -> None:
    """Requires the same names, and values equal within `tolerance` (relative, and absolute).

    The default is for float64 programs: some thousand roundings of 1e-16, and a margin of a
    hundred.
    """
    assert list(ours) == list(theirs), f"names differ: {sorted(ours.keys() ^ theirs.keys())}"
    for name, right in theirs.items():
        torch.testing.assert_close(
            ours[name],
            right,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@contextmanager
def unchanged(params: Iterable[Any]) -> Iterator[None]:
    """Requires that this rank's part of some tensors is at the end as it was."""
    before = [(param, _local(param).clone()) for param in params]
    yield
    assert all(torch.equal(_local(param), was) for param, was in before)


def _local(param: Tensor) -> Tensor:
    return (param.to_local() if isinstance(param, DTensor) else param).detach()


Program = Callable[..., Tensors]


def same_bits_as_fsdp2(program: Program, *args: Any, **kwargs: Any) -> None:
    """Runs a program under both engines on this rank and requires identical results."""
    assert_same_bits(program(SHARDGRAD, *args, **kwargs), program(FSDP2, *args, **kwargs))


def close_to_unsharded(
    program: Program, *args: Any, tolerance: float = 1e-10, **kwargs: Any
) -> None:
    """Runs a float64 program sharded, and unsharded on the concatenated batch; requires equal
    results.
    """
    with float64():
        ours, theirs = program(GATHERED, *args, **kwargs), program(UNSHARDED, *args, **kwargs)
    assert_close(ours, theirs, tolerance=tolerance)


def as_under_fsdp2(program: Program) -> Callable[..., None]:
    """Makes a program a test, under `on_ranks`: `same_bits_as_fsdp2`."""
    return judged_by(same_bits_as_fsdp2, program)


def closely_as_under_fsdp2(program: Program) -> Callable[..., None]:
    """Makes a float64 program a test, under `on_ranks`, where sums have another order than ours, as
    those of gloo on four ranks.
    """
    return judged_by(_close_to_fsdp2, program)


def _close_to_fsdp2(program: Program, **parameters: Any) -> None:
    with float64():
        assert_close(program(SHARDGRAD, **parameters), program(FSDP2, **parameters))


def as_unsharded(program: Program) -> Callable[..., None]:
    """Makes a program a test, under `on_ranks`: `close_to_unsharded`."""
    return judged_by(close_to_unsharded, program)


def judged_by(judge: Callable[..., None], program: Callable[..., Any]) -> Callable[..., None]:
    """Makes a program a test that gives it to a judge, with the test's parameters."""

    @wraps(program)
    def test(**parameters: Any) -> None:
        judge(program, **parameters)

    signature = inspect.signature(program)
    others = list(signature.parameters.values())[1:]  # all but the engine
    test.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    return test


@contextmanager
def float64() -> Iterator[None]:
    """Makes float64 the default dtype: models built inside have it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
