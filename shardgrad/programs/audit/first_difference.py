"""Where a program's run with its engine departs from its run without, as far as the numbers tell.

Steps are compared in order; in a step first the gradients, as they are when the optimizer steps,
then what it makes of the parameters; in each the parameters in the model's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
        gradients: for each step, those that its optimizer step found.
        parameters: for each step, those behind it.
        returned: what the program returned, by name.
    """

    initial: Snapshot = field(default_factory=dict)
    gradients: list[Snapshot] = field(default_factory=list)
    parameters: list[Snapshot] = field(default_factory=list)
    returned: Snapshot = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """The first parameter that differs.

    Attributes:
        when: such as "step 1, gradient".
        name: of the parameter.
        what: how it differs.
        others: number of other parameters that differ at the same point.
    """

    when: str
    name: str
    what: str
    others: int = 0

    def __str__(self) -> str:
        more = f", and {self.others} more" if self.others else ""
        return f"{self.when} of {self.name}{more}: {self.what}"


def first_difference(reference: Trace, ranks: Sequence[Trace]) -> Difference | None:
    """Returns where `ranks` first depart from `reference`; None if they do not.

    Two tensors agree if the norm of their difference is below the root of the dtype's precision
    times the norm of the expected one, that is in half of their digits: sums over ranks have
    another order, and optimizers amplify.

    Args:
        reference: the run of one rank without the engine.
        ranks: the runs of all ranks.
    """
    found = _compare("initial value", reference.initial, [trace.initial for trace in ranks])
    before = reference.initial
    steps = zip(reference.gradients, reference.parameters, strict=True)
    for step, (gradients, after) in enumerate(steps):
        theirs = [trace.gradients[step] for trace in ranks]
        found = found or _compare(f"step {step}, gradient", gradients, theirs)
        theirs = [trace.parameters[step] for trace in ranks]
        found = found or _compare(f"step {step}, update", after, theirs, before)
        before = after
    return found


def last_difference(reference: Trace, ranks: Sequence[Trace]) -> Difference | None:
    """Returns where `ranks` that returned something else than `reference` first depart from it;
    None if they did not.

    That is in an optimizer step, or else in what was returned: an engine may show optimizers other
    tensors than the model's parameters.
    """
    end = _compare("end", reference.returned, [trace.returned for trace in ranks])
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


def _compare(
    when: str,
    expected: Snapshot,
    ranks: Sequence[Snapshot],
    before: Mapping[str, Piece | None] = {},
) -> Difference | None:
    """Returns the first tensor that differs, and how; of values, how their change since `before`
    does.
    """
    names = dict.fromkeys([*expected, *(name for snapshot in ranks for name in snapshot)])
    differing = []
    for name in names:
        pieces = [snapshot.get(name) for snapshot in ranks]
        if any(not _agree(expected.get(name), piece) for piece in pieces):
            differing.append((name, pieces))
    if not differing:
        return None
    name, pieces = differing[0]
    what = _how(expected.get(name), pieces, before.get(name))
    return Difference(when, name, what, len(differing) - 1)


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


def _how(expected: Piece | None, pieces: Sequence[Piece | None], before: Piece | None) -> str:
    """Returns how what ranks hold of a tensor differs from what is expected."""
    held = [piece for piece in pieces if piece is not None]
    if expected is None:
        return f"{_ranks([rank for rank, piece in enumerate(pieces) if piece])} alone has one"
    if len(held) < len(pieces):
        return f"{_ranks([rank for rank, piece in enumerate(pieces) if piece is None])} has none"
    shapes = {piece.shape for piece in held}
    if shapes != {expected.shape}:
        return f"it has shape {' and '.join(map(str, sorted(shapes)))} instead of {expected.shape}"
    if held[0].is_whole and any(not _close(piece.values, held[0].values) for piece in held):
        return "every rank has its own"
    wrong = [rank for rank, piece in enumerate(held) if not _agree(expected, piece)]
    if len(wrong) < len(held):
        return f"what {_ranks(wrong)} holds of it is not right, the rest is"
    start = torch.zeros_like(expected.values) if before is None else before.values
    right = expected.values.double() - start.double()
    got = _stitched(held).double() - start.double()
    if not got.any():
        return "it is zero on all ranks"
    scale = float((got * right).sum() / right.square().sum())
    if _close(got.float(), (right * scale).float()):
        return f"it is {scale:.4g} times the expected one, on all ranks"
    return f"it is off by {float((got - right).norm() / right.norm()):.2%}, on all ranks"


def _stitched(pieces: Sequence[Piece]) -> torch.Tensor:
    """Returns the whole tensor, from pieces of all ranks."""
    whole = torch.zeros(pieces[0].shape, dtype=pieces[0].values.dtype)
    for piece in pieces:
        piece.of(whole).copy_(piece.values)
    return whole


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {' and '.join(map(str, numbers))}"
