"""Configurations of the built-in models. This module does not import PyTorch."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardgrad.programs.train.failure import UsageError

Scalar = bool | int | float | str
# Beyond these, building the model would not end, or torch could not count its elements.
_MOST = {
    "layers": 10_000,
    **dict.fromkeys(("width", "heads", "kv_heads", "hidden", "vocab_size"), 2**24),
}
BYTE_VALUES = 256


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only transformer.

    Args:
        width: width of the residual stream.
        layers: number of blocks.
        heads: number of query heads; divides `width`, and the head width is even, as RoPE rotates
            pairs.
        kv_heads: number of key and value heads; divides `heads` (grouped-query attention if
            smaller).
        hidden: inner width of the SwiGLU feed-forward.
        vocab_size: rows of the embedding. Bytes use the first 256; presets named after a known
            model have that model's vocabulary size, so that memory and communication are those of
            the model.
        tied: use the transposed embedding as output head.
        rope_theta: base of RoPE's wavelengths.
        norm_eps: number added to the mean square in RMSNorm.
        init_std: standard deviation of initial weights; for projections into the residual stream,
            divided by sqrt(2 * layers).
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab_size: int = BYTE_VALUES
    tied: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        sizes = ("width", "layers", "heads", "kv_heads", "hidden")
        for name in sizes:
            if getattr(self, name) < 1:
                raise UsageError(
                    f"The model's {name} is {getattr(self, name)}: give a positive number."
                )
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise UsageError(
                    f"The model's {name} is {getattr(self, name)}: give at most {most}."
                )
        if self.vocab_size < BYTE_VALUES:
            raise UsageError(
                f"The model's vocab_size is {self.vocab_size}: bytes need at least {BYTE_VALUES}."
            )
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise UsageError(
                f"The model's width {self.width} does not split into {self.heads} heads of even "
                "width: choose a width that is a multiple of twice the heads."
            )
        if self.heads % self.kv_heads:
            raise UsageError(
                f"The model's {self.heads} heads do not share {self.kv_heads} kv_heads evenly."
            )

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads


PRESETS: Mapping[str, TransformerConfig] = {
    "tiny": TransformerConfig(width=192, layers=2, heads=3, kv_heads=3, hidden=576),
    "small": TransformerConfig(width=384, layers=6, heads=6, kv_heads=6, hidden=1024),
    "medium": TransformerConfig(
        width=640, layers=10, heads=10, kv_heads=10, hidden=1728, tied=False
    ),
    "gpt2": TransformerConfig(
        width=768, layers=12, heads=12, kv_heads=12, hidden=2048, vocab_size=50_257
    ),
    "1b": TransformerConfig(
        width=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        hidden=8192,
        vocab_size=128_256,
        rope_theta=500_000.0,
    ),
    "8b": TransformerConfig(
        width=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        hidden=14_336,
        vocab_size=128_256,
        tied=False,
        rope_theta=500_000.0,
    ),
}


def transformer_config(
    preset: str, overrides: Mapping[str, Scalar], presets: Mapping[str, TransformerConfig] = PRESETS
) -> TransformerConfig:
    """Returns a preset's configuration with some fields replaced.

    Raises:
        UsageError: there is no such field, or a value has another type.
    """
    base = presets[preset]
    fields = {field.name: type(getattr(base, field.name)) for field in dataclasses.fields(base)}
    changes: dict[str, Scalar] = {}
    for name, value in overrides.items():
        if name not in fields:
            raise UsageError(f"The model has no field {name!r}: {suggestion(name, list(fields))}")
        kind = fields[name]
        if kind is float and type(value) is int:
            value = as_float(value, f"The model's {name}")
        if type(value) is not kind:
            raise UsageError(f"The model's {name} needs {_KIND_WORDS[kind]}, not {value!r:.100}.")
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"The model's {name} is {value}: give a finite number.")
        changes[name] = value
    # Checked above, field by field.
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


_KIND_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


def as_float(number: int, what: str) -> float:
    """The nearest float; a :class:`UsageError` that names `what` if there is none."""
    try:
        return float(number)
    except OverflowError:
        raise UsageError(
            f"{what} is a number of {number.bit_length()} bits: give a smaller one."
        ) from None


def suggestion(name: str, known: list[str]) -> str:
    """Returns `did you mean 'width'?` if a known name is close, else the list of known names."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}."
