"""What `kernels` measures: calls on the buffers that one block of a model gives rise to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shardgrad import ops
from shardgrad.layout import ShardLayout, alignment_numel
from shardgrad.training.model import Block
from shardgrad.training.presets import PRESETS

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One op on one set of buffers.

    Attributes:
        name: op and dtypes.
        nbytes: read and written, the same for every call.
        calls: `copy`, `reference`, and `compiled` if there is a library.
    """

    name: str
    nbytes: int
    calls: dict[str, Call]


def make_cases(preset: str, ranks: int) -> list[Case]:
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
    return ShardLayout.of(shapes, ranks, alignment=alignment_numel([torch.bfloat16]), with_flags=False)


def _pack(shapes: Sequence[tuple[int, ...]], ranks: int, source: torch.dtype, target: torch.dtype) -> Case:
    layout = _layout(shapes, ranks)
    grads = [torch.ones(shape, dtype=source) for shape in shapes]
    slot = torch.zeros(ranks * layout.chunk_numel, dtype=target)
    args = (grads, slot, layout.table, layout.chunk_numel, 1.0, False)
    return _case(f"pack {_short(source)} to {_short(target)}", "pack", args, grads, slot)


def _unpack(shapes: Sequence[tuple[int, ...]], ranks: int, source: torch.dtype, target: torch.dtype) -> Case:
    layout = _layout(shapes, ranks)
    chunks = [torch.ones(layout.chunk_numel, dtype=source) for _ in range(ranks)]
    whole = torch.zeros(layout.unsharded_numel, dtype=target)
    args = (chunks, whole, layout.table)
    return _case(f"unpack {_short(source)} to {_short(target)}", "unpack", args, chunks, whole)


def _sum_chunks(shapes: Sequence[tuple[int, ...]], ranks: int, dtype: torch.dtype) -> Case:
    numel = _layout(shapes, ranks).chunk_numel
    chunks = [torch.ones(numel, dtype=dtype) for _ in range(ranks)]
    out = torch.zeros(numel)
    args = (chunks, out, float(ranks), False)
    return _case(f"sum of {ranks} chunks, {_short(dtype)} to fp32", "sum_chunks", args, chunks, out)


def _case(name: str, op: str, args: tuple[object, ...], sources: Sequence[Tensor], target: Tensor) -> Case:
    nbytes = sum(source.nbytes for source in sources) + target.nbytes
    plain = torch.ones(nbytes // 2, dtype=torch.uint8)
    calls: dict[str, Call] = {"copy": partial(torch.zeros_like(plain).copy_, plain)}
    calls["reference"] = partial(getattr(ops, f"_{op}_reference"), *args)
    if ops.backend() == "compiled":
        calls["compiled"] = partial(getattr(torch.ops.shardgrad, op).default, *args)
    return Case(name, nbytes, calls)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
