"""Where a program's run with its engine departs from its run without, and why, as far as the
numbers tell.

Steps are compared in order; in a step first the gradients, as they are when the optimizer steps,
then the parameters behind it; in each the parameters in the model's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a tensor.

    Attributes:
        values: a copy on the host; the whole tensor, if the rank holds all of it.
        shape: of the whole tensor.
        offset: where `values` begins in it, for each dim.
    """

    values: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the same part of another tensor of the whole shape."""
        for dim, (start, length) in enumerate(zip(self.offset, self.values.shape, strict=True)):
            whole = whole.narrow(dim, start, length)
        return whole

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds all of it."""
        return tuple(self.values.shape) == self.shape


# Of gradients, None where a parameter has none; or of parameters.
Snapshot = dict[str, Piece | None]


@dataclass
class Trace:
    """One rank's run.

    Attributes:
        initial: parameters before the first step.
        gradients: for each step, those that its optimizer step found; None if it made no optimizer
            step.
        parameters: for each step, those behind it.
        returned: what the program returned, by name.
    """

    initial: Snapshot = field(default_factory=dict)
    gradients: list[Snapshot | None] = field(default_factory=list)
    parameters: list[Snapshot] = field(default_factory=list)
    returned: Snapshot = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """The first parameter that differs.

    Attributes:
        when: such as "step 1, gradient".
        name: of the parameter.
        why: what the numbers say about it, in a sentence.
        others: number of other parameters that differ at the same point.
    """

    when: str
    name: str
    why: str
    others: int = 0

    def __str__(self) -> str:
        more = f", and {self.others} more" if self.others else ""
        return f"{self.when} of {self.name}{more}: {self.why}"


def first_difference(reference: Trace, ranks: Sequence[Trace]) -> Difference | None:
    """Returns where `ranks` first depart from `reference`; None if they do not.

    Two tensors agree if the norm of their difference is below the root of the dtype's precision
    times the norm of the expected one, that is in half of their digits: sums over ranks have
    another order, and optimizers amplify.

    Args:
        reference: the run of one rank without the engine.
        ranks: the runs of all ranks.
    """
    found = _compare(
        "initial value", reference.initial, [trace.initial for trace in ranks], _why_initial
    )
    before = reference.initial
    for step, (gradients, parameters) in enumerate(
        zip(reference.gradients, reference.parameters, strict=True)
    ):
        if found is not None:
            return found
        own = [trace.gradients[step] for trace in ranks]
        odd = [
            rank for rank, snapshot in enumerate(own) if (snapshot is None) != (gradients is None)
        ]
        if odd:
            made = "made no optimizer step" if gradients is not None else "made an optimizer step"
            made = f"{_ranks(odd)} {made}, unlike the other run"
            return Difference(f"step {step}, update", "all parameters", made)
        if gradients is not None:
            why = partial(_why_gradient, reference.gradients[:step])
            theirs = [each or {} for each in own]
            found = _compare(f"step {step}, gradient", gradients, theirs, why, _why_no_gradient)
        if found is None:
            after = [trace.parameters[step] for trace in ranks]
            found = _compare(f"step {step}, value", parameters, after, partial(_why_update, before))
        before = parameters
    return found


def last_difference(reference: Trace, ranks: Sequence[Trace]) -> Difference | None:
    """Returns where `ranks` that returned something else than `reference` first depart from it;
    None if they did not.

    That is in an optimizer step, or else in what was returned: an engine may show optimizers other
    tensors than the model's parameters.
    """
    end = _compare("end", reference.returned, [trace.returned for trace in ranks], _why_end)
    if end is None or not all(_steps_alike(reference, trace) for trace in ranks):
        return end
    return first_difference(reference, ranks) or end


def _steps_alike(trace: Trace, other: Trace) -> bool:
    """Returns whether optimizers made as many steps, with parameters of the same shapes."""
    shapes, others = (
        [{name: piece and piece.shape for name, piece in step.items()} for step in each.parameters]
        for each in (trace, other)
    )
    return shapes == others


# -- comparing

_Why = Callable[[str, Piece, Sequence[Piece]], str]
_WhyAbsent = Callable[[Piece | None, Sequence[Piece | None]], str]


def _compare(
    when: str,
    expected: Snapshot,
    ranks: Sequence[Snapshot],
    why: _Why,
    why_absent: _WhyAbsent = lambda expected, pieces: "not every run has it",
) -> Difference | None:
    names = dict.fromkeys([*expected, *(name for snapshot in ranks for name in snapshot)])
    differing = []
    for name in names:
        pieces = [snapshot.get(name) for snapshot in ranks]
        if any(not _agree(expected.get(name), piece) for piece in pieces):
            differing.append((name, pieces))
    if not differing:
        return None
    name, pieces = differing[0]
    right, held = expected.get(name), [piece for piece in pieces if piece is not None]
    if right is None or len(held) < len(pieces):
        cause = why_absent(right, pieces)
    elif (shapes := {piece.shape for piece in held}) != {right.shape}:
        cause = f"it has shape {' and '.join(map(str, sorted(shapes)))} instead of {right.shape}"
    else:
        cause = why(name, right, held)
    return Difference(when, name, cause, len(differing) - 1)


