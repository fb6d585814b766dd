"""Nothing in a checkpoint is run, however it is made, and what claims to be huge is not read."""

from __future__ import annotations

import io
import os
import pickle
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardgrad import checkpoint
from shardgrad.errors import CheckpointError
from shardgrad.programs.text import listed, printable
from tests.support.processes import FairClock


def state() -> dict[str, Any]:
    return {"w": torch.arange(12.0).reshape(4, 3), "n": {"deep": [1, 2.5, "x", None]}}


def of_torch(folder: Path, change: Callable[[Any], Any]) -> Path:
    dcp.save(state(), checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def with_archive(folder: Path, key: str, content: bytes) -> Path:
    """Writes a checkpoint of torch in which an entry's archive is replaced."""

    def change(metadata: Any) -> None:
        (data,) = folder.glob("*.distcp")
        assert key in metadata.state_dict_metadata
        for index, info in metadata.storage_data.items():
            if index.fqn == key:
                info.offset, info.length = data.stat().st_size, len(content)
        data.write_bytes(data.read_bytes() + content)

    return of_torch(folder, change)


def archive(pickled: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made:
        for name, content in (("data.pkl", pickled), ("version", b"3\n"), ("byteorder", b"little")):
            made.writestr(f"archive/{name}", content)
    return stream.getvalue()


# -- metadata


OTHER_CLASSES = (
    b"\x80\x02cos\nsystem\nU\x02ls\x85R.",
    b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    b"\x80\x02cbuiltins\neval\nU\x011\x85R.",
    b"\x80\x02ctorch\nload\n.",
    b"\x80\x02ctorch\nserialization.os.system\nU\x02ls\x85R.",
    pickle.dumps(bytearray(8)),
)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        *((content, "is not allowed in the metadata of a checkpoint") for content in OTHER_CLASSES),
        *((content, "") for content in (pickle.dumps({"w": 1}), b"\x80\x02r", b"")),
        # Python 3.11.0 to 3.11.3 need getattr; what stands in for it reaches members of one enum.
        (b"\x80\x02cbuiltins\ngetattr\nctorch\nSize\nU\x08__init__\x86R.", "KeyError"),
    ],
)
def test_metadata_makes_objects_of_torchs_format_and_of_no_other_class(
    content: bytes, says: str, tmp_path: Path
) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"(?s)metadata is missing or damaged.*{says}"):
        checkpoint.read_metadata(tmp_path)


def test_a_tensor_that_its_parts_do_not_cover_is_refused(tmp_path: Path) -> None:
    of_torch(tmp_path / "c", lambda found: found.state_dict_metadata["w"].chunks.pop())
    with pytest.raises(CheckpointError, match="do not cover the tensor w"):
        checkpoint.load(state(), tmp_path / "c")


def test_a_link_in_a_checkpoint_without_checksums_is_not_followed(tmp_path: Path) -> None:
    folder = of_torch(tmp_path / "c", lambda _: None)
    (data,) = folder.glob("*.distcp")
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{data.name} is missing or damaged"):
        checkpoint.load(state(), folder)


# -- archives


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def bomb() -> bytes:
    """Returns a pickle of a dictionary whose key has 2**60 leaves: hashing it does not end."""
    content = b"\x80\x02}(X\x02\x00\x00\x00ha\x85q\x00"
    for i in range(60):
        content += b"h%ch%c\x86q%c" % (i, i, i + 1)
    return content + b"tK\x01s."


@pytest.mark.parametrize("key", ["w", "n.deep"])
def test_an_archive_with_an_older_format_in_front_is_refused_at_once(
    key: str, tmp_path: Path
) -> None:
    """Readers of zip archives begin at their end, torch begins at their first bytes."""
    stream = io.BytesIO()
    torch.save(torch.zeros(4, 3), stream)
    for front in (pickle.dumps(Trap(tmp_path / "sprung")), bomb()):
        folder = with_archive(tmp_path / str(len(front)), key, front + stream.getvalue())
        clock = FairClock()
        with pytest.raises(CheckpointError, match="or not a zip archive"):
            checkpoint.load(state(), folder)
        assert clock.elapsed_s() < 10
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("key", ["w", "n.deep"])
def test_nothing_in_an_archive_is_run(key: str, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    stream = io.BytesIO()
    torch.save(Trap(sprung), stream, _use_new_zipfile_serialization=False)
    for number, content in enumerate(
        [archive(pickle.dumps(Trap(sprung), protocol=2)), stream.getvalue(), b"", b"PK\x03\x04"]
    ):
        with pytest.raises(CheckpointError):
            checkpoint.load(state(), with_archive(tmp_path / str(number), key, content))
    assert not sprung.exists()


# -- sizes


@pytest.mark.parametrize("name", [".metadata", "manifest.json"])
def test_a_file_that_claims_40_gib_is_refused_by_its_size(tmp_path: Path, name: str) -> None:
    checkpoint.save({"w": torch.ones(3)}, tmp_path / "c")
    os.truncate(tmp_path / "c" / name, 40 * 2**30)
    if name == ".metadata":  # else its size is compared with the one in the manifest
        (tmp_path / "c" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="at most"):
        checkpoint.load({"w": torch.ones(3)}, tmp_path / "c")


def test_a_pointer_that_claims_40_gib_or_never_ends_is_no_pointer(tmp_path: Path) -> None:
    series = checkpoint.Series(tmp_path)
    checkpoint.save({"w": torch.ones(3)}, series.path_of(7))
    (tmp_path / "latest").touch()
    os.truncate(tmp_path / "latest", 40 * 2**30)
    assert series.latest() == series.path_of(7)
    (tmp_path / "latest").unlink()
    os.mkfifo(tmp_path / "latest")
    assert series.latest() == series.path_of(7)


# -- text


def test_text_from_a_file_cannot_steer_a_terminal_and_is_cut_before_it_is_escaped() -> None:
    assert printable("a\x1b[2J\n\u202eb") == "a\\x1b[2J\\n\\u202eb"
    assert listed([f"n{i}" for i in range(10)]).endswith("n6, n7 and 2 more")
    began_s = time.process_time()
    assert len(printable("\x1b" * 50_000_000)) == 200
    assert time.process_time() - began_s < 1
    assert printable(10**5000) == "int that is too long to show"
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert printable(deep) == "list that is too long to show"
