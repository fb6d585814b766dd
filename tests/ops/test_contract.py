"""What every operator promises torch, in both backends, and the arguments that the compiled
kernels refuse."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from shardgrad.ops.norm import NORM_SCRATCH_NUMEL
from shardgrad.ops.segments import segment_rows
from tests.support.segments import (
    ADAM,
    BACKENDS,
    REFERENCES,
    SGD,
    UNTOUCHED,
    assert_same_bits,
    hyper,
    needs_library,
    operator,
)

UPDATES = ("adam_", "sgd_")
OFFSETS = (1, 2, 3, 4, 8)  # elements: of four bytes, 8 and 4 begin at a multiple of 16 bytes
EACH = pytest.mark.parametrize("name", REFERENCES)


def example(name: str, sizes: Sequence[int] = (8,)) -> dict[str, Any]:
    """Returns arguments by their names, in order: parameters side by side, of which two ranks have
    a half each.
    """
    halves = [-(-size // 2) for size in sizes]
    begins, offsets = ([0, *itertools.accumulate(each)][:-1] for each in (sizes, halves))
    table = torch.tensor(list(zip(sizes, halves, halves, offsets, begins, strict=True)))
    places = enumerate(zip(begins, sizes, strict=True))
    rows, tiles = segment_rows([(at, at, at, size, i, i) for i, (at, size) in places])
    torch.manual_seed(0)
    count, numel = len(sizes), sum(sizes)
    flat = torch.randn(numel)
    segment = {"touched": torch.ones(count), "rows": rows, "tiles": tiles}
    cut = {"table": table, "chunk_numel": sum(halves)}
    if name == "pack":
        slot = torch.zeros(2 * sum(halves)).bfloat16()
        return {
            "grads": list(flat.split(list(sizes))),
            "slot": slot,
            **cut,
            "by": 3.0,
            "adds": True,
        }
    if name == "unpack":
        return {"gathered": torch.randn(2 * sum(halves)), "unsharded": torch.zeros(numel), **cut}
    if name == "sum_chunks":
        chunks = list(torch.randn(3, numel))
        return {"chunks": chunks, "out": torch.zeros(numel), "by": 3.0, "adds": False}
    if name == "norm_":
        out, scratch = (torch.zeros(n).double() for n in (2, NORM_SCRATCH_NUMEL))
        return {"out": out, "scratch": scratch, "flat": flat, **segment, "norm_type": 2.0}
    states = {"first": torch.zeros(numel), "second": torch.zeros(numel)}
    numbers, switches = hyper(*ADAM), [True] * 3
    if name == "sgd_":
        del states["second"]
        numbers, switches = hyper(*SGD), [True] * 4
    return {
        "param": flat.bfloat16(),
        "grad": torch.randn(numel),
        **states,
        "master": flat.clone(),
        "steps": torch.zeros(count),
        "ticket": torch.zeros(1, dtype=torch.int32),
        **segment,
        "hyper": numbers,
        "scale": torch.tensor(0.5),
        "found_inf": torch.tensor(0.0),
        **{f"switch {i}": switch for i, switch in enumerate(switches)},
        "seed": 7,
    }


# What has numbers in some dtype, and what errors call it.
NUMBERS = {
    "param": (UPDATES, "param"), "grad": (UPDATES, "grad"), "first": (UPDATES, "states"),
    "flat": (("norm_",), "flat"), "grads": (("pack",), "grads"), "slot": (("pack",), "slot"),
    "gathered": (("unpack",), "gathered"), "unsharded": (("unpack",), "unsharded"),
    "chunks": (("sum_chunks",), "chunks"), "out": (("sum_chunks",), "out"),
}  # fmt: skip


def tensors(arguments: dict[str, Any]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


@EACH
def test_a_reference_has_the_default_values_of_its_schema(name: str) -> None:
    """The dispatcher leaves out trailing arguments that are equal to them."""
    declared = getattr(torch.ops.shardgrad, name).default._schema.arguments
    taken = inspect.signature(REFERENCES[name]).parameters.values()
    for argument, parameter in zip(declared, taken, strict=True):
        assert argument.has_default_value() == (parameter.default is not parameter.empty)
        assert not argument.has_default_value() or argument.default_value == parameter.default


@EACH
def test_the_operators_keep_torchs_contract(name: str) -> None:
    torch.library.opcheck(operator("compiled", name), tuple(example(name).values()))


@pytest.mark.parametrize("backend", BACKENDS)
@EACH
def test_neither_version_counters_nor_autograd_notice(backend: str, name: str) -> None:
    arguments = example(name)
    for learnt in ("param", "unsharded"):
        if learnt in arguments:
            arguments[learnt].requires_grad_()
    before = [(each._version, each.requires_grad) for each in tensors(arguments)]
    operator(backend, name)(*arguments.values())
    assert [(each._version, each.requires_grad) for each in tensors(arguments)] == before
    assert all(each.grad_fn is None for each in tensors(arguments))


@needs_library
@EACH
def test_the_compiled_kernels_allocate_nothing(name: str) -> None:
    arguments = example(name, (3000, 5)).values()
    with torch.profiler.profile(profile_memory=True) as profile:
        operator("compiled", name)(*arguments)
    assert any(event.key == f"shardgrad::{name}" for event in profile.key_averages())
    assert all(event.cpu_memory_usage == 0 for event in profile.events())


@needs_library
@EACH
def test_results_are_the_same_whatever_the_threads(name: str) -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):  # which divide the tiles inside of a row, and between rows
            torch.set_num_threads(threads)
            arguments = example(name, (700_001, 0, *range(300)))
            operator("compiled", name)(*arguments.values())
            results.append(tensors(arguments))
    finally:
        torch.set_num_threads(before)
    for one, two, three in zip(*results, strict=True):
        if one.is_floating_point():
            assert_same_bits(two, one)
            assert_same_bits(three, one)


def moved(tensor: Tensor, offset: int) -> Tensor:
    """Returns a copy that begins so many elements behind where an allocation does, and ends where
    it ends.
    """
    storage = torch.full((offset + tensor.numel(),), UNTOUCHED).to(tensor.dtype)
    storage[offset:] = tensor.reshape(-1)
    return storage[offset:]


@needs_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@EACH
def test_results_are_the_same_wherever_memory_begins(name: str, dtype: torch.dtype) -> None:
    """Each tensor in turn, and all together, begin a few elements later; nothing before is
    written.
    """
    sizes = (4096, 0, 511, 9001)
    kept = ("param", "master")  # whose dtypes go together
    names = [each for each in example(name) if each in (*NUMBERS, "second", "master")]
    names = [each for each in names if (name, each) != ("norm_", "out")]

    def run(changed: Sequence[str], offset: int, adds: bool) -> list[Tensor]:
        arguments = example(name, sizes)
        for each in names:
            by, to = offset if each in changed else 0, None if each in kept else dtype
            arguments[each] = tree_map(
                lambda one, by=by, to=to: moved(one if to is None else one.to(to), by),
                arguments[each],
            )
        if "adds" in arguments:
            arguments["adds"] = adds
        operator("compiled", name)(*arguments.values())
        for one in tensors({each: arguments[each] for each in names}):
            before = one.new_empty(0).set_(one.untyped_storage(), 0, (one.storage_offset(),))
            assert (before == torch.tensor(UNTOUCHED).to(one.dtype)).all()
        return [one for one in tensors(arguments) if one.is_floating_point()]

    several = [*((each,) for each in names), names]
    for adds in (False, True):
        expected = run((), 0, adds)
        for changed, offset in itertools.product(several, OFFSETS):
            for ours, right in zip(run(changed, offset, adds), expected, strict=True):
                assert_same_bits(ours, right, f"{changed} moved by {offset}")


# -- what is refused


def freed(tensor: Tensor) -> Tensor:
    """Returns a tensor whose storage was taken away, as resharding does."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def with_gaps(tensor: Tensor) -> Tensor:
    return tensor.repeat(2)[::2]


