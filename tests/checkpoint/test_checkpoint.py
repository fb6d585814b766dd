"""Checkpoints in one process: what goes in comes out, whole or not at all, and nothing else is
believed.
"""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardgrad import checkpoint
from shardgrad.errors import CheckpointError, OptionError, OptionTypeError

ROWS, LARGE = 15, 1500  # of the first tensor; a large one has several blocks
DATA, METADATA, MANIFEST = "__0_0.distcp", ".metadata", "manifest.json"
DTYPES = (
    *(torch.bool, torch.uint8, torch.uint16, torch.int16, torch.int64, torch.float8_e5m2),
    *(torch.float16, torch.bfloat16, torch.float64, torch.complex32, torch.complex128),
)


def state(seed: int = 0, rows: int = ROWS) -> dict[str, Any]:
    """Returns a state with every kind of leaf."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(rows, 1000, generator=generator),
            "a/b~c": torch.randn(3, generator=generator).bfloat16(),
            "turned": torch.randn(4, 6, generator=generator).t(),
        },
        "step": torch.tensor(float(seed)),
        "nothing": torch.zeros(0, 3),
        "typed": Counter(
            {str(dtype): (torch.arange(16) % 2 ^ seed).byte().view(dtype) for dtype in DTYPES}
        ),
        "groups": [
            {"lr": 0.1 + seed, "betas": (0.9, 0.95), "name": "é", "none": None, "on": True, 3: seed}
        ],
    }


def same(ours: Any, theirs: Any) -> bool:
    """Returns whether two states are equal, to the bit and to the type."""
    if isinstance(theirs, torch.Tensor):
        bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (ours, theirs)]
        return (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape) and torch.equal(*bits)
    if isinstance(theirs, dict):
        alike = (type(ours), ours.keys()) == (type(theirs), theirs.keys())
        return alike and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return type(ours) is type(theirs) and bool(ours == theirs)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of `state(0)`."""
    checkpoint.save(state(), tmp_path / "saved")
    return tmp_path / "saved"


def refused(folder: Path, words: str, rows: int = ROWS, **changes: Any) -> None:
    """Asserts that a checkpoint is refused, with these words, and that nothing of a state was
    changed.
    """
    ours = state(1, rows) | changes
    before = copy.deepcopy(ours)
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load(ours, folder)
    assert same(ours, before)


# -- round trips


@pytest.mark.parametrize("rows", [ROWS, LARGE])
def test_what_was_saved_is_loaded_in_place(tmp_path: Path, rows: int) -> None:
    checkpoint.save(state(0, rows), tmp_path / "saved")
    ours = state(1, rows)
    addresses = [ours["model"][name].data_ptr() for name in ours["model"]]
    assert same(checkpoint.load(ours, tmp_path / "saved"), state(0, rows))
    assert same(ours["model"], state(0, rows)["model"])
    assert [ours["model"][name].data_ptr() for name in ours["model"]] == addresses


def test_a_key_may_have_the_name_of_what_lies_deeper(tmp_path: Path) -> None:
    ours = {"a.b": 1, "a": {"b": {"c": 2}, "d": [torch.ones(1)]}, "a.d": 3, "": 4}
    checkpoint.save(ours, tmp_path / "c")
    assert same(checkpoint.load(ours, tmp_path / "c"), ours)


