"""Ranks compare what each says of itself, line by line."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import torch.distributed as dist

from shardgrad.diagnosis.all_gather_object import all_gather_object
from shardgrad.errors import RankDisagreementError

__all__ = ["require_same_lines"]


def require_same_lines(lines: list[str], count: int, group: dist.ProcessGroup) -> int:
    """Returns the largest `count` of all ranks, if all have the same lines about their model. A
    collective.

    Raises:
        RankDisagreementError: on every rank, naming the first line that differs.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    answers: list[tuple[str, int]] = all_gather_object((digest, count), group)
    if len({answer[0] for answer in answers}) == 1:
        return max(answer[1] for answer in answers)
    everyone: list[list[str]] = all_gather_object(lines, group)
    ranks = dist.get_process_group_ranks(group)
    first, other, theirs = _first_difference(everyone)
    raise RankDisagreementError(
        "ranks built different models",
        expected=f"rank {ranks[0]}: {first}",
        got=f"rank {ranks[other]}: {theirs}",
        where=f"rank {dist.get_rank()}",
        fix="build the model from the same configuration and in the same order on every rank",
    )


def _first_difference(everyone: Sequence[list[str]]) -> tuple[str, int, str]:
    for other, lines in enumerate(everyone):
        for ours, theirs in zip_longest(everyone[0], lines, fillvalue="nothing more"):
            if ours != theirs:
                return ours, other, theirs
    return "", 0, ""
