"""The simulated accelerator, from Python: device `sim`, its hazards, and graphs.

`install()` makes `torch.device("sim", 0)` to `("sim", 7)` exist in this process, for good, and
makes them the accelerator that `torch.accelerator` speaks of. Tests therefore run in a process of
their own (`process.py`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from shardgrad.graphs import program_line
from tests.simulated.accelerator import build, errors

NAME = "sim"
program_line.LIBRARIES.append(str(Path(__file__).parent))

# -- what a checker reports


@dataclass(frozen=True)
class Use:
    """One of the two accesses of a hazard.

    Attributes:
        op: such as "aten::copy_", "shardgrad::pack", "simulated::all_gather", "allocate", "free".
        place: "file:line:function" of the innermost frame outside torch and this simulator; in a
            backward without Python frames "backward of " and the autograd node.
        stream: in words, such as "stream 3 of sim:1".
    """

    op: str
    place: str
    stream: str

    def __str__(self) -> str:
        return f"{self.op} on {self.stream}, at {self.place}"


@dataclass(frozen=True)
class Hazard:
    """Two accesses to the same bytes that no wait orders.

    Attributes:
        kind: "read-after-write", "write-after-read", "write-after-write", "free-while-in-flight",
            or "use-after-free" for a replay that uses memory its owner has freed since the capture.
        begin: the first shared byte, counted from the begin of the memory block.
        end: the byte after the last.
        address: of the first shared byte.
        labels: names that `name_range` gave to these bytes.
        count: how often the same two places met again.
    """

    kind: str
    earlier: Use
    later: Use
    device: int
    address: int
    begin: int
    end: int
    labels: str
    count: int

    def __str__(self) -> str:
        what = self.labels or f"a block at {self.address - self.begin:#x}"
        times = f" ({self.count} times)" if self.count > 1 else ""
        return (
            f"{self.kind} on bytes [{self.begin}, {self.end}) of {what} on "
            f"{NAME}:{self.device}{times}\n"
            f"  {self.later}\n  is not ordered after\n  {self.earlier}"
        )


def hazards() -> list[Hazard]:
    """Returns what was found since `reset`, in order."""
    return [
        Hazard(**{**found, "earlier": Use(**found["earlier"]), "later": Use(**found["later"])})
        for found in native().hazards()
    ]


def reset() -> None:
    """Forgets the hazards found so far."""
    native().forget_hazards()


@contextlib.contextmanager
def checked(*, raises: bool = True) -> Iterator[list[Hazard]]:
    """Collects the hazards of a block in the list it yields, which is filled at the end.

    Args:
        raises: raise `HazardError` at the end if there are any.
    """
    found: list[Hazard] = []
    reset()
    try:
        yield found
    finally:
        found += hazards()
        reset()
    if raises and found:
        raise errors.HazardError("\n".join([f"{len(found)} hazards:", *map(str, found)]))


def name_range(tensor: torch.Tensor, label: str) -> None:
    """Makes reports call the bytes of `tensor` by a name, until their memory is freed."""
    native().label(tensor.data_ptr(), tensor.numel() * tensor.itemsize, label)


def name_stream(stream: torch.Stream, name: str) -> None:
    """Makes reports call a stream by a name too."""
    native().name_stream(stream.device_index, stream.stream_id, name)


# -- what was launched


@dataclass(frozen=True)
class Launch:
    """One piece of work given to a stream.

    Attributes:
        op, place, stream: as in `Use`.
    """

    op: str
    place: str
    stream: str
    lane: int
    tick: int
    knows: tuple[int, ...]

    def comes_after(self, other: Launch) -> bool:
        """Returns whether streams and waits order this after `other`: the two cannot overlap."""
        return (
            self is not other
            and other.lane < len(self.knows)
            and self.knows[other.lane] >= other.tick
        )

    def may_overlap(self, other: Launch) -> bool:
        """Returns whether nothing orders the two."""
        return not (self is other or self.comes_after(other) or other.comes_after(self))


def restart_schedule(*, keep_launches: bool = False) -> None:
    """Begins a new schedule on every device: what `launches` speaks of."""
    native().restart_schedules(keep_launches)


def launches(index: int = 0) -> list[Launch]:
    """Returns a device's launches since the schedule was restarted to keep them, in the host's
    order.
    """
    return [
        Launch(**{**found, "knows": tuple(found["knows"])}) for found in native().launches(index)
    ]


# -- graphs


class Graph:
    """Recorded work of one device, to be replayed on the same addresses.

    Capturing does not execute: memory and random numbers are afterwards as they were before. Order
    between streams is checked when a replay happens, against the other work around it too.
    """

    def __init__(self) -> None:
        self._native = native().CapturedGraph()

    @contextlib.contextmanager
    def capture(self, stream: torch.Stream) -> Iterator[Graph]:
        """Captures what is launched on `stream` in this context, and on streams that join it by an
        event.

        Raises:
            CaptureError: one of its subclasses, for whatever CUDA would refuse; the capture is
                given up.
        """
        with stream:
            self._native.begin()
            try:
                yield self
            except BaseException:
                self._native.reset()
                raise
            self._native.end()

    def replay(self) -> None:
        """Launches the recorded work on the current stream of the graph's device."""
        self._native.replay()

    def reset(self) -> None:
        """Forgets the recorded work; its memory is not used again."""
        self._native.reset()


