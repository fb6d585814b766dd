"""What a capture reads and writes that was there before it.

A graph reads a tensor that the step was not given, such as a mask in a global variable, where it
was at the capture. If the program replaces it in the next call, comparing captures finds that;
later, the memory that the graph reads is mostly nobody's any more, and that is found here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from shardgrad.graphs.program_line import line_that_runs

__all__ = ["Reads"]


class Reads(TorchDispatchMode):
    """Notes what operations inside the block read and write without having made it.

    Args:
        known: tensors whose replacement is found otherwise: arguments of the step, and its state.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: set[int] = set()  # identities of storages
        self._met = set(map(_identity, _plain(known)))
        self._read: list[tuple[StorageWeakRef, str]] = []
        self._written: dict[int, tuple[StorageWeakRef, torch.device]] = {}
        self._launched: list[tuple[str, list[Any], str]] = []  # operators, numbers, and lines
        self._line = ""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keeps compiled regions compiled; torch runs them eagerly under other modes."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Collectives do not declare what they write.
        writes = func._schema.is_mutable or func.namespace == "c10d"
        leaves = tree_leaves((args, kwargs))
        line = line_that_runs()
        self._line = line or self._line
        numbers = [leaf for leaf in leaves if isinstance(leaf, int | float | complex)]
        self._launched.append((str(func), numbers, self._line))
        given = {_identity(tensor): tensor for tensor in _plain(leaves)}
        for identity in given.keys() - self._made - {0}:
            tensor = given[identity]
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)
            # One that cannot be resized may end before the memory that it is a part of.
            if line and identity not in self._met and storage.resizable():
                what = f"{tensor.dtype} of shape {tuple(tensor.shape)}".removeprefix("torch.")
                self._read.append((reference, f"a tensor ({what}) in {line}"))
            self._met.add(identity)
            if writes:
                self._written.setdefault(identity, (reference, tensor.device))
        self._made.update(map(_identity, _plain(tree_leaves(result))))
        self._made -= given.keys() & self._met
        return result

    def gone(self) -> list[str]:
        """Returns what was read in the block and exists no more, with the line that read it."""
        return [what for reference, what in self._read if reference.expired()]

    def change_to(self, other: Reads) -> str:
        """Returns where another capture first launched something else; "" if nowhere."""
        both = zip(self._launched, other._launched, strict=False)
        for (one, before, line), (two, now, _) in both:
            if (one, before) != (two, now):
                return f"{line}: first {one} with {before}, then {two} with {now}"
        return ""

    def written(self) -> Iterator[torch.Tensor]:
        """Yields the memory, as bytes, that was there before the block, was written in it, and is
        there now.
        """
        for reference, device in self._written.values():
            if reference.expired():
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            # One that cannot be resized is a part of other memory, as a gradient's of its shard. It
            # does not tell whether that is still there, and what keeps it would be taken for the
            # program.
            if storage is not None and storage.nbytes() and storage.resizable():
                empty = torch.empty(0, dtype=torch.uint8, device=device)
                yield empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _plain(leaves: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors among leaves; of wrapper subclasses, the inner ones."""
    for leaf in leaves:
        if is_traceable_wrapper_subclass(leaf):
            yield from _plain(getattr(leaf, name) for name in leaf.__tensor_flatten__()[0])
        elif isinstance(leaf, torch.Tensor):
            yield leaf


def _identity(tensor: torch.Tensor) -> int:
    """Returns the identity of a tensor's storage; 0 if it has none, as sparse tensors."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return 0
