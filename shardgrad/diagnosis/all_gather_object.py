"""All-gather of Python objects that, unlike torch.distributed.all_gather_object, does not need
numpy.
"""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import torch
import torch.distributed as dist

from shardgrad.diagnosis.flight_recorder import recorder

__all__ = ["all_gather_object"]


def all_gather_object(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns the objects of all ranks of a group, in the order of its ranks. A collective.

    Args:
        value: any object that can be pickled. Unpickling runs code, so the ranks have to trust each
            other.
        group: a process group of any backend.

    Streams: the current stream of the group's device; the host waits for it.
    """
    device = dist.distributed_c10d._get_object_coll_device(group)
    payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = torch.empty(group.size(), dtype=torch.int64, device=device)
    size = torch.tensor([payload.numel()], dtype=torch.int64, device=device)
    _all_gather(list(sizes.split(1)), size, group)
    lengths = sizes.tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: payload.numel()] = payload
    rows = [torch.empty(max(lengths), dtype=torch.uint8, device=device) for _ in lengths]
    _all_gather(rows, padded.to(device), group)
    return [
        pickle.loads(_bytes_of(row.cpu(), length))
        for row, length in zip(rows, lengths, strict=True)
    ]


def _all_gather(rows: list[torch.Tensor], own: torch.Tensor, group: dist.ProcessGroup) -> None:
    log = recorder.group_log(group)
    entry = log.record("comparison of the ranks", None)
    log.wait_for(dist.all_gather(rows, own, group=group, async_op=True), entry)


def _bytes_of(row: torch.Tensor, length: int) -> bytes:
    return ctypes.string_at(row.data_ptr(), length)
