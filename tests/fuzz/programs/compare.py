"""One program on one rank under plain torch, shardgrad and, where it can, FSDP2; and what differs.

What operations show is kept and compared at the end, so that no rank stops in the middle, and
nothing makes the host wait for a device in between. A rank compares its own part, without
communication.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests.fuzz.programs import explained
from tests.fuzz.programs.net import Net, Plan
from tests.fuzz.programs.plain import Exchange, Plain
from tests.fuzz.programs.program import Op, Program
from tests.fuzz.programs.script import Seen, do
from tests.fuzz.programs.sharded import Sharded

_STATES = ("momentum_buffer", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Difference:
    """What differs from plain torch first.

    Attributes:
        engine: "shardgrad" or "fsdp2".
        place: of the operation; -1 while building.
        what: which value, or "error".
        text: how it differs.
    """

    engine: str
    place: int
    what: str
    text: str

    def is_like(self, other: Difference) -> bool:
        """Returns whether both are errors of one kind, or both wrong values, of one engine."""
        kinds = [
            d.text.split(": ")[1] if d.what in ("error", "hang") else "" for d in (self, other)
        ]
        return (self.engine, kinds[0]) == (other.engine, kinds[1])

    def __str__(self) -> str:
        return f"{self.engine}, operation {self.place}, {self.what}: {self.text}"


@dataclass
class Outcome:
    """What came of a program on one rank.

    Attributes:
        differences: the first one of each engine.
        explained: reasons for which differences of FSDP2 are known, or why it did not run.
        is_broken: an engine stopped half-way, so the ranks may not fit together any more.
    """

    differences: list[Difference] = field(default_factory=list)
    explained: list[str] = field(default_factory=list)
    is_broken: bool = False


def run(
    program: Program,
    rank: int,
    exchange: Exchange,
    build: Callable[[Plan], Net],
    *,
    device: str = "cpu",
    call: Callable[..., Any] | None = None,
    with_fsdp2: bool = True,
) -> Outcome:
    """Runs a program."""
    outcome = Outcome()
    plain = Plain(program, rank, build, exchange)
    engines: dict[str, Sharded] = {}
    made: dict[str, Callable[[], Sharded]] = {
        "shardgrad": lambda: Sharded(program, rank, build, is_ours=True, device=device, call=call)
    }
    why = explained.why_not_fsdp2(program) if with_fsdp2 else "not asked for"
    if why:
        outcome.explained.append(f"FSDP2 not run: {why}")
    else:
        made["fsdp2"] = lambda: Sharded(program, rank, build, is_ours=False, device=device)
    cuts: dict[str, dict[str, Any]] = {}
    for name, make in made.items():
        try:
            engines[name] = make()
            cuts[name] = {n: _slices(p) for n, p in engines[name].params.items()}
        except Exception:
            outcome.differences.append(
                Difference(name, -1, "error", traceback.format_exc(limit=-4))
            )
            outcome.is_broken = True
    shown: list[tuple[int, Op, Seen, dict[str, Seen]]] = []
    running = dict(engines)
    for place, op in enumerate(program.ops):
        seen = {name: _kept(do(engine, op)) for name, engine in running.items()}
        if "shardgrad" in running:
            plain.lose(engines["shardgrad"].lost())
        expected = _kept(do(plain, op))
        shown.append((place, op, expected, seen))
        for name in [name for name in running if ("error" in seen[name]) != ("error" in expected)]:
            del running[name]  # what follows would only repeat it
            outcome.is_broken = True
        if "shardgrad" not in running:
            break
    for name, engine in engines.items():
        found = next(_differences(program, name, shown, cuts[name]), None)
        if found is not None:
            outcome.differences.append(found)
        engine.close()
    return outcome


def _kept(seen: Seen) -> Seen:
    return {key: v.detach().clone() if isinstance(v, Tensor) else v for key, v in seen.items()}


def _slices(param: Any) -> tuple[slice, ...]:
    """Returns where this rank's part of a parameter is."""
    shape, offset = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def _differences(
    program: Program,
    engine: str,
    shown: list[tuple[int, Op, Seen, dict[str, Seen]]],
    cuts: dict[str, tuple[slice, ...]],
) -> Iterator[Difference]:
    tolerance = explained.tolerance(program)
    for place, op, expected, by_engine in shown:
        if engine not in by_engine:
            continue
        seen = by_engine[engine]
        if "error" in expected or "error" in seen:
            text = _errors_differ(expected, seen)
            if text:
                yield Difference(engine, place, "error", text)
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
                yield Difference(engine, place, key, text)


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
