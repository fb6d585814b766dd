"""The ops, compiled and reference, beside a plain copy of as many bytes and torch's own where it
has one.

`movement` is packing, unpacking and summing on one block of a model; `segments` are optimizer
updates and norms of one large parameter and of very many small ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.measure import cost_of, interleaved, samples_of, spread, summarise
from benchmarks.run import Run, option
from shardgrad import ops
from shardgrad.ops import movement, norm, update
from shardgrad.programs.train.model import Block
from shardgrad.programs.train.presets import PRESETS
from shardgrad.sharding.layout import ShardLayout, alignment_numel

_PRESETS = ("tiny", "small", "medium")
_LEAST_S = 2e-3  # of one timing, so that it is long enough for the clock

Call = Callable[..., object]


@click.command()
@option(
    "--ops",
    "kinds",
    type=click.Choice(("movement", "segments")),
    multiple=True,
    default=["movement", "segments"],
    help="Packing and summing, or optimizer updates and norms; repeatable.",
)
@option("--preset", type=click.Choice(_PRESETS), default="small", help="Model of the block.")
@option("--ranks", type=click.IntRange(1), default=2, help="Shards of the block.")
@option("--numel", type=click.IntRange(1), default=2**24, help="Size of the large parameter.")
@option("--rounds", type=click.IntRange(2), default=40, help="Turns of each kernel.")
@option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where to compute.")
@click.pass_obj
def main(
    run: Run, kinds: Sequence[str], preset: str, ranks: int, numel: int, rounds: int, device: str
) -> None:
    """Measure the ops beside a plain copy, on one core or a GPU."""
    if run.smoke:
        preset, rounds, numel = "tiny", 2, 2**14
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # On a CPU the time of the process, which others on the machine cannot lengthen.
    clock = "cpu_s" if device == "cpu" else "wall_s"
    for kind in kinds:
        config: dict[str, Any] = {"preset": preset, "ranks": ranks}
        if kind == "segments":
            config = {"numel": numel, "tiny": 100 if run.smoke else 10_000}
        samples: dict[str, Any] = {}
        summary: dict[str, Any] = {}
        with torch.device(device):
            for case in (
                make_cases(**config) if kind == "movement" else make_segment_cases(**config)
            ):
                repeats = {name: _repeats(call, device) for name, call in case.calls.items()}
                costs = interleaved(case.calls, rounds, repeats=repeats, device=device)
                samples[case.name] = {"nbytes": case.nbytes} | samples_of(costs, clock)
                summary[case.name] = summarise(costs, "copy", clock)
                for name, of in costs.items():
                    rates = [case.nbytes / getattr(cost, clock) for cost in of]
                    summary[case.name][name]["bytes_per_s"] = spread(rates)
        run.finish(
            "kernels",
            config={"ops": kind} | config | {"device": device, "rounds": rounds},
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
            the same.
    """

    name: str
    nbytes: int
    calls: dict[str, Call]


def make_cases(preset: str, ranks: int) -> Iterable[Case]:
    """Returns the engine's uses of the ops: gradients in, parameters out, chunks added."""
    with torch.device("meta"):
        shapes = [tuple(param.shape) for param in Block(PRESETS[preset]).parameters()]
    fp32, bf16 = torch.float32, torch.bfloat16
    return [
        _pack(shapes, ranks, fp32, fp32),
        _pack(shapes, ranks, bf16, fp32),
        _unpack(shapes, ranks, fp32, fp32),
        _unpack(shapes, ranks, bf16, bf16),
        _sum_chunks(shapes, ranks, fp32),
        _sum_chunks(shapes, ranks, bf16),
    ]


def _layout(shapes: Sequence[tuple[int, ...]], ranks: int) -> ShardLayout:
    return ShardLayout.of(
        shapes, ranks, alignment=alignment_numel([torch.bfloat16]), with_flags=False
    )


def _pack(
    shapes: Sequence[tuple[int, ...]], ranks: int, source: torch.dtype, target: torch.dtype
) -> Case:
    layout = _layout(shapes, ranks)
    grads = [torch.ones(shape, dtype=source) for shape in shapes]
    slot = torch.zeros(ranks * layout.chunk_numel, dtype=target)
    args = (grads, slot, layout.table, layout.chunk_numel, 1.0, False)
    return _case(f"pack {_short(source)} to {_short(target)}", "pack", args, grads, slot)


def _unpack(
    shapes: Sequence[tuple[int, ...]], ranks: int, source: torch.dtype, target: torch.dtype
) -> Case:
    layout = _layout(shapes, ranks)
    gathered = torch.ones(ranks * layout.chunk_numel, dtype=source)
    unsharded = torch.zeros(layout.unsharded_numel, dtype=target)
    args = (gathered, unsharded, layout.table, layout.chunk_numel)
    return _case(
        f"unpack {_short(source)} to {_short(target)}", "unpack", args, [gathered], unsharded
    )


def _sum_chunks(shapes: Sequence[tuple[int, ...]], ranks: int, dtype: torch.dtype) -> Case:
    numel = _layout(shapes, ranks).chunk_numel
    chunks = [torch.ones(numel, dtype=dtype) for _ in range(ranks)]
    out = torch.zeros(numel)
    args = (chunks, out, float(ranks), False)
    return _case(f"sum of {ranks} chunks, {_short(dtype)} to fp32", "sum_chunks", args, chunks, out)


def _case(
    name: str, op: str, args: tuple[object, ...], sources: Sequence[Tensor], target: Tensor
) -> Case:
    nbytes = sum(source.nbytes for source in sources) + target.nbytes
    return _beside_copy(name, nbytes, getattr(movement, f"_{op}_reference"), op, args)


