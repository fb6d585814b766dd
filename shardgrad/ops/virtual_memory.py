"""Memory that can be released and mapped again at the same address.

A range of addresses stays reserved as long as a tensor uses it, while its physical memory is
unmapped and mapped again. So everything that holds the address (a view, a captured graph, a
receiver's registration) is valid again once the memory is mapped. The host uses `mmap`, and CUDA
the driver's virtual memory API (`csrc/cuda/pages.cpp`), which torch's allocator uses only for a
`VirtualPool`. Contents are saved to a file, or to pinned host memory.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shardgrad.errors import OptionError, unsupported
from shardgrad.ops.library import build_command

_PAGES = "_shardgrad_pages"  # set on the tensor that owns the memory

_away: weakref.WeakSet[_HostPages | _DevicePages] = weakref.WeakSet()  # those that are released


def virtual_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocates a zeroed 1-D tensor whose memory can be released."""
    if device.type == "meta":
        return torch.zeros(numel, dtype=dtype, device=device)
    nbytes = max(numel, 1) * dtype.itemsize  # no range of addresses is empty
    pages = _HostPages(nbytes) if device.type == "cpu" else _DevicePages(nbytes, device)
    tensor = pages.whole.view(dtype)[:numel]
    tensor.__dict__[_PAGES] = pages
    return tensor


