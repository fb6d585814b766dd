"""Custom collectives of a group, and the memory in which its messages are staged.

By default, the backend's transport sends messages from the engine's rings of slots. A program may
use its own collectives (torch's `Comm` protocol), stage in memory that the process group allocates,
or give reductions a separate process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.distributed.fsdp as torch_fsdp

from shardgrad.engine.buffers import Allocate, Chunks
from shardgrad.engine.comm_context import CollectiveConfig, CommContext, Route
from shardgrad.engine.param_group import ParamGroup
from shardgrad.engine.transports import MessageTag, StreamTransport, Work
from shardgrad.engine.unit import Unit
from shardgrad.errors import CustomCommError, unsupported
from shardgrad.sharding.mesh import new_group


def memory_of_process_group(group: dist.ProcessGroup) -> Allocate:
    """Returns the allocator of a group's staging memory: the backend's, or torch's if the backend
    has none.
    """

    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        backend = group._get_backend(device)
        if not backend.supports_tensor_alloc(device):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        return backend.allocate_tensor(nbytes, dtype=torch.uint8, device=device)

    return allocate


def symmetric_memory(group: dist.ProcessGroup) -> Allocate:
    """Returns an allocator of symmetric memory. All ranks of the group must allocate the same sizes
    in the same order.
    """

    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        pool = symm_mem.get_mem_pool(device)
        with torch.get_device_module(device).use_mem_pool(pool):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        symm_mem.rendezvous(memory, group=group.group_name)
        return memory

    return allocate


@dataclass(frozen=True, eq=False)
class CustomCollectives(CollectiveConfig):
    """Settings of one group's collectives.

    Attributes:
        all_gather: the program's own all-gather, an object with torch's `AllGather` protocol; or
            None.
        reduce_scatter: the program's own reduce-scatter, an object with torch's `ReduceScatter`
            protocol; or None.
        reduce_group: a process group of the same ranks for reductions only; or None.
        staging: a function that returns the allocator of a process group's staging memory; None for
            the default memory.
        exchanges: True if reductions receive the chunks of all ranks, which this rank sums:
            [Note: Wire dtype] in `wire_dtype.py`.
    """

    all_gather: Any = None
    reduce_scatter: Any = None
    reduce_group: dist.ProcessGroup | None = None
    staging: Callable[[dist.ProcessGroup], Allocate] | None = None
    exchanges: bool = False

    def for_gather(self, comm_ctx: CommContext, group: dist.ProcessGroup) -> Route:
        """See `CollectiveConfig`."""
        if self.all_gather is not None and group.size() > 1:
            return _own(comm_ctx, group, self.all_gather)
        ring = comm_ctx.gather_ring
        if self.staging is not None:
            key = self.staging, group, "gather"
            ring = comm_ctx.special_ring(key, self.staging(group), depth=2, elastic=True)
        return comm_ctx.transport(group), ring

    def for_reduce(self, comm_ctx: CommContext, group: dist.ProcessGroup) -> Route:
        """See `CollectiveConfig`."""
        group = group if self.reduce_group is None else self.reduce_group
        if self.reduce_scatter is not None and group.size() > 1:
            return _own(comm_ctx, group, self.reduce_scatter)
        ring = comm_ctx.reduce_ring
        staging = self.staging
        if staging is not None and (self.only_sums or staging is not symmetric_memory):
            key = staging, group, "reduce"
            ring = comm_ctx.special_ring(key, staging(group), depth=ring.depth)
        if not self.exchanges:
            return comm_ctx.transport(group), ring
        from shardgrad.features.wire_dtype import exchange_over

        return exchange_over(comm_ctx, group), ring


def collectives_of(group: ParamGroup) -> CustomCollectives:
    """Returns the present settings of a group."""
    current = group.collectives
    return current if isinstance(current, CustomCollectives) else CustomCollectives()


def set_collectives(groups: Iterable[ParamGroup], **settings: Any) -> None:
    """Changes attributes of `CustomCollectives` for groups. No collective may be in flight."""
    for group in groups:
        group.set_collectives(replace(collectives_of(group), **settings))


def _own(comm_ctx: CommContext, group: dist.ProcessGroup, comm: Any) -> Route:
    """Returns the route through a program's own collective.

    The route has one slot, since the collective's `allocate` may return the same memory each time.
    FSDP2 has one such buffer, too.
    """

    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        memory: torch.Tensor = comm.allocate((nbytes,), dtype=torch.uint8, device=device)
        return memory

    key = id(comm), group  # the transport holds the object, so no other gets its id
    transport = comm_ctx.own_transport(key, lambda: _CommTransport(group, comm))
    return transport, comm_ctx.special_ring(key, allocate, depth=1)


def separate_reductions(groups: Iterable[ParamGroup], *, enable: bool) -> None:
    """Creates a separate process group for reductions, one for each set of ranks, or stops using
    it.

    A collective among these ranks.
    """
    if not enable:
        set_collectives(groups, reduce_group=None)
        return
    separate: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for group in groups:
        ranks = tuple(dist.get_process_group_ranks(group.mesh.gather_group))
        separate[ranks] = (
            collectives_of(group).reduce_group
            or separate.get(ranks)
            or new_group(
                list(ranks), [group.mesh.gather_group], group.mesh.device, "fsdp_reduce_scatter"
            )
        )
        set_collectives([group], reduce_group=separate[ranks])


def stage_in_memory_of_process_group(unit: Unit, *, enable: bool) -> None:
    """Stages a unit's messages in memory that the process group allocates, or in the default
    memory.

    Raises:
        CustomCommError: the unit has custom collectives.
    """
    _require_default_comms(unit, "set_allocate_memory_from_process_group")
    set_collectives(unit.groups, staging=memory_of_process_group if enable else None)


def stage_in_symmetric_memory(unit: Unit, backend: Literal["NCCL"]) -> None:
    """Stages a unit's messages in symmetric memory of torch's `backend`; a collective.

    Raises:
        CustomCommError: the unit has custom collectives.
        RuntimeError: torch's own, if it was built without this backend.
    """
    _require_default_comms(unit, "set_symm_mem")
    for group in unit.groups:
        symm_mem.set_backend(backend)
        dist.barrier(group=group.mesh.gather_group)  # the group's communicator exists then
        set_collectives([group], staging=symmetric_memory)


def _require_default_comms(unit: Unit, method: str) -> None:
    for group in unit.groups:
        collectives = collectives_of(group)
        for comm in (collectives.all_gather, collectives.reduce_scatter):
            if comm is not None:
                raise CustomCommError(
                    f"{method}() does not support custom collectives",
                    expected="a unit with the engine's own collectives",
                    got=f"{type(comm).__name__}, which allocates its staging itself",
                    where=group.where,
                    fix="allocate that memory in the allocate() of the custom collective",
                )


def require_torchs(method: str, *parts: Any) -> None:
    """Refuses arguments of `method` that are not torch's own.

    Raises:
        UnsupportedError: an argument is not.
    """
    for part in parts:
        defined_in = getattr(part, "__module__", None) or ""
        if part is not None and not defined_in.startswith(f"{torch_fsdp.__name__}."):
            raise unsupported(
                f"FSDPModule.{method}({getattr(part, '__name__', part)})",
                instead="omit it, or use set_custom_all_gather and set_custom_reduce_scatter",
            )


class _CommTransport(StreamTransport):
    """A program's own collectives. The engine waits for the works that they return, and sends no
    tags.
    """

    receive_chunks = 1  # the output of a reduce-scatter is not part of its input, as under FSDP2

    def __init__(self, group: dist.ProcessGroup, comm: Any) -> None:
        super().__init__(group)
        self._comm = comm

    def all_gather(self, chunk: torch.Tensor, staging: Chunks, tag: MessageTag) -> Work:
        """See `Transport.all_gather`. Capture: as safe as the program's own."""
        own = staging.part(self.rank)
        if chunk.data_ptr() != own.data_ptr():
            own.copy_(chunk)  # the protocol's input lies in its output
        return self._call(own, staging.whole, tag)

    def reduce_scatter(self, send: Chunks, receive: Chunks, tag: MessageTag) -> Work:
        """See `Transport.reduce_scatter`: always a sum."""
        return self._call(send.whole, receive.part(0), tag, op=dist.ReduceOp.SUM)

    def _call(
        self, given: torch.Tensor, into: torch.Tensor, tag: MessageTag, **options: Any
    ) -> Work:
        tensors = {"output_tensor": into, "input_tensor": given}
        call = partial(self._comm, **tensors, **options, group=self.group, async_op=False)
        return self._start(call, [into], tag)
