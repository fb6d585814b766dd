"""What is fed to the doors through which files and words come in, and what may come out of them.

A target takes one input and returns what happened, in a word. Anything but a typed error, a success with the
right result, or (for the command line) an exit status fails.
"""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import shutil
import tempfile
import warnings
import zipfile
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
from shardgrad.checkpoint import lock
from shardgrad.checkpoint.index import Index
from shardgrad.checkpoint.source import marker_of
from shardgrad.cli import main
from shardgrad.errors import CheckpointError, ShardgradError
from shardgrad.train.config import TrainConfig, mesh_shape, read_settings, resumed
from shardgrad.train.failure import TrainingError
from shardgrad.train.launch import is_restarted, torchrun_world_size
from shardgrad.train.parallel import World
from shardgrad.train.record import RunRecord

WORLD = World(0, 1, torch.device("cpu"), None)  # type: ignore[arg-type]  # one rank


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


# -- pickles, by their grammar: programs that may share, nest, change and name anything ---

STRINGS = st.one_of(
    st.sampled_from(["ha", "torch", "Size", "os", "system", "w", "x" * 1000]), st.text(max_size=8)
)
OPCODES = st.one_of(
    st.sampled_from([b"N", b"\x88", b"}", b"]", b")", b"(", b"t", b"l", b"d", b"\x85", b"\x86", b"\x87"]),
    st.sampled_from(
        [b"a", b"e", b"s", b"u", b"b", b"R", b"\x81", b"\x93", b"\x94", b"0", b"2", b"Q", b"\x8f"]
    ),
    st.integers(0, 12).map(lambda number: b"h%c" % number),
    st.integers(0, 12).map(lambda number: b"q%c" % number),
    st.integers(-(2**70), 2**70).map(lambda number: pickle.dumps(number, protocol=2)[2:-1]),
    STRINGS.map(lambda text: pickle.dumps(text, protocol=4)[11:-2] if len(text.encode()) < 200 else b"N"),
    st.sampled_from(["torch Size", "torch float32", "os system", "collections OrderedDict"]).map(
        lambda name: b"c%b\n%b\n" % tuple(part.encode() for part in name.split())
    ),
)
# A run of opcodes again and again: doubling, deepening.
PROGRAMS = st.tuples(
    st.lists(OPCODES, max_size=12),
    st.lists(OPCODES, max_size=6),
    st.integers(0, 60),
    st.lists(OPCODES, max_size=6),
).map(lambda parts: b"\x80\x02" + b"".join([*parts[0], *parts[1] * parts[2], *parts[3]]) + b".")


def feed_list_of_contents(program: bytes) -> str:
    """A program of opcodes as torch's list of contents."""
    folder = scratch() / "torch-damaged"
    before = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(program)
    try:
        return load(folder, is_intact=False)
    finally:
        (folder / ".metadata").write_bytes(before)


def feed_attributes(case: tuple[str, str, Any]) -> str:
    """A list of contents of torch's of which one attribute is another plain object."""
    part, name, value = case
    folder = scratch() / "torch-damaged"
    before = (folder / ".metadata").read_bytes()
    metadata = pickle.loads(before)
    if part == "storage":
        for info in metadata.storage_data.values():
            object.__setattr__(info, name, value)
    elif part == "tensor":
        for stored in metadata.state_dict_metadata.values():
            object.__setattr__(stored, name, value)
    else:
        setattr(metadata, name, value)
    try:
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        return load(folder, is_intact=False)
    finally:
        (folder / ".metadata").write_bytes(before)


ATTRIBUTES = st.tuples(
    st.sampled_from(["storage", "tensor", "metadata"]),
    st.sampled_from(
        [
            *("relative_path", "offset", "length", "transform_descriptors", "size", "chunks", "properties"),
            *("planner_data", "storage_data", "state_dict_metadata"),
        ]
    ),
    st.one_of(ODD, ODD.map(lambda x: (x, x)), st.integers(0, 50).map(lambda levels: nested(levels))),
)


def nested(levels: int) -> Any:
    leaf: Any = ("ha",)
    for _ in range(levels):
        leaf = (leaf, leaf)
    return leaf


