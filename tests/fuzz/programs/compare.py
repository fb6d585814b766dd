"""One program on one rank under plain torch and under shardgrad, and what differs.

A program with graphs also runs eagerly under shardgrad, and one that says so under FSDP2; both give
the same bits.

What operations show is kept and compared at the end, so that no rank stops in the middle, and
nothing makes the host wait for a device in between. A rank compares its own part, without
communication.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests.fuzz.programs.plain import Exchange, Plain
from tests.fuzz.programs.program import Program
from tests.fuzz.programs.script import Seen
from tests.fuzz.programs.sharded import OfFSDP2, Sharded

_STATES = ("momentum_buffer", "exp_avg", "exp_avg_sq")

Cuts = Mapping[str, tuple[slice, ...]]


@dataclass(frozen=True)
class Difference:
    """What differs from plain torch first.

    Attributes:
        place: of the operation; -1 while building.
        what: which value, or "error".
        text: how it differs.
    """

    place: int
    what: str
    text: str

    @property
    def kind(self) -> str:
        """Returns the kind of an error; all wrong values are of one kind."""
        return self.text.split(": ")[1] if self.what in ("error", "hang") else ""

    def __str__(self) -> str:
        return f"operation {self.place}, {self.what}: {self.text}"


@dataclass
class Outcome:
    """What came of a program on one rank.

    Attributes:
        differences: the first one, and a hazard between streams.
        is_broken: the engine stopped half-way, so the ranks may not fit together any more.
    """

    differences: list[Difference] = field(default_factory=list)
    is_broken: bool = False


def run(program: Program, rank: int, exchange: Exchange) -> Outcome:
    """Runs a program."""
    plain = Plain(program, rank, exchange)
    try:
        engine = Sharded(program, rank)
        cuts = {name: _slices(param) for name, param in engine.params.items()}
    except Exception:
        return Outcome([Difference(-1, "error", traceback.format_exc(limit=-4))], is_broken=True)
    seen: list[Seen] = []
    expected: list[Seen] = []
    is_broken = False
    for op in program.ops:
        seen.append(engine.called(op))
        plain.lose(engine.lost())
        expected.append(plain.do(op))
        is_broken = ("error" in seen[-1]) != ("error" in expected[-1])
        if is_broken:  # what follows would only repeat it
            break
    found = _first(_differences(seen, expected, cuts, _tolerance(program)))
    if is_broken:
        return Outcome(found, is_broken)
    calls = [op.n for op in program.ops if op.do == "graphed"]
    # The first call warms up, and the next one with equal guards is captured.
    if max(calls, default=0) > 3 and not engine.captures:
        found.append(Difference(-1, "graphs", "none in four calls"))
    engine.close()
    if calls:
        eager = Sharded(program, rank, graphs=False)
        found += _first(_differences(seen, list(map(eager.called, program.ops)), {}, 0.0))
    if program.fsdp2:
        theirs = OfFSDP2(program, rank)
        found += _first(_differences(seen, list(map(theirs.called, program.ops)), {}, 0.0))
        found += _first(
            Difference(-1, "whole parameters", f"{ours}\ninstead of {others}")
            for ours, others in zip_longest(engine.shown, theirs.shown)
            if ours != others
        )
    return Outcome(found)


def _first(differences: Iterator[Difference]) -> list[Difference]:
    return list(islice(differences, 1))


def _slices(param: Any) -> tuple[slice, ...]:
    """Returns where this rank's part of a parameter is."""
    shape, offset = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def _tolerance(program: Program) -> float:
    """Returns by how much results may differ, relative to the largest element."""
    sharding = program.sharding
    dtypes = sharding.param_dtype, sharding.reduce_dtype, sharding.wire_dtype
    if "bfloat16" in dtypes or "float16" in dtypes:
        # A rounding is 2**-9, or 2**-11. Gradients are sums of what was rounded, and momentum is a
        # sum of gradients: these may cancel out while their roundings do not.
        return 2**-4
    if (
        sharding.param_dtype
        or sharding.reduce_dtype
        or any(op.do == "clip" and op.how != "torch" for op in program.ops)
    ):
        # A norm is a float32 scalar by contract, and so are low-precision sums: some ten roundings
        # of 6e-8 in each of some ten steps.
        return 1e-5
    return 1e-9  # float64: some thousand roundings of 1e-16, and a margin


def _differences(
    seen: Sequence[Seen], expected: Sequence[Seen], cuts: Cuts, tolerance: float
) -> Iterator[Difference]:
    """Yields what differs; `cuts` are this rank's parts, by name, of what is expected whole."""
    for place, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
        keys = ours.keys() | theirs.keys()
        for key in sorted({"error"} & keys or keys):
            left, right = ours.get(key), theirs.get(key)
            if key == "error":
                is_same = left and right and issubclass(left, right)
                left, right = ours.get("message"), theirs.get("message")
            elif isinstance(left, Tensor) and isinstance(right, Tensor):
                cut = cuts.get(key) or cuts.get(key.rpartition(".")[0], ())
                is_same = _is_close(left.double().cpu(), right.double().cpu(), cut, tolerance)
                left, right = left.tolist(), right[cut].tolist()
            elif right is None and key.endswith(_STATES):
                is_same = not left.any()  # shardgrad.optim has its state from the start, as zeros
            else:
                is_same = left == right
            if not is_same:
                yield Difference(place, key, f"{left} instead of {right}")


def _is_close(left: Tensor, whole: Tensor, cut: tuple[slice, ...], tolerance: float) -> bool:
    # Relative to the largest element of the whole: that is what roundings are of.
    tolerance *= 0.1 + max((0.0, *whole.abs().flatten().tolist()))
    part = whole[cut]
    return left.shape == part.shape and torch.allclose(
        left, part, rtol=0.0, atol=tolerance, equal_nan=True
    )
