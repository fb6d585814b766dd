"""What targets of the fuzzer are made of: odd values, changes of nested things, edits of bytes, a
folder.
"""

from __future__ import annotations

import atexit
import copy
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True)
class Target:
    """One door through which files and words come in.

    Attributes:
        inputs: what is fed to it.
        feed: feeds one input, and returns a word for what happened. Anything but a typed error, a
            success with the right result, or (for the command line) an exit status raises.
    """

    inputs: st.SearchStrategy[Any]
    feed: Callable[[Any], str]


@cache
def scratch() -> Path:
    """Returns a folder of this process, in memory where that is possible."""
    memory = Path("/dev/shm")
    where = memory if memory.is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="shardgrad-fuzz-", dir=where))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


ODD_NUMBERS = st.one_of(
    st.integers(),
    st.sampled_from(
        [0, -1, 1, 2**31, 2**62, 2**63, 2**64, 10**40, 1.5, float("nan"), float("inf")]
    ),
)
ODD_TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "..",
            "../x",
            "/etc/passwd",
            "a/b",
            "\0",
            "\x1b[2J",
            "",
            "~",
            "float32",
            "object",
            "x" * 300,
        ]
    ),
)
ODD = st.recursive(
    st.one_of(st.none(), st.booleans(), ODD_NUMBERS, ODD_TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(ODD_TEXTS, inner, max_size=4)
    ),
    max_leaves=8,
)
# What may be right somewhere.
PLAUSIBLE = st.one_of(
    st.sampled_from([0, 1, 2, 3, 4, 6, 8, 16, 256, -1, 0.0, 0.5, 1.0, 1e-3, True, False, None]),
    st.sampled_from(
        ["", "cpu", "tiny", "adamw", "2x2", "3", "skip", "torch", "w", "bfloat16", "silu"]
    ),
    st.builds(list),
    st.builds(dict),
)
# Where to go in a nested thing (each number chooses among what is there), and what to put there.
CHANGES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 30), max_size=6),
        st.sampled_from(["put", "drop", "twice"]),
        st.one_of(PLAUSIBLE, ODD),
    ),
    min_size=1,
    max_size=3,
)
# Where in a text of bytes (in parts of a million), what, and what to put there.
EDITS = st.lists(
    st.tuples(
        st.integers(0, 999_999),
        st.sampled_from(["flip", "cut", "drop", "insert"]),
        st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=4,
)


def changed(thing: Any, changes: list[tuple[list[int], str, Any]]) -> Any:
    """Returns a nested thing with changes at places."""
    thing = copy.deepcopy(thing)
    for path, kind, value in changes:
        inside = thing
        for step in path:
            keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
            if not keys:
                break
            key = keys[step % len(keys)]
            child = inside[key]
            if isinstance(child, dict | list) and step is not path[-1]:
                inside = child
                continue
            if kind == "drop":
                del inside[key]
            elif kind == "twice" and isinstance(inside, list):
                inside.append(copy.deepcopy(child))
            else:
                inside[key] = value
            break
    return thing


def edited(text: bytes, edits: list[tuple[int, str, bytes]]) -> bytes:
    """Returns bytes with edits."""
    content = bytearray(text)
    for part, kind, value in edits:
        at = part * len(content) // 1_000_000
        if kind == "flip" and content:
            content[at] ^= value[0] or 1
        elif kind == "cut":
            del content[at:]
        elif kind == "drop":
            del content[at : at + value[0] + 1]
        else:
            content[at:at] = value
    return bytes(content)
