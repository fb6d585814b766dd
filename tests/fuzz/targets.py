"""What is fed to the doors through which files and words come in, and what may come out of them.

A target takes one input and returns what happened, in a word. Anything but a typed error, a success with the
right result, or (for the command line) an exit status fails.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from hypothesis import strategies as st

from shardgrad import checkpoint
from shardgrad.checkpoint.index import Index
from shardgrad.checkpoint.source import marker_of
from shardgrad.cli import main
from shardgrad.errors import CheckpointError, ShardgradError
from shardgrad.train.config import TrainConfig, mesh_shape, read_settings, resumed
from shardgrad.train.failure import TrainingError


@dataclass(frozen=True)
class Target:
    """One door.

    Attributes:
        inputs: what is fed to it.
        feed: feeds one input, and returns a word for what happened.
    """

    inputs: st.SearchStrategy[Any]
    feed: Callable[[Any], str]


# -- inputs -------------------------------------------------------------------------------------------------

ODD_NUMBERS = st.one_of(
    st.integers(),
    st.sampled_from([0, -1, 1, 2**31, 2**62, 2**63, 2**64, 10**40, 1.5, float("nan"), float("inf")]),
)
ODD_TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["..", "../x", "/etc/passwd", "a/b", "\0", "\x1b[2J", "", "~", "float32", "object", "x" * 300]
    ),
)
ODD = st.recursive(
    st.one_of(st.none(), st.booleans(), ODD_NUMBERS, ODD_TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(ODD_TEXTS, inner, max_size=4)),
    max_leaves=8,
)
# Where to go in a nested thing (each number chooses among what is there), and what to put there.
CHANGES = st.lists(
    st.tuples(st.lists(st.integers(0, 30), max_size=6), st.sampled_from(["put", "drop", "twice"]), ODD),
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


# -- the checkpoint reader ----------------------------------------------------------------------------------


def state(value: float) -> dict[str, Any]:
    return {
        "w": torch.full((4, 3), value),
        "b": torch.full((5,), int(value), dtype=torch.int64),
        "groups": [{"lr": value, "name": str(value), "betas": (value, 0.5)}],
    }


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return all(same(ours[key], theirs[key]) for key in theirs)
    return all(map(same, ours, theirs)) if isinstance(theirs, list | tuple) else bool(ours == theirs)


@cache
def scratch() -> Path:
    """Returns a folder of this process, with a checkpoint of each kind and a copy to be damaged."""
    folder = Path(tempfile.mkdtemp(prefix="shardgrad-fuzz-"))
    checkpoint.save(state(1.0), folder / "ours")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state(1.0), checkpoint_id=folder / "torch", no_dist=True)
    for kind in ("ours", "torch"):
        shutil.copytree(folder / kind, folder / f"{kind}-damaged")
    return folder


def load(folder: Path, *, is_intact: bool) -> str:
    """Loads a checkpoint that may be damaged: all of it, or nothing and a typed error."""
    into = state(0.0)
    tensors = {name: value for name, value in into.items() if isinstance(value, torch.Tensor)}
    try:
        loaded = checkpoint.load(into, folder)
    except CheckpointError:
        assert all(not tensor.any() for tensor in tensors.values()), (
            "a refused checkpoint left something behind"
        )
        return "refused"
    assert not is_intact or same(loaded, state(1.0)), "damage went unnoticed"
    return "loaded"


def feed_index(changes: list[tuple[list[int], str, Any]]) -> str:
    """An index that lies, with a marker that agrees. What it says may be believed, if it is possible."""
    right = json.loads((scratch() / "ours" / "index.json").read_text(encoding="utf-8"))
    text = json.dumps(changed(right, changes)).encode()
    folder = scratch() / "ours-damaged"
    (folder / "index.json").write_bytes(text)
    (folder / "complete").write_text(marker_of(text), encoding="ascii")
    try:
        return load(folder, is_intact=False)
    finally:
        for name in ("index.json", "complete"):
            shutil.copy(scratch() / "ours" / name, folder / name)


def feed_index_text(text: bytes) -> str:
    try:
        Index.from_json(text)
    except CheckpointError:
        return "refused"
    return "read"


def feed_file(kind: str, case: tuple[int, list[tuple[int, str, bytes]]]) -> str:
    """Damage to one file of a checkpoint, without anybody's correcting a checksum."""
    number, edits = case
    right = scratch() / kind
    files = sorted(path.name for path in right.iterdir())
    name, folder = files[number % len(files)], scratch() / f"{kind}-damaged"
    before = (right / name).read_bytes()
    after = edited(before, edits)
    (folder / name).write_bytes(after)
    try:
        # torch's list of contents has no checksum: what it says is believed where it is possible.
        return load(folder, is_intact=name != ".metadata")
    finally:
        (folder / name).write_bytes(before)


