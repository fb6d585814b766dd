"""The process group of virtual ranks: `torch.distributed` backend "simulated".

As with NCCL, a group has a communication stream on each rank. A collective makes it wait for the
caller's current stream, runs on it, and the caller's stream waits for it: at once, or with
`async_op` when the returned work is waited for. Until then the work keeps the tensors alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.simulated.accelerator import device

BACKEND = "simulated"

_REDUCTIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "product",
}


def own_name(name: str, rank: int) -> str:
    """Returns a rank's own name for a group that all its members call `name`."""
    return f"{name}@rank{rank}"


def abort(reason: str) -> None:
    """Makes every collective that waits, or is still to come, raise."""
    device.native().abort_groups(reason)


def forget() -> None:
    """Forgets the groups; graphs that captured their collectives keep what they need."""
    device.native().forget_groups()


class Work(dist._Work):
    """A collective under way."""

    def __init__(self, done: torch.Event, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._done = done
        self._tensors = list(tensors)

    def wait(self, timeout: Any = None) -> bool:
        """Makes the current stream wait; the host goes on."""
        if self._tensors:
            self._done.wait(torch.accelerator.current_stream(self._tensors[0].device))
        self._tensors = []
        return True


class SimulatedGroup(dist.ProcessGroup):
    """One rank's side of a group.

    Args:
        options: torch's description of the group.
    """

    def __init__(self, options: Any, _: Any = None) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._rank = options.group_rank
        self._size = options.group_size
        self._owner = device.rank_thread.rank
        self._name = str(options.group_id)
        members = sorted(options.global_ranks_in_group)
        timeout_s = options.timeout.total_seconds()
        self._number = device.native().group_of(f"{self._name} of {members}", self._size, timeout_s)
        self._device = torch.device(device.NAME, device.native().current_device())
        self.stream = torch.Stream(self._device, priority=-1)
        device.name_stream(self.stream, f"communication of group {self._name}")

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        """The name that other threads find this rank's group by."""
        return own_name(self._name, self._owner)

    @property
    def _device_types(self) -> list[torch.device]:
        """Where torch puts objects that it sends as tensors."""
        return [torch.device(device.NAME)]

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _enter(self, ready: torch.Event) -> None:
        """Makes the communication wait for what the caller's stream was given so far."""
        ready.wait(self.stream)

    def _launch(
        self,
        kind: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        opts: Any = None,
        reduction: Any = None,
        root: int = 0,
    ) -> Work:
        for tensor in (*inputs, *outputs):
            if tensor.device != self._device:
                raise device.errors.MixedDevicesError(
                    f"{kind}: expected tensors on {self._device}, this rank's device, got one on "
                    f"{tensor.device}"
                )
        caller = torch.accelerator.current_stream(self._device)
        ready = torch.Event(self._device)
        ready.record(caller)
        self._enter(ready)
        with self.stream, torch.no_grad():
            torch.ops.simulated.collective(
                list(inputs),
                list(outputs),
                kind,
                _reduction(reduction),
                root,
                self._number,
                self._rank,
            )
        done = torch.Event(self._device)
        done.record(self.stream)
        work = Work(done, [*inputs, *outputs])
        if not getattr(opts, "asyncOp", True):
            work.wait()
        return work

    def _cut(self, whole: torch.Tensor, sizes: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Returns one piece of a tensor for each rank; equal ones, or of so many rows."""
        if not sizes:
            flat = whole.view(-1)
            return (
                list(flat.split(flat.numel() // self._size))
                if flat.numel()
                else [flat] * self._size
            )
        return list(whole.split(list(sizes)))

    # The names are torch's. 2.13 renamed two; before, it calls the ones with an underscore.

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Work:
        return self._launch("all_gather", [input.view(-1)], self._cut(output), opts)

    _allgather_base = all_gather_single

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Work:
        return self._launch(
            "reduce_scatter",
            self._cut(input),
            [output.view(-1)],
            opts,
            opts.reduceOp if opts else None,
        )

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work:
        return self._launch(
            "all_to_all",
            self._cut(input, input_split_sizes),
            self._cut(output, output_split_sizes),
            opts,
        )

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        return self._launch("all_reduce", tensors, tensors, opts, opts.reduceOp if opts else None)

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)  # what others than the root get is undefined

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        return self._launch("broadcast", tensors, tensors, opts, root=opts.rootRank if opts else 0)


def _reduction(op: Any) -> str:
    return "" if op is None else next(name for known, name in _REDUCTIONS.items() if op == known)


def _create(options: Any, backend_options: Any) -> SimulatedGroup:
    return SimulatedGroup(options, backend_options)


if BACKEND.upper() not in dist.Backend._plugins:
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=[device.NAME])
