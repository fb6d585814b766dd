"""Checkpoints made to exhaust their reader are refused by a typed error within 5 CPU seconds and
256 MiB.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import resource
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardgrad import checkpoint
from shardgrad.checkpoint.pickles import check_pickle
from shardgrad.checkpoint.source import marker_of
from shardgrad.checkpoint.text import printable
from shardgrad.errors import CheckpointError

MOST_S, MOST_NBYTES = 5, 256 * 2**20
VALUE = {"w": torch.arange(12.0).reshape(4, 3), "n": {"deep": [1, 2.5, "x", None]}}


def read_all(folder: Path) -> None:
    with checkpoint.open_checkpoint(folder) as source:
        for name, entry in source.tensors.items():
            source.check(name, checkpoint.boxes.Box.whole(entry.shape))
            source.read(name)


def refused(folder: Path, words: str) -> None:
    """Asserts that reading a checkpoint in another process raises a `CheckpointError`, within the
    limits.
    """
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        used = resource.getrusage(resource.RUSAGE_SELF)
        most_s = int(used.ru_utime + used.ru_stime) + MOST_S + 1
        now_nbytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s))
        resource.setrlimit(resource.RLIMIT_AS, (now_nbytes + MOST_NBYTES,) * 2)
        try:
            read_all(folder)
            said = "read"
        except CheckpointError as error:
            said = f"refused: {error}"
        except BaseException:
            said = traceback.format_exc()
        os.write(tells, said.encode()[:4000])
        os._exit(0)
    os.close(tells)
    _, status = os.waitpid(child, 0)
    with os.fdopen(told) as stream:
        said = stream.read()
    assert status == 0, (
        f"ended with {status} after {MOST_S} CPU seconds or for want of memory: {said}"
    )
    assert said.startswith("refused: "), said
    assert words in said


def of_torch(folder: Path, change: Callable[[Any], Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(VALUE, checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def nested(levels: int, leaf: Any = ("ha",)) -> Any:
    """Returns a tuple with 2**levels leaves in memory for `levels` tuples."""
    for _ in range(levels):
        leaf = (leaf, leaf)
    return leaf


def exploding_key() -> bytes:
    """Returns a pickle of a dictionary whose key has 2**60 leaves: the unpickler itself would hash
    it.
    """
    content = b"\x80\x02}U\x02ha\x85q\x00"
    for i in range(60):
        content += b"h%ch%c\x86q%c" % (i, i, i + 1)
    return content + b"K\x01s."


# -- pickles


def test_a_key_that_takes_for_ever_to_hash_is_refused_before_it_is_unpickled(
    tmp_path: Path,
) -> None:
    (tmp_path / ".metadata").write_bytes(exploding_key())
    refused(tmp_path, "repeats more than")


@pytest.mark.parametrize("attribute", ["relative_path", "offset", "length"])
def test_an_attribute_that_takes_for_ever_to_print_is_refused(
    tmp_path: Path, attribute: str
) -> None:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            object.__setattr__(info, attribute, nested(40))

    refused(of_torch(tmp_path, change), "repeats more than")


def test_names_that_take_for_ever_to_join_are_refused(tmp_path: Path) -> None:
    def change(metadata: Any) -> None:
        metadata.planner_data = {"w": nested(40)}

    refused(of_torch(tmp_path, change), "repeats more than")


def test_many_references_to_one_large_object_are_refused_like_few_to_an_exploding_one() -> None:
    for leaf, count in ((("x" * 100_000,), 1_000), (nested(12), 2_000)):
        with pytest.raises(pickle.UnpicklingError, match="repeats more than"):
            check_pickle(pickle.dumps([(leaf,)] + [leaf] * count), names=(), calls=())


def test_tuples_nested_deeper_than_the_stack_of_c_are_refused() -> None:
    content = b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s."
    with pytest.raises(pickle.UnpicklingError, match="nests deeper"):
        check_pickle(content, names=(), calls=())


def test_lists_that_grow_after_they_were_shared_are_refused() -> None:
    """Their size is unknown when they are referred to: they would explode unseen."""
    content = b"\x80\x02(" + b"".join(b"]q%c" % i for i in range(40)) + b"l"
    for i in range(39):
        content += b"h%c(h%ch%ce\x85" % (i, i + 1, i + 1)
    with pytest.raises(pickle.UnpicklingError, match="changes an object"):
        check_pickle(content + b".", names=(), calls=())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps(bytearray(8)), "bytearray"),
        (pickle.dumps({1, 2}), "EMPTY_SET"),
        (b"\x80\x02cos\nsystem\nU\x02ls\x85R.", "names os system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "names os system"),
        (b"\x80\x02ctorch\nfloat32\nK\x01\x85R.", "calls torch float32"),
        (b"\x80\x02]r\xff\xff\xff\x7f.", "numbers an object"),
        (b"\x80\x02\x85.", "takes more"),
        (b"\x80\x02(\x85.", "takes more"),
    ],
)
def test_what_plain_data_does_not_need_is_refused_before_it_is_unpickled(
    content: bytes, words: str
) -> None:
    with pytest.raises(pickle.UnpicklingError, match=words):
        check_pickle(content, names={"torch float32"}, calls=())


def test_what_torch_writes_for_a_large_model_passes(tmp_path: Path) -> None:
    """Names and dtypes are shared by thousands of entries."""
    state = {f"model.layers.{i}.attention.projection.weight": torch.ones(2) for i in range(2_000)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"model": state, "names": ["x" * 200] * 1_000}, checkpoint_id=tmp_path, no_dist=True
        )
    with checkpoint.open_checkpoint(tmp_path) as source:
        assert len(source.tensors) == 2_000
        assert len(source.values) == 1_000


# -- archives


def with_archive(folder: Path, key: str, content: bytes) -> Path:
    """Writes a checkpoint of torch in which an entry's archive is replaced."""

    def change(metadata: Any) -> None:
        (data,) = folder.glob("*.distcp")
        assert key in metadata.state_dict_metadata
        for index, info in metadata.storage_data.items():
            if index.fqn == key:
                object.__setattr__(info, "offset", data.stat().st_size)
                object.__setattr__(info, "length", len(content))
        data.write_bytes(data.read_bytes() + content)

    return of_torch(folder, change)


