"""What CUDA answers to each mistake in a capture, through torch.

`tests/cuda_runtime` answers as NVIDIA's documentation says, and these tests hold it to that. On a
GPU they hold the documentation, and what had to be guessed, to what a device does.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

UNSUPPORTED = "operation not permitted when stream is capturing"
INVALIDATED = "operation failed due to a previous error during capture"
UNJOINED = "capturing stream has unjoined work"
ISOLATION = "dependency created on uncaptured work in another stream"
IMPLICIT = "operation would make the legacy stream depend on a capturing blocking stream"
CAPTURED_EVENT = "operation not permitted on an event last recorded in a capturing stream"


def attempt(body: Callable[[torch.Tensor], object], mode: str = "global") -> list[str]:
    """Captures `body` after one operation; returns the first lines of the errors, first error
    first.
    """
    x = torch.ones(16, device="cuda")
    torch.cuda.synchronize()
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    error: BaseException | None = None
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
            x * 2
            body(x)
    except Exception as raised:
        error = raised
        # Torch's allocator is not told that the capture is over, and would keep what other streams
        # have used.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    lines: list[str] = []
    while error is not None:
        lines.insert(0, str(error).partition("\n")[0].removeprefix("CUDA error: "))
        error = error.__context__
    torch.cuda.set_stream(torch.cuda.default_stream())  # a failed capture leaves its own current
    torch.cuda.synchronize()
    assert float((x + 1).sum()) == 32, "torch is not usable any more"
    return lines


def unjoined(x: torch.Tensor) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x * 3


def foreign_event(x: torch.Tensor) -> None:
    torch.cuda.current_stream().wait_event(RECORDED_BEFORE[0])


def captured_event(use: Callable[[torch.cuda.Event], object]) -> Callable[[torch.Tensor], object]:
    def body(x: torch.Tensor) -> None:
        event = torch.cuda.Event()
        event.record()
        use(event)

    return body


def begin_again(x: torch.Tensor) -> None:
    runtime = ctypes.CDLL("libcudart.so.13")
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    error = runtime.cudaStreamBeginCapture(stream, 1)
    runtime.cudaGetLastError()
    raise RuntimeError(runtime.cudaGetErrorString(error).decode())


def default_joins(x: torch.Tensor) -> None:
    torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())


RECORDED_BEFORE: list[torch.cuda.Event] = []
REFUSED: dict[str, tuple[Callable[[torch.Tensor], object], list[str]]] = {
    "item": (lambda x: x[0].item(), [UNSUPPORTED, INVALIDATED]),
    "nonzero": (torch.nonzero, [UNSUPPORTED, INVALIDATED]),
    "synchronized stream": (
        lambda x: torch.cuda.current_stream().synchronize(),
        [UNSUPPORTED, INVALIDATED],
    ),
    "synchronized device": (lambda x: torch.cuda.synchronize(), [UNSUPPORTED, INVALIDATED]),
    "blocking copy": (lambda x: x.copy_(torch.ones(16).pin_memory()), [UNSUPPORTED, INVALIDATED]),
    "work that is not joined": (unjoined, [UNJOINED]),
    "event from before": (foreign_event, [ISOLATION, INVALIDATED]),
    "query of an event": (captured_event(lambda e: e.query()), [CAPTURED_EVENT, INVALIDATED]),
    "wait for an event": (captured_event(lambda e: e.synchronize()), [CAPTURED_EVENT, INVALIDATED]),
    "default stream": (default_joins, [IMPLICIT, INVALIDATED]),
    "capture in a capture": (
        begin_again,
        ["the operation cannot be performed in the present state"],
    ),
}
ALLOWED: dict[str, Callable[[torch.Tensor], object]] = {
    "copy from pinned memory": lambda x: x.copy_(torch.ones(16).pin_memory(), non_blocking=True),
    "an allocation": lambda x: torch.empty(1 << 27, device="cuda"),
    "an event that is only recorded": captured_event(lambda e: None),
    "random numbers": lambda x: torch.randn(4, device="cuda"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_cuda_refuses(name: str) -> None:
    event = torch.cuda.Event()
    event.record()
    RECORDED_BEFORE[:] = [event]
    body, errors = REFUSED[name]
    assert attempt(body) == errors


@pytest.mark.parametrize("name", ALLOWED)
def test_cuda_captures(name: str) -> None:
    assert attempt(ALLOWED[name]) == []


@pytest.mark.parametrize(("mode", "expected"), [("global", [INVALIDATED]), ("thread_local", [])])
@pytest.mark.parametrize("what", ["cudaMalloc", "query"])
def test_another_thread_disturbs_a_global_capture_only(
    mode: str, expected: list[str], what: str
) -> None:
    before = torch.cuda.Event()
    before.record()
    outcome: list[str] = []

    def disturb() -> None:
        try:
            if what == "query":
                before.query()
            else:
                torch.cuda.memory.caching_allocator_alloc(1 << 28)
        except Exception as error:
            outcome.append(str(error))

    def body(x: torch.Tensor) -> None:
        thread = threading.Thread(target=disturb)
        thread.start()
        thread.join()

    assert attempt(body, mode) == expected
    assert bool(outcome) == bool(expected)
    torch.cuda.empty_cache()


def test_an_event_of_a_capture_that_has_ended_is_refused_everywhere() -> None:
    kept: list[torch.cuda.Event] = []
    assert attempt(captured_event(kept.append)) == []
    [event] = kept
    for use in (event.query, event.synchronize, partial(torch.cuda.Stream().wait_event, event)):
        with pytest.raises(RuntimeError, match="invalid argument"):
            use()
