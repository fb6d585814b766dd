"""Looking at the stacks of threads changes nothing about them, and cannot hang."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from pathlib import Path

from shardgrad.diagnosis import thread_stacks as module
from shardgrad.diagnosis.thread_stacks import LIMIT, Call, thread_stacks
from tests.support.processes import run

# Each thread is new, so its frames have no objects yet: `sys._current_frames()` makes some, and
# begins a collection that finalizes the garbage. The finalizer does so, too, as the callback of a
# forgotten model did.
FORGETS_WHILE_LOOKING = """
import faulthandler, gc, threading, weakref
from shardgrad.diagnosis.thread_stacks import thread_stacks

faulthandler.dump_traceback_later(30, exit=True)
listed = []

class Cycle:
    def __init__(self):
        self.itself = self
        weakref.finalize(self, lambda: listed.append(thread_stacks()))

def look():
    gc.collect()
    gc.set_threshold(1)
    gc.disable()
    Cycle()
    gc.enable()
    stacks = thread_stacks()
    assert gc.get_threshold()[0] == 1
    assert "look" in [call.name for call in stacks[threading.get_ident()]]

for _ in range(20):
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
gc.collect()
print(len(listed))
"""


def test_a_finalizer_that_looks_at_stacks_while_another_look_runs_does_not_hang() -> None:
    root = Path(__file__).parents[2]
    done = run(
        [sys.executable, "-c", FORGETS_WHILE_LOOKING],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        timeout_s=60,
    )
    assert (done.returncode, done.stdout) == (0, "20\n"), done.stderr


def test_what_a_function_has_named_goes_with_its_end_while_its_stack_is_looked_at() -> None:
    class Named:
        pass

    is_named, is_seen, seen = threading.Event(), threading.Event(), []

    def name() -> weakref.ref[Named]:
        named = Named()
        is_named.set()
        is_seen.wait()
        return weakref.ref(named)

    def look() -> None:
        is_named.wait()
        seen.append(thread_stacks())
        is_seen.set()

    looks = threading.Thread(target=look)
    looks.start()
    assert name()() is None
    looks.join()
    calls = seen[0][threading.get_ident()]
    assert Call(__file__, name.__code__.co_firstlineno + 3, "name") in calls
    assert [call.name for call in calls].index("name") < [call.name for call in calls].index(
        "test_what_a_function_has_named_goes_with_its_end_while_its_stack_is_looked_at"
    )


def test_names_that_are_not_ascii_are_read_as_they_are() -> None:
    found: dict[str, object] = {"look": thread_stacks}
    exec(
        compile("def größe():\n    return look()\nstacks = größe()", "/mü/数/🙂.py", "exec"), found
    )
    assert found["stacks"][threading.get_ident()][:2] == (
        Call(module.__file__, found["stacks"][threading.get_ident()][0].line, "thread_stacks"),
        Call("/mü/数/🙂.py", 2, "größe"),
    )


def test_a_stack_without_end_is_cut() -> None:
    def deep(calls: int) -> dict[int, tuple[Call, ...]]:
        return deep(calls - 1) if calls else thread_stacks()

    calls = deep(2 * LIMIT)[threading.get_ident()]
    assert [call.name for call in calls] == ["thread_stacks", *["deep"] * (LIMIT - 1)]


def test_the_newest_of_very_many_threads_are_seen() -> None:
    over = threading.Event()
    threads = [threading.Thread(target=over.wait) for _ in range(LIMIT)]
    for thread in threads:
        thread.start()
    stacks = thread_stacks()
    over.set()
    for thread in threads:
        thread.join()
    assert len(stacks) == LIMIT
    assert threads[-1].ident in stacks
