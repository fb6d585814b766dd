"""Listing the frames of threads cannot hang, whatever a collection of garbage calls."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.processes import run

# Each thread is new, so its frames have no objects yet: to list them makes some, and begins a collection
# that finalizes the garbage. The finalizer lists frames, as the callback of a forgotten model did.
FORGETS_WHILE_LISTING = """
import faulthandler, gc, threading, weakref
from shardgrad.diagnosis.thread_frames import current_frames

faulthandler.dump_traceback_later(30, exit=True)
listed = []

class Cycle:
    def __init__(self):
        self.itself = self
        weakref.finalize(self, lambda: listed.append(current_frames()))

def look():
    gc.collect()
    gc.set_threshold(1)
    gc.disable()
    Cycle()
    gc.enable()
    frames = current_frames()
    assert gc.get_threshold()[0] == 1
    assert frames[threading.get_ident()].f_code.co_name in ("look", "current_frames")

for _ in range(20):
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
gc.collect()
print(len(listed))
"""


def test_a_finalizer_that_lists_frames_while_frames_are_listed_does_not_hang() -> None:
    root = Path(__file__).parents[2]
    done = run(
        [sys.executable, "-c", FORGETS_WHILE_LISTING],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        timeout_s=60,
    )
    assert (done.returncode, done.stdout) == (0, "20\n"), done.stderr