def feed_archive(program: bytes) -> str:
    """A program of opcodes in the archive of a value, with right checksums."""
    folder = scratch() / "torch-damaged"
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in (("data.pkl", program), ("version", b"3\n"), ("byteorder", b"little")):
            archive.writestr(f"archive/{name}", content)
    metadata_before = (folder / ".metadata").read_bytes()
    (data,) = folder.glob("*.distcp")
    data_before = data.read_bytes()
    metadata = pickle.loads(metadata_before)
    info = next(info for index, info in metadata.storage_data.items() if index.offset is None)
    object.__setattr__(info, "offset", len(data_before))
    object.__setattr__(info, "length", len(stream.getvalue()))
    try:
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        data.write_bytes(data_before + stream.getvalue())
        return load(folder, is_intact=False)
    finally:
        (folder / ".metadata").write_bytes(metadata_before)
        data.write_bytes(data_before)


# -- a run folder ---------------------------

EVENTS = st.lists(
    st.one_of(
        st.dictionaries(
            st.sampled_from(["event", "step", "loss", "digest", "x"]),
            st.one_of(ODD, st.sampled_from(["start", "step", "validation", 1, 2.5])),
            max_size=5,
        ).map(lambda event: json.dumps(event).encode()),
        st.binary(max_size=40),
    ),
    max_size=6,
).map(b"\n".join)


def feed_metrics(text: bytes) -> str:
    folder = scratch() / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(text)
    record = RunRecord(folder)
    warning = record.begin(TrainConfig(ranks=1), WORLD, step=3, facts={"digest": "abc"})
    assert record.events()[-1]["event"] == "start"
    for event in record.events():
        float(event["step"]), float(event.get("loss", 0.0))
    assert (warning is None) == (not list(folder.glob("*.unreadable*")))
    return "read" if warning is None else "set aside"


def feed_lock(text: bytes) -> str:
    """What an owner that has ended, on this host, may have left in its lock."""
    path = scratch() / ".lock"
    path.write_bytes(text)
    with mock.patch.object(lock, "RENEWAL_S", 0.001):  # others on another host have not renewed it
        lock.FileLock.take(path, path.parent).release()
    return "taken over"


ENVIRONMENT = st.dictionaries(
    st.sampled_from(["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"]),
    st.one_of(
        st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=10),
        st.integers().map(str),
        st.sampled_from(["zero", "", "9" * 5000]),
    ),
)


def feed_environment(variables: dict[str, str]) -> str:
    try:
        with mock.patch.dict(os.environ, variables):
            torchrun_world_size()
            is_restarted()
    except TrainingError:
        return "refused"
    return "taken"


NUMBERS = st.one_of(
    st.integers(-(10**6), 10**6).map(str),
    st.floats().map(str),
    st.sampled_from(["nan", "inf", "-inf", "0", "-0.0", "1e400", "9" * 5000, "-1", "", "x"]),
)
PLANNED = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *(
                    "--memory-gib",
                    "--node",
                    "--cards",
                    "--compute-s",
                    "--mfu",
                    "--ranks",
                    "--mesh",
                    "--reshard-to",
                ),
                *("--batch-size", "--seq-len", "--accumulate", "--stage", "--device", "--link", "--network"),
                *("--precision", "--reduce-dtype", "--gradient-dtype", "--optimizer", "--override", "--unit"),
            ]
        ),
        st.one_of(NUMBERS, ODD_TEXTS, st.sampled_from(["2x2", "h100", "bf16", "hfsdp", "layers=nan"])),
    ),
    max_size=4,
)


def feed_plan(options: list[tuple[str, str]]) -> str:
    """Options of `shardgrad plan`; a request that makes sense is not planned, since that takes seconds."""
    words = ["plan", "--preset", "tiny", "--no-advice", *(word for pair in options for word in pair)]
    with mock.patch("shardgrad.plan.planning.make_plan", side_effect=TrainingError("made sense")):
        result = CliRunner().invoke(main, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "was not expected" not in result.output, result.output
    return f"exit status {result.exit_code}"


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
    assert "was not expected" not in result.output, result.output
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
    "list of contents of torch": Target(PROGRAMS, feed_list_of_contents),
    "attributes in a list of torch": Target(ATTRIBUTES, feed_attributes),
    "archive of torch": Target(PROGRAMS, feed_archive),
    "metrics": Target(EVENTS, feed_metrics),
    "lock": Target(
        st.one_of(
            st.binary(max_size=100),
            st.fixed_dictionaries({"host": ODD, "process": ODD, "since": ODD}).map(
                lambda x: json.dumps(x).encode()
            ),
        ),
        feed_lock,
    ),
    "environment": Target(ENVIRONMENT, feed_environment),
    "options of a plan": Target(PLANNED, feed_plan),
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