def _beside_copy(
    name: str, nbytes: int, reference: Call, op: str, args: tuple[object, ...]
) -> Case:
    plain = torch.ones(nbytes // 2, dtype=torch.uint8)
    calls: dict[str, Call] = {"copy": partial(torch.zeros_like(plain).copy_, plain)}
    calls["reference"] = partial(reference, *args)
    if ops.backend() == "compiled":
        calls["compiled"] = partial(getattr(torch.ops.shardgrad, op).default, *args)
    return Case(name, nbytes, calls)


def make_segment_cases(numel: int, tiny: int) -> Iterator[Case]:
    """Yields updates and norms of one large parameter, and of very many small ones.

    Args:
        numel: of the large parameter.
        tiny: how many small ones, of 1 to 64 elements.
    """
    fp32, bf16 = torch.float32, torch.bfloat16
    one, many = (numel,), tuple(1 + i % 64 for i in range(tiny))
    # One after the other: together they would fill the memory.
    yield _adam("adam_ fp32", one, fp32, fp32, None)
    yield _adam("adam_ bf16 gradient", one, fp32, bf16, None)
    yield _adam("adam_ bf16 parameter, fp32 master", one, bf16, bf16, fp32)
    yield _adam("adam_ bf16 parameter, remainder", one, bf16, bf16, torch.int16)
    yield _adam(f"adam_ {tiny} tiny parameters", many, fp32, fp32, None)
    yield _sgd(one)
    yield _norm("norm_ fp32", one, fp32)
    yield _norm("norm_ bf16", one, bf16)
    yield _norm(f"norm_ {tiny} tiny parameters", many, fp32)


def _segment(sizes: Sequence[int]) -> tuple[int, list[Tensor], list[object]]:
    """Returns the elements of `sizes` laid out without gaps; steps and ticket; touched, table and
    tiles.
    """
    offsets = list(itertools.accumulate(sizes, initial=0))
    pieces = [(at, at, at, n, i, i) for i, (at, n) in enumerate(zip(offsets, sizes, strict=False))]
    rows, tiles = ops.segment_rows(pieces)
    counters = [torch.zeros(len(sizes)), torch.zeros(1, dtype=torch.int32)]
    return offsets[-1], counters, [torch.ones(len(sizes)), rows.to(counters[0].device), tiles]


def _adam(
    name: str,
    sizes: Sequence[int],
    param: torch.dtype,
    grad: torch.dtype,
    master: torch.dtype | None,
) -> Case:
    numel, counters, where = _segment(sizes)
    flat, gradient = torch.ones(numel, dtype=param), torch.ones(numel, dtype=grad)
    moments = [torch.zeros(numel) for _ in range(2)]
    exact = None if master is None else torch.zeros(numel, dtype=master)
    hyper = torch.tensor([1e-3, 0.9, 0.999, 1e-8, 0.01], dtype=torch.float64)
    args = (
        flat,
        gradient,
        *moments,
        exact,
        *counters,
        *where,
        hyper,
        None,
        None,
        True,
        False,
        False,
        0,
    )
    written = [flat, *moments, *([] if exact is None else [exact])]
    case = _in_place(name, update._adam_reference, "adam_", args, written, [gradient])
    if param == grad and master is None:  # what torch's own has a kernel for
        case.calls["torch"] = _fused(torch.optim.AdamW, flat, gradient, sizes)
    return case


def _sgd(sizes: Sequence[int]) -> Case:
    numel, counters, where = _segment(sizes)
    flat, gradient, buffer = torch.ones(numel), torch.ones(numel), torch.zeros(numel)
    hyper = torch.tensor([1e-3, 0.9, 0.0, 0.01], dtype=torch.float64)
    args = (flat, gradient, buffer, None, *counters, *where, hyper, None, None, *[False] * 4, 0)
    case = _in_place("sgd_ fp32", update._sgd_reference, "sgd_", args, [flat, buffer], [gradient])
    case.calls["torch"] = _fused(torch.optim.SGD, flat, gradient, sizes, momentum=0.9)
    return case


def _norm(name: str, sizes: Sequence[int], dtype: torch.dtype) -> Case:
    numel, _, where = _segment(sizes)
    flat, out = torch.ones(numel, dtype=dtype), torch.zeros(2, dtype=torch.float64)
    scratch = torch.zeros(ops.NORM_SCRATCH_NUMEL, dtype=torch.float64)
    args = (out, scratch, flat, *where, 2.0, None)
    case = _in_place(name, norm._norm_reference, "norm_", args, [], [flat])
    parts = list(flat.split(list(sizes)))
    case.calls["torch"] = partial(torch.nn.utils.get_total_norm, parts)
    return case


def _fused(
    cls: type[torch.optim.Optimizer],
    flat: Tensor,
    gradient: Tensor,
    sizes: Sequence[int],
    **options: float,
) -> Call:
    params = [torch.nn.Parameter(part.clone()) for part in flat.split(list(sizes))]
    for param, part in zip(params, gradient.split(list(sizes)), strict=True):
        param.grad = part
    return cls(params, lr=1e-3, weight_decay=0.01, fused=True, **options).step


def _in_place(
    name: str,
    reference: Call,
    op: str,
    args: tuple[object, ...],
    written: list[Tensor],
    read: list[Tensor],
) -> Case:
    nbytes = 2 * sum(tensor.nbytes for tensor in written) + sum(tensor.nbytes for tensor in read)
    return _beside_copy(name, nbytes, reference, op, args)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
