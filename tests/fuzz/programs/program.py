"""A training program as data, so that it can be printed, shrunk, kept in a file and run again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from string import ascii_lowercase, digits
from typing import Any


@dataclass(frozen=True)
class Block:
    """A part of the model; `x + 0.5 * tanh(f(x))`, where the kind says what f is.

    Attributes:
        kind: "linear"; "mlp"; "norm": after a LayerNorm; "gain": times a parameter of one element;
            "spare": with a parameter that is not used; "table": plus rows of an embedding;
            "buffer": less a running mean; "shrinks": forward writes its weight; "experts": one of
            two layers; "branch": with a side of the detached input; "again": calls itself once.
        hidden: size of what is inside.
        bias: layers have one.
        unit: sharded by itself.
        expert_units: so are its experts; which of them runs must then not depend on the rank.
        frozen: the first parameter does not train at first.
        recompute: "", "saved" or "reentrant" activation checkpointing.
        inner: blocks inside, which run before f.
        stream: where it is sharded and runs, on a device with streams.
        sides: further layers of its input, each in a stream of its own; of a "branch" the last one
            gets the detached input.
        apart: what its sides compute are outputs of their own.
        hooks: the stream in which the nodes are born that accumulate its gradients, and so where
            its hooks run; -1: where forward uses the parameters first.
    """

    kind: str = "linear"
    hidden: int = 5
    bias: bool = True
    unit: bool = True
    expert_units: bool = False
    frozen: bool = False
    recompute: str = ""
    inner: tuple[Block, ...] = ()
    stream: int = 0
    sides: tuple[int, ...] = ()
    apart: bool = False
    hooks: int = -1


@dataclass(frozen=True)
class Model:
    """The root: a stem, blocks, a head.

    Attributes:
        width: of what goes from block to block.
        outputs: of the head.
        blocks: in order of construction.
        order: indices of blocks in the order in which forward runs them; some more than once, some
            never.
        ties: pairs of blocks of which the second has the weight of the first.
        aux: a second output, from the middle.
        guess: "", "no_grad" or "grad": forward first calls the root itself.
        several: these two neighbors are one unit, a list.
        parallel: blocks get the same input, and do not wait for each other.
        stem: the stream in which the stem runs.
        caller: the stream in which every operation is called.
    """

    width: int = 4
    outputs: int = 3
    blocks: tuple[Block, ...] = (Block(),)
    order: tuple[int, ...] = (0,)
    ties: tuple[tuple[int, int], ...] = ()
    aux: bool = False
    guess: str = ""
    several: tuple[int, ...] = ()
    parallel: bool = False
    stem: int = 0
    caller: int = 0


@dataclass(frozen=True)
class Sharding:
    """The arguments of `fully_shard`, and what is set on the units.

    Attributes:
        mesh: "flat", or "hsdp": two shards, replicated.
        stage: `zero_stage`.
        reshard: `reshard_after_forward`.
        columns: matrices are sharded along dim 1 where their size allows it.
        param_dtype, reduce_dtype: of `MixedPrecisionPolicy`; "" for None.
        wire_dtype: of `GradientPolicy`; "" for None.
        gradients: "", or what `GradientPolicy` sets: "persistent", "decoupled".
        offload: `CPUOffloadPolicy`; "blocks": not for the root's unit.
        zero_copy: parameters travel by themselves, however small they are.
        windows: they are gathered by symmetric memory; over gloo by a stand-in for it.
        prefetch: "", "forward", "backward", "both": explicit prefetching of the block after next.
        reductions: `set_reduce_scatter_max_input_buffers`; 0 leaves it.
        divide: `set_gradient_divide_factor`; 0 leaves it.
    """

    mesh: str = "flat"
    stage: int | str = 3
    reshard: bool | int | None = None
    columns: bool = False
    param_dtype: str = ""
    reduce_dtype: str = ""
    wire_dtype: str = ""
    gradients: str = ""
    offload: bool | str = False
    zero_copy: bool = False
    windows: bool = False
    prefetch: str = ""
    reductions: int = 0
    divide: float = 0.0


@dataclass(frozen=True)
class Optimizer:
    """How parameters are updated.

    Attributes:
        library: "torch" or "shardgrad"; plain torch uses torch's.
        kind: "sgd", "momentum", "adam", "adamw".
        groups: 1 or 2; the second has the parameters of the last block.
        partial: parameters of the last block are left out; `edit` may add them.
        stream: where it updates.
        event: only the next forward waits for the update, by `set_post_optim_event`.
    """

    library: str = "torch"
    kind: str = "sgd"
    groups: int = 1
    partial: bool = False
    stream: int = 0
    event: bool = False


PLAIN_STEP = "train 7; step; zero"


@dataclass(frozen=True)
class Op:
    """One operation of a training script. `contract.py` says when each is allowed.

    Attributes:
        do: what; the methods of `plain.Plain` and `sharded.Sharded` of this name.
        n: which micro-batch, block, parameter or graph; of "graphed", how many calls.
        how: a variant; of "graphed", the operations in the graph, such as "train 1; step; zero".
    """

    do: str
    n: int = 0
    how: str = ""

    @property
    def inside(self) -> tuple[Op, ...]:
        """The operations in a graph."""
        words = [part.split(" ", 2) for part in (self.how or PLAIN_STEP).split("; ")]
        return tuple(Op(do, *map(int, rest[:1]), *rest[1:]) for do, *rest in words)


@dataclass(frozen=True)
class Program:
    """All of it.

    Attributes:
        seed: what it was drawn from; it chooses initial weights and data.
        fsdp2: FSDP2 runs it, too, and gives the same bits.
    """

    seed: int = 0
    world: str = "2"
    model: Model = Model()
    sharding: Sharding = Sharding()
    optimizer: Optimizer = Optimizer()
    ops: tuple[Op, ...] = ()
    fsdp2: bool = False

    @property
    def ranks(self) -> int:
        return int(self.world.strip(ascii_lowercase))

    @property
    def device(self) -> str:
        return self.world.strip(digits) or "cpu"

    @property
    def on_device(self) -> bool:
        return self.device != "cpu"

    def to_json(self) -> str:
        """Returns it as text, without what is as by default."""
        lines = (
            f" {json.dumps(key)}: {json.dumps(value, default=_brief)}"
            for key, value in _brief(self).items()
        )
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @staticmethod
    def from_json(text: str) -> Program:
        """Reads what `to_json` wrote."""
        made: dict[str, Any] = json.loads(text)
        for name, kind in (("model", Model), ("sharding", Sharding), ("optimizer", Optimizer)):
            made[name] = _made(made.get(name, {}), kind)
        return Program(**{**made, "ops": tuple(Op(*op) for op in made.get("ops", ()))})

    __str__ = to_json


def _brief(value: Any) -> Any:
    if isinstance(value, Op):
        return [value.do, value.n, value.how] if value.how else [value.do, value.n]
    return {
        field.name: now
        for field in fields(value)
        if (now := getattr(value, field.name)) != field.default
    }


def _made(data: Any, kind: Callable[..., Any] = Block) -> Any:
    """Makes tuples of lists and a `kind` of a dictionary; in a list, those are blocks."""
    if isinstance(data, dict):
        return kind(**{key: _made(value) for key, value in data.items()})
    return tuple(map(_made, data)) if isinstance(data, list) else data