def require_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        operator("compiled", name)(*(example(name) | change).values())


WHOLE = torch.zeros(8)
TABLE = example("pack")["table"]
REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (("pack",), {"grads": []}, "table has 1 rows for 0 gradients"),
    (("sum_chunks",), {"chunks": []}, "chunks must"),
    (UPDATES, {"steps": torch.zeros(1).double()}, "steps must be float32"),
    (UPDATES, {"ticket": torch.zeros(1)}, "ticket must be int32"),
    (UPDATES, {"ticket": torch.zeros(2).int()}, "ticket must"),
    (UPDATES, {"touched": torch.ones(1).bool()}, "touched must be float32"),
    (UPDATES, {"rows": torch.zeros(1, 7)}, "rows must be int64 of shape"),
    (UPDATES, {"rows": torch.zeros(1, 6).long()}, "rows must be int64 of shape"),
    (UPDATES, {"param": WHOLE}, "master must be float32 for a bfloat16 or float16 param"),
    (UPDATES, {"param": WHOLE.half(), "master": WHOLE.short()}, "master must be float32"),
    (UPDATES, {"master": torch.zeros(9)}, "share one number of elements"),
    (UPDATES, {"hyper": hyper(1.0, 2.0)}, "hyper"),
    (UPDATES, {"scale": torch.ones(2)}, "scale must be float32 or float64"),
    (UPDATES, {"scale": torch.ones(1).half()}, "scale must be float32 or"),
    (UPDATES, {"found_inf": torch.ones(1).double()}, "found_inf must be float32"),
    (("norm_",), {"out": torch.zeros(2)}, "out must be float64 with 2 elements"),
    (("norm_",), {"out": torch.zeros(3).double()}, "out must be float64 with 2 elements"),
    (("norm_",), {"scratch": torch.zeros(2048).double()}, "scratch must be float64 with 2049"),
    (("norm_",), {"norm_type": math.nan}, "norm_type must be a number"),
    (("pack",), {"grads": [torch.zeros(7)]}, "gradient 0 has 7 elements, the table says 8"),
    (("pack",), {"slot": torch.zeros(9)}, "slot has 9 elements, not a multiple of chunk_numel 4"),
    (("pack",), {"slot": torch.zeros(4)}, "table does not fit 1 chunks of 4"),
    (("pack",), {"table": TABLE.int()}, "table must be int64"),
    (("pack",), {"table": TABLE[:, :4]}, "table must be int64 of shape"),
    *(
        (("pack",), {"table": torch.tensor([row])}, "table does not fit")
        for row in ([8, 4, 3, 0, 0], [8, 4, 4, 1, 0], [8, 4, 4, -1, 0], [8, 0, 4, 0, 0])
    ),
    (("unpack",), {"gathered": torch.zeros(9)}, "gathered has 9 elements, not a multiple of"),
    (("unpack",), {"gathered": torch.zeros(4)}, "table does not fit 1 chunks of 4"),
    (("unpack",), {"unsharded": torch.zeros(7)}, "parameter 0 ends behind the 7 elements"),
    (("unpack",), {"table": torch.tensor([[8, 4, 4, 0, -1]])}, "table does not fit"),
    (("sum_chunks",), {"chunks": [WHOLE, torch.zeros(3)]}, "chunks must share"),
    (("sum_chunks",), {"out": torch.zeros(5)}, "out has 5 elements, the chunks have 8"),
]


