"""A process that has simulated devices. Once known to torch they stay, so the tests' own process
has none.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.support.processes import CONTEXT, FairClock
from tests.support.ranks import RankError


def _serve(pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    # From 2.15 on, torch's asks a group for its name in C++, which one that Python made has not.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    import torch

    from tests.simulated.accelerator import device

    torch.set_num_threads(1)
    device.install()
    while (task := pipe.recv()) is not None:
        module, name, args, kwargs = task
        try:
            torch.manual_seed(0)
            result = getattr(importlib.import_module(module), name)(*args, **kwargs)
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        for index in range(
            torch.accelerator.device_count()
        ):  # nothing of one test is in flight in the next
            torch.accelerator.synchronize(index)
        device.reset()


class SimulatorProcess:
    """Runs functions where `sim` devices exist; started when first used."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Any = None

    def _start(self) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(theirs, sys.path), daemon=True)
        self._process.start()
        theirs.close()

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = 110.0, **kwargs: Any
    ) -> Any:
        """Returns what a function at the top of its module returned there.

        Raises:
            RankError: it raised, the process died, or it took too long; the process is replaced.
        """
        if self._process is None:
            self._start()
        try:
            self._pipe.send((function.__module__, function.__qualname__, args, kwargs))
            clock = FairClock([self._process.pid])
            while not self._pipe.poll(0.5):
                if clock.elapsed_s() > timeout_s:
                    raise RankError(
                        f"{function.__qualname__} did not finish within {timeout_s:.0f} s"
                    )
            succeeded, result = self._pipe.recv()
        except BaseException as error:
            self.stop()
            if isinstance(error, EOFError | OSError):
                raise RankError("the process with the simulated devices died") from error
            raise
        if not succeeded:
            raise RankError(result)
        return result
