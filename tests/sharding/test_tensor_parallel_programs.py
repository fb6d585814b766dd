"""A transformer and its states under tensor parallelism and sharding: as the plain one, or as
FSDP2's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from tests.support.parity import (
    SHARDGRAD,
    VOCABULARY,
    Engine,
    Tensors,
    as_under_fsdp2,
    assert_close,
    assert_same_bits,
    float64,
)
from tests.support.ranks import on_ranks
from tests.support.two_engines import whole

WIDTH, HEADS, LENGTH, ROWS = 8, 2, 4, 2


@cache
def mesh_of(*shape: int) -> DeviceMesh:
    names = {2: ("dp", "tp"), 3: ("replicate", "dp", "tp")}[len(shape)]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        cut = (each(x).unflatten(-1, (-1, WIDTH // HEADS)) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in cut), is_causal=True
        )
        return self.o(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    """Attributes: recomputed: whether backward runs forward again."""

    recomputed = False

    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.between, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward()

    def _layer(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.feed_forward(self.between(x))

    def forward(self, x: Tensor) -> Tensor:
        return (
            checkpoint(self._layer, x, use_reentrant=False) if self.recomputed else self._layer(x)
        )


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def transformer(seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer()


def parallelize(model: Transformer, tp: DeviceMesh) -> Transformer:
    """Cuts matrices over `tp`, and what is between them along the sequence, as torchtitan does."""
    whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    for layer in model.layers:
        plan = {
            "before": SequenceParallel(),
            "attention": PrepareModuleInput(**whole),
            "attention.o": RowwiseParallel(output_layouts=Shard(1)),
            "between": SequenceParallel(),
            "feed_forward": PrepareModuleInput(**whole),
            "feed_forward.up": ColwiseParallel(),
            "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(
            layer, tp, plan | {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        )
    outer = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, tp, outer)


def shard(engine: Engine, model: Transformer, mesh: DeviceMesh, **options: Any) -> Transformer:
    for layer in model.layers:
        engine.fully_shard(layer, mesh=mesh, **options)
    return engine.fully_shard(model, mesh=mesh, **options)


def build(engine: Engine, mesh: DeviceMesh, seed: int = 0, **options: Any) -> Transformer:
    axes = tuple(name for name in mesh.mesh_dim_names if name in ("replicate", "dp"))
    return shard(engine, parallelize(transformer(seed), mesh["tp"]), mesh[axes], **options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def tokens(step: int, part: int | None, parts: int) -> Tensor:
    """Returns a batch, or one data-parallel rank's part of it."""
    generator = torch.Generator().manual_seed(step)
    batch = torch.randint(VOCABULARY, (ROWS * parts, LENGTH + 1), generator=generator)
    return batch if part is None else batch.chunk(parts)[part]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def part_of(mesh: DeviceMesh) -> tuple[int, int]:
    """Returns this rank's number among the data-parallel ones, and how many there are."""
    outer = mesh["replicate"] if "replicate" in mesh.mesh_dim_names else None
    part = mesh["dp"].get_local_rank() + (
        outer.get_local_rank() * mesh["dp"].size() if outer else 0
    )
    return part, mesh["dp"].size() * (outer.size() if outer else 1)


def take_steps(
    model: nn.Module, optim: torch.optim.Optimizer, mesh: DeviceMesh, steps: range
) -> None:
    for step in steps:
        optim.zero_grad()
        loss_of(model, tokens(step, *part_of(mesh))).backward()
        optim.step()


# -- training


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2)], ids=["2d", "3d"])
@on_ranks(4)
def test_a_transformer_over_both_axes_equals_the_plain_one(
    shape: tuple[int, ...], recomputed: bool
) -> None:
    """Losses, gradients and parameters, in float64."""
    mesh = mesh_of(*shape)
    part, parts = part_of(mesh)
    with float64():
        plain, model = transformer(), build(SHARDGRAD, mesh)
        for layer in model.layers:
            layer.recomputed = recomputed
        optims = adamw(plain), adamw(model)
        for step in range(3):
            expected = loss_of(plain, tokens(step, None, parts))
            loss = loss_of(model, tokens(step, part, parts))
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=mesh["dp"].get_group())
            if "replicate" in mesh.mesh_dim_names:
                dist.all_reduce(mean, group=mesh["replicate"].get_group())
            torch.testing.assert_close(mean / parts, expected.detach())
            expected.backward()
            loss.backward()
            gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
            assert_close(gradients, {name: p.grad for name, p in plain.named_parameters()})
            for optim in optims:
                optim.step()
                optim.zero_grad()
        assert_close(
            whole(model), {name: p.detach() for name, p in plain.named_parameters()}, tolerance=1e-8
        )


@on_ranks(4)
@as_under_fsdp2
def test_a_meta_model_on_both_axes_trains_bit_for_bit_like_fsdp2(engine: Engine) -> Tensors:
    mesh = mesh_of(2, 2)
    with torch.device("meta"):
        model = build(engine, mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, value in build(engine, mesh, seed=4).named_parameters():
            model.get_parameter(name).copy_(value)
    take_steps(model, adamw(model), mesh, range(2))
    return engine.snapshot(model)


# -- states


def trained(
    engine: Engine, mesh: DeviceMesh, seed: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(engine, mesh, seed)
    optim = adamw(model)
    take_steps(model, optim, mesh, range(2))
    for module in (model, *model.layers):
        module.reshard()
    return model, optim


@on_ranks(4)
def test_a_full_state_on_rank_0_reaches_both_axes() -> None:
    """What rank 0 holds whole, as a checkpoint of a plain run is, goes to all ranks of both
    axes.
    """
    mesh = mesh_of(2, 2)
    model, optim = trained(SHARDGRAD, mesh)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = get_state_dict(model, optim, options=full)
    assert bool(saved[0]) is bool(saved[1]) is (dist.get_rank() == 0)
    other, other_optim = trained(SHARDGRAD, mesh, seed=1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, saved[0], options=options)
    set_optimizer_state_dict(other, other_optim, saved[1], options=options)
    assert_same_bits(whole(other, other_optim), whole(model, optim))
