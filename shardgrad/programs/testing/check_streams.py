"""Checking the order between a program's streams and the engine's: `with check_streams(model):
step()`.

Every operation of the block is recorded with the bytes it accesses and the stream it was launched
on. Two that access the same bytes, one of them writing, must be ordered: by an event that one
stream recorded and the other waited for, or by a wait of the host. If they are not, the result
depends on which is faster, and the report names the parameter, the operations, the streams and the
lines. It does not depend on timing: a race is reported even if the result happened to be right.

Recorded are operations of the calling thread and of autograd that go through torch's dispatcher,
the engine's included, and the device's trace of events, which has autograd's waits and NCCL's.

Not recorded are:

* kernels that are not dispatched: Triton called directly, other libraries, graph replays, compiled
regions; * which bytes of a strided view are skipped: a view counts from its first byte to its last;
* memory that is freed while a stream uses it, and what happened before the block;
* the moment a collective ends: it counts as work of the stream it was issued on.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from shardgrad.engine.param import local_of
from shardgrad.engine.root import RootContext, context_of
from shardgrad.engine.unit import units_under
from shardgrad.errors import RootError, ShardgradError, UnsupportedError
from shardgrad.programs.testing.event_order import EventOrder

__all__ = [
    "Order",
    "StreamCheckError",
    "StreamHazard",
    "StreamReport",
    "StreamUse",
    "check_streams",
]


class StreamCheckError(ShardgradError, RuntimeError):
    """`check_streams` was entered inside a `check_streams` of the same model."""


class Order(Protocol):
    """The order of work on a device; `EventOrder` for CUDA."""

    def start(self) -> None:
        """Starts following the device's events."""

    def stop(self) -> None:
        """Stops following them."""

    def now(self) -> Any:
        """Returns the end of the current stream's work, as a moment."""

    def is_ordered(self, moment: Any) -> bool:
        """Returns whether work launched on the current stream now runs after that moment."""


@dataclass(frozen=True)
class StreamUse:
    """One side of a hazard.

    Attributes:
        op: name of the operation, such as "aten::mul_" or "shardgrad::pack".
        writes: whether it writes the memory.
        stream: description of the stream.
        place: source location, "file:line in function", or "backward of" and the autograd node.
    """

    op: str
    writes: bool
    stream: str
    place: str

    def __str__(self) -> str:
        return f"{self.op} on {self.stream} ({self.place})"


@dataclass(frozen=True)
class StreamHazard:
    """Two unordered uses of the same bytes.

    Attributes:
        memory: such as "gradient of layers.0.weight".
        earlier: the use that the program launched first.
        later: the other one, which may overtake it.
        count: how often the same pair was found.
    """

    memory: str
    earlier: StreamUse
    later: StreamUse
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        does, did = (
            ("writes" if self.later.writes else "reads"),
            ("wrote" if self.earlier.writes else "read"),
        )
        return (
            f"{self.memory}: {self.later} {does} it, not ordered after {self.earlier}, which {did} "
            f"it{times}"
        )


@dataclass
class StreamReport:
    """The result of `check_streams`, complete when the block has ended.

    Attributes:
        hazards: in the order in which they were found, each pair of uses once.
        operations: how many were recorded; 0 on a device without streams.
        streams: descriptions of those that were used.
    """

    hazards: list[StreamHazard] = field(default_factory=list)
    operations: int = 0
    streams: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(map(str, self.hazards)) or (
            f"{self.operations} operations on {len(self.streams)} streams, all of them ordered"
        )


_watched: set[RootContext] = set()


