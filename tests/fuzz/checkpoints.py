"""Files of checkpoints: ours, torch's, and what lies in a folder of several."""

from __future__ import annotations

import json
import shutil
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st

from shardgrad import checkpoint
from shardgrad.errors import CheckpointError
from tests.checkpoint.test_checkpoint import same
from tests.fuzz.inputs import CHANGES, EDITS, ODD, ODD_TEXTS, Target, changed, edited, scratch


def state(value: float) -> dict[str, Any]:
    return {
        "w": torch.full((4, 3), value),
        "b": torch.full((5,), int(value), dtype=torch.int64),
        "groups": [{"lr": value, "name": str(value), "betas": (value, 0.5)}],
    }


@cache
def samples() -> Path:
    """Returns a folder with a checkpoint of each kind, a copy of each to be damaged, and a
    series.
    """
    folder = scratch() / "checkpoints"
    checkpoint.save(state(1.0), folder / "ours")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state(1.0), checkpoint_id=folder / "torch", no_dist=True)
    for kind in ("ours", "torch"):
        shutil.copytree(folder / kind, folder / f"{kind}-damaged")
        (folder / "series").mkdir(exist_ok=True)
        (folder / "series" / f"step_00000{len(kind)}").symlink_to(folder / kind)
    return folder


def load(folder: Path, *, has_checksums: bool) -> str:
    """Loads a checkpoint that may be damaged: all of it, or nothing and a typed error. Without
    checksums, damage may go unnoticed, or be found late.
    """
    into = state(0.0)
    tensors = {name: value for name, value in into.items() if isinstance(value, torch.Tensor)}
    try:
        loaded = checkpoint.load(into, folder)
    except CheckpointError:
        assert not has_checksums or all(not tensor.any() for tensor in tensors.values()), (
            "a refused checkpoint left something behind"
        )
        return "refused"
    assert not has_checksums or same(loaded, state(1.0)), "damage went unnoticed"
    return "loaded"


def load_damaged(kind: str, contents: dict[str, bytes]) -> str:
    """Loads a checkpoint in which some files have other contents."""
    folder = samples() / f"{kind}-damaged"
    try:
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        return load(folder, has_checksums=kind == "ours")
    finally:
        for name in contents:
            shutil.copy(samples() / kind / name, folder / name)


def feed_manifest(changes: list[tuple[list[int], str, Any]]) -> str:
    """A manifest that is JSON and says something else. What it says may be believed, if it is
    possible: one of another name's files leaves the bytes as they are.
    """
    right = json.loads((samples() / "ours" / "manifest.json").read_text(encoding="utf-8"))
    return feed_manifest_text(json.dumps(changed(right, changes)).encode())


def feed_manifest_text(text: bytes) -> str:
    return load_damaged("ours", {"manifest.json": text})


def feed_file(kind: str, case: tuple[int, list[tuple[int, str, bytes]]]) -> str:
    """Damage to one file of a checkpoint, without anybody's correcting a checksum."""
    number, edits = case
    files = sorted((samples() / kind).iterdir())
    path = files[number % len(files)]
    return load_damaged(kind, {path.name: edited(path.read_bytes(), edits)})


def feed_pointer(text: bytes) -> str:
    folder = samples() / "series"
    (folder / "latest").write_bytes(text)
    found = checkpoint.Series(folder).latest()
    assert found in (folder / "step_000004", folder / "step_000005"), (
        f"{found} is none of this folder"
    )
    return "newest" if found.name == "step_000005" else "another"


POINTERS = st.one_of(
    st.binary(max_size=40),
    ODD_TEXTS.map(lambda text: text.encode("utf-8", "replace")),
    st.tuples(
        st.sampled_from(["", " ", "../", "/", "../series/", "series/"]),
        st.sampled_from(
            ["step_000004", "step_000005", "step_5", "step_000009", "ours", "step_\u0661\u0661"]
        ),
        st.sampled_from(["", "\n", "/", "/manifest.json", "\0", ".tmp", ".abandoned", "\n\n"]),
    ).map(lambda parts: "".join(parts).encode()),
)


FILES = st.tuples(st.integers(0, 2), EDITS)
TARGETS = {
    "manifest": Target(CHANGES, feed_manifest),
    "manifest as text": Target(
        st.one_of(st.binary(max_size=200), ODD.map(lambda x: json.dumps(x).encode())),
        feed_manifest_text,
    ),
    "files": Target(FILES, lambda case: feed_file("ours", case)),
    "files of torch": Target(FILES, lambda case: feed_file("torch", case)),
    "latest": Target(POINTERS, feed_pointer),
}
