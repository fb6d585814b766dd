"""Records which memory outside of the graph a capture reads and writes, operation by operation.

For each tensor that the step closes over, the capture records the places where Python finds it
(`closed_over.py`). For all other device memory, it records whether the program still holds it. A
graph is replayed only while both are unchanged. An operation whose effect a replay would not repeat
or whose state could not be restored is refused at its line.

A CPU tensor reaches the device by value, like a number. So the graph depends on its value as well
as on its address, wherever the program keeps it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _resolve_process_group
from torch._library.utils import zip_schema
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardgrad.engine.param_group import fsdp_param_of
from shardgrad.engine.streams import is_capturing
from shardgrad.errors import CaptureError, ReplayMismatchError, listed
from shardgrad.graphs.closed_over import (
    GONE,
    Place,
    address_of,
    changes,
    closed_over,
    is_same,
    named_by_code,
    tensors_in,
)
from shardgrad.graphs.outputs import (
    host_value,
    is_of_host,
    is_slice,
    plain_tensors,
    storage_ids,
    storage_of,
)
from shardgrad.graphs.pool import GraphPool

_CDATA = attrgetter("_cdata")  # the C++ object, of which there may be several Python wrappers
_DETACH = torch.ops.aten.detach.default
_EXPIRED: Any = torch.UntypedStorage._expired


class Reads(TorchDispatchMode):
    """Records the memory that operations inside the block read and write and that they did not
    create.

    Args:
        function: the step's function.
        modules: the modules that were passed to `graphed_step`.
        objects: the objects among the step's arguments that are neither tensors nor numbers.
        pool: the pool of the graph that the block is captured in.
        state: tensors of capturables, whose replacement the guards detect.
        inputs: the graph's inputs, which hold the next call's arguments in the next call.
        generators: the generators that were passed to `graphed_step`.
        known: places that other graphs of the step read. Those without a tensor are among `places`
            in the end: with one, the step might read it.

    Attributes:
        places: the places of tensors that the function closes over and that an operation reads,
            with `Place.key` at the beginning of the block.
        numbers: the values other than tensors that the function closes over, with their places.
        groups: the process groups whose collectives in the block have device tensors.
        changed_constants: returns the names of the constants and functions that the step's code
            names and that have changed; none before `guard_constants`.

    Raises:
        CaptureError: in the block, at an operation that uses a trained or sharded parameter that is
            not among those of `modules` or a generator that is not among `generators`, that writes
            a CPU tensor, or that writes on a stream that is not captured.
    """

    changed_constants: Callable[[], list[str]] = list

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Sequence[nn.Module],
        objects: Iterable[Any],
        pool: GraphPool,
        state: Iterable[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        generators: Sequence[torch.Generator],
        known: Iterable[Place] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool = pool
        self.places: dict[Place, Hashable] = {}
        self._empty = {
            place: place.key() for place in known if not isinstance(place.found(), torch.Tensor)
        }
        self._of_graph: dict[Place, Hashable] = {}  # those of the present part of a split graph
        self.numbers: list[tuple[Place, Any]] = []
        self.groups: set[dist.ProcessGroup] = set()
        # Storages that operations of the block created. While a weak reference exists, no other
        # storage, such as one that is created without an operation, gets the same identity.
        self._made: dict[int, StorageWeakRef] = {}
        self._inputs = storage_ids(inputs)
        self._state = self._inputs | storage_ids(state)
        self._generators = generators
        # Storages that existed before the block. Those on a device, with a description and the
        # address; and those that the block writes, with the name of the place.
        self._on_device: dict[int, tuple[StorageWeakRef, str, int]] = {}
        self._written: dict[int, tuple[StorageWeakRef, str]] = {}
        # By storage: the places where the function finds it. The addresses are recorded now, since
        # the block may put another tensor there.
        self._candidates = defaultdict[int, list[tuple[Place, Hashable]]](list)
        # By `Place.where`: the place, the tensor there before the block, and its address.
        self._before: dict[Hashable, tuple[Place, Callable[[], Any], Hashable]] = {}
        self._given = {id(x) for each in modules for x in (*each.parameters(), *each.buffers())}
        self._search = partial(closed_over, function, [*modules, *objects])
        found = list(self._search())
        self._constants = named_by_code(found)
        for place, value in found:
            if not isinstance(value, torch.Tensor):
                self.numbers.append((place, value))
            elif fsdp_param_of(value) is None:
                address = address_of(value)
                self._before[place.where] = place, ref(value), address
                if id(value) not in self._given:  # whose addresses are guards
                    for storage in storage_ids([value]):
                        self._candidates[storage].append((place, address))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keeps compiled regions compiled. torch runs them eagerly under other dispatch modes."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = list(plain_tensors(leaves))
        written = set(map(id, _written(func, args, kwargs)))
        is_captured = is_capturing(self._pool.device)
        runs_on_host = all(map(is_of_host, tensors))
        if not runs_on_host:  # a collective on the host is not part of the graph
            self.groups.update(groups_among(leaves))
        if is_captured:
            for leaf in leaves:
                self._require_given(leaf, func)
        for tensor in tensors:
            # In an eager region, which every replay runs again, the host may do what it likes.
            is_free = not is_captured and is_of_host(tensor)
            if not is_free and storage_of(tensor) not in self._made:
                is_written = id(tensor) in written
                self._note(tensor, func, runs_on_host=runs_on_host, is_written=is_written)
        result = func(*args, **kwargs)
        known = {0, *map(storage_of, tensors)}
        for made in plain_tensors(tree_leaves(result)):
            if storage_of(made) not in known:
                self._made[storage_of(made)] = StorageWeakRef(made.untyped_storage())
        return result

    def _note(
        self, tensor: torch.Tensor, func: Any, *, runs_on_host: bool, is_written: bool
    ) -> None:
        """Notes that an operation uses a tensor that the block did not create."""
        identity = storage_of(tensor)
        is_on_device = tensor.device.type not in ("cpu", "meta")
        by_value = is_of_host(tensor) and (runs_on_host or tensor.ndim == 0)
        found = self._candidates[identity]
        if identity in self._inputs:  # a place may hold what an earlier call has stored there
            found = [each for each in found if self._before[each[0].where][1]() is tensor]
        if by_value and not found:
            found.append((Place("a host tensor", tensor), address_of(tensor)))
        for place, address in found:
            key = address, host_value(place.found())
            self._of_graph[place] = self.places.setdefault(place, key)
        name = found[0][0].name if found else ""
        if is_written:
            if runs_on_host:
                raise CaptureError(
                    f"it writes {name} on the host, so a replay would not write it",
                    where=name,
                    fix="keep it on the device, or write it after the call or in "
                    "shardgrad.graphs.outside",
                )
            # A write on a stream that is not captured is executed now and not by a replay. The
            # step's own stream is exempt, since between the parts of a split graph torch writes the
            # state of random generators on it.
            is_eager = is_on_device and not is_capturing(tensor.device)
            stream = torch.accelerator.current_stream(tensor.device) if is_eager else None
            if stream not in (None, self._pool.stream):
                raise CaptureError(
                    "it writes on a stream that is not captured, so a replay would not write",
                    fix="inside the step, side.wait_stream(torch.cuda.current_stream()) before "
                    "that work, and torch.cuda.current_stream().wait_stream(side) after it",
                )
        # The lifetime of a slice is not that of the memory, and references of the engine would be
        # mistaken for the program's. Of a tensor without elements nothing is read.
        if tensor.numel() and identity and not is_slice(tensor):
            memory = tensor.untyped_storage()
            if is_written:
                self._written.setdefault(identity, (StorageWeakRef(memory), name))
            if is_on_device and identity not in self._state:
                what = name or f"a tensor of shape {tuple(tensor.shape)} that {func} reads"
                noted = StorageWeakRef(memory), what, memory.data_ptr()
                self._on_device.setdefault(identity, noted)

    def _require_given(self, leaf: Any, func: Any) -> None:
        """Refuses a generator that is not registered with the graph, which torch up to 2.14
        refuses as well, and a parameter whose gradient or shard the graph could neither guard nor
        restore.
        """
        if isinstance(leaf, torch.Generator) and leaf.device.type != "cpu":
            own = torch.get_device_module(leaf.device).default_generators
            if _CDATA(leaf) not in map(_CDATA, (*self._generators, *own)):
                raise CaptureError(
                    "it draws from a torch.Generator that was not passed to graphed_step",
                    fix="graphed_step(..., generator)",
                )
        managed = fsdp_param_of(leaf)
        if managed is not None:
            param, name = managed.sharded, managed.name
        else:
            param, name = leaf, "a tensor that requires a gradient"
            # Asked first, since `is_leaf` raises for some views that the block has written.
            if not torch.is_grad_enabled() or func is _DETACH:
                return
            if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad or not leaf.is_leaf:
                return
            # A tensor that the block made, or of the state or the inputs, is none of the program's.
            if storage_ids([leaf]) - self._state <= self._made.keys():
                return
        if id(param) not in self._given:
            raise CaptureError(
                f"it uses {name}, which is no parameter of a module that was passed to "
                "graphed_step",
                fix="graphed_step(..., module); and make an nn.Parameter of a module of a tensor "
                "that is trained by itself",
            )

    def next_graph(self) -> Callable[[], None]:
        """Called where a call in `outside` splits the graph. Returns a function that each replay
        calls there: it raises if the call has replaced a tensor that the next graph reads.
        """
        self._of_graph = places = dict[Place, Hashable]()

        def require_same() -> None:
            changed = (place.name for place, found in places.items() if place.key() != found)
            if replaced := list(dict.fromkeys(changed)):
                raise ReplayMismatchError(
                    f"a call in `outside` has replaced {listed(replaced)}",
                    expected="the tensors that the graph was captured with",
                    got="others, which the rest of the graph does not read; the step is incomplete",
                    fix="copy into the existing tensor: x.copy_(...); or replace it between calls",
                )

        return require_same

    def left_on_host(self) -> list[tuple[Place, Any]]:
        """Called at the end of the block. Refuses a step that steps a schedule, appends tensors to
        a list or replaces the data of a tensor, and one that stores an argument and reads it in the
        next call.

        Returns:
            (place, value) of what a replay has to assign: the tensors that the block has put into
            attributes, dictionaries and lists that the function closes over, which are those that
            it made, such as a loss for the log, and others, such as two buffers that it has
            exchanged; and what is now where a tensor was, such as a hint that is used once.
        """
        for place, value in self.numbers:
            # The count of a schedule of torch's is its `last_epoch`.
            is_count = any(
                get is tensors_in or name == "last_epoch" for get, name in place.way[-1:]
            )
            if is_count and place.found() not in (None, GONE, value):
                raise CaptureError(
                    f"it changes {place.name} from {value}, which a replay would not do",
                    fix="schedule.step() after the call; return a tensor, and append it there",
                )
        for place in self.places:
            if self._inputs & storage_ids([place.found()]):
                raise CaptureError(
                    f"it stores an argument in {place.name}, and reads it in the next call",
                    fix=f"{place.name}.copy_(...), or pass it as an argument",
                )

        self.places = self._empty | self.places
        before = [place for place, *_ in self._before.values()]
        gone = [place for place in before if not isinstance(place.found(), torch.Tensor)]
        left = [place.assignment() for place in reversed(gone)]  # of a list, the last one first
        for place, value in self._search():
            if not isinstance(value, torch.Tensor) or fsdp_param_of(value) is not None:
                continue
            _, former, address = self._before.get(place.where, (place, type(None), ()))
            if former() is not value:
                left.append(place.assignment())
                # A replay assigns the same tensor, so it must still be where the block took it.
                for storage in storage_ids([value]) - self._made.keys():
                    for source, found in self._candidates[storage]:
                        self.places.setdefault(source, (found, host_value(value)))
            elif address_of(value) != address:
                raise CaptureError(
                    f"it replaces the data of {place.name}, which a replay would not do",
                    fix=f"{place.name}.copy_(...)",
                )
        return left

    def assignments(self, left: Iterable[tuple[Place, Any]]) -> list[Callable[[], object]]:
        """Called after the capture, before `close`. Returns functions to call after each replay,
        which assign what `left_on_host` has returned.

        Tensors that the block made are copied out of the graphs' memory. They live until the next
        assignment, and until then a graph that was captured before them may use that memory.
        """
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by storage, of all its bytes

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if storage_of(tensor) not in self._made or is_of_host(tensor):
                return tensor
            whole = _bytes_of(tensor.untyped_storage())
            copy, _ = copies.setdefault(storage_of(tensor), (torch.empty_like(whole), whole))
            place = copy.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
            return tensor.data.set_(*place)

        puts = [
            partial(place.put, tree_map_only(torch.Tensor, copied, value)) for place, value in left
        ]
        return [*(partial(copy.copy_, whole) for copy, whole in copies.values()), *puts]

    def written(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, bytes) of each storage that existed before the block, was written in it,
        and still exists. The name is that of its place, or "" if the function does not close over
        it.
        """
        for memory, name in self._written.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)
            if storage is not None:
                yield name, _bytes_of(storage)

    def writes(self, tensor: torch.Tensor) -> bool:
        """Returns whether an operation of the block wrote the tensor's storage."""
        return storage_of(tensor) in self._written

    def close(self) -> None:
        """Forgets what the block made, and the memory that turned out to be the graph's: Inductor
        allocates it without a dispatched operation, so it looked like memory of the program.
        """
        self._made.clear()
        self._before.clear()  # torch swaps no tensor that has a weak reference
        own = list(self._pool.segments())
        for identity, (_, _, address) in list(self._on_device.items()):
            if _EXPIRED(identity) and any(begin <= address < end for begin, end in own):
                del self._on_device[identity]

    def steady_since(self, before: Reads) -> set[Hashable]:
        """Called after the capture, if it agrees with the one before it. Returns where constants
        are that have not changed since. Others, such as a count of calls, cannot matter.
        """
        former = {place.where: value for place, value in before._constants}
        return {
            place.where
            for place, value in self._constants
            if is_same(former.get(place.where), value) and is_same(place.found(), value)
        }

    def guard_constants(self, steady: set[Hashable]) -> None:
        """Makes constants guards that are at these places."""
        guarded = [(place, value) for place, value in self._constants if place.where in steady]
        self.changed_constants = changes(guarded)

    def changed(self) -> list[str]:
        """Returns what a replay would read other than an eager step: tensors that the block read
        and that the program has replaced, and device memory from outside of the graph that it has
        freed.
        """
        replaced = [place.name for place, found in self.places.items() if place.key() != found]
        freed = compress(self._on_device.values(), map(_EXPIRED, self._on_device))
        return [*replaced, *(what for _, what, _ in freed)]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    content = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return content.set_(storage, 0, (storage.nbytes(),), (1,))


def groups_among(leaves: Iterable[Any]) -> Iterator[dist.ProcessGroup]:
    """Yields the process group among a collective's arguments."""
    for leaf in leaves:
        with suppress(RuntimeError):  # a string that names no group, or a ReduceOp
            if isinstance(leaf, str):  # of a functional collective
                yield _resolve_process_group(leaf)  # type: ignore[arg-type]
            elif isinstance(leaf, torch.ScriptObject):
                yield dist.ProcessGroup.unbox(leaf)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors that an operation writes. For c10d these are all its tensors, since the
    schemas of collectives do not declare writes.
    """
    for declared, given in zip_schema(func._schema, args, kwargs):
        is_write = declared.alias_info is not None and declared.alias_info.is_write
        if is_write or func.namespace == "c10d":
            yield from plain_tensors(tree_leaves(given))
