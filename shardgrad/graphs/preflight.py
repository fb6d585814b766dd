"""Checks for conditions under which a step cannot be captured, beyond what a capture itself finds.

A capture raises at an operation that a graph cannot contain, and values that it freezes are found
by capturing twice (`comparison.py`). This file covers the rest. Settings with which a capture would
harm the process are refused before it. Conditions that make captures fail far from their cause are
added to the error. On a device without graphs, an eager call is watched instead of a capture.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Distribution
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from shardgrad.errors import CaptureError, ShardgradError
from shardgrad.graphs import eager_regions
from shardgrad.graphs.closed_over import changed_numbers, closed_over
from shardgrad.graphs.program_line import TORCH, is_of_the_program
from shardgrad.ops.library import build_command, has_kernels

_BLOCKING = {
    "CUDA_LAUNCH_BLOCKING": "makes the host wait at every launch, for debugging",
    "TORCH_NCCL_BLOCKING_WAIT": "makes the host wait for every collective",
    "NCCL_BLOCKING_WAIT": "makes the host wait for every collective",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "allocates from the driver, which a capture forbids",
}


_SCALER = CaptureError(
    "torch.amp.GradScaler reads on the host whether to skip the step",
    fix="use shardgrad.GradScaler, and pass it to graphed_step(...)",
)
_SAVED_STATE = CaptureError(
    "torch.utils.checkpoint saves the RNG state, which a graph on this device cannot do",
    fix="torch.utils.checkpoint.checkpoint(..., preserve_rng_state=False), if it draws no "
    "random numbers",
)
_VALIDATED = CaptureError(
    "torch.distributions validates its arguments on the host",
    fix="validate_args=False, or torch.distributions.Distribution.set_default_validate_args(False)",
)
_HOST_READ = CaptureError(
    "a call reads a device value on the host, or waits for the device",
    fix="return the value from the step and read it afterwards; use torch.where instead of an if, "
    "and shardgrad.graphs.outside for host work in the middle of the step",
)
# By the function of torch that raises, in which an error in a capture has only one cause, and by
# cudaError_t. CUDA raises those about streams at the call that breaks the capture.
_CAUSES: dict[object, CaptureError] = {
    torch.amp.GradScaler.step.__code__: _SCALER,
    checkpoint.get_device_states.__code__: _SAVED_STATE,
    Distribution.__init__.__code__: _VALIDATED,
    Distribution._validate_sample.__code__: _VALIDATED,
    900: _HOST_READ,
    904: CaptureError(
        "the step launches work on another stream and does not wait for it",
        fix="torch.cuda.current_stream().wait_stream(side) after that work, inside the step",
    ),
    905: CaptureError(
        "the step waits for work that was launched on another stream before it",
        fix="side.wait_stream(torch.cuda.current_stream()) before that work, inside the step",
    ),
    906: CaptureError(
        "the step uses the default stream while it is captured on another one",
        fix="use torch.cuda.current_stream(), or a torch.cuda.Stream(); or, before the call, "
        "detach() or del what is left of eager forwards, such as a loss, and in a region of "
        "torch.autocast that they share, torch.clear_autocast_cache()",
    ),
    907: _HOST_READ,  # the host waits for an event of the step
}
_COPY = CaptureError(
    "a call copies a tensor or a number from the host to the device",
    fix="create it before the step and pass it as an argument; or use torch.full or torch.arange "
    "with device=, and fill_ for an element",
)
# Operations whose result, or its shape, the host reads. The first is `.item()`, float(x) and if x.
_HOST_READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
)


def environment_issues(device: torch.device) -> Iterator[CaptureError]:
    """Yields the issues that can be found without running a step.

    Args:
        device: the device of the step. Kernels and environment variables are checked on CUDA only.

    Capture: called outside of a capture; it reads nothing from the device.
    """
    if device.type == "cuda":
        if not has_kernels("cuda"):
            yield CaptureError(
                "shardgrad's CUDA kernels were not built, and the Python replacements for norms "
                "and updates wait for the device",
                fix=f"{build_command()}, with nvcc of CUDA {torch.version.cuda} on PATH",
            )
        for name, effect in _BLOCKING.items():
            if os.environ.get(name, "0") not in ("", "0"):
                yield _setting(f"{name}={os.environ[name]} {effect}", f"unset {name}")
        yield from harmful_settings(device)
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        yield CaptureError(
            "anomaly detection reads every gradient on the host to check for NaNs",
            fix="torch.autograd.set_detect_anomaly(False), or check_nan=False",
        )


def cause_of(error: BaseException) -> ShardgradError:
    """Returns the cause of an error inside a capture. An error of this package is its own cause."""
    if isinstance(error, ShardgradError):
        return error
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    for key in (*codes, getattr(error, "error_code", None)):
        if key in _CAUSES:
            return _CAUSES[key]
    if "Cannot copy between CPU and CUDA tensors" in str(error):  # before torch calls CUDA
        return _COPY
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    return CaptureError(what, fix=_HOST_READ.fix)


def require_launch_order(groups: Iterable[dist.ProcessGroup]) -> None:
    """Refuses a graph with collectives of several communicators whose launches are not ordered.

    Args:
        groups: the process groups whose collectives were captured.

    Raises:
        CaptureError: several groups have more than one rank, and NCCL does not order their
            launches.
    """
    names = sorted(group.group_desc for group in groups if group.size() > 1)
    if len(names) > 1 and os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") in ("", "0"):
        raise CaptureError(
            f"it uses {len(names)} communicators ({', '.join(names)}), and a graph does not order "
            "their collectives: ranks that start them in different orders would deadlock",
            fix="export NCCL_LAUNCH_ORDER_IMPLICIT=1 on every rank, before Python starts",
        )


def harmful_settings(device: torch.device) -> Iterator[CaptureError]:
    """Yields the settings of CUDA's caching allocator with which a capture would leave the process
    in a broken state.
    """
    if device.type != "cuda":
        return
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        yield _setting(
            f"torch does not test graphs with the {backend} allocator",
            "remove backend: from PYTORCH_CUDA_ALLOC_CONF",
        )
        return
    # From the allocator, since a program may choose the setting without the environment.
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    if settings.get("expandable_segments") and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        yield _setting(
            "the allocator uses expandable segments, which NCCL tries to register for graphs",
            "export NCCL_GRAPH_REGISTER=0",
        )


@contextmanager
def watched(
    function: Callable[..., Any], modules: Sequence[nn.Module], found: list[str]
) -> Iterator[None]:
    """Surrounds an eager call on a device without graphs. Adds to `found` what a capture would
    refuse or freeze, as far as that shows there: lines of the program that read a tensor on the
    host, except in `outside`, and numbers that the function closes over and changes, such as those
    of a scheduler.

    Args:
        function: the step's function.
        modules: the modules that were passed to `graphed_step`.
        found: the list to add to.
    """
    before = list(closed_over(function, modules))
    with _HostReads(found):
        yield
    found += changed_numbers(before)


class _HostReads(TorchDispatchMode):
    """Adds the program's lines with operations of `_HOST_READS` to `found`."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keeps compiled regions compiled, as in `Reads`."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOST_READS:
            stack = traceback.extract_stack()
            reader = next(
                f for f in reversed(stack) if not f.filename.startswith((TORCH, __file__))
            )
            # This package reads tensors that are on the host on every device.
            is_allowed = eager_regions.__file__ in [frame.filename for frame in stack]
            if is_of_the_program(reader.filename) and not is_allowed:
                file, number, name, text = reader
                self._found.append(f"{file}:{number} in {name}: {text}")
        return func(*args, **(kwargs or {}))


def _setting(what: str, fix: str) -> CaptureError:
    return CaptureError(what, fix=f"{fix}, before Python starts")