def is_virtual(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's memory can be released."""
    return _PAGES in tensor.__dict__


def is_released(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's memory, which other tensors may share, is released."""
    address = tensor.untyped_storage().data_ptr() if _away else 0
    return any(pages.whole.untyped_storage().data_ptr() == address for pages in _away)


def require_virtual(tensors: Iterable[torch.Tensor]) -> None:
    """Refuses tensors whose memory cannot be released."""
    if not all(map(is_virtual, tensors)):
        raise OptionError(
            "the memory of a unit cannot be released",
            expected="offload_policy=SleepPolicy() in each fully_shard of the model",
            got="a unit without it",
            fix="fully_shard(module, offload_policy=shardgrad.SleepPolicy())",
        )


def give_back(tensors: Iterable[torch.Tensor], *, keep: bool = True) -> None:
    """Releases memory after all work on it. Contents are saved if `keep`, else lost.

    If they cannot be saved, such as on a full disk, nothing is released.

    Streams: the host waits for the device. Capture: not safe.
    """
    with ExitStack() as undo:
        for tensor in tensors:
            pages: _HostPages | _DevicePages = tensor.__dict__[_PAGES]
            pages.give_back(keep)
            _away.add(pages)
            undo.callback(bring_back, [tensor])
        undo.pop_all()


def bring_back(tensors: list[torch.Tensor]) -> None:
    """Maps memory again at the same addresses, with its saved contents, or zeros.

    Takes out of the list what is back, so that a call that failed, such as for want of memory, can
    be repeated.

    Streams: filled on the current one. Capture: not safe.
    """
    while tensors:
        pages: _HostPages | _DevicePages = tensors[-1].__dict__[_PAGES]
        pages.bring_back()
        _away.discard(pages)
        del tensors[-1]


class _HostPages:
    """Host pages. `whole` is a byte tensor over them, which keeps them alive."""

    def __init__(self, nbytes: int) -> None:
        # Private pages: shared ones, the default of mmap, would keep their memory when released.
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._file: Any = None

    def give_back(self, keep: bool) -> None:
        if keep:
            file: Any = tempfile.TemporaryFile()  # noqa: SIM115  # until it is read
            file.write(self._map)
            file.flush()  # a full disk fails here, and not when it is read
            self._file = file
        self._map.madvise(mmap.MADV_DONTNEED)

    def bring_back(self) -> None:
        if self._file is not None:
            self._file.seek(0)
            self._file.readinto(self._map)
            self._file.close()
            self._file = None


# -- CUDA


_Range = tuple[int, int, int]  # address, bytes, index of the device

# Ranges of freed tensors. During a capture they are kept until it ends.
_ended: list[_Range] = []


class _DevicePages:
    """Device pages. `whole` is a byte tensor over them, which keeps them alive."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        _free_ended()
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.current_stream(index)  # there is a context then, which the driver wants
        address = _library().shardgrad_pages_alloc(nbytes, index, None)
        if not address:
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory: {nbytes} bytes for a shard")
        self._range = address, nbytes, index
        self.whole = _tensor_over(self._range).zero_()
        storage = self.whole.untyped_storage()  # lives as long as any tensor over it
        weakref.finalize(storage, _end, self._range).atexit = False
        self._kept: torch.Tensor | None = None
        self._is_kept = False

    def give_back(self, keep: bool) -> None:
        _free_ended()
        self._is_kept = keep
        torch.cuda.synchronize(self.whole.device)  # any stream may have written it
        if keep:
            if self._kept is None:  # once: pinning takes longer than a copy
                self._kept = torch.empty_like(self.whole, device="cpu", pin_memory=True)
            self._kept.copy_(self.whole, non_blocking=True)
        torch.cuda.synchronize(self.whole.device)
        _change("unmap", self._range)

    def bring_back(self) -> None:
        _change("map", self._range)
        if self._is_kept and self._kept is not None:
            self.whole.copy_(self._kept, non_blocking=True)
        else:
            self.whole.zero_()


class VirtualPool:
    """A memory pool of torch's CUDA allocator for graphs, which is released and mapped again as a
    whole.

    Its contents are not saved, since a replay reads only memory of the pool that it has written.
    The outputs of earlier replays become NaN.

    Attributes:
        id: the pool's id, for captures.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.MemPool(_allocator())
        self.id = self._pool.id
        self._away: list[_Range] = []

    def give_back(self) -> None:
        """Releases the memory after all work on it.

        Streams: the host waits for the device. Capture: not safe.
        """
        torch.cuda.synchronize()
        self._away = [
            (segment["address"], segment["total_size"], segment["device"])
            for segment in torch.cuda.memory_snapshot(self.id)
        ]
        for each in self._away:
            _change("unmap", each)

    def bring_back(self) -> None:
        """Maps the memory again at the same addresses.

        Streams: filled on the current one. Capture: not safe.
        """
        while self._away:
            each = self._away[-1]
            _change("map", each)
            _tensor_over(each).fill_(0xFF)  # a NaN in every floating-point dtype
            del self._away[-1]


@cache
def _library() -> Any:
    paths = map(Path, torch.ops.loaded_libraries)
    ours = [path for path in paths if path.parts[-2:] == ("shardgrad", "_C.so")]
    library: Any = ctypes.CDLL(str(ours[0])) if ours else None
    if not hasattr(library, "shardgrad_pages_alloc"):
        raise unsupported(
            "SleepPolicy() on CUDA without the compiled kernels", instead=build_command()
        )
    address, size, index = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.shardgrad_pages_alloc.restype = address
    library.shardgrad_pages_alloc.argtypes = (size, index, address)
    library.shardgrad_pages_free.argtypes = (address, size, index, address)
    for change in (library.shardgrad_pages_map, library.shardgrad_pages_unmap):
        change.argtypes = (address, size, index)
    return library


@cache
def _allocator() -> Any:
    """Returns the allocator of the pools' memory. It has to live as long as any pool."""
    functions = _library().shardgrad_pages_alloc, _library().shardgrad_pages_free
    addresses: Any = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    return torch._C._cuda_customAllocator(*addresses)


def _change(what: str, pages: _Range) -> None:
    """Maps or unmaps the memory of a range."""
    status = getattr(_library(), f"shardgrad_pages_{what}")(*pages)
    if status == 2:
        raise torch.cuda.OutOfMemoryError(f"CUDA out of memory: {pages[1]} bytes")
    if status:
        raise RuntimeError(f"cuMem{what.capitalize()} failed with CUDA error {status}")


def _tensor_over(pages: _Range) -> torch.Tensor:
    address, nbytes, index = pages
    device = torch.device("cuda", index)
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _end(pages: _Range) -> None:
    _ended.append(pages)
    if not torch.cuda.is_current_stream_capturing():  # which a wait for the device would break
        _free_ended()


def _free_ended() -> None:
    while _ended:
        pages = _ended.pop()
        torch.cuda.synchronize(pages[2])
        _library().shardgrad_pages_free(*pages, None)