@contextlib.contextmanager
def check_streams(model: nn.Module, *, order: Order | None = None) -> Iterator[StreamReport]:
    """Finds unordered work on streams, between the program and the engine or within either.

    Each hazard is printed as one sentence. After the block nothing is recorded any more, except
    that torch goes on tracing CUDA events to an empty list of callbacks. Inside, a step takes many
    times its usual time.

    Args:
        model: sharded, after at least one step: in the first step the host waits for the device
            often, which orders everything.
        order: for a device whose events torch does not trace; None for CUDA's own.

    Raises:
        RootError: nothing in `model` is sharded, or it has not run yet.
        StreamCheckError: a block inside a block of the same model.
        UnsupportedError: the events of the device's streams cannot be followed.
    """
    contexts = _contexts(model)
    device = contexts[0].comm_ctx.device
    report = StreamReport()
    if not _watched.isdisjoint(contexts):
        raise StreamCheckError(
            "check_streams() inside check_streams() of the same model",
            expected="one block at a time",
            got="a second one",
            fix="leave the outer block first; it covers what the inner one would",
        )
    if device.type in ("cpu", "meta"):
        order = None
    elif order is None:
        order = _order_of(device)
    _watched.update(contexts)
    try:
        if order is None:  # work is done when a call returns
            yield report
        else:
            with _watching(contexts, order, report):
                yield report
    finally:
        _watched.difference_update(contexts)


@contextlib.contextmanager
def _watching(contexts: list[RootContext], order: Order, report: StreamReport) -> Iterator[None]:
    order.start()
    watch = _Watch(contexts, order, report)
    try:
        with watch:
            yield
    finally:
        order.stop()
        watch.finish()
        for hazard in report.hazards:
            print(hazard)


def _contexts(model: nn.Module) -> list[RootContext]:
    units = units_under(model)
    contexts = list(
        dict.fromkeys(context for context in map(context_of, units) if context is not None)
    )
    if not contexts:
        raise RootError(
            "check_streams() needs a sharded model that has run",
            expected="a module with units of fully_shard, after its first forward",
            got=f"{type(model).__name__}, which {'has not run yet' if units else 'has no unit'}",
            fix="run one step, then `with check_streams(model): step()`"
            if units
            else "call shardgrad.fully_shard(model) first",
        )
    return contexts


def _order_of(device: torch.device) -> Order:
    if device.type != "cuda":
        raise UnsupportedError(
            f"check_streams() cannot follow the streams of {device.type}",
            expected="cuda, whose events torch traces, or an `order` for the device",
            got=device.type,
            fix="check_streams(model, order=...)",
        )
    return EventOrder(device)


# -- what an operation accesses

# They allocate memory or make views, and launch no work on it.
_NO_WORK = {
    "aten::_unsafe_view",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::lift_fresh",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
}


def _plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a value; of wrapper subclasses such as DTensor, the inner ones."""
    for leaf in tree_leaves(value):
        if is_traceable_wrapper_subclass(leaf):
            inner, _ = leaf.__tensor_flatten__()
            for name in inner:
                yield from _plain_tensors(getattr(leaf, name))
        elif isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield leaf


def _arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yields (tensor, whether it is written) for the tensors that an operation accesses."""
    schema = func._schema
    if schema.name in _NO_WORK:
        return
    for index, argument in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        if alias is not None and not alias.is_write:
            continue  # the result is a view of it
        writes = alias is not None
        if schema.name.startswith(
            "c10d::"
        ):  # their schemas do not say what they write; argument names do
            writes = argument.name.startswith("output") or argument.name == "tensors"
        for tensor in _plain_tensors(value):
            yield tensor, writes


