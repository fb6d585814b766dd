"""What `torch.compile` of each block does to recorded kernels: neighbours that can be one become
one.

Inductor fuses elementwise operations and reductions, and leaves products and attention to
libraries. A fused kernel reads what was written before it, and writes what is needed after it; what
is born and dies inside stays in registers. Inductor also recomputes cheap activations in backward,
which is not modeled: memory stays that of an eager step, which is the larger one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from shardgrad.plan.recording import Change, Event, Kernel

__all__ = ["fused"]

# Kernels of libraries, other than products: Inductor calls them as they are.
_LIBRARY = ("_scaled_dot_product", "sort", "topk", "index_add", "convolution")


def fused(events: Sequence[Event], changes: Iterable[Change]) -> list[Event]:
    """Returns the events with runs of the model's fusable kernels merged into the first one of each
    run.

    The others of a run stay in place, since waits refer to positions, and do nothing.

    Args:
        events: the events of a step.
        changes: the allocations and releases in it.
    """
    died: dict[int, list[int]] = {}  # a storage's releases, by the number of events before each
    for change in changes:
        if change.nbytes < 0:
            died.setdefault(change.storage, []).append(change.event)
    result = list(events)
    for run in _runs(events):
        kernels = [
            kernel for kernel in (events[number] for number in run) if isinstance(kernel, Kernel)
        ]
        last = run[-1]
        written = {storage: nbytes for kernel in kernels for storage, nbytes in kernel.written}
        outside: dict[int, int] = {}
        born: set[int] = set()
        for kernel in kernels:
            outside |= {storage: nbytes for storage, nbytes in kernel.read if storage not in born}
            born |= {storage for storage, _ in kernel.written}
        kept = {
            storage: nbytes
            for storage, nbytes in written.items()
            if not any(run[0] < moment <= last + 1 for moment in died.get(storage, ()))
        }
        nbytes = sum(outside.values()) + sum(kept.values())
        nbytes = min(nbytes, sum(kernel.nbytes for kernel in kernels))
        result[run[0]] = dataclasses.replace(kernels[0], name="fused", nbytes=nbytes)
        for number, kernel in zip(run[1:], kernels[1:], strict=True):
            result[number] = dataclasses.replace(kernel, name="fused", nbytes=0, is_launched=False)
    return result


def _runs(events: Sequence[Event]) -> Iterator[list[int]]:
    """Yields the positions of kernels that follow each other and can be fused."""
    run: list[int] = []
    for number, event in enumerate(events):
        if not isinstance(event, Kernel):
            continue
        if _is_fusable(event):
            run.append(number)
        elif event.stream == "compute":
            if len(run) > 1:
                yield run
            run = []
    if len(run) > 1:
        yield run


def _is_fusable(kernel: Kernel) -> bool:
    is_own = not kernel.is_engine and kernel.phase != "optimizer" and kernel.stream == "compute"
    return is_own and not kernel.flops and not kernel.name.startswith(_LIBRARY)