def _agree(expected: Piece | None, piece: Piece | None) -> bool:
    if expected is None or piece is None:
        return expected is piece
    return piece.shape == expected.shape and _close(piece.values, piece.of(expected.values))


def _close(values: torch.Tensor, expected: torch.Tensor) -> bool:
    dtypes = [
        each.dtype for each in (values, expected) if each.is_floating_point() or each.is_complex()
    ]
    precision = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0) ** 0.5
    ours, theirs = values.to(torch.complex128), expected.to(torch.complex128)
    both_broken = (~ours.isfinite()) & (~theirs.isfinite())
    off = (ours - theirs).masked_fill(both_broken, 0).norm()
    return bool(off <= precision * theirs.masked_fill(both_broken, 0).norm())


def _stitched(pieces: Sequence[Piece]) -> torch.Tensor:
    """Returns the whole tensor, from pieces of all ranks."""
    whole = torch.zeros(pieces[0].shape, dtype=pieces[0].values.dtype)
    for piece in pieces:
        piece.of(whole).copy_(piece.values)
    return whole


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {' and '.join(map(str, numbers))}"


def _wrong(expected: Piece, pieces: Sequence[Piece]) -> list[int]:
    return [rank for rank, piece in enumerate(pieces) if not _agree(expected, piece)]


# -- why


def _why_end(name: str, expected: Piece, held: Sequence[Piece]) -> str:
    values = expected.values.double()
    off = max(float((piece.values.double() - values).norm() / values.norm()) for piece in held)
    how = f"it is off by {off:.2%}"
    if any(not _close(piece.values, held[0].values) for piece in held):
        return f"{how}, and ranks have different values, as where gradients are not averaged"
    return f"{how}, on all ranks alike"


def _why_initial(name: str, expected: Piece, held: Sequence[Piece]) -> str:
    wrong = _wrong(expected, held)
    if len(wrong) == len(held):
        return "the program does not make the same weights twice: seed it"
    return (
        f"{_ranks(wrong)} begins with other weights: seed every rank alike before the model is "
        "built"
    )


def _why_no_gradient(expected: Piece | None, pieces: Sequence[Piece | None]) -> str:
    missing = [rank for rank, piece in enumerate(pieces) if piece is None]
    if expected is None:
        has = [rank for rank in range(len(pieces)) if rank not in missing]
        return f"{_ranks(has)} has a gradient, and the other run has none"
    if len(missing) == len(pieces):
        return "no rank has a gradient: it is not reduced, or frozen there"
    return (
        f"{_ranks(missing)} has no gradient: those of this parameter are not averaged, and its "
        "module did not run there"
    )


def _why_gradient(
    history: Sequence[Snapshot | None],  # expected gradients of earlier steps
    name: str,
    expected: Piece,
    held: Sequence[Piece],
) -> str:
    right, wrong, world = expected.values, _wrong(expected, held), len(held)
    if held[0].is_whole and any(not _close(piece.values, held[0].values) for piece in held):
        mean = torch.stack([piece.values.double() for piece in held]).mean(0)
        if _close(mean.to(right.dtype), right):
            return "not averaged: every rank has its own, and their mean would be right"
        return "not averaged: every rank has its own"
    got = _stitched(held)
    if not got.any():
        return "it is zero on all ranks: the data of no rank came in"
    scale = float((got.double() * right.double()).sum() / right.double().square().sum())
    if scale and _close(got, right * scale):
        if abs(scale / world - 1) < 0.01:
            return f"{world} times too large: summed over the ranks, not averaged"
        if abs(scale * world - 1) < 0.01:
            return f"{world} times too small: averaged once too often, or only a part of the sum"
        return f"{scale:.4g} times the expected one"
    pieces = [snapshot.get(name) for snapshot in history if snapshot is not None]
    former = [piece.values for piece in pieces if piece is not None]
    last = f"the gradient of step {len(history) - 1}"
    if former and _close(got, former[-1]):
        return f"stale: it is {last}"
    if former and _close(got, former[-1] + right):
        return f"it contains {last} too: not set to zero"
    if len(wrong) < world:
        return f"what {_ranks(wrong)} holds of it is not right, the rest is"
    return "what every rank holds of it is not right"


def _why_update(before: Snapshot, name: str, expected: Piece, held: Sequence[Piece]) -> str:
    former = before.get(name)
    if former is None:
        return "it is new"
    wrong = _wrong(expected, held)
    kept = [rank for rank in wrong if _close(held[rank].values, held[rank].of(former.values))]
    if len(kept) == len(held):
        return "gradients agree, and no rank updates it: the optimizer does not hold this parameter"
    if kept:
        return f"gradients agree, and {_ranks(kept)} does not update it"
    step = expected.values.double() - former.values.double()
    scales = set()
    for rank in wrong:
        own = held[rank].values.double() - held[rank].of(former.values).double()
        part = held[rank].of(step)
        scale = float((own * part).sum() / part.square().sum())
        scales.add(f"{scale:.3g}" if _close(own.float(), (part * scale).float()) else "")
    if len(scales) == 1 and "" not in scales:
        return (
            f"gradients agree, and the update of {_ranks(wrong)} is {scales.pop()} times the "
            "expected one"
        )
    return (
        f"gradients agree, and the update of {_ranks(wrong)} does not: its optimizer has other "
        "settings or state, or weights are written besides"
    )
