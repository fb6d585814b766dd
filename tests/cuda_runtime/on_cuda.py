"""Lets the programs of `tests/simulated` run on torch.cuda and NCCL: a pytest plugin.

    export HOSTCUDA_DEVICES=4
    .venv-cuda/bin/python -m pytest -p tests.cuda_runtime.on_cuda tests/simulated/test_matrix.py

Stands where the simulated accelerator is. Ranks are processes with a device each; they look for
work without an order in what they launch, and run it in the order that ON_CUDA_ORDER names
(`inspection.order`). Tests of the simulated accelerator itself have nothing to say here.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tests.cuda_runtime import inspection
from tests.support.ranks import RankError, Ranks

NAME = "cuda"
BACKEND = "cpu:gloo,cuda:nccl"
_HERE = "tests.simulated.accelerator"

_looking: list[list[str]] = []
_worlds: dict[int, Ranks] = {}


@contextlib.contextmanager
def checked(*, raises: bool = True) -> Iterator[list[str]]:
    """Collects pairs of work without an order, of this process and of ranks that are started
    inside.
    """
    found: list[str] = []
    _looking.append(found)
    inspection.trace(True)
    try:
        yield found
    finally:
        _looking.pop()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        found += inspection.conflicts(inspection.log())
        inspection.trace(False)
    if raises and found:
        raise HazardError("\n".join([f"{len(found)} hazards:", *found]))


class HazardError(AssertionError):
    """Work that shares memory has no order."""


def on_rank(looks: bool, pickled: bytes) -> tuple[Any, list[str]]:
    """Calls a function in the process of a rank; returns what it returned, and what was found.

    It comes pickled, so that its module is imported after this one.
    """
    function, args, kwargs = pickle.loads(pickled)
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    with inspection.order(os.environ.get("ON_CUDA_ORDER", "host")):
        with checked(raises=False) if looks else contextlib.nullcontext([]) as found:
            value = function(*args, **kwargs)
        torch.cuda.synchronize()
    return value, found


class VirtualRanks:
    """`world_size` processes, each with one device."""

    def __init__(self, world_size: int, collective_timeout_s: float = 60.0) -> None:
        self.world_size = world_size

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0, **kwargs: Any
    ) -> list[Any]:
        """Returns what `function` returned on each rank."""
        ranks = _worlds.setdefault(self.world_size, Ranks(self.world_size, backend=BACKEND))
        pickled = pickle.dumps((function, args, kwargs))
        outcomes = ranks.run(on_rank, bool(_looking), pickled, timeout_s=timeout_s)
        for rank, (_, found) in enumerate(outcomes):
            for each in _looking[-1:]:
                each += [f"rank {rank}: {text}" for text in found]
        return [value for value, _ in outcomes]


class Graph:
    """A graph of torch.cuda with the interface of the simulated accelerator's."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    @contextlib.contextmanager
    def capture(self, stream: torch.Stream) -> Iterator[Graph]:
        """Captures what is launched on `stream` in this context."""
        with stream:
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                yield self
            finally:
                self._graph.capture_end()

    def replay(self) -> None:
        """Launches the graph on the current stream."""
        self._graph.replay()

    def reset(self) -> None:
        """Destroys the graph."""
        self._graph.reset()


class InThisProcess:
    """Runs tests where they are: ranks are other processes."""

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls it."""
        return function(*args, **kwargs)

    def stop(self) -> None:
        """Does nothing."""


class Unavailable:
    """What only the simulated accelerator has."""


def _native(*_: Any) -> Any:
    raise NotImplementedError("a test of the simulated accelerator itself")


def _nothing(*_: Any, **__: Any) -> Any:
    return None


def install() -> None:
    """Stands where the simulated accelerator is imported from."""
    errors = {
        name: type(name, (RuntimeError,), {})
        for name in ("CaptureError", "CollectiveFailedError", "HostSyncInCaptureError")
    }
    modules: dict[str, dict[str, Any]] = {
        "device": {
            "NAME": NAME,
            "checked": checked,
            "Graph": Graph,
            "Hazard": str,
            "Launch": Unavailable,
            "native": _native,
            "install": _nothing,
            "restart_schedule": _nothing,
            "schedule_digest": lambda devices=1: (0,) * devices,
            "name_range": _nothing,
            "name_stream": _nothing,
            "reset": _nothing,
        },
        "virtual_ranks": {"VirtualRanks": VirtualRanks, "one_at_a_time": contextlib.nullcontext},
        "errors": {"HazardError": HazardError, "TYPED": errors, **errors},
        "collectives": {
            "SimulatedGroup": type("SimulatedGroup", (), {"_enter": _nothing}),
            "Work": type("Work", (), {"wait": _nothing}),
        },
        "process": {"SimulatorProcess": InThisProcess},
        "build": {"compiler": lambda: "not needed", "build": _nothing},
    }
    for name, members in modules.items():
        module = ModuleType(f"{_HERE}.{name}")
        vars(module).update(members)
        sys.modules[module.__name__] = module
        package = sys.modules.get(_HERE) or importlib.import_module(_HERE)
        setattr(package, name, module)


@atexit.register
def _stop() -> None:
    for ranks in _worlds.values():
        with contextlib.suppress(RankError):
            ranks.stop()


install()
