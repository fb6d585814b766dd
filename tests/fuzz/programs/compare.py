"""One program on one rank under plain torch and under shardgrad, and what differs.

A program with graphs also runs eagerly under shardgrad, and one that says so under FSDP2, which
gives the same bits.

What operations show is kept and compared at the end, so that no rank stops in the middle, and
nothing makes the host wait for a device in between. A rank compares its own part, without
communication.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests.fuzz.programs.net import Net, Plan
from tests.fuzz.programs.plain import Exchange, Plain
from tests.fuzz.programs.program import Op, Program
from tests.fuzz.programs.script import Seen
from tests.fuzz.programs.sharded import OfFSDP2, Sharded
from tests.fuzz.programs.streams import Streams

_STATES = ("momentum_buffer", "exp_avg", "exp_avg_sq")


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

    def is_like(self, other: Difference) -> bool:
        """Returns whether both are errors of one kind, or both wrong values."""
        kinds = [
            d.text.split(": ")[1] if d.what in ("error", "hang") else "" for d in (self, other)
        ]
        return kinds[0] == kinds[1]

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


def run(
    program: Program,
    rank: int,
    exchange: Exchange,
    build: Callable[[Plan], Net],
    *,
    device: str = "cpu",
    streams: Streams | None = None,
) -> Outcome:
    """Runs a program."""
    plain = Plain(program, rank, build, exchange)
    sharded = partial(Sharded, program, rank, build, device=device, streams=streams)
    try:
        engine = sharded()
        cuts = {name: _slices(param) for name, param in engine.params.items()}
    except Exception:
        found = Difference(-1, "error", traceback.format_exc(limit=-4))
        return Outcome([found], is_broken=True)
    outcome = Outcome()
    shown: list[tuple[int, Op, Seen, Seen]] = []
    for place, op in enumerate(program.ops):
        seen = engine.plan.streams.call(program.model.caller, partial(engine.do, op))
        plain.lose(engine.lost())
        expected = plain.do(op)
        shown.append((place, op, expected, seen))
        if ("error" in seen) != ("error" in expected):  # what follows would only repeat it
            outcome.is_broken = True
            break
    outcome.differences = list(islice(_differences(program, shown, cuts), 1))
    calls = [op.n for op in program.ops if op.do == "graphed"]
    # The first call warms up, and the next one with equal guards is captured.
    if max(calls, default=0) > 3 and not (engine.captures or outcome.is_broken):
        outcome.differences.append(Difference(-1, "graphs", "none in four calls"))
    engine.close()
    if any(op.do == "graphed" for op in program.ops) and not outcome.is_broken:
        eager = sharded(graphs=False)
        again = [
            eager.plan.streams.call(program.model.caller, partial(eager.do, op))
            for op in program.ops
        ]
        outcome.differences += list(islice(_other_bits(shown, again, "the eager program"), 1))
    if program.fsdp2 and not outcome.is_broken:
        theirs = OfFSDP2(program, rank, build)
        again = [theirs.do(op) for op in program.ops]
        outcome.differences += list(islice(_other_bits(shown, again, "FSDP2"), 1))
        pairs = zip_longest(engine.shown, theirs.shown)
        differ = [f"{a}\ninstead of {b}" for a, b in pairs if a != b]
        outcome.differences += [Difference(-1, "whole parameters", differ[0])] if differ else []
    return outcome


def _other_bits(
    shown: list[tuple[int, Op, Seen, Seen]], again: list[Seen], whose: str
) -> Iterator[Difference]:
    for (place, _, _, ours), theirs in zip(shown, again, strict=True):
        for key in ours.keys() | theirs.keys():
            left, right = ours.get(key), theirs.get(key)
            if isinstance(left, Tensor) and isinstance(right, Tensor):
                is_same = torch.equal(left.cpu().nan_to_num(), right.cpu().nan_to_num())
            else:
                is_same = left == right
            if not is_same:
                yield Difference(place, key, f"other bits than {whose} gives")


def _slices(param: Any) -> tuple[slice, ...]:
    """Returns where this rank's part of a parameter is."""
    shape, offset = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def _differences(
    program: Program,
    shown: list[tuple[int, Op, Seen, Seen]],
    cuts: dict[str, tuple[slice, ...]],
) -> Iterator[Difference]:
    tolerance = _tolerance(program)
    for place, op, expected, seen in shown:
        if "error" in expected or "error" in seen:
            text = _errors_differ(expected, seen)
            if text:
                yield Difference(place, "error", text)
            continue
        for key in sorted(expected.keys() | seen.keys()):
            left, right = seen.get(key), expected.get(key)
            if (
                right is None
                and key.endswith(_STATES)
                and isinstance(left, Tensor)
                and not left.any()
            ):
                continue  # shardgrad.optim has its state from the start, as zeros
            name = next((n for n in cuts if key == n or key.rpartition(".")[0] == n), "")
            text = _differ(left, right, cuts[name] if name and op.do == "look" else None, tolerance)
            if text:
                yield Difference(place, key, text)


def _tolerance(program: Program) -> float:
    """Returns by how much results may differ, relative to the largest element."""
    sharding = program.sharding
    if "bfloat16" in (sharding.param_dtype, sharding.wire_dtype):
        # A rounding is 2**-9. Gradients are sums of what was rounded, and momentum is a sum of
        # gradients: these may cancel out while their roundings do not.
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


def _errors_differ(expected: Seen, seen: Seen) -> str:
    ours, theirs = seen.get("error"), expected.get("error")
    if ours == theirs:
        return ""
    if isinstance(ours, type) and isinstance(theirs, type):
        is_as_good = issubclass(ours, theirs)
        return (
            ""
            if is_as_good
            else f"{ours.__name__}: {seen['message']}, instead of {theirs.__name__}"
        )
    if ours is not None:
        instead = "" if theirs is None else f", instead of {getattr(theirs, '__name__', theirs)}"
        return f"{getattr(ours, '__name__', ours)}: {seen.get('message', '')[:1500]}{instead}"
    return f"no error instead of {theirs}: {expected.get('message', '')[:300]}"


def _differ(left: Any, right: Any, cut: tuple[slice, ...] | None, tolerance: float) -> str:
    if isinstance(left, str) or isinstance(right, str) or left is None or right is None:
        return (
            ""
            if isinstance(left, str) and left == right
            else f"{_brief(left)} instead of {_brief(right)}"
        )
    whole = right.double()
    part = whole[cut] if cut is not None else whole
    left = left.cpu().double()
    if left.shape != part.shape:
        return f"shape {tuple(left.shape)} instead of {tuple(part.shape)}"
    if not part.numel():
        return ""
    off = (left - part).abs().max().item()
    # Relative to the largest element of the whole: that is what roundings are of.
    if off <= tolerance * (0.1 + whole.abs().max().item()):
        return ""
    return (
        f"off by {off:.3g}; {left.flatten()[:4].tolist()} instead of {part.flatten()[:4].tolist()}"
    )


def _brief(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else str(value)
