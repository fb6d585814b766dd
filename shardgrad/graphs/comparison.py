"""Finds values that a capture has frozen: replays two captures of a step from the same state and
compares the results.

The second capture is made in the next call, so that Python has changed what it changes from call to
call. A graph is not compared with an eager step, for three reasons. That step would need the memory
of activations twice. Code that checks whether it is being captured may rightly produce other bits.
And an eager step cannot be repeated without repeating its effects on Python state. Repeating is
needed because some kernels sum in no fixed order: for example, attention's backward uses atomics,
which may produce the same bits for several runs and then others. Such a random difference is
recognized when both graphs are replayed again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._pytree import keystr, tree_leaves_with_path

from shardgrad.graphs.outputs import plain_tensors, storage_ids, storage_of
from shardgrad.ops.library import has_kernels
from shardgrad.ops.virtual_memory import virtual_zeros

_PIECE_NBYTES = 2**24
_ALIGNMENT = 512  # bytes between the beginnings of copies, as in torch's allocator
_ODD = -0x61C8864680B583EB  # 2**64 divided by the golden ratio
# With this many, a result that differs at random in every fourth run is mistaken for a frozen one
# once in 10,000 comparisons.
_ROUNDS = 6


def frozen_values(
    first: Callable[[], Any],
    again: Callable[[], Any],
    state: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    memory: Iterable[tuple[str, torch.Tensor]],
    groups: Iterable[dist.ProcessGroup],
    device: torch.device,
    restore_host: Callable[[], None],
) -> tuple[Any, list[str], Callable[[], None]]:
    """Replays two captures of a step from the same state. The effects of the last replay stay.

    If anything differs on any rank, all ranks replay both again, to distinguish frozen values from
    random differences.

    Args:
        first: replays one capture.
        again: replays the other.
        state: returns (name, tensor) for the state that the step uses.
        memory: (name, tensor) for all memory that the step writes. Memory that no capturable has
            and that has no name, since the step's function does not close over it, may be scratch:
            it is restored but not compared.
        groups: the process groups in which the step communicates. Their ranks agree on the number
            of replays.
        device: the device of the step.
        restore_host: restores the host state and the random generators of before the second
            capture, which has changed them.

    Returns:
        The outputs of `again`; the names of the frozen outputs and memory, those for which all
        replays of `first` gave the same bits and no replay of `again` gave these; and a function
        that restores all state.

    Streams: everything runs on the current stream; the host waits for each replay.
    Capture: not safe.
    """

    def restore() -> None:
        for tensor, value in copies:
            tensor.copy_(value)
        restore_host()

    def note(outputs: Any, seen: defaultdict[str, set[Hashable]]) -> None:
        of_outputs = [(f"output{keystr(p)}", leaf) for p, leaf in tree_leaves_with_path(outputs)]
        for name, tensor in chain(of_outputs, state(), others):
            if name:
                seen[name].add(tuple(map(_digest, plain_tensors([tensor]))))

    restore_host()
    present = list(plain_tensors(tensor for _, tensor in state()))
    known = storage_ids(present)
    others = [(name, tensor) for name, tensor in memory if storage_of(tensor) not in known]
    copies = _copies([*present, *(tensor for _, tensor in others)], device)
    of_first, of_again = (defaultdict[str, set[Hashable]](set) for _ in range(2))
    for _ in range(_ROUNDS):
        restore()
        note(first(), of_first)
        restore()
        outputs = again()
        note(outputs, of_again)
        frozen = [
            name
            for name, bits in of_again.items()
            if len(of_first[name]) == 1 and bits.isdisjoint(of_first[name])
        ]
        if not _on_any_rank(bool(frozen), groups, device):
            break
    return outputs, frozen, restore


def _on_any_rank(found: bool, groups: Iterable[dist.ProcessGroup], device: torch.device) -> bool:
    """Returns whether `found` is True on any rank that the groups connect, directly or by way of
    others.

    One round over all groups carries the flag across at least one axis of a mesh, so as many rounds
    as groups reach all ranks. Sorting by name gives all ranks the same order of groups.
    """
    ordered = sorted(groups, key=lambda group: group.group_name)
    flag = torch.tensor(float(found), device=device)
    for group in ordered * len(ordered):
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag)


def _copies(
    tensors: Sequence[torch.Tensor], device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the tensors, each with a copy: on the device if the copies need at most half of its
    free memory, else on the host. With copies on the host, a comparison of 1.2 billion parameters
    took 42 s on an H200.

    The device memory does not come from torch's allocator, so that it does not raise the
    allocator's peak and is released as soon as the copies are dropped.
    """
    sizes = [-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in tensors]
    can_map = device.type == "cuda" and has_kernels("cuda")
    if not can_map or 2 * sum(sizes) > torch.cuda.mem_get_info(device)[0]:
        device = torch.device("cpu")
    places = virtual_zeros(sum(sizes), torch.uint8, device).split(sizes)
    pairs = [
        (tensor.data, place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        for place, tensor in zip(places, tensors, strict=True)
    ]
    for tensor, copy in pairs:
        copy.copy_(tensor)
    return pairs


def _digest(tensor: torch.Tensor) -> Hashable:
    """Returns a digest of a tensor's bits: shape, dtype, and a checksum, the sum of its 64-bit
    words, each multiplied by an odd number that depends on its position.

    NaNs with the same bits compare equal, and zeros of different sign do not. Different bits have
    the same checksum with a probability of about 2**-60. To compare with a copy would need as much
    memory as the state; the checksum needs one piece at a time.
    """
    whole = tensor.detach().ravel().view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=whole.device)
    # Pseudo-random odd numbers. Integer multiplication wraps around.
    factors = torch.arange(min(len(whole), _PIECE_NBYTES) // 8 + 1, device=whole.device).mul_(_ODD)
    factors ^= factors >> 29
    factors.mul_(_ODD).bitwise_or_(1)
    for piece in whole.split(_PIECE_NBYTES):
        words = F.pad(piece, (0, -len(piece) % 8)).view(torch.int64)  # a copy, changed in place
        total = total * _ODD + words.mul_(factors[: len(words)]).sum()
    return tensor.shape, tensor.dtype, int(total)