def _made(func: Any, result: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yields the tensors that an operation has allocated and written."""
    if func._schema.name not in _NO_WORK:
        for tensor in _plain_tensors(result):
            if tensor.untyped_storage()._cdata not in seen:
                yield tensor


# -- the engine's memory


@dataclass(frozen=True)
class _Range:
    begin: int
    end: int
    name: str


def _range(tensor: torch.Tensor, name: str) -> _Range:
    begin = tensor.data_ptr()
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return _Range(begin, begin + (last + 1) * tensor.itemsize if tensor.numel() else begin, name)


def _buffers(context: RootContext) -> Iterator[_Range]:
    """Yields memory ranges that live as long as the model. A range may contain several storages."""
    rings = (context.comm_ctx.gather_ring, context.comm_ctx.reduce_ring)
    for slot in (slot for ring in rings for slot in ring.slots):
        yield _range(slot._bytes, "the engine's staging memory")
    for grads in context.grad_groups:
        group = grads.group
        yield _range(group.shard, f"shard of unit {group.name or 'root'!r}")
        if grads.shard is not None and grads.shard.has_memory:
            yield _range(grads.shard.flat, f"gradients of unit {group.name or 'root'!r}")
        if grads._sum is not None:
            yield _range(
                grads._sum._bytes, f"accumulated gradients of unit {group.name or 'root'!r}"
            )


def _parts(context: RootContext) -> Iterator[_Range]:
    """Yields the present memory of each parameter."""
    for grads in context.grad_groups:
        group = grads.group
        for p in group.params:
            yield _range(local_of(p.sharded), f"shard of {p.name}")
            if p.unsharded is not None and p.unsharded.untyped_storage().nbytes():
                yield _range(p.unsharded, f"parameter {p.name}")
        for place, p in enumerate(grads.params):
            if grads.shard is not None and grads.shard.has_memory:
                yield _range(grads.shard.view(place), f"gradient of {p.name}")
        for p, grad in zip(grads.params, grads.collector.gradients, strict=False):
            if grad is not None:
                yield _range(grad, f"gradient of {p.name}")
            if p.unsharded is not None and p.unsharded.grad is not None:
                yield _range(p.unsharded.grad, f"gradient of {p.name}")


# -- watching


@dataclass(frozen=True)
class _Access:
    begin: int
    end: int
    use: StreamUse
    moment: Any


@dataclass
class _Pair:
    """A hazard before the report is complete."""

    name: str
    begin: int
    end: int
    storage: StorageWeakRef
    earlier: StreamUse
    later: StreamUse
    count: int = 1


class _Watch(TorchDispatchMode):
    """Records every operation of the block, also those of autograd's threads."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True: compiled regions run compiled. Under other modes torch would not compile
        them.
        """
        return True

    def __init__(self, contexts: list[RootContext], order: Order, report: StreamReport) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._contexts = contexts
        self._order = order
        self._report = report
        self._device = contexts[0].comm_ctx.device
        self._main = torch.accelerator.current_stream(self._device)
        self._lock = threading.RLock()
        self._accesses: dict[int, list[_Access]] = {}
        self._storages: dict[int, StorageWeakRef] = {}
        self._pairs: list[_Pair] = []
        self._update_ranges()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not hasattr(func, "_schema"):
            return func(*args, **kwargs)
        with self._lock:
            before = list(_arguments(func, args, kwargs))
            self._record(func, before)
        result = func(*args, **kwargs)
        with self._lock:
            seen = {t.untyped_storage()._cdata for t in _plain_tensors((args, kwargs))}
            self._record(func, [(tensor, True) for tensor in _made(func, result, seen)])
        return result

    def _update_ranges(self) -> None:
        """Updates the addresses of the engine's memory."""
        ranges = (r for context in self._contexts for r in _buffers(context) if r.begin < r.end)
        self._engine = sorted(ranges, key=lambda r: r.begin)
        self._begins = [r.begin for r in self._engine]
        for number in [n for n, storage in self._storages.items() if storage.expired()]:
            del self._storages[number]
            self._accesses.pop(number, None)
        # A gradient gets its name when it reaches the engine, which may be after the race.
        for pair in self._pairs:
            if not pair.name and not pair.storage.expired():
                pair.name = self._name(pair.begin, pair.end)

    def _block(self, tensor: torch.Tensor, begin: int) -> int:
        """Returns the identity of a tensor's memory block: the engine's, or its storage."""
        place = bisect_right(self._begins, begin) - 1
        if place >= 0 and begin < self._engine[place].end:
            return -self._engine[place].begin
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            # A weak reference: the memory may be reused, but the identity may not while the
            # reference exists.
            self._storages[storage._cdata] = StorageWeakRef(storage)
        return int(storage._cdata)

    def _record(self, func: Any, tensors: Iterable[tuple[torch.Tensor, bool]]) -> None:
        touched = [
            (tensor, writes)
            for tensor, writes in tensors
            if tensor.device == self._device
            and tensor.numel()
            and tensor.untyped_storage().nbytes()
        ]
        if not touched:
            return
        if func.namespace == "shardgrad":
            self._update_ranges()
        moment, stream = self._order.now(), self._stream_name()
        self._report.operations += 1
        use = StreamUse(func._schema.name, False, stream, _place())
        for tensor, writes in touched:
            span = _range(tensor, "")
            access = _Access(span.begin, span.end, replace(use, writes=writes), moment)
            self._check(
                self._accesses.setdefault(self._block(tensor, span.begin), []), access, tensor
            )

    def _check(self, earlier: list[_Access], access: _Access, tensor: torch.Tensor) -> None:
        """Compares with earlier accesses of this block, and drops those that the new one
        supersedes.
        """
        kept = []
        for old in earlier:
            meets = old.begin < access.end and access.begin < old.end
            conflicts = meets and (old.use.writes or access.use.writes)
            # Accesses of one operation do not conflict. The order is asked for last, since that is
            # slow.
            if (
                conflicts
                and old.moment is not access.moment
                and not self._order.is_ordered(old.moment)
            ):
                self._add(old, access, tensor)
            covered = access.begin <= old.begin and old.end <= access.end
            repeated = not old.use.writes and old.use.stream == access.use.stream
            if not (covered and (access.use.writes or repeated)):
                kept.append(old)
        kept.append(access)
        earlier[:] = kept

    def _add(self, old: _Access, access: _Access, tensor: torch.Tensor) -> None:
        begin, end = max(old.begin, access.begin), min(old.end, access.end)
        name = self._name(begin, end)
        for pair in self._pairs:
            if (pair.earlier, pair.later, pair.name or name) == (old.use, access.use, name):
                pair.count += 1
                return
        self._pairs.append(
            _Pair(name, begin, end, StorageWeakRef(tensor.untyped_storage()), old.use, access.use)
        )

    def _name(self, begin: int, end: int) -> str:
        """Returns the name of some bytes; empty if they are not the engine's, or not yet."""
        parts = [part for context in self._contexts for part in _parts(context)]
        names = dict.fromkeys(part.name for part in parts if part.begin < end and begin < part.end)
        if len(names) > 3:
            return f"{next(iter(names))} and {len(names) - 1} more"
        engine = (r.name for r in self._engine if r.begin < end and begin < r.end)
        return ", ".join(names) or next(engine, "")

    def finish(self) -> None:
        """Completes the report."""
        counts: dict[tuple[str, StreamUse, StreamUse], int] = {}
        for pair in self._pairs:
            memory = (
                pair.name or f"a tensor of {pair.end - pair.begin} bytes that is not the engine's"
            )
            key = (memory, pair.earlier, pair.later)
            counts[key] = counts.get(key, 0) + pair.count
        self._report.hazards += [StreamHazard(*key, count=count) for key, count in counts.items()]

    def _stream_name(self) -> str:
        stream = torch.accelerator.current_stream(self._device)
        streams = self._contexts[0].comm_ctx.streams
        if stream == self._main:
            name = "the stream that the block began on"
        elif stream == streams.gather:
            name = "the engine's gather stream"
        elif stream == streams.reduce:
            name = "the engine's reduce stream"
        elif stream == streams.second:
            name = "the engine's stream of second steps"
        else:
            name = f"stream {stream.stream_id}"
        if name not in self._report.streams:
            self._report.streams.append(name)
        return name


_TORCH = str(Path(torch.__file__).parent)


def _place() -> str:
    """Returns the innermost source line outside of torch and this file, else the running autograd
    node.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith((_TORCH, "<")):
            return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    node = torch._C._current_autograd_node()
    return f"backward of {node.name()}" if node is not None else "no Python line"
