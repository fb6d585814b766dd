"""The operator library `torch.ops.shardgrad`: declaring ops, and loading their compiled kernels.

Each op exists twice. Its module declares the schema, a fake kernel and a reference in plain torch ops, which
the dispatcher uses on every device for which `shardgrad/_C.so` (sources in `csrc/`) has brought no kernel.
The schemas are here and not in C++, because the reference needs them when there is no library.
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

__all__ = ["backend", "declare", "load_compiled"]

_LIBRARY = torch.library.Library("shardgrad", "DEF")  # the registrations live as long as this object
_PATH = Path(__file__).parents[1] / "_C.so"
_is_compiled = False


def declare(schema: str, reference: Callable[..., None]) -> None:
    """Declares an op that returns nothing.

    Args:
        schema: name and arguments; says truly which tensors are written.
        reference: the implementation in plain torch ops.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(f"{schema} -> ()")
    # An alias of every device; a kernel registered for one device, as in csrc/, goes before it.
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardgrad::{name}", _fake, lib=_LIBRARY)


def _fake(*_: object) -> None:
    """Nothing to infer: the ops return nothing and change no shape."""


def backend() -> Literal["compiled", "reference"]:
    """Returns whether `shardgrad/_C.so` was loaded ("compiled") or not ("reference")."""
    return "compiled" if _is_compiled else "reference"


def load_compiled() -> None:
    """Loads the library of the package, or warns once and leaves the references in place."""
    global _is_compiled
    if _PATH.is_file():
        try:
            torch.ops.load_library(_PATH)
        except OSError as error:
            what = (
                f"{_PATH} could not be loaded by torch {torch.__version__}, perhaps because it was built for "
                f"an incompatible one ({error.__cause__ or error})"
            )
        else:
            _is_compiled = True
            return
    else:
        what = f"there is no compiled library {_PATH}"
    warnings.warn(
        f"shardgrad: {what}; the slower Python reference ops are used. "
        f"To build it with a C++17 compiler, type: {_command()}",
        RuntimeWarning,
        stacklevel=2,
    )


def _command() -> str:
    root = _PATH.parents[1]
    if (root / "setup.py").is_file():
        return f"pip install --no-build-isolation -e {shlex.quote(str(root))}"
    return "pip install --no-build-isolation --no-deps --force-reinstall --no-binary shardgrad shardgrad"
