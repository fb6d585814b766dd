"""Putting this engine where programs look for torch's FSDP2, so that they need no change of their own.

A program has `fully_shard` as an attribute of one of torch's packages, or as a copy that a `from` import left
in its own globals. So the function is looked for by identity in the globals of every module. What goes there
is a stand-in made for one patch, which nothing can hold for another reason: when the patch ends, the stand-in
is found again, also in modules that were imported meanwhile, and torch's function put back.

Classes stay as they are. A module that this engine shards is an instance of torch's `FSDPModule` (see
`shardgrad.module`), and policies, `UnshardHandle` and `DTensor` are torch's own, so `isinstance` holds from
wherever a program imported them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch.distributed.fsdp as torch_fsdp

from shardgrad.fully_shard import fully_shard
from shardgrad.module import register_fsdp_forward_method, share_comm_ctx

__all__ = ["patch"]

_REPLACED: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = (
    (torch_fsdp.fully_shard, fully_shard),
    (torch_fsdp.register_fsdp_forward_method, register_fsdp_forward_method),
    (torch_fsdp.share_comm_ctx, share_comm_ctx),
)


@contextmanager
def patch() -> Iterator[None]:
    """Makes programs in this process shard with shardgrad while active, where they ask for FSDP2.

    `fully_shard` and the functions beside it are replaced in every module that has them: torch's
    packages, frameworks that are imported already, and those imported meanwhile. Models keep the engine they
    were sharded with, before and afterwards.

    A copy that is no global of a module (in a closure, a default argument, an attribute of an object) stays
    what it was if it was made before. If it was made meanwhile, it is torch's again afterwards.

    Patches may be nested. They are not for a process in which another thread is importing modules. Each
    process needs its own: `torchrun -m shardgrad.patch script.py` patches every rank.

    Streams: none.
    Capture: safe; it touches no device.
    """
    replacements = [_Replacement(theirs, ours) for theirs, ours in _REPLACED]
    _exchange([(each.theirs, each.stand_in) for each in replacements])
    try:
        yield
    finally:
        for each in replacements:
            each.active = False
        _exchange([(each.stand_in, each.theirs) for each in replacements])


class _Replacement:
    """One function of torch's, ours, and the stand-in that calls one of them.

    Attributes:
        active: whether the stand-in calls ours.
    """

    def __init__(self, theirs: Callable[..., Any], ours: Callable[..., Any]) -> None:
        self.theirs = theirs
        self.active = True

        @functools.wraps(ours)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return (ours if self.active else theirs)(*args, **kwargs)

        self.stand_in = stand_in


def _exchange(pairs: Sequence[tuple[object, object]]) -> None:
    """Rebinds globals that are the first of a pair to the second, in every imported module but our own."""
    new = {id(before): after for before, after in pairs}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.partition(".")[0] == "shardgrad":
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in new:
                setattr(module, attribute, new[id(value)])
