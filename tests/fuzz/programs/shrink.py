"""Makes a program that fails small: fewer operations, a smaller model, options as by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.fuzz.programs.contract import is_valid
from tests.fuzz.programs.program import Block, Model, Op, Optimizer, Program, Sharding


def shrunk(program: Program, fails: Callable[[Program], bool], *, tries: int = 400) -> Program:
    """Returns a smaller program that still fails.

    Args:
        program: one that does.
        fails: runs a program; True if it fails in the same way.
        tries: calls of `fails` at most.
    """
    left = tries
    progress = True
    while progress and left > 0:
        progress = False
        for candidate in _smaller(program):
            if left <= 0:
                break
            if not is_valid(candidate):
                continue
            left -= 1
            if fails(candidate):
                program, progress = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Yields programs that are a bit smaller, those that are most so first."""
    ops = program.ops
    size = len(ops) // 2
    while size:
        for begin in range(0, len(ops), size):
            yield replace(program, ops=ops[:begin] + ops[begin + size :])
        size //= 2
    for model in _smaller_models(program.model):
        yield replace(program, model=model)
    for sharding in _defaults(program.sharding, Sharding()):
        yield replace(program, sharding=sharding)
    for optimizer in _defaults(program.optimizer, Optimizer()):
        yield replace(program, optimizer=optimizer)
    if program.world in ("4", "sim2"):
        yield replace(program, world="2" if program.world == "4" else "sim1")
    for i, op in enumerate(ops):
        for simpler in (replace(op, how=""), replace(op, n=0), replace(op, n=1)):
            if simpler != op and _rank(simpler) < _rank(op):
                yield replace(program, ops=(*ops[:i], simpler, *ops[i + 1 :]))


def _rank(op: Op) -> tuple[int, int]:
    return len(op.how), op.n


def _defaults(value: Any, standard: Any) -> Iterator[Any]:
    for field in fields(value):
        default = getattr(standard, field.name)
        if getattr(value, field.name) != default:
            yield replace(value, **{field.name: default})


def _smaller_models(model: Model) -> Iterator[Model]:
    for index in range(len(model.blocks)):
        if len(model.blocks) > 1:
            yield _without(model, index)
    for index, block in enumerate(model.blocks):
        for simpler in _simpler(block):
            blocks = (*model.blocks[:index], simpler, *model.blocks[index + 1 :])
            yield replace(model, blocks=blocks)
    standard = Model()
    for name in ("width", "outputs", "ties", "aux", "guess", "several"):
        if getattr(model, name) != getattr(standard, name):
            yield replace(model, **{name: getattr(standard, name)})
    if len(model.ties) > 1:
        yield replace(model, ties=model.ties[:1])
    for place in range(len(model.order)):
        if len(model.order) > 1:
            yield replace(model, order=model.order[:place] + model.order[place + 1 :])
    if model.order != tuple(sorted(model.order)):
        yield replace(model, order=tuple(sorted(model.order)))


def _without(model: Model, index: int) -> Model:
    def moved(i: int) -> int:
        return i - (i > index)

    return replace(
        model,
        blocks=model.blocks[:index] + model.blocks[index + 1 :],
        order=tuple(moved(i) for i in model.order if i != index) or (0,),
        ties=tuple((moved(a), moved(b)) for a, b in model.ties if index not in (a, b)),
        several=() if index in model.several else tuple(map(moved, model.several)),
    )


def _simpler(block: Block) -> Iterator[Block]:
    if block != Block():
        yield Block()
    yield from _defaults(block, Block())
    for i, inner in enumerate(block.inner):
        for simpler in _simpler(inner):
            yield replace(block, inner=(*block.inner[:i], simpler, *block.inner[i + 1 :]))
