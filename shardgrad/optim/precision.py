"""The dtypes of an optimizer's state.

[Note: Exact weights]
A bf16 weight has 8 bits of mantissa, so a small update is lost to rounding. There are three
remedies, each applied in the same pass that writes the weight:

* `master="float32"`: the optimizer updates a float32 copy, and the weight is that copy rounded (6
  bytes per parameter);
* `master="remainder"`: stores the 16 bits of the float32 value that the weight lacks (4 bytes per
  parameter; bit for bit the same training, except that ties round up);
* `stochastic_rounding=True`: needs no more memory; updates are correct on average.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from shardgrad.errors import OptionError

Master = Literal["float32", "remainder"] | None

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Precision:
    """Options of every optimizer here. See [Note: Exact weights].

    Attributes:
        moment_dtype: the dtype of moments and momentum; None for float32, or float64 for float64
            parameters.
        master: the kind of master copy next to 16-bit weights; None for none.
        stochastic_rounding: round bf16 weights up or down at random, without bias.
        seed: the seed of stochastic rounding.
    """

    moment_dtype: torch.dtype | None = None
    master: Master = None
    stochastic_rounding: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.moment_dtype not in (None, torch.float32, torch.bfloat16, torch.float64):
            raise OptionError(
                "moment_dtype is not supported",
                expected="None, torch.float32, torch.bfloat16 or torch.float64",
                got=repr(self.moment_dtype),
                fix="moment_dtype=torch.bfloat16",
            )
        if self.master not in (None, "float32", "remainder"):
            raise OptionError(
                "master is not supported",
                expected='None, "float32" or "remainder"',
                got=repr(self.master),
                fix='master="float32"',
            )
        if not isinstance(self.seed, int) or abs(self.seed) >= 2**62:
            raise OptionError(
                "seed must be a whole number that fits in 64 bits",
                expected="an int below 2**62",
                got=repr(self.seed),
                fix="seed=0",
            )
        if self.master is not None and self.stochastic_rounding:
            raise OptionError(
                "stochastic_rounding and master exclude each other",
                expected="one of master and stochastic_rounding",
                got=f"master={self.master!r} and stochastic_rounding=True",
                fix="pass only one of them",
            )

    @property
    def keeps_small_steps(self) -> bool:
        """True if updates that are too small for a 16-bit weight are not lost."""
        return self.master is not None or self.stochastic_rounding

    def dtypes(
        self, param_dtype: torch.dtype, moments: tuple[str, ...]
    ) -> Mapping[str, torch.dtype]:
        """Returns the dtypes of the state buffers for parameters of a dtype, by name."""
        wide = torch.float64 if param_dtype is torch.float64 else torch.float32
        dtypes = dict.fromkeys(moments, self.moment_dtype or wide)
        if self.master == "float32" and param_dtype in _HALVES:
            dtypes["master"] = torch.float32
        elif self.master == "remainder" and param_dtype is torch.bfloat16:
            dtypes["remainder"] = torch.int16
        elif self.master == "remainder" and param_dtype is torch.float16:
            raise OptionError(
                "master='remainder' requires bf16 weights",
                expected="parameters in torch.bfloat16, or in wider dtypes, which need none",
                got="parameters in torch.float16",
                fix='master="float32"',
            )
        return dtypes

    @staticmethod
    def exact(state: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Returns the master or remainder buffer among a segment's state, if there is one."""
        master = state.get("master")
        return state.get("remainder") if master is None else master
