"""What a graph cannot record about one operation or one call, apart from where it happened.

A finding is the kind, the sentence and the fix of an obstacle. See `shardgrad.graphs.obstacles`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardgrad.graphs.recording import Operand

__all__ = ["Call", "Finding", "findings", "functions"]

Finding = tuple[str, str, str]

_LATER = "return the tensor from the step and read it afterwards"
_ON_DEVICE = f"keep it on the device (torch.where instead of an if), or {_LATER}"
_INPUT = (
    "make it before the step and pass it as an input, or compute it on the device (torch.full, torch.arange)"
)
_FIXED_SIZE = (
    "compute with a mask (torch.where, a product); in MoE routing, give each expert a fixed capacity"
)


@dataclass(frozen=True)
class Call:
    """One operation that has run.

    Attributes:
        leaves: everything in its arguments, lists taken apart.
        took, gave: tensors, those of wrapper subclasses unwrapped.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: Sequence[Any]
    took: Sequence[torch.Tensor]
    gave: Sequence[torch.Tensor]

    @property
    def name(self) -> str:
        """Such as "aten::mul_", without the overload."""
        return str(self.func._schema.name)

    @property
    def is_async_copy(self) -> bool:
        """Whether it copies, and was told not to wait."""
        wish = self.args[2:3] if self.name == "aten::copy_" else ()
        return bool(self.kwargs.get("non_blocking", any(wish)))


def findings(call: Call, device: torch.device, generators: set[int]) -> Iterator[Finding]:
    """Yields what a graph could not record about an operation.

    Args:
        call: the operation.
        device: the step's; on the CPU every tensor counts as one that would be on a device.
        generators: which a graph would know, by address.
    """
    own = next((t for t in call.took if t.device.type == device.type), None)
    if own is not None and _reads(call):
        yield (
            "host read",
            f"the host waits for a value of a tensor {_words(own)} ({call.func}: .item(), float(), if)",
            _ON_DEVICE,
        )
    elif own is not None and _size_depends_on_values(call):
        what = f"the size of what {call.func} makes of a tensor {_words(own)} depends on values"
        yield "data-dependent shape", f"{what}, for which the host waits", _FIXED_SIZE
    yield from _from_python(call, device) if call.name == "aten::lift_fresh" else _copies(call, device)
    for leaf in call.leaves:
        is_own = isinstance(leaf, torch.Generator) and leaf.device.type == device.type
        if is_own and leaf._cdata not in generators:
            what = f"{call.func} draws from a generator that a graph does not know, so it would repeat itself"
            yield "unregistered generator", what, "leave generator= out, to draw from the device's own"


def _reads(call: Call) -> bool:
    checks = call.name == "aten::_linalg_check_errors"
    return checks or torch.Tag.data_dependent_output in call.func.tags


def _size_depends_on_values(call: Call) -> bool:
    if call.name in ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        # A mask is turned into positions, unless one number is written: that is masked_fill.
        _, *indices, values = call.took
        return any(map(_is_mask, indices)) and values.numel() != 1
    if call.name == "aten::index":
        return any(map(_is_mask, call.took[1:]))
    if call.name == "aten::repeat_interleave":
        return call.kwargs.get("output_size") is None
    return torch.Tag.dynamic_output_shape in call.func.tags


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _from_python(call: Call, device: torch.device) -> Iterator[Finding]:
    """Looks at `torch.tensor(...)`. On the CPU a single number is let through: it would stay on the host."""
    (made,) = call.took
    if made.device.type == device.type and (device.type != "cpu" or made.ndim):
        what = f"a tensor {_words(made)} is made of Python values, which a replay would not read again"
        yield "copy from the host", what, _INPUT


def _copies(call: Call, device: torch.device) -> Iterator[Finding]:
    """Looks for tensors that cross between host and device; on the CPU none does."""
    if device.type == "cpu":
        return
    target = call.took[:1] if call.name == "aten::copy_" else call.gave
    if _any_on(call.took, device) and any(map(_is_host, target)):
        if not all(_may_be_recorded(call, t) for t in target):
            yield (
                "host read",
                f"{call.func} copies a tensor {_words(target[0])} to the host, which waits",
                _ON_DEVICE,
            )
    elif _any_on((*call.took, *call.gave), device):
        is_copy = call.name in ("aten::copy_", "aten::_to_copy")
        for t in filter(_is_host, call.took):
            # A single number goes with the launch, if it is not copied.
            if (is_copy or t.ndim) and not _may_be_recorded(call, t):
                yield (
                    "copy from the host",
                    f"{call.func} takes a tensor {_words(t)} out of the host's memory",
                    _INPUT,
                )


def _may_be_recorded(call: Call, host: torch.Tensor) -> bool:
    return call.is_async_copy and host.is_pinned()


def _is_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _any_on(tensors: Sequence[torch.Tensor], device: torch.device) -> bool:
    return any(t.device.type == device.type for t in tensors)


def _words(tensor: torch.Tensor) -> str:
    return str(Operand(tuple(tensor.shape), tensor.dtype))


def functions(device: torch.device) -> Iterator[tuple[Any, str, Finding]]:
    """Yields functions that no operation tells of, as owner and name, and what it means to call them."""
    methods = {"tolist": ".tolist()", "numpy": ".numpy()", "cpu": ".cpu()", "__repr__": "a print"}
    for name, written in methods.items():
        yield torch.Tensor, name, ("host read", f"{written} makes the host wait for a whole tensor", _LATER)
    module = torch.get_device_module(device)
    classes = (getattr(module, name, None) for name in ("Stream", "Event"))
    for owner in (torch.accelerator, module, *(c for c in classes if isinstance(c, type))):
        for name in ("synchronize", "query"):
            if hasattr(owner, name):
                what = f"{owner.__name__}.{name}() is called"
                yield owner, name, ("synchronisation", what, "call it after the step, or leave it out")
    for owner in (torch, module):
        if hasattr(owner, "manual_seed"):
            what = "the random seed is set, which a replay would not do again"
            yield owner, "manual_seed", ("seed", what, "set it before the first step")
