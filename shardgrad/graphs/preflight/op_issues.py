"""Issues of one operation or one call: what a graph cannot record about it, without the source
location.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardgrad.graphs.preflight.op_trace import Operand

__all__ = ["OpCall", "OpIssue", "op_issues", "synchronizing_functions"]


class OpIssue(NamedTuple):
    """Kind, sentence and fix of an `Issue`, which adds where it happened."""

    kind: str
    what: str
    fix: str


_LATER = "return the tensor from the step and read it afterwards"
_ON_DEVICE = f"keep it on the device (torch.where instead of an if), or {_LATER}"
_INPUT = (
    "make it before the step and pass it as an input, or compute it on the device (torch.full, "
    "torch.arange)"
)
_FIXED_SIZE = (
    "compute with a mask (torch.where, a product); in MoE routing, give each expert a fixed "
    "capacity"
)


@dataclass(frozen=True)
class OpCall:
    """One operation that has run.

    Attributes:
        func: the operator.
        args, kwargs: its arguments.
        leaves: the flattened arguments.
        inputs, outputs: tensors; of wrapper subclasses the inner ones.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: Sequence[Any]
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]

    @property
    def name(self) -> str:
        """Such as "aten::mul_", without the overload."""
        return str(self.func._schema.name)

    @property
    def is_async_copy(self) -> bool:
        """Whether it is a copy with `non_blocking=True`."""
        positional = self.args[2:3] if self.name == "aten::copy_" else ()
        return bool(self.kwargs.get("non_blocking", any(positional)))


def op_issues(call: OpCall, device: torch.device, generators: set[int]) -> Iterator[OpIssue]:
    """Yields what a graph cannot record about an operation.

    Args:
        call: the operation.
        device: of the step. On the CPU every tensor is treated as if it were on an accelerator.
        generators: addresses of the generators that a graph registers.
    """
    on_device = next((t for t in call.inputs if t.device.type == device.type), None)
    if on_device is not None and _reads(call):
        what = f"the host waits for a value of a tensor {_describe(on_device)}"
        yield OpIssue("host read", f"{what} ({call.func}: .item(), float(), if)", _ON_DEVICE)
    elif on_device is not None and _size_depends_on_values(call):
        what = (
            f"the size of what {call.func} makes of a tensor {_describe(on_device)} depends on "
            "values"
        )
        yield OpIssue("data-dependent shape", f"{what}, for which the host waits", _FIXED_SIZE)
    yield from (
        _from_python(call, device) if call.name == "aten::lift_fresh" else _copies(call, device)
    )
    for leaf in call.leaves:
        draws = isinstance(leaf, torch.Generator) and leaf.device.type == device.type
        if draws and leaf._cdata not in generators:
            what = (
                f"{call.func} draws from a generator that no graph registers, so it would repeat "
                "itself"
            )
            fix = "leave generator= out, to draw from the device's default generator"
            yield OpIssue("unregistered generator", what, fix)


def _reads(call: OpCall) -> bool:
    checks = call.name == "aten::_linalg_check_errors"
    return checks or torch.Tag.data_dependent_output in call.func.tags


def _size_depends_on_values(call: OpCall) -> bool:
    if call.name in ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        # A mask is turned into positions, unless one number is written: that is masked_fill.
        _, *indices, values = call.inputs
        return any(map(_is_mask, indices)) and values.numel() != 1
    if call.name == "aten::index":
        return any(map(_is_mask, call.inputs[1:]))
    if call.name == "aten::repeat_interleave":
        return call.kwargs.get("output_size") is None
    return torch.Tag.dynamic_output_shape in call.func.tags


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _from_python(call: OpCall, device: torch.device) -> Iterator[OpIssue]:
    """Yields the issue of `torch.tensor(...)`. A scalar on the CPU has none: it would stay on the
    host.
    """
    (made,) = call.inputs
    if made.device.type == device.type and (device.type != "cpu" or made.ndim):
        what = (
            f"a tensor {_describe(made)} is made of Python values, which a replay does not read "
            "again"
        )
        yield OpIssue("copy from the host", what, _INPUT)


def _copies(call: OpCall, device: torch.device) -> Iterator[OpIssue]:
    """Yields the issues of copies between host and device; there are none on the CPU."""
    if device.type == "cpu":
        return
    target = call.inputs[:1] if call.name == "aten::copy_" else call.outputs
    if _any_on(call.inputs, device) and any(map(_is_host, target)):
        if not all(_may_be_recorded(call, t) for t in target):
            yield OpIssue(
                "host read",
                f"{call.func} copies a tensor {_describe(target[0])} to the host, which waits",
                _ON_DEVICE,
            )
    elif _any_on((*call.inputs, *call.outputs), device):
        is_copy = call.name in ("aten::copy_", "aten::_to_copy")
        for t in filter(_is_host, call.inputs):
            # A scalar is an argument of the launch, unless it is copied.
            if (is_copy or t.ndim) and not _may_be_recorded(call, t):
                yield OpIssue(
                    "copy from the host",
                    f"{call.func} reads a tensor {_describe(t)} from host memory",
                    _INPUT,
                )


def _may_be_recorded(call: OpCall, host: torch.Tensor) -> bool:
    return call.is_async_copy and host.is_pinned()


def _is_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _any_on(tensors: Sequence[torch.Tensor], device: torch.device) -> bool:
    return any(t.device.type == device.type for t in tensors)


def _describe(tensor: torch.Tensor) -> str:
    return str(Operand(tuple(tensor.shape), tensor.dtype))


def synchronizing_functions(device: torch.device) -> Iterator[tuple[Any, str, OpIssue]]:
    """Yields functions that no operation reports: (owner, name, the issue of calling it)."""
    methods = {"tolist": ".tolist()", "numpy": ".numpy()", "cpu": ".cpu()", "__repr__": "a print"}
    for name, written in methods.items():
        what = f"{written} makes the host wait for a whole tensor"
        yield torch.Tensor, name, OpIssue("host read", what, _LATER)
    module = torch.get_device_module(device)
    classes = (getattr(module, name, None) for name in ("Stream", "Event"))
    for owner in (torch.accelerator, module, *(c for c in classes if isinstance(c, type))):
        for name in ("synchronize", "query"):
            if hasattr(owner, name):
                what = f"{owner.__name__}.{name}() is called"
                yield (
                    owner,
                    name,
                    OpIssue("synchronisation", what, "call it after the step, or leave it out"),
                )
    for owner in (torch, module):
        if hasattr(owner, "manual_seed"):
            what = "the random seed is set, which a replay would not do again"
            yield owner, "manual_seed", OpIssue("seed", what, "set it before the first step")
