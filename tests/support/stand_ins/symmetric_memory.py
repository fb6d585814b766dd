"""torch's symmetric memory for ranks on the CPU, which share files instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from shardgrad.features.symmetric_memory import _decided

# What is known stays, so that no address is used again.
_known: dict[tuple[int, str], SharedFiles] = {}


class SharedFiles(NamedTuple):
    """The methods of torch's `_SymmetricMemory` that are used."""

    group: Any
    memories: list[torch.Tensor]

    def get_buffer(self, rank: int, sizes: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return self.memories[rank].view(dtype)[: sizes.numel()].view(sizes)

    def barrier(self) -> None:
        dist.barrier(self.group)


def empty(nbytes: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    memory = torch.full((nbytes + 7 & ~7,), 0xFF, dtype=dtype, device=device)  # NaN
    memory.untyped_storage()._share_filename_cpu_()
    return memory


def rendezvous(memory: torch.Tensor, group_name: Any) -> SharedFiles:
    key = memory.data_ptr(), group_name
    if key not in _known:
        group = dist.distributed_c10d._resolve_process_group(group_name)
        files: list[Any] = [None] * group.size()
        dist.all_gather_object(files, memory.untyped_storage()._share_filename_cpu_(), group)
        storages = [torch.UntypedStorage._new_shared_filename_cpu(*file) for file in files]
        memories = [memory.new_empty(0).set_(each) for each in storages]
        memories[group.rank()] = memory
        _known[key] = SharedFiles(group, memories)
        dist.barrier(group)
    return _known[key]


@contextmanager
def symmetric_memory_on_the_cpu() -> Iterator[None]:
    torchs = "torch.distributed._symmetric_memory"
    stream = mock.patch.object(torch.cpu, "default_stream", torch.cpu.current_stream, create=True)
    with mock.patch.multiple(torchs, empty=empty, rendezvous=rendezvous), stream:
        _decided.clear()
        yield
    _decided.clear()