def archive(pickled: bytes, **members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made:
        for name, content in {
            "data.pkl": pickled,
            "version": b"3\n",
            "byteorder": b"little",
        }.items():
            made.writestr(f"archive/{name}", content)
        for name, content in members.items():
            made.writestr(f"archive/data/{name}", content)
    return stream.getvalue()


@pytest.mark.parametrize(
    "pickled",
    [
        exploding_key(),
        pickle.dumps(nested(40), protocol=2),
        pickle.dumps([nested(3)] * 1_000_000, protocol=2),
        b"\x80\x02c__builtin__\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.",
        b"\x80\x02ctorch.storage\nUntypedStorage\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.",
    ],
    ids=["key", "tuple", "list", "bytearray", "storage"],
)
def test_a_value_of_torch_that_explodes_is_refused(tmp_path: Path, pickled: bytes) -> None:
    refused(with_archive(tmp_path, "n.deep", archive(pickled)), "only data")


def test_a_tensor_whose_pickle_says_more_than_its_archive_holds_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save(torch.zeros(1), stream)
    with zipfile.ZipFile(stream) as made:
        (name,) = (name for name in made.namelist() if name.endswith("data.pkl"))
        pickled = made.read(name)
    size = b"K\x01\x85"  # (1,), once the size and once the stride
    assert pickled.count(size) == 2
    for sizes in (
        [b"\x8a\x06\x00\x00\x00\x00\x00\x01\x85", size],
        [b"\x8a\x06\x00\x00\x00\x00\x00\x01\x85", b"K\x00\x85"],
    ):
        first, second, rest = pickled.split(size)
        forged = archive(first + sizes[0] + second + sizes[1] + rest, **{"0": bytes(4)})

        def change(metadata: Any, forged: bytes = forged) -> None:
            stored = metadata.state_dict_metadata["w"]
            stored.size = torch.Size([2**40])
            stored.chunks = [type(stored.chunks[0])(torch.Size([0]), torch.Size([2**40]))]
            for index in [index for index in metadata.storage_data if index.fqn == "w"]:
                info = metadata.storage_data.pop(index)
                object.__setattr__(index, "offset", torch.Size([0]))
                metadata.storage_data[index] = info

        folder = tmp_path / str(len(sizes[1]) + sizes[1][1])
        with_archive(folder, "w", forged)
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        refused(folder, "the bytes of")


def test_members_of_an_archive_that_share_bytes_are_refused(tmp_path: Path) -> None:
    content = bytearray(archive(pickle.dumps(1, protocol=2), **{"0": bytes(64)}))
    at = content.rindex(
        b"PK\x01\x02"
    )  # the list's last entry: its sizes are 20 and 24 bytes behind
    content[at + 20 : at + 28] = (2**20).to_bytes(4, "little") * 2
    refused(with_archive(tmp_path, "n.deep", bytes(content)), "undamaged")


def test_no_flipped_bit_of_an_archive_raises_an_untyped_error(tmp_path: Path) -> None:
    content = archive(pickle.dumps([1, 2.5, "x"], protocol=2))
    folder = with_archive(tmp_path / "c", "n.deep", content)
    (data,) = folder.glob("*.distcp")
    right = data.read_bytes()
    begin = right.index(content)
    outcomes = set()
    for at in range(begin, begin + len(content)):
        for bit in (0, 3, 6):
            damaged = bytearray(right)
            damaged[at] ^= 1 << bit
            data.write_bytes(damaged)
            try:
                read_all(folder)
                outcomes.add("read")
            except CheckpointError:
                outcomes.add("refused")
    assert "refused" in outcomes


# -- sizes


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    index = json.loads((folder / "index.json").read_text())
    change(index)
    text = json.dumps(index).encode()
    (folder / "index.json").write_bytes(text)
    (folder / "complete").write_text(marker_of(text))
    return folder


def test_pieces_that_share_bytes_are_refused_before_memory_is_reserved(tmp_path: Path) -> None:
    """4,000 pieces over one file of 4 MiB would be a tensor of 16 GiB."""
    count = 4_000

    def change(index: dict[str, Any]) -> None:
        file, start, _, shape, sums = index["tensors"]["w"][2][0]
        pieces = [[file, start, [1024 * i, 0], shape, sums] for i in range(count)]
        index["tensors"]["w"] = ["float32", [1024 * count, 1024], pieces]

    checkpoint.save({"w": torch.ones(1024, 1024)}, tmp_path / "c")
    refused(rewrite(tmp_path / "c", change), "share bytes")


@pytest.mark.parametrize("shift", [0, -1, 11])
def test_tensors_that_share_bytes_are_refused(tmp_path: Path, shift: int) -> None:
    def change(index: dict[str, Any]) -> None:
        tensors = index["tensors"]
        tensors["b"][2][0][1] = tensors["a"][2][0][1] + (12 + shift if shift < 0 else shift)

    checkpoint.save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "c")
    refused(rewrite(tmp_path / "c", change), "share bytes")


