"""What a capture reads and writes without being given it, seen at its operations.

Tensors that the step closes over are noted with the places in which Python finds them
(`closed_over.py`), and memory of the device wherever the program has it: a graph is replayed only
while both are as they were. What a replay would not do, or could not put back, is refused at the
operation.

A tensor of the host reaches the device as a number, so its value is as much a part of the graph as
where it lies, wherever the program keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardgrad.engine.param import fsdp_param_of
from shardgrad.engine.streams import Stream, is_capturing
from shardgrad.errors import CaptureError
from shardgrad.graphs.closed_over import Place, address_of, closed_over, elements, value_of
from shardgrad.graphs.outputs import plain_tensors

__all__ = ["Reads"]

_CDATA = attrgetter("_cdata")  # what several objects of Python may stand for
_EXPIRED: Any = torch.UntypedStorage._expired


class Reads(TorchDispatchMode):
    """Notes what operations inside the block read and write without being given it.

    Args:
        function: of the step.
        modules: that the step was given.
        objects: among the arguments of the step.
        stream: on which the block runs.
        state: memory of the step's participants, who know themselves when it is another.
        generators: that the step was given.

    Attributes:
        places: of tensors that the function closes over and operations read, with `Place.key` at
            the beginning of the block.
        numbers: what the function closes over besides tensors, by the names of their places.
        groups: process groups in which operations of the block move tensors of a device.

    Raises:
        CaptureError: in the block, at an operation that uses a sharded module that is not among
            `modules`, or another generator, or that writes on a stream that is not captured.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Sequence[nn.Module],
        objects: Iterable[Any] = (),
        stream: Stream = None,
        state: Iterable[torch.Tensor] = (),
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream
        self.places: dict[Place, Hashable] = {}
        self.numbers: dict[str, Any] = {}
        self.groups: set[dist.ProcessGroup] = set()
        # Sharded modules that were not given, by the addresses of their parameters.
        self._others: dict[int, str] = {}
        self._made: set[int] = set()  # storages of the block's own
        self._state = set(map(_identity, plain_tensors(state)))
        self._generators = generators
        # By storages, memory that was there before the block, while the program keeps it; what that
        # is on a device, and its address; and of what was written in the block, the names of
        # places.
        self._memory: dict[int, StorageWeakRef] = {}
        self._on_device: dict[int, tuple[str, int]] = {}
        self._written: dict[int, str] = {}
        # By storages; with addresses of the beginning, since the block may replace what is there.
        self._candidates: dict[int, list[tuple[Place, Hashable]]] = {}
        registered = (chain(each.parameters(), each.buffers()) for each in modules)
        given = frozenset(map(id, chain.from_iterable(registered)))
        for place, value in closed_over(function, [*modules, *objects], given):
            if isinstance(value, nn.Module):
                for param in value.parameters():
                    if id(param) not in given and fsdp_param_of(param) is not None:
                        for tensor in plain_tensors([param]):
                            self._others.setdefault(tensor.data_ptr(), place.name)
            elif isinstance(value, torch.Tensor | list | tuple | dict):
                found = place, address_of(value)
                for tensor in plain_tensors(elements(value)):
                    self._candidates.setdefault(_identity(tensor), []).append(found)
            else:
                self.numbers.setdefault(place.name, value)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keeps compiled regions compiled; torch runs them eagerly under other modes."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = list(plain_tensors(leaves))
        written = set(map(id, _written(func, args, kwargs)))
        is_captured = self._stream is not None and is_capturing(self._stream.device)
        runs_on_host = is_captured and all(map(_is_of_host, tensors))
        if "c10d" in func.namespace:
            self.groups.update(_groups(leaves))
        if is_captured:
            self._require_given(leaves)
        for tensor in tensors:
            identity = _identity(tensor)
            if self._others and identity and (name := self._others.get(tensor.data_ptr())):
                _refuse_not_given(name)
            if identity in self._made:
                continue
            found = self._candidates.get(identity, [])
            if _is_of_host(tensor) and self._stream is not None:
                if not is_captured:  # the host does it at each replay again
                    continue
                if runs_on_host and id(tensor) in written:
                    _refuse_write_on_host(found[0][0].name if found else "a tensor")
                if not found and (runs_on_host or tensor.ndim == 0):
                    place = Place("a tensor of the host", tensor)
                    found = self._candidates[identity] = [(place, address_of(tensor))]
            for place, address in found:
                if place not in self.places:
                    self.places[place] = address, value_of(place.found())
            is_on_device = tensor.device.type not in ("cpu", "meta")
            name = found[0][0].name if found else ""
            # Storage that cannot be resized is a part of other memory, as a gradient's of its
            # shard. It does not tell whether that is still there, and what keeps it would be taken
            # for the program.
            if identity not in self._memory and identity and tensor.untyped_storage().resizable():
                memory = self._memory[identity] = StorageWeakRef(tensor.untyped_storage())
                if is_on_device and identity not in self._state:
                    what = f"a tensor of shape {tuple(tensor.shape)} that {func} reads"
                    address = tensor.untyped_storage().data_ptr()
                    self._on_device[memory.cdata] = name or what, address
            if id(tensor) in written:
                if is_on_device:
                    self._require_captured(tensor.device)
                self._written.setdefault(identity, name)
        result = func(*args, **kwargs)
        given = set(map(_identity, tensors))
        self._made.update({_identity(t) for t in plain_tensors(tree_leaves(result))} - given)
        return result

    def _require_given(self, leaves: Iterable[Any]) -> None:
        """Refuses a generator that is not put back before each replay. Torch says so up to 2.14."""
        for leaf in leaves:
            if isinstance(leaf, torch.Generator) and leaf.device.type != "cpu":
                own = torch.get_device_module(leaf.device).default_generators
                if _CDATA(leaf) not in map(_CDATA, (*self._generators, *own)):
                    raise CaptureError(
                        "it draws from a torch.Generator that graphed_step was not given",
                        fix="graphed_step(..., generator)",
                    )

    def _require_captured(self, device: torch.device) -> None:
        """Refuses a write on a stream that is no part of the capture, which takes place during it.
        On the step's own, between two parts of a split graph, torch writes what a graph draws from.
        """
        stream = torch.accelerator.current_stream(device)
        if stream != self._stream and not is_capturing(device):
            raise CaptureError(
                "it writes on a stream that is not captured, which a replay would not",
                expected="streams that wait for the step's, and that it waits for",
                got=str(stream),
                fix="inside the step, side.wait_stream(torch.cuda.current_stream()) before that "
                "work, and torch.cuda.current_stream().wait_stream(side) after it",
            )

    def refuse_kept(self, buffers: Iterable[torch.Tensor]) -> None:
        """Refuses a graph of a step that keeps an argument and reads it in the next call, where
        `buffers` has the next argument.
        """
        memory = set(map(_identity, buffers))
        for place in self.places:
            if memory.intersection(map(_identity, plain_tensors([place.found()]))):
                raise CaptureError(
                    f"it keeps an argument in {place.name}, and reads it in the next call",
                    expected="memory of the program's for what the next call reads",
                    got="the graph's input, which the next call writes over",
                    fix=f"{place.name}.copy_(...), or pass it as an argument",
                )

    def written(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the memory, as bytes, that was there before the block, was written in it, and is
        there now; with the name of its place, "" where the function closes over none.
        """
        for identity, name in self._written.items():
            if identity not in self._memory:
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(self._memory[identity].cdata)
            if storage is not None and storage.nbytes():
                empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
                yield name, empty.set_(storage, 0, (storage.nbytes(),), (1,))

    @property
    def is_gone(self) -> bool:
        """True if the program has let go of memory of a device that the block used and was not
        given, wherever it had it: what a replay would find there is something else.
        """
        return any(map(_EXPIRED, self._on_device))

    def gone(self) -> list[str]:
        """Returns what that memory was."""
        return [what for memory, (what, _) in self._on_device.items() if _EXPIRED(memory)]

    def leave_out(self, segments: Iterable[tuple[int, int]]) -> None:
        """Forgets memory between these addresses, which is the graph's: inductor allocates without
        an operation, so it was taken for the program's.
        """
        for begin, end in segments:
            self._on_device = {
                memory: (what, address)
                for memory, (what, address) in self._on_device.items()
                if not begin <= address < end
            }


def _refuse_write_on_host(name: str) -> NoReturn:
    raise CaptureError(
        f"it writes {name} on the host, which a replay would not",
        expected="writes to memory of the device",
        got="an operation of the host",
        where=name,
        fix="keep it on the device, or write it after the call, or in shardgrad.graphs.outside",
    )


def _refuse_not_given(name: str) -> NoReturn:
    raise CaptureError(
        f"it uses {name}, a sharded module that graphed_step was not given",
        expected="every sharded module that the step uses",
        got="one whose state a graph can neither guard nor put back",
        fix=f"graphed_step(..., {name})",
    )


def _groups(leaves: Sequence[Any]) -> Iterator[dist.ProcessGroup]:
    """Yields the process group among the arguments of a collective on a device."""
    if all(leaf.device.type == "cpu" for leaf in leaves if isinstance(leaf, torch.Tensor)):
        return
    named: dict[str, dist.ProcessGroup]
    named = {name: group for group, name in dist.distributed_c10d._world.pg_names.items()}
    for leaf in leaves:
        if isinstance(leaf, str) and leaf in named:  # of a functional collective
            yield named[leaf]
        elif isinstance(leaf, torch.ScriptObject):
            with suppress(RuntimeError):  # the operation of a sum
                yield dist.ProcessGroup.unbox(leaf)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yields what an operation writes; collectives do not declare it."""
    declared = func._schema.arguments
    given = dict(zip([each.name for each in declared], args, strict=False)) | kwargs
    for each in declared:
        is_write = each.alias_info is not None and each.alias_info.is_write
        if is_write or func.namespace == "c10d":
            yield from plain_tensors(tree_leaves(given.get(each.name)))


def _is_of_host(tensor: torch.Tensor) -> bool:
    """Returns whether the device gets what it holds as numbers; it reads pinned memory."""
    return tensor.device.type == "cpu" and not tensor.is_pinned()


def _identity(tensor: torch.Tensor) -> int:
    """Returns the identity of a tensor's storage; 0 if it has none, as sparse tensors."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return 0
