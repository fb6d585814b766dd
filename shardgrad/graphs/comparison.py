"""What a capture has frozen: two captures of a step run from the same state, and are compared.

The partner of a graph is a second capture, made in the next call, when Python has had the chance to
change what it changes from call to call. An eager step would be none: it needs the memory of
activations twice; code that asks whether it is being captured rightly gives it other bits; and it
cannot run once more without Python doing its part once more. That last is needed, since some
kernels have no fixed order of sums, such as attention's backward, whose atomics give the same bits
for a while and others then. A difference by chance shows when both graphs are replayed again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardgrad.graphs.capturable import Capturable
from shardgrad.graphs.host_state import host_snapshot
from shardgrad.graphs.outputs import named, plain_tensors
from shardgrad.ops.library import has_kernels
from shardgrad.ops.virtual_memory import virtual_zeros

__all__ = ["Comparison"]

_PIECE_NBYTES = 2**24
_ALIGNMENT = 512  # of a copy, as in torch's allocator
_ODD = -0x61C8864680B583EB  # 2**64 divided by the golden ratio
_ROUNDS = 6  # what differs by chance in every fourth run is taken for frozen once in 10,000 then


class Comparison:
    """Compares two captures of a step from the state that it finds when it is made.

    Args:
        capturables: whose state a step starts from.
        memory: all that the step writes, with names. What is of no capturable and has no name,
            since the step's function does not close over it, is restored and not compared: it may
            be scratch.
        device: whose random numbers are drawn.
        generators: that the step draws from in addition.
    """

    def __init__(
        self,
        capturables: Sequence[Capturable],
        memory: Iterable[tuple[str, torch.Tensor]],
        device: torch.device,
        generators: Sequence[torch.Generator],
    ) -> None:
        self._capturables = capturables
        self._others: list[tuple[str, torch.Tensor]] = []
        known = {tensor.untyped_storage()._cdata for _, tensor in self._state()}
        self._others = [(n, t) for n, t in memory if t.untyped_storage()._cdata not in known]
        self._restore_host = host_snapshot(capturables, device, generators)
        self._device = device
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the memory in which the state of capturables lies now, by its name."""
        for number, each in enumerate(self._capturables):
            suffix = f" (capturable {number})" if len(self._capturables) > 1 else ""
            for name, tensor in each.tensors():
                yield from _inner(name + suffix, tensor)
        yield from ((name, tensor) for name, tensor in self._others if name)

    def restore(self) -> None:
        """Makes the next step start from the state; memory is put back once `frozen` has begun."""
        with torch.no_grad():
            for tensor, value in self._copies:
                tensor.copy_(value)
        self._restore_host()

    def frozen(
        self,
        first: Callable[[], Any],
        again: Callable[[], Any],
        groups: Iterable[dist.ProcessGroup],
    ) -> tuple[Any, list[str]]:
        """Replays two captures of a step; the effects of the last replay stay.

        Where anything differs on any rank, all ranks replay both again, to tell what is frozen from
        what differs by chance.

        Args:
            first: a replay of one capture.
            again: a replay of the other.
            groups: in which the step communicates, so that its ranks agree.

        Returns:
            What `again` returned, and the names of the outputs and the memory in which `first` gave
            the same bits each time, and `again` never these.

        Streams: everything on the current stream; the host waits for each replay.
        Capture: not safe.
        """
        self.restore()  # the host's state, which the second capture has changed
        self._copy_memory()
        of_first: dict[str, set[Hashable]] = {}
        of_again: dict[str, set[Hashable]] = {}
        outputs: Any = None
        frozen: list[str] = []
        for number in range(_ROUNDS):
            if number:
                self.restore()
            self._note(first(), of_first)
            self.restore()
            outputs = again()
            self._note(outputs, of_again)
            frozen = [
                name
                for name, bits in of_again.items()
                if len(of_first.get(name, ())) == 1 and bits.isdisjoint(of_first[name])
            ]
            if not _on_any_rank(bool(frozen), groups, self._device):
                break
        return outputs, frozen

    def _note(self, outputs: Any, seen: dict[str, set[Hashable]]) -> None:
        """Adds the bits that a replay has left, by the names of outputs and memory."""
        of_outputs = (_inner(f"output{path}", leaf) for path, leaf in named(outputs))
        for name, tensor in chain(chain.from_iterable(of_outputs), self._state()):
            seen.setdefault(name, set()).add(_digest(tensor))

    def _copy_memory(self) -> None:
        # What was staged may have given its memory back since.
        self._others = [(n, t) for n, t in self._others if t.untyped_storage().nbytes()]
        scratch = [tensor for name, tensor in self._others if not name]
        memory = [*scratch, *(tensor for _, tensor in self._state())]
        self._copies = list(zip(memory, _copies(memory, self._device), strict=True))


def _inner(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields what a tensor consists of, each by a name of its own."""
    for number, each in enumerate(plain_tensors([tensor])):
        yield f"{name}, inner tensor {number}" if number else name, each


def _on_any_rank(found: bool, groups: Iterable[dist.ProcessGroup], device: torch.device) -> bool:
    """Returns whether any rank has found something, of all that these groups connect.

    One round brings it across one axis of a mesh. All ranks take the groups in one order: their
    names count them.
    """
    ordered = sorted(groups, key=lambda group: group.group_name)
    flag = torch.tensor(float(found), device=device)
    for group in ordered * len(ordered):
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag)


def _copies(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Returns copies: in memory of the device if they take at most half of what is free there, else
    on the host, by way of which a comparison of 1.2 billion parameters took 42 s on an H200.

    The device's is not from torch's allocator, so that it is no part of its peak and goes back
    when the copies end.
    """
    sizes = [-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in tensors if each.is_cuda]
    has_room = bool(sizes) and has_kernels("cuda")
    has_room = has_room and 2 * sum(sizes) <= torch.cuda.mem_get_info(device)[0]
    pieces = iter(virtual_zeros(sum(sizes), torch.uint8, device).split(sizes) if has_room else ())

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if not has_room or not tensor.is_cuda:
            return tensor.detach().to("cpu", copy=True)
        place: torch.Tensor = next(pieces)[: tensor.nbytes].view(tensor.dtype)
        place.view(tensor.shape).copy_(tensor.detach())
        return place.view(tensor.shape)

    return list(map(copy, tensors))


def _digest(tensor: torch.Tensor) -> Hashable:
    """Returns what tells bits apart: shape, dtype, and a sum of 64-bit words, each times an odd
    number that follows from its place.

    So two NaNs are equal, and two zeros of different sign are not. Other bits have the same sum by
    chance, once in some 2**60. A copy to compare with would be as large as the state; here a
    piece is in memory at a time.
    """
    whole = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=whole.device)
    factors = _odd_numbers(min(len(whole), _PIECE_NBYTES) // 8 + 1, whole.device)
    for piece in whole.split(_PIECE_NBYTES):
        words = F.pad(piece, (0, -len(piece) % 8)).view(torch.int64)  # a copy, which may be changed
        total = total * _ODD + words.mul_(factors[: len(words)]).sum()
    return tensor.shape, tensor.dtype, int(total)


def _odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    """Returns numbers of 64 bits without a pattern; integers wrap."""
    numbers = torch.arange(count, device=device).mul_(_ODD)
    numbers ^= numbers >> 29
    return numbers.mul_(_ODD).bitwise_or_(1)
