"""Draws programs. Each has a few kinds of operations, so that those meet often (swarm testing)."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

from tests.fuzz.programs.contract import State, fits, is_valid, shortened
from tests.fuzz.programs.program import (
    PLAIN_STEP,
    Block,
    Model,
    Op,
    Optimizer,
    Program,
    Sharding,
)
from tests.fuzz.programs.streams import SIDE_STREAMS

KINDS = ("linear", "mlp", "norm", "gain", "spare", "table", "buffer", "experts", "branch", "again")
TIEABLE = tuple(kind for kind in ("linear", *KINDS) if kind not in ("mlp", "experts"))
WORLD_WEIGHTS = {"2": 70, "4": 10, "sim1": 5, "sim2": 15}

# Kinds of operations, with what draws one; each program has a handful of them, besides "train",
# "step", "zero" and "look".
EXTRA = (
    *("forward", "evaluate", "partial", "input_grad", "hand", "fail_forward", "fail_backward"),
    *(
        "clip",
        "write",
        "freeze",
        "hook",
        "poke",
        "nan",
        "edit",
        "save",
        "sync",
        "sync_unit",
        "all_reduce",
    ),
    *("last", "keep", "whole", "unshard", "reshard", "participate", "graphed"),
)
LATE = ("around", "assign", "renew")
# What a part that runs around forward runs in its own forward, or that it is recomputed.
INSIDE = ("", "", "saved", "itself", "layer", "trap")
# Variants that came last.
RARE = {
    "poke": ("local", "data", "at once"),
    "nan": ("assigned",),
    "assign": ("former",),
}
MICROS = 6
# How a loss scaler steps: torch's or ours, clipped in part or whole, with an infinity on one rank.
SCALED = tuple(
    " ".join(filter(None, each))
    for each in product(("", "torch"), ("", "clip", "part"), ("", "inf"))
)
# What a graph is made of.
GRAPHED = (
    PLAIN_STEP,
    "train 1; train 2; clip 3 ours; step; zero",
    "sync 0; train 1; sync 1; train 2; step; zero 0 zeros",
    "last 0; train 1; last 1; train 2; clip 2 part; step; zero",
    "zero; train 3; clip 2 ours; step",
    "scaled 1 clip; evaluate 2 no_grad",
    "train 1 around twice; train 2; step; zero",
)


def program_of(seed: int, world: str = "") -> Program:
    """Returns the program of a seed."""
    rng = random.Random(seed)
    late = random.Random(f"late {seed}")  # for what came later: the rest stays
    drawn = _weighted(rng, WORLD_WEIGHTS)
    world = world or drawn
    while True:
        model, sharding = _model(rng), _with_wire_dtype(late, _sharding(rng, world))
        program = Program(seed, world, model, sharding, _optimizer(rng, world))
        if fits(program):
            break
    if program.on_device:
        program = _on_streams(random.Random(f"streams {seed}"), program)
    program = replace(program, ops=_ops(rng, late, program))
    program = _with_what_is_rare(random.Random(f"rare {seed}"), program)
    has_windows = program.device != "sim" and not program.sharding.offload
    windows = has_windows and _often(random.Random(f"windows {seed}"), 0.15)
    return replace(program, sharding=replace(program.sharding, windows=windows))


def _with_what_is_rare(rng: random.Random, program: Program) -> Program:
    """Returns a program with a few changes, of which those that do not fit are left out."""
    blocks, ops = list(program.model.blocks), list(program.ops)
    place = rng.randrange(len(blocks))
    blocks[place] = replace(blocks[place], kind="shrinks", expert_units=False)
    ops.insert(rng.randrange(len(ops) + 1), Op("divide", rng.randrange(8)))
    gradients = rng.choice(("persistent", "decoupled"))
    changes: list[dict[str, Any]] = [
        {"model": replace(program.model, blocks=tuple(blocks))},
        {"sharding": replace(program.sharding, gradients=gradients)},
        {"ops": tuple(ops)},
    ]
    for change in changes:
        if _often(rng, 0.2) and is_valid(changed := replace(program, **change)):
            program = changed
    for place, op in enumerate(program.ops):
        if op.do in RARE and _often(rng, 0.3):
            ops = [
                *program.ops[:place],
                replace(op, how=rng.choice(RARE[op.do])),
                *program.ops[place + 1 :],
            ]
            program = shortened(program, tuple(ops)) or program
    return program


def _weighted(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def _often(rng: random.Random, chance: float) -> bool:
    return rng.random() < chance


def _block(
    rng: random.Random, *, depth: int = 0, kinds: tuple[str, ...] = ("linear", *KINDS)
) -> Block:
    kind = rng.choice(kinds)
    inner: tuple[Block, ...] = ()
    if depth == 0 and _often(rng, 0.15):
        inner = tuple(_block(rng, depth=1) for _ in range(rng.choice((1, 1, 2))))
    return Block(
        kind=kind,
        hidden=rng.choice((1, 3, 5)),
        bias=_often(rng, 0.8),
        unit=_often(rng, 0.8),
        expert_units=kind == "experts" and _often(rng, 0.6),
        frozen=_often(rng, 0.1),
        recompute=rng.choice(("saved", "reentrant")) if _often(rng, 0.12) else "",
        inner=inner,
        stream=rng.choice((0, 0, 1, 2, 3)),
    )


def _model(rng: random.Random) -> Model:
    pairs = rng.choices((0, 1, 2), (82, 12, 6))[0]
    count = rng.choice((1, 2, 2, 3, 3, 4))
    if pairs:
        blocks = tuple(_block(rng, kinds=TIEABLE) for _ in range(max(count, 2 * pairs)))
    else:
        blocks = tuple(_block(rng) for _ in range(count))
    order = list(range(len(blocks)))
    if _often(rng, 0.12):
        order.append(rng.choice(order))
    if _often(rng, 0.08):
        rng.shuffle(order)
    if len(order) > 1 and _often(rng, 0.08):
        order.pop()
    tied = rng.sample(range(len(blocks)), 2 * pairs)
    ties = tuple((min(pair), max(pair)) for pair in zip(tied[::2], tied[1::2], strict=True))
    several: tuple[int, ...] = ()
    if len(blocks) > 1 and _often(rng, 0.06):
        start = rng.randrange(len(blocks) - 1)
        several = (start, start + 1)
    return Model(
        width=rng.choice((3, 4, 4, 5, 8, 9)),
        outputs=rng.choice((1, 3)),
        blocks=blocks,
        order=tuple(order),
        ties=ties,
        aux=_often(rng, 0.15),
        guess=rng.choice(("no_grad", "grad")) if _often(rng, 0.08) else "",
        several=several,
    )


def _sharding(rng: random.Random, world: str) -> Sharding:
    mesh = "hsdp" if _often(rng, 0.35 if world == "4" else 0.1) else "flat"
    stage: int | str = rng.choice((3, 3, 3, 3, 1, 2))
    if mesh == "hsdp" and _often(rng, 0.3):
        stage = "hfsdp"
    reshard: Any = rng.choice((None, None, None, True, False, 2 if world == "4" else False))
    param_dtype = rng.choice(("float32", "bfloat16")) if _often(rng, 0.12) else ""
    reduce_dtype = ""
    if param_dtype == "bfloat16" or _often(rng, 0.08):
        reduce_dtype = rng.choice(("float32", "float64"))
    return Sharding(
        mesh=mesh,
        stage=stage,
        reshard=reshard,
        columns=_often(rng, 0.12),
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        offload=_often(rng, 0.04),
        zero_copy=_often(rng, 0.12),
        prefetch=rng.choice(("forward", "backward", "both")) if _often(rng, 0.15) else "",
        reductions=rng.choice((1, 3)) if _often(rng, 0.15) else 0,
        divide=rng.choice((1.0, 3.0)) if _often(rng, 0.08) else 0.0,
    )


def _with_wire_dtype(rng: random.Random, sharding: Sharding) -> Sharding:
    """Returns settings under which gradients travel in bfloat16, now and then; they are summed in
    float32.
    """
    if not _often(rng, 0.1):
        return sharding
    return replace(
        sharding,
        param_dtype=sharding.param_dtype or "float32",
        reduce_dtype="float32",
        wire_dtype="bfloat16",
    )


def _optimizer(rng: random.Random, world: str) -> Optimizer:
    library = "shardgrad" if _often(rng, 0.5) else "torch"
    return Optimizer(
        library=library,
        kind=rng.choice(("sgd", "momentum", "adam", "adamw")),
        groups=2 if _often(rng, 0.25) else 1,
        partial=_often(rng, 0.08),
    )


# -- streams


def _on_streams(rng: random.Random, program: Program) -> Program:
    """Returns a program with what it computes on streams of its own."""
    model, places = program.model, range(SIDE_STREAMS + 1)

    def spread(block: Block) -> Block:
        sides = () if block.recompute else tuple(rng.choices(places, k=rng.choice((0, 0, 1, 2))))
        return replace(
            block,
            inner=tuple(map(spread, block.inner)),
            sides=sides,
            apart=bool(sides) and _often(rng, 0.3),
            hooks=rng.choice((-1, -1, *places)),
        )

    model = replace(
        model,
        blocks=tuple(map(spread, model.blocks)),
        parallel=_often(rng, 0.15),
        stem=rng.choice((0, 0, *places)),
        caller=rng.choice((0, 0, *places)),
    )
    chosen, place = program.optimizer, rng.choice((0, 0, *places))
    chosen = replace(chosen, stream=place, event=_often(rng, 0.2))
    spread_out = replace(program, model=model, optimizer=chosen)
    return spread_out if fits(spread_out) else program


# -- operations


def _ops(rng: random.Random, late: random.Random, program: Program) -> tuple[Op, ...]:
    extra = [kind for kind in EXTRA if kind != "all_reduce" or program.sharding.mesh == "hsdp"]
    kinds = rng.sample(extra, rng.choice((2, 3, 4, 5, 6)))
    weights = {"train": 4.0, "step": 2.0, "zero": 2.0, "look": 1.5} | dict.fromkeys(kinds, 2.5)
    if {"forward", "hand"} & set(kinds):
        weights["backward"] = 5.0
    if "save" in kinds:
        weights |= {"load": 2.0, "resume": 1.0}
    if _often(late, 0.3):
        weights["scaled"] = 4.0
    weights |= {kind: 2.5 for kind in LATE if _often(late, 0.15)}
    if program.on_device:
        weights |= {"move": 2.0, "skip": 1.0}
    if "freeze" in kinds:
        weights["unfreeze"] = 1.0
    state, ops = State(program), []
    wanted = rng.choice((4, 6, 8, 10, 12))
    for _ in range(200):
        if len(ops) >= wanted:
            break
        op = _op(rng, rng.choices(list(weights), list(weights.values()))[0], program)
        if op.do == "zero" and _often(late, 0.3):
            op = replace(op, how="model")
        if state.allows(op):
            state.after(op)
            ops.append(op)
    return tuple(ops + _ending(state))


def _ending(state: State) -> list[Op]:
    """Returns what shows everything: open graphs go backward, what waits is reduced, all is looked
    at.
    """
    wanted = [Op("backward", 0)] * 3 + [
        Op("sync", 1),
        Op("last", 1),
        Op("train", 0),
        Op("look"),
        Op("step"),
    ]
    wanted += [Op("train", 1), Op("look")]
    ending = []
    for op in wanted:
        if state.allows(op):
            state.after(op)
            ending.append(op)
    return ending


def _op(rng: random.Random, kind: str, program: Program) -> Op:
    n = rng.randrange(MICROS)
    hows: dict[str, tuple[str, ...]] = {
        "train": ("", "", "", "x", "side", "both") if program.model.aux else ("", "", "", "x"),
        "forward": ("", "", "both") if program.model.aux else ("", "x"),
        "evaluate": ("no_grad", "eval", "inference"),
        "partial": ("", "", "no_grad"),
        "fail_forward": ("", "shape"),
        "zero": ("", "", "zeros"),
        "clip": ("torch", "ours", "ours", "part"),
        "write": ("none", "ones", "double"),
        "nan": ("", "zeros"),
        "scaled": SCALED,
        "edit": ("lr", "add", "remove", "clear"),
        "load": ("", "", "model"),
        "unshard": ("", "async"),
        "participate": ("all", "some"),
        "look": ("", "grads"),
        "backward": ("", "", "", "retain"),
        "graphed": GRAPHED,
        "assign": ("", "own", "saved"),
        "renew": ("",),
    }
    if kind == "around":
        do = rng.choice(("train", "train", "forward", "evaluate", "fail_forward"))
        words = ("around", rng.choice(("", "twice")), rng.choice(("", "between")))
        inside = "fails" if do == "fail_forward" else rng.choice(INSIDE)
        return Op(do, n, " ".join(filter(None, (*words, inside))))
    if kind == "unfreeze":
        return Op("freeze", rng.randrange(24), "un")
    below = dict.fromkeys(("freeze", "hook", "poke", "write"), 24)
    below |= dict.fromkeys(
        ("backward", "sync", "all_reduce", "last", "keep", "whole", "graphed"), 2
    )
    below |= dict.fromkeys(("sync_unit", "unshard", "reshard"), 8)
    below |= dict.fromkeys(("partial", "skip"), len(program.model.blocks))
    below["fail_backward"] = max(1, len(program.model.order))
    if kind in below:
        n = rng.randrange(below[kind])
    elif kind in ("step", "zero", "look", "save", "load", "resume", "edit", "assign", "renew"):
        n = 0
    if kind == "graphed":  # as many calls
        n += 4
    return Op(kind, n, rng.choice(hows.get(kind, ("",))))
