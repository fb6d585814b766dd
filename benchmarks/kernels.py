"""The ops, compiled and reference, beside a plain copy of as many bytes and torch's own where it
has one: packing, unpacking and summing of one block of a model; optimizer updates and norms of one
large parameter and of very many small ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.measure import cost_of, interleaved, samples_of, spread, summarize
from benchmarks.run import Run, option
from shardgrad import ops
from shardgrad.ops import movement, norm, update
from shardgrad.ops.norm import NORM_SCRATCH_NUMEL
from shardgrad.ops.segments import segment_rows
from shardgrad.programs.train.model import Block
from shardgrad.programs.train.presets import PRESETS
from shardgrad.sharding.layout import ShardLayout, alignment_numel

_LEAST_S = 2e-3  # of one timing, so that it is long enough for the clock
_RANKS = 2  # shards of the block
_REFERENCES = {
    "pack": movement.pack_reference,
    "unpack": movement.unpack_reference,
    "sum_chunks": movement.sum_chunks_reference,
    "adam_": update.adam_reference,
    "sgd_": update.sgd_reference,
    "norm_": norm.norm_reference,
}

Call = Callable[..., object]


@click.command()
@option("--numel", type=click.IntRange(1), default=2**24, help="Size of the large parameter.")
@option("--rounds", type=click.IntRange(2), default=40, help="Turns of each kernel.")
@option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where to compute.")
@click.pass_obj
def main(run: Run, numel: int, rounds: int, device: str) -> None:
    """Measure the ops beside a plain copy, on one core or a GPU."""
    # The reference ops take some twenty launches a parameter on a GPU.
    preset, tiny = "small", 10_000 if device == "cpu" else 1_000
    if run.smoke:
        preset, tiny, rounds, numel = "tiny", 100, 2, 2**14
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # On a CPU the time of the process, which others on the machine cannot lengthen.
    clock = "cpu_s" if device == "cpu" else "wall_s"
    samples: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    with torch.device(device):
        for case in (*_of_a_block(preset), *_of_segments((numel,), tiny)):
            repeats = {name: _repeats(call, device) for name, call in case.calls.items()}
            costs = interleaved(case.calls, rounds, repeats=repeats, device=device)
            samples[case.name] = {"nbytes": case.nbytes} | samples_of(costs, clock)
            summary[case.name] = summarize(costs, "copy", clock)
            for name, of in costs.items():
                rates = [case.nbytes / getattr(cost, clock) for cost in of]
                summary[case.name][name]["bytes_per_s"] = spread(rates)
    run.finish(
        "kernels",
        config={
            "preset": preset,
            "ranks": _RANKS,
            "numel": numel,
            "tiny": tiny,
            "device": device,
            "rounds": rounds,
        },
        samples=samples,
        summary=summary,
    )
    torch.set_num_threads(threads)


def _repeats(call: Call, device: str) -> int:
    call()
    return math.ceil(_LEAST_S / max(cost_of(call, device=device).wall_s, 1e-5))


@dataclass(frozen=True)
class Case:
    """One op on one set of buffers.

    Attributes:
        name: op and dtypes.
        nbytes: read and written, the same for every call.
        calls: `copy`, `reference`, and `compiled` if there is a library; `torch` where torch has
            the same, once more with the learning rate on the device if that may be there.
    """

    name: str
    nbytes: int
    calls: dict[str, Call]


def _case(name: str, op: str, args: tuple[Any, ...], nbytes: int, **others: Call) -> Case:
    plain = torch.ones(nbytes // 2, dtype=torch.uint8)
    calls: dict[str, Call] = {"copy": partial(torch.zeros_like(plain).copy_, plain)}
    calls["reference"] = partial(_REFERENCES[op], *args)
    if ops.backend() == "compiled":
        calls["compiled"] = partial(getattr(torch.ops.shardgrad, op).default, *args)
    return Case(name, nbytes, calls | others)


def _of_a_block(preset: str) -> Iterator[Case]:
    """Yields the engine's uses of the ops: gradients in, parameters out, chunks added."""
    with torch.device("meta"):
        shapes = [tuple(param.shape) for param in Block(PRESETS[preset]).parameters()]
    layout = ShardLayout.of(
        shapes, _RANKS, alignment=alignment_numel([torch.bfloat16]), with_flags=False
    )
    table, numel = layout.table, layout.chunk_numel
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        grads = [torch.ones(shape, dtype=dtype) for shape in shapes]
        slot, summed = torch.zeros(_RANKS * numel), torch.zeros(numel)
        gathered = torch.ones(_RANKS * numel, dtype=dtype)
        unsharded = torch.zeros(layout.unsharded_numel, dtype=dtype)
        chunks = list(gathered.chunk(_RANKS))
        nbytes = sum(grad.nbytes for grad in grads)
        yield _case(
            f"pack {name} to fp32",
            "pack",
            (grads, slot, table, numel, 1.0, False),
            nbytes + slot.nbytes,
        )
        yield _case(
            f"unpack {name}",
            "unpack",
            (gathered, unsharded, table, numel),
            gathered.nbytes + unsharded.nbytes,
        )
        yield _case(
            f"sum of {_RANKS} chunks, {name} to fp32",
            "sum_chunks",
            (chunks, summed, float(_RANKS), False),
            gathered.nbytes + summed.nbytes,
        )


