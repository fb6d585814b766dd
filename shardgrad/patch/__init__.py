"""Replacing torch's FSDP2 by this engine in unmodified programs.

A program refers to `fully_shard` as an attribute of one of torch's packages, or by a `from` import
in its globals. So the function is looked up by identity in the globals of every module, and
replaced by a function made for this patch: when the patch ends, that function is looked up in the
same way, also in modules imported in the meantime, and torch's function is put back.

Classes stay as they are. A module that this engine shards is an instance of torch's `FSDPModule`
(see `shardgrad.module`), and policies, `UnshardHandle` and `DTensor` are torch's own, so
`isinstance` holds from wherever a program imported them.
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
    """Makes programs in this process shard with shardgrad instead of FSDP2 inside the block.

    `fully_shard`, `register_fsdp_forward_method` and `share_comm_ctx` are replaced in every module
    that has them: torch's packages, and frameworks imported before or during the patch. Models keep
    the engine they were sharded with.

    A reference that is not a global of a module (in a closure, a default argument, an attribute of
    an object) is not replaced if it was made before; if it was made during the patch, it calls
    torch's function afterwards.

    Patches may be nested. They are not safe while another thread imports modules. Each process has
    to be patched: `torchrun -m shardgrad.patch script.py` patches every rank.

    For example:

        with shardgrad.patch():
            main()  # calls torch.distributed.fsdp.fully_shard

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
    """A function of torch, this engine's function, and a stand-in that calls one of the two.

    Attributes:
        active: whether the stand-in calls this engine's function.
    """

    def __init__(self, theirs: Callable[..., Any], ours: Callable[..., Any]) -> None:
        self.theirs = theirs
        self.active = True

        @functools.wraps(ours)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return (ours if self.active else theirs)(*args, **kwargs)

        self.stand_in = stand_in


def _exchange(pairs: Sequence[tuple[object, object]]) -> None:
    """Rebinds globals equal to the first of a pair to the second, in all modules but our own."""
    new = {id(before): after for before, after in pairs}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.partition(".")[0] == "shardgrad":
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in new:
                setattr(module, attribute, new[id(value)])