@pytest.mark.parametrize("saved", [torch.float32, torch.int64, torch.complex128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.complex64])
def test_numbers_may_be_loaded_into_another_precision_and_into_no_other_kind(
    saved: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    values, ours = torch.arange(5).to(saved), {"x": torch.zeros(5, dtype=dtype)}
    checkpoint.save({"x": values}, tmp_path / "c")
    saved_kind, kind = ((d.is_floating_point, d.is_complex) for d in (saved, dtype))
    if saved_kind == kind != (False, False):  # a narrower dtype of whole numbers wraps around
        checkpoint.load(ours, tmp_path / "c")
        assert torch.equal(ours["x"], values.to(dtype))
    else:
        with pytest.raises(CheckpointError, match=r"x is a tensor of .* numbers .*, not a "):
            checkpoint.load(ours, tmp_path / "c")
        assert not ours["x"].any()


def test_a_number_goes_into_a_tensor_of_one_and_the_reverse(tmp_path: Path) -> None:
    checkpoint.save({"lr": torch.tensor(0.5), "eps": 0.25}, tmp_path / "c")
    ours = {"lr": 0.0, "eps": (eps := torch.zeros((), requires_grad=True))}
    assert same(checkpoint.load(ours, tmp_path / "c"), {"lr": 0.5, "eps": torch.tensor(0.25)})
    assert eps == 0.25


def test_parts_are_loaded_only_when_they_are_named_optional(saved: Path) -> None:
    ours = {"model": {"weight": torch.zeros(ROWS, 1000), "new": torch.ones(2)}}
    with pytest.raises(CheckpointError, match=r"model\.new"):
        checkpoint.load(ours, saved)
    with pytest.raises(
        CheckpointError, match=r"0\.3 is only in the checkpoint, .* nothing is only .* step is"
    ):
        checkpoint.load(ours, saved, optional=("model.*",))
    with pytest.raises(OptionTypeError, match=r"optional=\('model\.\*',\)"):
        checkpoint.load(ours, saved, optional="model.*")
    assert not ours["model"]["weight"].any()
    checkpoint.load(ours, saved, optional=("*",))
    assert torch.equal(ours["model"]["weight"], state()["model"]["weight"])
    assert torch.equal(ours["model"]["new"], torch.ones(2))


def test_a_checkpoint_of_torch_is_loaded_like_ours(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path, no_dist=True)
    assert same(checkpoint.load(state(1), tmp_path), state())


def test_a_checkpoint_of_ours_is_loaded_by_torch(saved: Path, tmp_path: Path) -> None:
    theirs = state(1)
    dcp.load(theirs, checkpoint_id=saved, no_dist=True)
    del theirs["groups"][0]["3"]  # torch sets values under texts
    assert same(theirs | {"groups": 0}, state() | {"groups": 0})
    dcp_to_torch_save(saved, tmp_path / "file.pt")
    found = torch.load(tmp_path / "file.pt")
    assert torch.equal(found["model"]["weight"], state()["model"]["weight"])
    assert found["groups"][0]["betas"] == (0.9, 0.95)


# -- atomicity


def small(number: int) -> dict[str, Any]:
    return {"x": torch.full((300,), float(number)), "n": number}


def number_in(path: Path | None) -> int:
    """Returns which small state a checkpoint holds; all of it."""
    assert path is not None
    loaded = checkpoint.load(small(-1), path)
    assert same(loaded, small(loaded["n"]))
    return int(loaded["n"])


def test_a_checkpoint_may_take_the_place_of_the_folder_one_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    checkpoint.save(small(1), ".")
    assert number_in(tmp_path / "here") == 1


def test_a_path_through_links_means_what_the_system_takes_it_for(tmp_path: Path) -> None:
    (tmp_path / "disk" / "runs").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "disk" / "runs")
    (tmp_path / "newest").symlink_to(tmp_path / "disk" / "c")
    for number, path in enumerate(("runs/../a", "newest")):
        checkpoint.save(small(number), tmp_path / path)
        assert number_in(tmp_path / path) == number
    assert {path.name for path in (tmp_path / "disk").iterdir()} == {"a", "c", "runs"}


