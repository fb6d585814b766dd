"""All-gathers that read the other ranks' memory: `fully_shard(comm="symmetric_memory")`.

[Note: Windows]
A *window* is symmetric memory of torch: each rank of a process group has one, and all can read it.
A rank copies its chunk into its window, in the dtype that is gathered, and then each piece of each
window to its place in the unsharded parameters:

    barrier: every rank has read the windows, for whichever gather came before
    chunk -> own window
    barrier: every rank has written its window
    windows -> unsharded parameters, from the next rank's window on

So the chunks of other ranks are neither staged nor copied out. A piece of a parameter that is
sharded on dim 0 is one range, which a copy engine can copy, and compute keeps all SMs. Rows may be
uneven.

All of this runs on the gather stream, so one window serves all units. The first barrier comes
before the write, not after the reads: whoever waits for a gather does not wait for ranks that read
more slowly. It also needs no knowledge of what came before, such as another unit, a replay of a
graph, or a gather that was dropped.

A process group that cannot have windows uses collectives. All its ranks decide that together, when
its first gather is made.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Sequence
from ctypes import CDLL
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.engine.buffers import Allocate, Slot
from shardgrad.engine.comm_context import CollectiveConfig, CommContext
from shardgrad.engine.param_group import AllGather, FSDPParam
from shardgrad.engine.streams import wait_for_device
from shardgrad.engine.tracing import span
from shardgrad.engine.transports import MessageTag
from shardgrad.features.hfsdp import HfsdpGather
from shardgrad.sharding.layout import ShardLayout
from shardgrad.sharding.mesh import DataParallelMesh


def gather_through_windows(
    chunk: torch.Tensor,
    layout: ShardLayout,
    mesh: DataParallelMesh,
    dtype: torch.dtype,
    tag: MessageTag,
    comm_ctx: CommContext,
    collectives: CollectiveConfig,
) -> AllGather:
    """Returns a group's all-gather: through windows, or the one that `fully_shard` uses by default.

    A collective, at the first call for a process group.
    """
    transport, ring = collectives.for_gather(comm_ctx, mesh.gather_group)
    # What a program sets for the messages of a unit comes first, such as its own all-gather.
    is_default = transport.sends and ring is comm_ctx.gather_ring
    kinds: tuple[type[AllGather], type[AllGather]] = (AllGather, WindowGather)
    if mesh.levels is not None:
        kinds = (HfsdpGather, HfsdpWindowGather)
    kind = kinds[is_default and has_windows(mesh.gather_group, comm_ctx.device)]
    return kind(chunk, layout, mesh, dtype, tag, comm_ctx, collectives)


class WindowGather(AllGather):
    """An all-gather through windows. See [Note: Windows]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.in_place = True

    def write_into(self, unsharded: torch.Tensor, params: Sequence[FSDPParam]) -> None:
        """See `AllGather`: all parameters are written to. A collective."""
        layout, group = self.layout, self.transport.group
        allocate = _symmetric_memory_of(group)
        self.ring = self.comm_ctx.special_ring((WindowGather, group), allocate, depth=1)
        # A larger window replaces the ring's for later gathers. This one keeps its own.
        sizes = [(self.dtype, 1, self.chunk.numel())]
        _, (window,) = self.ring.take(sizes, self.streams.gather)
        self._window = self._gathered = window.whole
        self._handle = symm_mem.rendezvous(self._window, group.group_name)
        self._slot = Slot(self.streams, self.comm_ctx.device)  # for its events
        self._log = recorder.group_log(group)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.inference_mode(mode=False):
            places = layout.whole.local_views(unsharded, 0)
            for further in range(1, group.size() + 1):
                peer = (group.rank() + further) % group.size()
                theirs = self._handle.get_buffer(peer, self._window.shape, self.dtype)
                # Over two levels a window has the chunks of several ranks: [Note: Two levels] in
                # `hfsdp.py`.
                for outer, chunk in enumerate(theirs.split(layout.chunk_numel)):
                    rank = outer * group.size() + peer
                    pieces = layout.local_views(chunk, rank)
                    for piece, place, p in zip(pieces, places, layout.pieces, strict=True):
                        if piece.numel():
                            self._copies.append((p.of(place, rank), piece))
        self.layout = replace(layout, pieces=())  # nothing is copied out
        self.table = self.layout.table

    def launch(self, name: str, version: object, finish: Callable[[], None]) -> None:
        """See `AllGather`. Capture: safe; a replay reads the windows again."""
        stream = self.streams.gather
        with span("all_gather", name), self.streams.on(stream):
            self.comm_ctx.parameters_ready.wait(stream)
            self._log.record(self.tag.what)
            self._handle.barrier()
            self._window.copy_(self.chunk, non_blocking=True)
            self._handle.barrier()
            for place, piece in self._copies:
                place.copy_(piece, non_blocking=True)
            self._slot.ready.record(stream)


class HfsdpWindowGather(HfsdpGather, WindowGather):
    """`HfsdpGather` with windows for inner shards."""


def _symmetric_memory_of(group: dist.ProcessGroup) -> Allocate:
    """Returns an allocator of windows; to allocate is a collective."""

    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        # Not from torch's pool of symmetric memory: it keeps what is freed, and ranks that free at
        # different times would not agree on which allocations are new.
        module = torch.get_device_module(device)
        # torch 2.11 fills signals and the table of addresses in the default stream, and nothing
        # waits for that.
        with module.stream(module.default_stream(device)):
            memory = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
            wait_for_device(device)
            symm_mem.rendezvous(memory, group.group_name)
            wait_for_device(device)
        return memory

    return allocate


# -- whether there are windows


# Decided once for each group, since all its ranks take part. A group that a program has destroyed
# is not kept alive.
_decided = WeakKeyDictionary[dist.ProcessGroup, bool]()


def has_windows(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Returns whether the ranks of a group can have windows, and warns if they cannot.

    The same on every rank. A collective at the first call.
    """
    if group not in _decided:
        _decided[group] = _agree(group, device)
    return _decided[group]


def _agree(group: dist.ProcessGroup, device: torch.device) -> bool:
    here = why_not_here(device), socket.gethostname()
    reasons, hosts = map(set, zip(*_of_all_ranks(group, here), strict=True))
    if len(hosts) > 1:
        reasons.add("its ranks are on several hosts")
    if reasons == {None}:
        made = partial(_symmetric_memory_of(group), 1, device)
        reasons = set(_of_all_ranks(group, _refusal(made)))
    found = sorted(filter(None, reasons))
    if found:
        _warn(found[0])
    return not found


def why_not_here(device: torch.device) -> str | None:
    """Returns why this process has no symmetric memory on a device, or None if it has."""
    # torch's allocator calls NVML without looking whether it is there, as in some containers.
    nvml = _refusal(partial(CDLL, "libnvidia-ml.so.1")) if device.type == "cuda" else None
    return nvml or _refusal(partial(symm_mem.empty, 1, dtype=torch.uint8, device=device))


def _refusal(make: Callable[[], object]) -> str | None:
    try:
        make()
    except (OSError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    return None


def _of_all_ranks(group: dist.ProcessGroup, answer: Any) -> list[Any]:
    answers = [None] * group.size()
    dist.all_gather_object(answers, answer, group=group)
    return answers


@lru_cache(maxsize=256)  # once for each reason
def _warn(reason: str) -> None:
    warnings.warn(
        'shardgrad: comm="symmetric_memory" uses collectives, because a process group has no '
        f"symmetric memory: {reason}",
        stacklevel=2,
    )
