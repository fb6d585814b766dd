"""Memory that can be given back and taken again at the same address.

A range of addresses is reserved for as long as a tensor lives in it; the memory behind it comes and
goes. So what knows the address (a view, a captured graph, a receiver's registration) is right
again once the memory is back. On the host these are pages of `mmap`, on CUDA the driver's calls for
virtual memory, and neither allocator of torch is asked. Contents are kept in a file, or in pinned
memory of the host.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

__all__ = ["bring_back", "give_back", "is_virtual", "virtual_zeros"]

_PAGES = "_shardgrad_pages"  # set on the tensor that owns the memory


def virtual_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocates a zeroed 1-D tensor whose memory can be given back."""
    nbytes = numel * dtype.itemsize
    if nbytes == 0 or device.type == "meta":
        return torch.zeros(numel, dtype=dtype, device=device)
    pages = _HostPages(nbytes) if device.type == "cpu" else _DevicePages(nbytes, device)
    tensor = pages.whole.view(dtype)
    tensor.__dict__[_PAGES] = pages
    return tensor


def is_virtual(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's memory can be given back."""
    return _PAGES in tensor.__dict__


def give_back(tensors: Iterable[torch.Tensor], *, keep: bool = True) -> None:
    """Gives memory back, after all work on it; contents are kept elsewhere, or forgotten.

    Streams: the host waits for the device. Capture: not safe.
    """
    for tensor in tensors:
        pages: _Pages = tensor.__dict__[_PAGES]
        pages.give_back(keep)


def bring_back(tensors: Iterable[torch.Tensor]) -> None:
    """Takes memory again where it was, with what was kept, or zeros.

    Streams: filled on the current one. Capture: not safe.
    """
    for tensor in tensors:
        pages: _Pages = tensor.__dict__[_PAGES]
        pages.bring_back()


class _Pages(ABC):
    """A range of addresses; `whole` is a tensor of bytes over it, which keeps it alive."""

    whole: torch.Tensor

    @abstractmethod
    def give_back(self, keep: bool) -> None:
        """See the function."""

    @abstractmethod
    def bring_back(self) -> None:
        """See the function."""


class _HostPages(_Pages):
    def __init__(self, nbytes: int) -> None:
        # Shared pages, which are the default, would stay when they are given back.
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._file: Any = None

    def give_back(self, keep: bool) -> None:
        if keep:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  # until it is read
            self._file.write(self._map)
        self._map.madvise(mmap.MADV_DONTNEED)

    def bring_back(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with file:
                file.seek(0)
                file.readinto(self._map)


# -- CUDA


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Allocation(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _DLTensor(ctypes.Structure):  # DLManagedTensor, of DLPack
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_DEVICE, _PINNED, _READ_WRITE, _DLPACK_CUDA, _UNSIGNED = 1, 1, 3, 2, 1
# Of memory that a tensor lies in, by address: what DLPack reads, and the size of the range.
_alive: dict[int, tuple[_DLTensor, Any, int]] = {}
_mapped: set[int] = set()  # addresses of ranges that have memory
# Addresses and devices of tensors that have ended; inside a capture, they wait for its end.
_ended: list[tuple[int, int]] = []


class _DevicePages(_Pages):
    def __init__(self, nbytes: int, device: torch.device) -> None:
        _free_ended()
        index = torch.cuda.current_device() if device.index is None else device.index
        location = _Location(_DEVICE, index)
        self._kind = _Allocation(_PINNED, 0, location)
        self._access = _Access(location, _READ_WRITE)
        torch.cuda.current_stream(
            index
        )  # the driver is asked for memory of a context that is there
        grain, address = ctypes.c_size_t(), ctypes.c_uint64()
        _driver("cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(self._kind), 0)
        self._nbytes = -(-nbytes // grain.value) * grain.value
        size, zero = ctypes.c_size_t(self._nbytes), ctypes.c_uint64(0)
        _driver("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), zero, zero)
        self._address = address.value
        self._map()
        self.whole = _tensor_over(self._address, nbytes, index, self._nbytes).zero_()
        self._kept: torch.Tensor | None = None
        self._is_kept = False

    def _map(self) -> None:
        handle, none = ctypes.c_uint64(), ctypes.c_uint64(0)
        size, address = ctypes.c_size_t(self._nbytes), ctypes.c_uint64(self._address)
        _driver("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._kind), none)
        _driver("cuMemMap", address, size, ctypes.c_size_t(0), handle, none)
        _driver("cuMemSetAccess", address, size, ctypes.byref(self._access), ctypes.c_size_t(1))
        _driver("cuMemRelease", handle)  # it goes when it is unmapped
        _mapped.add(self._address)

    def give_back(self, keep: bool) -> None:
        _free_ended()
        self._is_kept = keep
        torch.cuda.synchronize(self.whole.device)  # any stream may have written it
        if keep:
            if self._kept is None:  # once: pinning takes longer than a copy
                self._kept = torch.empty_like(self.whole, device="cpu", pin_memory=True)
            self._kept.copy_(self.whole, non_blocking=True)
        torch.cuda.synchronize(self.whole.device)
        _mapped.remove(self._address)
        _driver("cuMemUnmap", ctypes.c_uint64(self._address), ctypes.c_size_t(self._nbytes))

    def bring_back(self) -> None:
        self._map()
        if self._is_kept and self._kept is not None:
            self.whole.copy_(self._kept, non_blocking=True)
        else:
            self.whole.zero_()


@cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _driver(name: str, *arguments: Any) -> None:
    """Calls a function of CUDA's driver."""
    status = getattr(_library(), name)(*arguments)
    if status == 2:
        raise torch.cuda.OutOfMemoryError(f"CUDA out of memory: {name}")
    if status:
        raise RuntimeError(f"{name} failed with CUDA error {status}")


def _tensor_over(address: int, nbytes: int, index: int, reserved: int) -> torch.Tensor:
    """Returns a tensor of bytes, whose end gives memory and addresses back."""
    shape = (ctypes.c_int64 * 1)(nbytes)
    managed = _DLTensor(address, _DLPACK_CUDA, index, 1, _UNSIGNED, 8, 1, shape)
    managed.deleter = ctypes.cast(_deleter, ctypes.c_void_p)
    _alive[address] = managed, shape, reserved
    capsule = _new_capsule(ctypes.addressof(managed), b"dltensor", None)
    return torch.from_dlpack(capsule)  # type: ignore[attr-defined]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def _free(managed: Any) -> None:
    _ended.append((managed.contents.data, managed.contents.device_id))
    if not torch.cuda.is_current_stream_capturing():  # which a wait for the device would break
        _free_ended()


def _free_ended() -> None:
    while _ended:
        address, index = _ended.pop()
        _, _, reserved = _alive.pop(address)
        torch.cuda.synchronize(index)
        size = ctypes.c_size_t(reserved)
        if address in _mapped:
            _mapped.remove(address)
            _library().cuMemUnmap(ctypes.c_uint64(address), size)
        _library().cuMemAddressFree(ctypes.c_uint64(address), size)


_deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLTensor))(_free)