def test_a_name_that_is_taken_is_left_alone(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for taken in (tmp_path / "mine", saved):
        with pytest.raises(CheckpointError, match="already exists"):
            checkpoint.save(small(1), taken)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    assert same(checkpoint.load(state(1), saved), state())


def test_an_error_with_a_note_is_told_as_any_other(tmp_path: Path) -> None:
    error = CheckpointError("not published")
    error.add_note("by the program")
    with pytest.raises(CheckpointError, match="not published"):
        checkpoint.save(small(1), tmp_path / "c", then=mock.Mock(side_effect=error))


def test_what_is_no_data_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for odd in (
        {1, 2},
        b"bytes",
        object(),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
        (torch.zeros(2),),
    ):
        with pytest.raises(CheckpointError, match="odd"):
            checkpoint.save({"odd": odd}, tmp_path / "c")
    with pytest.raises(CheckpointError, match="duplicated flatten key 1"):
        checkpoint.save({1: 1, "1": 2}, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_retention_keeps_the_newest_and_the_one_named_latest(tmp_path: Path) -> None:
    series = checkpoint.Series(tmp_path, keep=2)
    for step in (5, 10, 999_999, 1_000_000):
        path = series.path_of(step)
        checkpoint.save(small(step), path, then=lambda path=path: series.publish(path))
    assert [path.name for path in series.complete()] == ["step_999999", "step_1000000"]
    assert number_in(series.latest()) == 1_000_000
    for name in ("step_999999\n", "step_999999/", "checkpoints/step_999999"):
        (tmp_path / "latest").write_text(name)
        assert number_in(series.latest()) == 999_999
    series.path_of(5).mkdir()  # nothing is in it
    for wrong in ("../../etc", "step_000005", "", "\xff"):
        (tmp_path / "latest").write_text(wrong, encoding="latin-1")
        assert number_in(series.latest()) == 1_000_000
    (tmp_path / "latest").write_text("step_999999")
    series.recover()
    assert [path.name for path in series.complete()] == ["step_999999"]
    for path in map(series.path_of, (1_000_000, 7)):  # a run may go back
        checkpoint.save(small(1), path, then=lambda path=path: series.publish(path))
    with pytest.raises(OptionError, match="only a complete checkpoint"):
        series.publish(str(series.path_of(8)))
    assert [path.name for path in series.complete()] == ["step_000007", "step_1000000"]
    for odd in (0, 1.5):
        with pytest.raises(OptionError, match="newest checkpoint is always kept"):
            checkpoint.Series(tmp_path, keep=odd)  # type: ignore[arg-type]
    for step in (-1, 1.0, 10**18):
        with pytest.raises(OptionError, match="no such step"):
            series.path_of(step)  # type: ignore[arg-type]


# -- damage


def test_a_flipped_bit_anywhere_is_found_before_anything_is_changed(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    checkpoint.save(state(0, LARGE), saved)
    for name in (DATA, METADATA, MANIFEST):
        right = (saved / name).read_bytes()
        for at in (0, len(right) // 2, len(right) - 1):
            damaged = bytearray(right)
            damaged[at] ^= 4
            (saved / name).write_bytes(damaged)
            refused(saved, f"file .* is missing or damaged(.|\n)*{tmp_path}", LARGE)
        (saved / name).write_bytes(right)
    assert same(checkpoint.load(state(1, LARGE), saved), state(0, LARGE))


@pytest.mark.parametrize("name", [DATA, METADATA, MANIFEST])
@pytest.mark.parametrize("change", ["shorter", "longer", "gone", "link", "folder", "pipe"])
def test_a_file_of_another_size_or_kind_is_refused(saved: Path, name: str, change: str) -> None:
    path = saved / name
    content = path.read_bytes()
    path.unlink()
    if change in ("shorter", "longer"):
        path.write_bytes(content[:-3] if change == "shorter" else content + b"}")
    elif change == "link":
        (saved.parent / "elsewhere").write_bytes(content)
        path.symlink_to(saved.parent / "elsewhere")
    elif change == "folder":
        path.mkdir()
    elif change == "pipe":
        os.mkfifo(path)
    elif name == MANIFEST:  # what is left is a checkpoint as torch writes it
        with pytest.raises(CheckpointError, match="checksums"):
            checkpoint.verify(saved)
        assert same(checkpoint.load(state(1), saved), state())
        return
    refused(saved, "damaged")


@pytest.mark.parametrize("name", [DATA, METADATA])
def test_a_file_that_the_manifest_does_not_list_is_refused(saved: Path, name: str) -> None:
    content = json.loads((saved / MANIFEST).read_text())
    del content["files"][name]
    (saved / MANIFEST).write_text(json.dumps(content))
    refused(saved, "damaged")


def test_what_does_not_fit_is_named_all_of_it(saved: Path) -> None:
    wrong = {
        "weight": torch.zeros(1000, ROWS),
        "a/b~c": torch.zeros(3, dtype=torch.int64),
        "turned": torch.zeros(6, 4),
    }
    refused(
        saved,
        r"model.a/b~c is a tensor of real numbers .* not a tensor of torch.int64 numbers .*"
        r"model.weight is a .* with shape \(15, 1000\), not a .* with shape \(1000, 15\)",
        model=wrong,
    )
    refused(saved, "more is missing, other is missing", more=1, other=torch.zeros(1))
    refused(saved, r"step is a tensor .*, not a value", step="3")
    refused(saved, r"nothing is a tensor .*, not a value", nothing=3)
    refused(
        saved,
        "name is a value, not a tensor",
        groups=[state()["groups"][0] | {"name": torch.zeros(())}],
    )
    ours = state(1)
    del ours["model"]["turned"]
    with pytest.raises(CheckpointError, match=r"model\.turned is only in the checkpoint"):
        checkpoint.load(ours, saved)


# -- hostile input


@pytest.mark.parametrize("version", [0, 2, 10**30])
def test_a_manifest_of_another_version_says_so_whatever_else_is_in_it(
    saved: Path, version: int
) -> None:
    (saved / MANIFEST).write_text(f'{{"version": {version}, "unknown": 1}}')
    refused(saved, rf"manifest.json is missing or damaged[^?]*version 1[^?]*version {version}")