# -- making torch know the device


@cache
def native() -> ModuleType:
    """Returns the compiled module, installing the device if nobody has."""
    return install()


@cache
def install() -> ModuleType:
    """Makes the device known to torch; see the module's docstring."""
    module = build.load()
    module.set_errors(errors.TYPED)
    ours = Path(__file__).parent
    module.set_ignored_files(
        [str(Path(torch.__file__).parent), "<"]
        + [str(ours / name) for name in ("device.py", "collectives.py", "virtual_ranks.py")]
    )
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(module))
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.Event = _event_class(torch.Event)  # type: ignore[misc]
    _AUTOCAST.fallback(torch.library.fallthrough_kernel)
    adopt_ops(module)
    return module


# Under autocast, no op casts: enough for what depends on whether it is on.
_AUTOCAST = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")


def adopt_ops(module: ModuleType | None = None) -> None:
    """Runs the ops of `torch.ops.shardgrad` that exist now by CPU kernels, reads and writes by
    schema.
    """
    import shardgrad.ops  # noqa: F401  (registers them)

    (module or native()).adopt_namespace("shardgrad")


def _event_class(base: Any) -> Any:
    """Returns `torch.Event`, but with a native part from the start.

    Torch answers a wait for an event without a native part itself, by doing nothing. With one it
    asks the device, which refuses. A record on this stream, which does not exist, makes that part
    and records nothing.
    """

    class Event(base):  # type: ignore[misc]
        def __new__(cls, device: Any = None, **options: Any) -> Any:
            event = super().__new__(cls, device, **options)
            where = torch.device(NAME if device is None else device)
            if where.type == NAME:
                index = native().current_device() if where.index is None else where.index
                event.record(
                    torch.Stream(stream_id=-1, device_index=index, device_type=_device_type())
                )
            return event

    return Event


@cache
def _device_type() -> int:
    return torch.Stream(torch.device(NAME, 0)).device_type


# Threads that stand for a rank seed only their own device.
rank_thread = threading.local()


def _seed(seed: int) -> None:
    own = getattr(rank_thread, "rank", None)
    for index in range(native().DEVICES) if own is None else [own]:
        torch.ops.simulated.seed_generator(index, seed)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return native().current_device() if index is None else index


def _readable(device: Any) -> int:
    """Returns the index of a device whose random numbers have a state that the host may see."""
    index = _index(device)
    if native().capturing(index):
        raise errors.CaptureError(
            "the state of random numbers is asked for, or set, during a capture"
        )
    return index


def _device_module(module: ModuleType) -> ModuleType:
    """Returns what `torch.get_device_module("sim")` gives: what libraries look for there."""
    made = ModuleType(f"torch.{NAME}")
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "device_count": lambda: module.DEVICES,
        "current_device": module.current_device,
        "device": lambda device: torch.accelerator.device_index(_index(device)),
        "is_current_stream_capturing": lambda: module.capturing(module.current_device()),
        "manual_seed": _seed,
        "manual_seed_all": _seed,
        "memory_allocated": lambda device=None: module.memory(_index(device))["live"],
        "memory_reserved": lambda device=None: module.memory(_index(device))["reserved"],
        "empty_cache": lambda: module.empty_cache(module.current_device()),
        "get_rng_state": lambda device=None: torch.ops.simulated.generator_state(_readable(device)),
        "set_rng_state": lambda state, device=None: torch.ops.simulated.set_generator_state(
            _readable(device), state
        ),
    }
    for name, function in functions.items():
        setattr(made, name, function)
    return made
