"""Prevents glibc from returning the memory of a training step to the kernel after every step."""

from __future__ import annotations

import ctypes
import sys

# From <malloc.h>: parameters of mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_NEVER = 2**31 - 1  # mallopt takes an int
_OLD_LIMIT_NBYTES = 32 * 2**20  # older glibc refuses a larger mmap threshold
_TOP_PAD_NBYTES = 64 * 2**20


def keep_freed_memory() -> bool:
    """Keeps freed memory in this process's heap, so that the next step finds it mapped.

    On CPU PyTorch has no caching allocator: activations and gradients come from `malloc`. By
    default glibc maps each block above a dynamic threshold (at most 32 MiB) separately and unmaps
    it on free, and trims the top of the heap, so that every step pays a page fault and a zeroed
    page for every 4 KiB it touches. This function makes large blocks come from the heap, which is
    never trimmed and grows in steps of 64 MiB. The cost is that the process keeps its peak memory
    until it ends, as a training rank does in any case.

    Returns:
        True if it took effect; False if the C library is not glibc or refused.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    mapped = libc.mallopt(_M_MMAP_THRESHOLD, _NEVER) or libc.mallopt(
        _M_MMAP_THRESHOLD, _OLD_LIMIT_NBYTES
    )
    trimmed = libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    padded = libc.mallopt(_M_TOP_PAD, _TOP_PAD_NBYTES)
    return bool(mapped and trimmed and padded)
