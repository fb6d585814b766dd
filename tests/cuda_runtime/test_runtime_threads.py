"""Threads that wait for the device while others keep Python's lock in calls of torch: none stands
still.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import pytest
import torch

from tests.cuda_runtime import inspection
from tests.support.ranks import Ranks

LIMIT_S = 30.0  # it takes a second


def while_another_thread_waits(call: Callable[[], object]) -> None:
    thread = Thread(target=torch.cuda.synchronize)
    thread.start()
    while thread.is_alive():
        call()
    thread.join()


def tensors_of_python_are_copied() -> None:
    """What a copy holds is let go by the thread that runs it, which may need Python's lock for
    that.
    """
    large = torch.ones(512, 512, device="cuda")
    with inspection.order("late"):
        for _ in range(5):
            host = [torch.full((4,), float(number)).pin_memory() for number in range(16)]
            # Takes long enough for this thread to have Python's lock when the copies begin.
            _ = large @ large
            device = [each.cuda(non_blocking=True) for each in host]
            while_another_thread_waits(lambda: torch.Event("cuda").record())  # keeps Python's lock
            assert [int(each[0]) for each in device] == list(range(16))


def an_operator_is_written_in_python() -> None:
    """The CPU's kernel of RMSNorm's backward is."""
    weight = torch.ones(8, device="cuda", requires_grad=True)
    inputs = torch.randn(4, 8, device="cuda")
    with inspection.order("late"):
        for _ in range(5):
            weight.grad = None
            for _ in range(4):
                torch.nn.functional.rms_norm(inputs, (8,), weight).sum().backward()
            event = torch.cuda.Event()
            event.record()
            while_another_thread_waits(event.query)  # keeps Python's lock
            assert event.query()


@pytest.mark.parametrize(
    "program", [tensors_of_python_are_copied, an_operator_is_written_in_python]
)
def test_threads_do_not_wait_for_each_other(program: Callable[[], None]) -> None:
    ranks = Ranks(1)
    try:
        ranks.run(program, timeout_s=LIMIT_S)
    finally:
        ranks.stop()