def test_entries_of_torch_that_share_bytes_are_refused(tmp_path: Path) -> None:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            object.__setattr__(info, "offset", 0)

    refused(of_torch(tmp_path, change), "share bytes")


@pytest.mark.parametrize("name", ["complete", "index.json", ".metadata"])
def test_a_file_that_claims_40_gib_is_refused_by_its_size(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "c"
    if name == ".metadata":
        of_torch(folder, lambda metadata: None)
    else:
        checkpoint.save({"w": torch.ones(3)}, folder)
    os.truncate(folder / name, 40 * 2**30)
    refused(folder, "at most")


def test_a_tensor_that_does_not_fit_into_memory_is_refused_by_a_typed_error(tmp_path: Path) -> None:
    """Its bytes are there, if only as a hole in the file."""
    nbytes = 2**42

    def change(index: dict[str, Any]) -> None:
        blocks = nbytes // 2**22
        index["files"][0][1] = nbytes
        index["tensors"]["w"] = ["uint8", [nbytes], [[0, 0, [0], [nbytes], [0] * blocks]]]

    folder = tmp_path / "c"
    checkpoint.save({"w": torch.ones(3)}, folder)
    rewrite(folder, change)
    os.truncate(folder / "rank_00000.bin", nbytes)
    with (
        checkpoint.open_checkpoint(folder) as source,
        pytest.raises(CheckpointError, match="no room for w"),
    ):
        source.read("w")


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


def test_text_is_cut_before_it_is_escaped_and_what_cannot_be_written_is_named() -> None:
    began_s = time.process_time()
    assert len(printable("\x1b" * 50_000_000)) == 200
    assert time.process_time() - began_s < 1
    assert printable(10**5000) == "int that is too long to show"
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert printable(deep) == "list that is too long to show"


def test_the_tests_own_pickles_are_what_they_claim() -> None:
    assert sum(code.name == "BINGET" for code, _, _ in pickletools.genops(exploding_key())) == 120


def test_a_flipped_bit_in_any_block_of_a_tensor_is_found_the_last_and_partial_one_too(
    tmp_path: Path,
) -> None:
    nbytes, block = 2 * 2**22 + 100, 2**22
    checkpoint.save(
        {"a": torch.ones(nbytes, dtype=torch.uint8), "b": torch.ones(1000)}, tmp_path / "c"
    )
    data = tmp_path / "c" / "rank_00000.bin"
    right = data.read_bytes()
    for begin, end in ((0, block), (block, 2 * block), (2 * block, nbytes)):
        for at in (begin, end - 1):
            damaged = bytearray(right)
            damaged[at] ^= 16
            data.write_bytes(damaged)
            with pytest.raises(CheckpointError, match="a in the checkpoint is damaged"):
                checkpoint.load(
                    {"a": torch.zeros(nbytes, dtype=torch.uint8), "b": torch.zeros(1000)},
                    data.parent,
                )
    data.write_bytes(right)
    read_all(data.parent)
