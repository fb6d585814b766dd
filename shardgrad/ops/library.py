"""The operator library `torch.ops.shardgrad`: declaring ops, and loading their compiled kernels.

Each op exists twice. Its module declares the schema, a fake kernel and a reference in plain torch
ops. The dispatcher uses the reference on every device for which `shardgrad/_C.so` (sources in
`csrc/`) has registered no kernel. Schemas are declared here and not in C++ because the reference
needs them without the library, too.
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from shardgrad.errors import DeviceError

# The registrations live as long as this object.
_LIBRARY = torch.library.Library("shardgrad", "DEF")
_PATH = Path(__file__).parents[1] / "_C.so"
_OLDEST_CAPABILITY = (8, 0)  # of setup.py's architectures; another build may have more
_is_compiled = False


def declare(schema: str, reference: Callable[..., None]) -> Callable[..., None]:
    """Declares an op that returns nothing, and returns it.

    Args:
        schema: name and arguments, with correct annotations of the tensors that are written.
        reference: the implementation in plain torch ops. Its docstring documents the op. It must
            have the schema's default values, since the dispatcher omits arguments that are equal to
            them.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(f"{schema} -> ()")
    # An alias key of all devices. A kernel for one device, as in csrc/, takes precedence.
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardgrad::{name}", _fake, lib=_LIBRARY)
    # Look the overload up once, since that costs more than a small op.
    op: Callable[..., None] = getattr(torch.ops.shardgrad, name).default
    return op


def _fake(*_: object) -> None:
    """Nothing to infer: the ops return nothing and change no shape."""


def backend() -> Literal["compiled", "reference"]:
    """Returns whether `shardgrad/_C.so` was loaded ("compiled") or not ("reference")."""
    return "compiled" if _is_compiled else "reference"


def has_kernels(device_type: str) -> bool:
    """Returns whether the ops on devices of a type are compiled kernels, not the references."""
    op: Any = torch.ops.shardgrad.pack.default
    key = device_type.upper()
    return key in ("CPU", "CUDA") and bool(op.has_kernel_for_dispatch_key(key))


@cache
def check_kernels(device_type: str) -> None:
    """Warns once if references, which make the host wait for a GPU, would run in place of kernels.

    For the CPU, `load_compiled` has warned already. For other devices no kernels exist.

    Raises:
        DeviceError: the GPU is older than those that the kernels were built for.
    """
    if device_type != "cuda" or not torch.cuda.is_available():
        return
    if not has_kernels(device_type):
        warnings.warn(
            "shardgrad: the CUDA kernels were not built, so the slower Python reference ops are "
            "used. Some of them wait for the device, so a step with them cannot be captured. To "
            f"build the kernels with nvcc of CUDA {torch.version.cuda} on PATH: {build_command()}",
            RuntimeWarning,
            stacklevel=3,
        )
        return
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < _OLDEST_CAPABILITY and not _is_launched():
        raise DeviceError(
            f"shardgrad's kernels were not built for {torch.cuda.get_device_name()}",
            expected="a GPU of compute capability 8.0 or newer",
            got=f"{major}.{minor}",
            fix=f"build them with nvcc: TORCH_CUDA_ARCH_LIST={major}.{minor} {build_command()}",
        )


def _is_launched() -> bool:
    """Returns whether the library contains kernel code for the current device."""
    one = torch.ones(1, device="cuda")
    try:
        torch.ops.shardgrad.sum_chunks([one], one, 1.0, False)
    except RuntimeError:
        return False
    return True


def load_compiled() -> None:
    """Loads the library of the package, or warns once and leaves the references in place."""
    global _is_compiled
    if _PATH.is_file():
        try:
            torch.ops.load_library(_PATH)
        except OSError as error:
            what = (
                f"{_PATH} could not be loaded by torch {torch.__version__}, perhaps because it was "
                f"built for an incompatible one ({error.__cause__ or error})"
            )
        else:
            _is_compiled = True
            return
    else:
        what = f"there is no compiled library {_PATH}"
    warnings.warn(
        f"shardgrad: {what}, so the slower Python reference ops are used. To build it with a C++17 "
        f"compiler: {build_command()}",
        RuntimeWarning,
        stacklevel=2,
    )


def build_command() -> str:
    """Returns the command that compiles the ops for this torch."""
    root = _PATH.parents[1]
    if (root / "setup.py").is_file():
        return f"pip install --no-build-isolation -e {shlex.quote(str(root))}"
    return (
        "pip install --no-build-isolation --no-deps --force-reinstall --no-binary shardgrad "
        "shardgrad"
    )