@needs_library
@pytest.mark.parametrize(("names", "change", "message"), REFUSED)
def test_arguments_that_would_leave_their_memory_are_refused(
    names: tuple[str, ...], change: dict[str, Any], message: str
) -> None:
    for name in names:
        require_refused(name, change, message)


@needs_library
@pytest.mark.parametrize("argument", NUMBERS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Tensor.int, "must be float32"),
        (with_gaps, "must be contiguous"),
        (freed, "lies? in a storage that was freed or shrunk"),
    ],
)
def test_numbers_that_a_kernel_could_not_read_are_refused(
    argument: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    names, called = NUMBERS[argument]
    for name in names:
        value = example(name)[argument]
        changed = list(map(change, value)) if isinstance(value, list) else change(value)
        require_refused(name, {argument: changed}, f"{called} {message}")


# Where a row begins in the parameter, its gradient and its states, how long it is, where its count
# of steps and its flag are, and its first tile.
OUTSIDE = [
    *((1, 0, 0, 8, 0, 0, 0), (0, 1, 0, 8, 0, 0, 0), (0, 0, 1, 8, 0, 0, 0), (0, 0, 0, 9, 0, 0, 0)),
    *((0, 0, 0, -1, 0, 0, 0), (0, 0, 0, 8, 1, 0, 0), (0, 0, 0, 8, 0, -1, 0), (0, 0, 0, 8, 0, 0, 1)),
    (2**62, 0, 0, 8, 0, 0, 0),
]
OF_NORMS = [row for row in OUTSIDE if not (row[0] or row[2] or row[4])]


@needs_library
@pytest.mark.parametrize("name", [*UPDATES, "norm_"])
def test_rows_that_would_leave_their_memory_are_refused_where_they_are_on_the_host(
    name: str,
) -> None:
    for row in OF_NORMS if name == "norm_" else OUTSIDE:
        require_refused(name, {"rows": torch.tensor([row])}, "row 0 does not fit")
    require_refused(name, {"tiles": 2}, "rows have 1 tiles, but tiles says 2")