def feed_pointer(text: bytes) -> str:
    folder = scratch() / "series"
    folder.mkdir(exist_ok=True)
    (folder / "latest").write_bytes(text)
    found = checkpoint.Series(folder).latest()
    assert found is None, f"{found} is no checkpoint of this folder"
    return "none"


# -- the configuration --------------------------------------------------------------------------------------

FIELDS = st.sampled_from(list(TrainConfig.__dataclass_fields__))
KEYS = st.one_of(FIELDS, st.sampled_from(["unknown", "batch-size", "", "a.b"]))


def feed_settings(settings: dict[str, Any]) -> str:
    try:
        config = TrainConfig(**settings)
        resumed(config, {}, world_size=3)
    except TrainingError:
        return "refused"
    return "taken"


def feed_settings_file(case: tuple[str, bytes]) -> str:
    kind, text = case
    path = scratch() / f"settings.{kind}"
    path.write_bytes(text)
    try:
        settings = read_settings(path)
        TrainConfig(**settings)
    except TrainingError:
        return "refused"
    return "taken"


def feed_mesh(text: str) -> str:
    try:
        mesh_shape(text)
    except TrainingError:
        return "refused"
    return "taken"


# -- the command line ---------------------------------------------------------------------------------------

OPTIONS = [option for command in main.commands.values() for one in command.params for option in one.opts]
WORDS = st.one_of(
    st.sampled_from(
        [
            *OPTIONS,
            *main.commands,
            "verify",
            "inspect",
            "convert",
            "--to",
            "torch",
            "--only",
            "model",
            "--all",
        ]
    ),
    st.sampled_from(["ours", "torch", "ours-damaged", "missing", ".", "new", "layers=2", "1", "-1", "nan"]),
    ODD_TEXTS,
)


def feed_command(words: list[str]) -> str:
    """Words on a command line, of which none may start a run or write outside the folder it is called in."""
    from shardgrad.train.rank import Report

    runner = CliRunner()
    with (
        runner.isolated_filesystem(scratch()),
        mock.patch("shardgrad.train.launch.spawn", return_value=Report(0, 0)),
        mock.patch("shardgrad.cli.doctor._issues", return_value=[]),
    ):
        for kind in ("ours", "torch"):
            Path(kind).symlink_to(scratch() / kind)
        result = runner.invoke(main, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert isinstance(result.exception, ShardgradError), repr(result.exception)
        raise result.exception
    assert "\x1b" not in result.output
    assert "Traceback" not in result.output
    return f"exit status {result.exit_code}"


FILES = st.tuples(st.integers(0, 2), EDITS)
TARGETS: dict[str, Target] = {
    "index": Target(CHANGES, feed_index),
    "index as text": Target(
        st.one_of(st.binary(max_size=200), ODD.map(lambda x: json.dumps(x).encode())), feed_index_text
    ),
    "files": Target(FILES, lambda case: feed_file("ours", case)),
    "files of torch": Target(FILES, lambda case: feed_file("torch", case)),
    "latest": Target(
        st.one_of(st.binary(max_size=40), ODD_TEXTS.map(lambda x: x.encode("utf-8", "replace"))), feed_pointer
    ),
    "settings": Target(st.dictionaries(FIELDS, ODD, max_size=4), feed_settings),
    "file of settings": Target(
        st.tuples(
            st.sampled_from(["toml", "json"]),
            st.one_of(
                st.binary(max_size=200),
                st.dictionaries(KEYS, ODD, max_size=4).map(lambda x: json.dumps(x).encode()),
                st.lists(st.tuples(KEYS, ODD_TEXTS), max_size=4).map(
                    lambda rows: "\n".join(f"{name} = {value}" for name, value in rows).encode(
                        "utf-8", "replace"
                    )
                ),
            ),
        ),
        feed_settings_file,
    ),
    "mesh": Target(st.one_of(ODD_TEXTS, st.from_regex(r"[0-9x²]{1,8}")), feed_mesh),
    "command line": Target(st.lists(WORDS, max_size=6), feed_command),
}
