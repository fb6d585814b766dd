"""To look at the calls of a thread changes nothing about it, and cannot hang or end the process."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from pathlib import Path
from traceback import FrameSummary

from shardgrad.diagnosis import thread_stacks as module
from shardgrad.diagnosis.thread_stacks import calls_of_thread
from tests.support.processes import run

# Each thread is new, so its frames have no objects yet: `sys._current_frames()` makes some, and
# would begin a collection, whose finalizer looks, too.
FORGETS_WHILE_LOOKING = """
import faulthandler, gc, threading, weakref
from shardgrad.diagnosis.thread_stacks import calls_of_thread

gc.freeze()  # torch's objects, which would take each collection long to visit
faulthandler.dump_traceback_later(30, exit=True)
listed = []

class Cycle:
    def __init__(self):
        self.itself = self
        weakref.finalize(self, lambda: listed.append(calls_of_thread(threading.get_ident())))

def look():
    gc.collect()
    gc.set_threshold(1)
    gc.disable()
    Cycle()
    gc.enable()
    calls = calls_of_thread(threading.get_ident())
    assert gc.get_threshold()[0] == 1 and gc.isenabled()
    assert "look" in [call.name for call in calls]

for _ in range(20):
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
gc.collect()
gc.disable()
calls_of_thread(threading.get_ident())
assert not gc.isenabled()
print(len(listed))
"""

# A thread of C++, as gloo's and autograd's, that enters Python has no frame at first. A look by
# faulthandler ended this process within a second.
THREADS_ENTER_WHILE_LOOKING = """
import ctypes, threading, time
from shardgrad.diagnosis.thread_stacks import calls_of_thread

enter = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
libc, ends = ctypes.CDLL(None), time.monotonic() + 5

def enter_python():
    thread = ctypes.c_ulong()
    while time.monotonic() < ends:
        libc.pthread_create(ctypes.byref(thread), None, enter, None)
        libc.pthread_join(thread, None)

entering = threading.Thread(target=enter_python)
entering.start()
while time.monotonic() < ends:
    assert calls_of_thread(threading.get_ident())
entering.join()
"""


def run_program(text: str) -> str:
    """Returns what a program printed; it must end well."""
    root = Path(__file__).parents[2]
    done = run(
        [sys.executable, "-c", text],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        timeout_s=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_finalizer_that_looks_while_another_look_runs_does_not_hang() -> None:
    assert run_program(FORGETS_WHILE_LOOKING) == "20\n"


def test_threads_of_cpp_that_enter_python_during_looks_do_not_end_the_process() -> None:
    run_program(THREADS_ENTER_WHILE_LOOKING)


def test_what_a_function_has_named_goes_with_its_end_after_its_calls_are_looked_at() -> None:
    class Named:
        pass

    is_named, is_seen, seen = threading.Event(), threading.Event(), []
    here = threading.get_ident()

    def name() -> weakref.ref[Named]:
        named = Named()
        is_named.set()
        is_seen.wait()
        return weakref.ref(named)

    def look() -> None:
        is_named.wait()
        seen.extend(calls_of_thread(here))
        is_seen.set()

    looks = threading.Thread(target=look)
    looks.start()
    assert name()() is None
    looks.join()
    assert FrameSummary(__file__, name.__code__.co_firstlineno + 3, "name") in seen
    assert [call.name for call in seen].index("name") < [call.name for call in seen].index(
        "test_what_a_function_has_named_goes_with_its_end_after_its_calls_are_looked_at"
    )


def test_a_thread_that_has_ended_is_in_no_call() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert thread.ident is not None
    assert calls_of_thread(thread.ident) == ()


def test_names_that_are_not_ascii_are_read_as_they_are() -> None:
    found: dict[str, object] = {"look": lambda: calls_of_thread(threading.get_ident())}
    exec(compile("def größe():\n    return look()\ncalls = größe()", "/mü/数/🙂.py", "exec"), found)
    assert found["calls"][0].filename == module.__file__  # type: ignore[index]
    assert found["calls"][2] == FrameSummary("/mü/数/🙂.py", 2, "größe")  # type: ignore[index]
