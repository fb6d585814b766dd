"""The ZeRO stages: what a rank keeps unsharded.

[Note: Stages]
Optimizer states are always sharded. A stage decides the rest:

| stage | parameters                   | gradients                            |
|-------|------------------------------|--------------------------------------|
| 1     | unsharded during a step      | unsharded until the last micro-batch |
| 2     | unsharded during a step      | sharded                              |
| 3     | unsharded while a unit runs  | sharded                              |

A program sees the same in all stages: shards outside of forward and backward. Unsharded memory that
is kept serves the unit's next forward in the same step. It is dropped when the last backward of a
step ends, and after an evaluation, since the program may write the shards then, and torch does not
count every write: an update by `torch._foreach_*_`, or weights that an evaluation has borrowed and
that are put back through `data`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardgrad.errors import OptionError


@dataclass(frozen=True)
class Stage:
    """One of the ZeRO stages. See [Note: Stages].

    Attributes:
        keeps_unsharded: unsharded parameters are kept until a step's last backward ends.
        sums_unsharded: a backward that is not the last adds to an unsharded gradient and reduces
            nothing.
        over_both_axes: an HSDP mesh is sharded over its outer axis too; see [Note: Two levels] in
            `features/hfsdp.py`.
        decides: `keeps_unsharded` is decided after the first step; see [Note: Stage auto] in
            `features/zero_stage_auto.py`.
    """

    keeps_unsharded: bool
    sums_unsharded: bool
    over_both_axes: bool
    decides: bool

    @classmethod
    def of(cls, name: Any, reshard_after_forward: Any) -> Stage:
        """Returns the stage of a `zero_stage` argument.

        Raises:
            OptionError: there is no such stage, or it contradicts `reshard_after_forward`.
        """
        if isinstance(name, bool) or name not in (1, 2, 3, "auto", "hfsdp"):
            raise OptionError(
                f"zero_stage={name!r} does not exist",
                expected='1, 2, 3, "auto" or "hfsdp"',
                got=repr(name),
                fix="zero_stage=3, which is fully sharded",
            )
        if name in (1, 2, "auto") and reshard_after_forward not in (None, False):
            raise OptionError(
                f"zero_stage={name!r} keeps parameters unsharded, which contradicts "
                "reshard_after_forward",
                expected="reshard_after_forward=None or False",
                got=repr(reshard_after_forward),
                fix="zero_stage=3",
            )
        if name == "hfsdp" and not isinstance(reshard_after_forward, bool | None):
            raise OptionError(
                'zero_stage="hfsdp" always reshards to the inner axis of the mesh',
                expected="reshard_after_forward=None, True or False",
                got=repr(reshard_after_forward),
                fix="reshard_after_forward=True",
            )
        return cls(
            keeps_unsharded=name in (1, 2),
            sums_unsharded=name == 1,
            over_both_axes=name == "hfsdp",
            decides=name == "auto",
        )