def _of_segments(one: Sequence[int], tiny: int) -> Iterator[Case]:
    """Yields updates and norms of one large parameter, and of many of 1 to 64 elements."""
    fp32, bf16 = torch.float32, torch.bfloat16
    many = tuple(1 + i % 64 for i in range(tiny))
    # One after the other: together they would fill the memory.
    yield _adam("adam_ fp32", one, fp32, None)
    yield _adam("adam_ bf16 parameter, fp32 master", one, bf16, fp32)
    yield _adam("adam_ bf16 parameter, remainder", one, bf16, torch.int16)
    yield _adam(f"adam_ {tiny} tiny parameters", many, fp32, None)
    yield _sgd("sgd_ fp32", one)
    yield _norm("norm_ fp32", one, fp32)
    yield _norm("norm_ bf16", one, bf16)
    yield _norm(f"norm_ {tiny} tiny parameters", many, fp32)


def _segment(sizes: Sequence[int]) -> tuple[list[Tensor], list[object]]:
    """Returns, for `sizes` laid out without gaps: steps and ticket; touched, table and tiles."""
    offsets = itertools.accumulate(sizes, initial=0)
    pieces = [(at, at, at, n, i, i) for i, (at, n) in enumerate(zip(offsets, sizes, strict=False))]
    rows, tiles = segment_rows(pieces)
    counters = [torch.zeros(len(sizes)), torch.zeros(1, dtype=torch.int32)]
    return counters, [torch.ones(len(sizes)), rows.to(counters[0].device), tiles]


def _adam(name: str, sizes: Sequence[int], dtype: torch.dtype, master: torch.dtype | None) -> Case:
    numel = sum(sizes)
    counters, where = _segment(sizes)
    flat, gradient = torch.ones(numel, dtype=dtype), torch.ones(numel, dtype=dtype)
    moments = [torch.zeros(numel) for _ in range(2)]
    exact = None if master is None else torch.zeros(numel, dtype=master)
    hyper = torch.tensor([1e-3, 0.9, 0.999, 1e-8, 0.01], dtype=torch.float64)
    flags = (None, None, True, False, False, 0)
    args = (flat, gradient, *moments, exact, *counters, *where, hyper, *flags)
    written = sum(each.nbytes for each in (flat, *moments, exact) if each is not None)
    nbytes = 2 * written + gradient.nbytes
    if master is not None:  # torch has no kernel for it
        return _case(name, "adam_", args, nbytes)
    theirs = {
        "torch": _fused(torch.optim.AdamW, flat, gradient, sizes),
        # As in a graph that follows a schedule; ours always reads it there.
        "torch, lr on the device": _fused(
            torch.optim.AdamW, flat, gradient, sizes, lr=torch.tensor(1e-3)
        ),
    }
    return _case(name, "adam_", args, nbytes, **theirs)


def _sgd(name: str, sizes: Sequence[int]) -> Case:
    numel = sum(sizes)
    counters, where = _segment(sizes)
    flat, gradient, buffer = torch.ones(numel), torch.ones(numel), torch.zeros(numel)
    hyper = torch.tensor([1e-3, 0.9, 0.0, 0.01], dtype=torch.float64)
    args = (flat, gradient, buffer, None, *counters, *where, hyper, None, None, *[False] * 4, 0)
    theirs = _fused(torch.optim.SGD, flat, gradient, sizes, momentum=0.9)
    return _case(name, "sgd_", args, 5 * flat.nbytes, torch=theirs)


def _norm(name: str, sizes: Sequence[int], dtype: torch.dtype) -> Case:
    flat, out = torch.ones(sum(sizes), dtype=dtype), torch.zeros(2, dtype=torch.float64)
    scratch = torch.zeros(NORM_SCRATCH_NUMEL, dtype=torch.float64)
    args = (out, scratch, flat, *_segment(sizes)[1], 2.0)
    theirs = partial(torch.nn.utils.get_total_norm, list(flat.split(list(sizes))))
    return _case(name, "norm_", args, flat.nbytes, torch=theirs)


def _fused(
    cls: type[torch.optim.Optimizer],
    flat: Tensor,
    gradient: Tensor,
    sizes: Sequence[int],
    *,
    lr: float | Tensor = 1e-3,
    **options: float,
) -> Call:
    params = [torch.nn.Parameter(part.clone()) for part in flat.split(list(sizes))]
    for param, part in zip(params, gradient.split(list(sizes)), strict=True):
        param.grad = part
    return cls(params, lr=lr, weight_decay=0.01, fused=True, **options).step
