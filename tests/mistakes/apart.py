"""Running a mistake that leaves ranks waiting: in processes that are killed once each has named
it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

from tests.support.apart import RANKS, heard_apart, text_of

Program = Callable[[], None]


def _rank(tell: Callable[[Any], None], rank: int, folder: str, program: Program) -> None:
    try:
        program()
    except Exception as error:
        tell(text_of(error))
        # As at the end of a script; children of multiprocessing have forgotten it by then in 3.13.
        sys.last_value = error
        raise


def named_apart(
    program: Program,
    is_named: Callable[[int, str], bool],
    on: Iterable[int],
    *,
    limit_s: float,
    backend: str = "gloo",
) -> tuple[set[int], dict[int, list[str]]]:
    """Returns which ranks have not named a mistake when the time was over, and what each has said.

    Args:
        program: at the top of its module; run on two ranks.
        is_named: whether a rank names the mistake by a text.
        on: the ranks that are to name it.
        limit_s: seconds, those left out in which the ranks waited for a core.
        backend: of the process group.
    """
    said: dict[int, list[str]] = {rank: [] for rank in range(RANKS)}
    missing = set(on)
    with closing(heard_apart(_rank, program, backend=backend)) as heard:
        for rank, told, now_s in heard:
            if isinstance(told, str):
                said[rank].append(told)
                if rank in missing and is_named(rank, told):
                    missing.discard(rank)
            if not missing or now_s > limit_s:
                break
    return missing, said
