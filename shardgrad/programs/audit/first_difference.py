"""Where a program's run on several ranks departs from another run of it, and by how much.

A run is a sequence of snapshots: initial values; for each step the gradients, as they are when the
optimizer steps, and the values behind it; or what the program returned at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


Snapshot = dict[str, Piece]  # parameters by name; or gradients, of those that have one
Run = dict[str, Snapshot]  # by the moment, such as "step 1, gradient", in order


@dataclass(frozen=True)
class Difference:
    """The first parameter that differs.

    Attributes:
        when: such as "step 1, gradient".
        name: of the parameter.
        how: in a sentence.
        others: number of other parameters that differ at the same moment.
    """

    when: str
    name: str
    how: str
    others: int = 0

    def __str__(self) -> str:
        more = f", and {self.others} more" if self.others else ""
        return f"{self.when} of {self.name}{more}: {self.how}"


def first_difference(reference: Run, ranks: Sequence[Run]) -> Difference | None:
    """Returns where `ranks` first depart from `reference`; None if they do not.

    Two tensors agree if the norm of their difference is below the root of the dtype's precision
    times the norm of the expected one, that is in half of their digits: sums over ranks have
    another order, and optimizers amplify.
    """
    for when, expected in reference.items():
        without = [rank for rank, run in enumerate(ranks) if when not in run]
        if without:
            none = f"there was no optimizer step on {_ranks(without)}"
            return Difference(when, "all parameters", none)
        own = [run[when] for run in ranks]
        names = dict.fromkeys([*expected, *(name for snapshot in own for name in snapshot)])
        differing = [
            (name, how)
            for name in names
            if (how := _how(expected.get(name), [each.get(name) for each in own])) is not None
        ]
        if differing:
            return Difference(when, *differing[0], others=len(differing) - 1)
    return None


def _how(expected: Piece | None, pieces: Sequence[Piece | None]) -> str | None:
    """Returns how a parameter differs; None if it does not."""
    held = {rank: piece for rank, piece in enumerate(pieces) if piece is not None}
    if expected is None:
        return f"there is one on {_ranks(held)}, and should be none"
    if len(held) < len(pieces):
        return f"there is none on {_ranks(rank for rank in range(len(pieces)) if rank not in held)}"
    shapes = {piece.shape for piece in held.values()}
    if shapes != {expected.shape}:
        return f"it has shape {' and '.join(map(str, sorted(shapes)))} instead of {expected.shape}"
    compared = {rank: (each.values, each.of(expected.values)) for rank, each in held.items()}
    wrong = [rank for rank, (got, right) in compared.items() if not _close(got, right)]
    if not wrong:
        return None
    factors = {_factor(*compared[rank]) for rank in wrong}
    if len(factors) == 1 and None not in factors:
        return f"it is {factors.pop()} times the expected one on {_ranks(wrong)}"
    off = max(_off(*compared[rank]) for rank in wrong)
    how = f"it is off by {off:.2%}"
    values = [piece.values for piece in held.values()]
    are_whole = all(piece.values.shape == piece.shape for piece in held.values())
    if are_whole and any(not _close(each, values[0]) for each in values):
        if _close(torch.stack(values).mean(0, dtype=torch.double), expected.values):
            return f"{how}: every rank has its own, and their mean would be right: not averaged"
        return f"{how}, and ranks have different values, as where gradients are not averaged"
    return f"{how} on {_ranks(wrong)}" if len(wrong) < len(held) else f"{how}, on all ranks alike"


def _close(values: torch.Tensor, expected: torch.Tensor) -> bool:
    dtypes = [
        each.dtype for each in (values, expected) if each.is_floating_point() or each.is_complex()
    ]
    precision = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0) ** 0.5
    return _off(values, expected) <= float(precision)


def _off(values: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the norm of the difference as a share of the expected one's; what is not finite in
    both counts as equal.
    """
    ours, theirs = values.to(torch.complex128), expected.to(torch.complex128)
    both_broken = (~ours.isfinite()) & (~theirs.isfinite())
    off = (ours - theirs).masked_fill(both_broken, 0).norm()
    norm = theirs.masked_fill(both_broken, 0).norm()
    return float(off / norm) if off else 0.0


def _factor(values: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Returns by which factor a tensor of several elements differs, if that is all."""
    ours, theirs = values.double(), expected.double()
    factor = float((ours * theirs).sum() / theirs.square().sum())
    is_all = values.numel() > 1 and _close(values, (theirs * factor).to(values.dtype))
    return f"{factor:.3g}" if is_all else None


def _ranks(numbers: Iterable[int]) -> str:
    each = list(map(str, numbers))
    return f"rank{'s' if len(each) > 1 else ''} {' and '.join(each)}"
