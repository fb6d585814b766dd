"""`torch.compile`: hooks stay out of the graphs, nothing is compiled twice, numbers are those of FSDP2."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from tests.parity.programs import (
    FSDP2,
    SHARDGRAD,
    Engine,
    Tensors,
    assert_close,
    assert_same_bits,
    make_optimizer,
    token_loss,
    tower,
)
from tests.ranks import Ranks

# Traced and differentiated ahead of time, and run without a C++ compiler: what is compiled is the same.
BACKEND = "aot_eager"

Shard = Callable[[Engine, nn.Module, CompileCounterWithBackend], nn.Module]


def blocks_before_sharding(engine: Engine, model: nn.Module, backend: CompileCounterWithBackend) -> nn.Module:
    """`module.compile()`, as torchtitan does; parameters keep their names."""
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)
    return engine.shard_tower(model)


def blocks_as_wrappers(engine: Engine, model: nn.Module, backend: CompileCounterWithBackend) -> nn.Module:
    """`torch.compile(module)` in the module's place, sharded as a whole."""
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer, backend=backend, fullgraph=True)
    return engine.shard_tower(model)


def blocks_after_sharding(engine: Engine, model: nn.Module, backend: CompileCounterWithBackend) -> nn.Module:
    """Hooks are inside what is compiled; Dynamo breaks its graph around each."""
    engine.shard_tower(model)
    for layer in model.layers:
        layer.compile(backend=backend)
    return model


def whole_model(engine: Engine, model: nn.Module, backend: CompileCounterWithBackend) -> nn.Module:
    """The outermost call is compiled; it falls apart at the hooks into one graph or more for each unit."""
    engine.shard_tower(model)
    model.compile(backend=backend)
    return model


def trained(engine: Engine, shard: Shard | None, steps: int = 5) -> tuple[Tensors, list[int]]:
    """Returns what training gave, and how many graphs had been compiled after each step."""
    torch._dynamo.reset()
    backend = CompileCounterWithBackend(BACKEND)
    model = tower()
    model = engine.shard_tower(model) if shard is None else shard(engine, model, backend)
    optimizer = make_optimizer("adamw", model)
    losses, compiled = [], []
    for step in range(steps):
        loss = token_loss(model, engine.tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        compiled.append(backend.frame_count)
    return {"losses": torch.stack(losses), **engine.snapshot(model)}, compiled


def compiled_once_and_equal(shard: Shard, *, settled_after: int, fewest: int) -> dict[str, int]:
    counters.clear()
    ours, compiled = trained(SHARDGRAD, shard)
    breaks = dict(counters["graph_break"])
    theirs, _ = trained(FSDP2, shard)
    assert_same_bits(
        {k.replace("_orig_mod.", ""): v for k, v in ours.items()},
        {k.replace("_orig_mod.", ""): v for k, v in theirs.items()},
    )
    plain, _ = trained(SHARDGRAD, None)
    # Compiled and plain blocks round alike but for what a decomposition reorders.
    names = {name.replace("_orig_mod.", ""): tensor for name, tensor in ours.items()}
    assert_close(names, plain, tolerance=1e-4)
    assert compiled[-1] >= fewest, f"only {compiled[-1]} graphs were compiled"
    assert len(set(compiled[settled_after - 1 :])) == 1, f"compiled again: {compiled}"
    return {"graphs": compiled[-1], "breaks": sum(breaks.values())}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shard", [blocks_before_sharding, blocks_as_wrappers])
def test_compiled_blocks_are_one_graph_each_and_never_compiled_again(two_ranks: Ranks, shard: Shard) -> None:
    """`fullgraph=True` raises at a graph break: the hooks are outside."""
    for found in two_ranks.run(compiled_once_and_equal, shard, settled_after=1, fewest=1, timeout_s=250):
        print(found)
        assert found["breaks"] == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shard", [blocks_after_sharding, whole_model])
def test_hooks_inside_what_is_compiled_break_its_graph_and_stay_right(two_ranks: Ranks, shard: Shard) -> None:
    for found in two_ranks.run(compiled_once_and_equal, shard, settled_after=2, fewest=3, timeout_s=250):
        print(found)
        assert found["breaks"] > 0
