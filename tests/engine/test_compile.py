"""`torch.compile`: hooks stay out of the graphs, nothing is compiled twice, numbers are those of
FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

import shardgrad
from tests.support.parity import (
    FSDP2,
    SHARDGRAD,
    Engine,
    Tensors,
    assert_close,
    assert_same_bits,
    token_loss,
    tower,
    train,
)
from tests.support.ranks import Ranks

# Traced and differentiated ahead of time, and run without a C++ compiler: what is compiled is the
# same.
BACKEND = "aot_eager"

Shard = Callable[[Engine, nn.Module, CompileCounterWithBackend], nn.Module]


def blocks_before_sharding(
    engine: Engine, model: nn.Module, backend: CompileCounterWithBackend
) -> nn.Module:
    """`module.compile()`, as torchtitan does; parameters keep their names."""
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)
    return engine.shard_tower(model)


def blocks_as_wrappers(
    engine: Engine, model: nn.Module, backend: CompileCounterWithBackend
) -> nn.Module:
    """`torch.compile(module)` in the module's place, sharded as a whole."""
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer, backend=backend, fullgraph=True)
    return engine.shard_tower(model)


def blocks_after_sharding(
    engine: Engine, model: nn.Module, backend: CompileCounterWithBackend
) -> nn.Module:
    engine.shard_tower(model)
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)
    return model


def whole_model(engine: Engine, model: nn.Module, backend: CompileCounterWithBackend) -> nn.Module:
    """The outermost call is compiled; Dynamo breaks its graph where a hook of an inner unit
    runs.
    """
    engine.shard_tower(model)
    model.compile(backend=backend)
    return model


def trained(engine: Engine, shard: Shard | None, steps: int = 5) -> tuple[Tensors, list[int]]:
    """Returns what training gave, and how many graphs had been compiled after each step."""
    torch._dynamo.reset()
    backend = CompileCounterWithBackend(BACKEND)
    model = tower()
    model = engine.shard_tower(model) if shard is None else shard(engine, model, backend)
    compiled: list[int] = []

    def count(step: int) -> Tensors:
        compiled.append(backend.frame_count)
        return {}

    return train(engine, model, steps=steps, before_step=count), compiled


def compiled_once_and_equal(shard: Shard) -> dict[str, int]:
    """Returns how many graphs were compiled, all of them in the first step, and how often one was
    broken.
    """
    counters.clear()
    ours, compiled = trained(SHARDGRAD, shard)
    breaks = sum(counters["graph_break"].values())
    assert set(compiled) == {compiled[0]}, f"compiled again: {compiled}"
    theirs, _ = trained(FSDP2, shard)
    assert_same_bits(ours, theirs)
    plain, _ = trained(SHARDGRAD, None)
    unwrapped = {name.replace("_orig_mod.", ""): tensor for name, tensor in ours.items()}
    # Compiled and plain blocks may round elsewhere: some roundings of float32, enlarged by five
    # steps.
    assert_close(unwrapped, plain, tolerance=1e-4)
    return {"graphs": compiled[-1], "breaks": breaks}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "shard", [blocks_before_sharding, blocks_as_wrappers, blocks_after_sharding]
)
def test_compiled_blocks_are_one_graph_and_are_never_compiled_again(
    two_ranks: Ranks, shard: Shard
) -> None:
    """All blocks have one class, so one graph serves them; a hook inside it would be a break."""
    for found in two_ranks.run(compiled_once_and_equal, shard, timeout_s=250):
        assert found == {"graphs": 1, "breaks": 0}


@pytest.mark.timeout(300)
def test_a_model_compiled_as_a_whole_falls_apart_at_the_hooks_and_stays_right(
    two_ranks: Ranks,
) -> None:
    for found in two_ranks.run(compiled_once_and_equal, whole_model, timeout_s=250):
        assert found["graphs"] > 1
        assert found["breaks"] > 0


def steps_compiled(optimizer_kind: str, *, compiles: bool) -> Tensors:
    """Trains by a function that has the whole step in it."""
    torch._dynamo.reset()
    model = SHARDGRAD.shard_tower(tower(depth=1))
    params = list(model.parameters())
    if optimizer_kind == "torch":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(params, lr=0.1, foreach=False)
    else:
        optimizer = shardgrad.optim.SGD(params, lr=0.1)
    clip = nn.utils.clip_grad_norm_ if optimizer_kind == "torch" else shardgrad.clip_grad_norm_

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = token_loss(model, (tokens, targets))
        loss.backward()
        norm = clip(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    run = torch.compile(step, backend="eager") if compiles else step
    seen = [value for number in range(3) for value in run(*SHARDGRAD.tokens(number))]
    figures = [v.full_tensor() if isinstance(v, DTensor) else v for v in seen]
    return {"losses and norms": torch.stack(figures), **SHARDGRAD.snapshot(model)}


def same_bits_if_the_step_is_compiled(optimizer_kind: str) -> None:
    compiled = steps_compiled(optimizer_kind, compiles=True)
    assert_same_bits(compiled, steps_compiled(optimizer_kind, compiles=False))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("optimizer_kind", ["torch", "shardgrad"])
def test_a_program_that_compiles_its_whole_step_trains_as_it_does_without(
    two_ranks: Ranks, optimizer_kind: str
) -> None:
    """Dynamo watches the thread through backward and step, where it cannot trace the engine."""
    two_ranks.run(same_bits_if_the_step_is_compiled, optimizer_kind, timeout_s=250)
