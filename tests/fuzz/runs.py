"""What a run reads apart from checkpoints: its settings, its text, and the environment."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from shardgrad.programs.train.config import TrainConfig, read_settings, resumed
from shardgrad.programs.train.failure import TrainingError
from shardgrad.programs.train.texts import LIMIT_NBYTES, read_text
from tests.fuzz.inputs import (
    CHANGES,
    ODD,
    PLAUSIBLE,
    Target,
    changed,
    scratch,
)

# -- the environment

NUMBERED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MEETING = ("MASTER_ADDR", "MASTER_PORT")
SETTINGS = (
    *("CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"),
    *("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    *("NCCL_GRAPH_REGISTER", "OMP_NUM_THREADS"),
)
ENVIRONMENT = (*NUMBERED, *MEETING, *SETTINGS)
_VALUES = st.one_of(
    st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=10),
    st.integers(-1, 9).map(str),
    st.integers().map(str),
    st.sampled_from(
        [
            "zero",
            "",
            "9" * 5000,
            "65535",
            "65536",
            "expandable_segments:True",
            "localhost",
            "online",
        ]
    ),
)
# None or more of them, and a launcher's of which some are others.
VARIABLES = st.one_of(
    st.dictionaries(st.sampled_from(ENVIRONMENT), _VALUES),
    st.dictionaries(st.sampled_from(ENVIRONMENT), _VALUES, max_size=3).map(
        lambda others: {
            **{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            **{"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", **others},
        }
    ),
)


# -- settings

FIELDS = st.sampled_from(list(TrainConfig.__dataclass_fields__))
KEYS = st.one_of(FIELDS, st.sampled_from(["unknown", "batch-size", "", "a.b"]))


def feed_saved_settings(changes: list[tuple[list[int], str, Any]]) -> str:
    """A `config.json` of which parts were changed, resumed on another number of ranks."""
    right = asdict(TrainConfig(ranks=2, batch_size=6))
    return feed_settings_file(json.dumps(changed(right, changes)).encode())


def feed_settings_file(text: bytes) -> str:
    path = scratch() / "settings.json"
    path.write_bytes(text)
    try:
        resumed(TrainConfig(**read_settings(path)), {"ranks": 3})
    except TrainingError:
        return "refused"
    return "taken"


SETTINGS_FILES = st.one_of(
    st.binary(max_size=200),
    st.dictionaries(KEYS, st.one_of(PLAUSIBLE, ODD), max_size=3).map(
        lambda x: json.dumps(x).encode()
    ),
    st.integers(0, 3000).map(lambda levels: b"[" * levels),
)


# -- a text to train on

ENTRIES = st.lists(
    st.sampled_from(["text", "empty", "pipe", "dangling", "loop", "zero", "unreadable"]),
    max_size=4,
)
TEXTS = st.tuples(
    ENTRIES,
    st.sampled_from(
        [
            "folder",
            "text-0",
            "text-0",
            "pipe-0",
            "zero-0",
            "dangling-0",
            "loop-0",
            "missing",
            "\0",
            "x" * 300,
        ]
    ),
    st.sampled_from([2, 16, 2**40]),
)


def _make_entry(kind: str, path: Path) -> None:
    if kind == "text":
        path.write_bytes(bytes(range(256)) * 8)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("dangling", "loop", "zero"):
        path.symlink_to({"dangling": "nothing", "loop": ".", "zero": "/dev/zero"}[kind])
    else:
        path.touch(0 if kind == "unreadable" else 0o644)


def feed_text(case: tuple[list[str], str, int]) -> str:
    """A file or folder given by `--data`, with entries of all kinds that a file system has."""
    entries, name, seq_len = case
    folder = scratch() / "texts"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number, kind in enumerate(entries):
        _make_entry(kind, folder / f"{kind}-{number}")
    path = str(folder if name == "folder" else folder / name)
    try:
        text = read_text(path, seq_len=seq_len)
    except TrainingError:
        return "refused"
    assert seq_len < len(text) <= LIMIT_NBYTES
    return "read"


TARGETS = {
    "saved settings": Target(CHANGES, feed_saved_settings),
    "file of settings": Target(SETTINGS_FILES, feed_settings_file),
    "text to train on": Target(TEXTS, feed_text),
}
