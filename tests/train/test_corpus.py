"""What the corpus promises: the same bytes, the same samples, however many ranks read them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardgrad.programs.train.corpus import Sampler
from shardgrad.programs.train.failure import UsageError
from shardgrad.programs.train.texts import LIMIT_NBYTES, read_text


def read(path: Path | None) -> bytes:
    return bytes(read_text(None if path is None else str(path), seq_len=4))


def test_the_standard_library_is_read_alike_each_time() -> None:
    import __future__ as first_module  # by name

    text = read(None)
    assert text == read(None)
    assert text.startswith(Path(str(first_module.__file__)).read_bytes())


def test_a_text_is_read_no_further_than_the_limit(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"words")
    os.truncate(tmp_path / "text", LIMIT_NBYTES + 1)
    assert len(read(tmp_path / "text")) == LIMIT_NBYTES


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "no regular file at .*nothing"),
        ("pipe", "no regular file at .*pipe"),
        ("\0", "correct --data"),
    ],
)
def test_a_path_without_text_is_refused_in_words(tmp_path: Path, name: str, words: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=words):
        read(tmp_path / name)


def test_a_text_holds_a_sequence_and_the_byte_after_it(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"12345")
    assert read(tmp_path / "text").decode() == "12345"
    (tmp_path / "text").write_bytes(b"1234")
    with pytest.raises(UsageError, match="has 4 bytes, too few for sequences of 4"):
        read(tmp_path / "text")


@given(
    first=st.integers(0, 10**12),
    count=st.integers(1, 6),
    seed=st.integers(0, 2**40),
    nbytes=st.integers(6, 97),
)
def test_a_sample_depends_on_its_number_and_the_seed_alone(
    first: int, count: int, seed: int, nbytes: int
) -> None:
    sampler = Sampler(torch.arange(nbytes, dtype=torch.uint8), seq_len=5, seed=seed)
    tokens, targets = sampler.batch(first, count)
    one_by_one = [sampler.batch(first + number, 1) for number in range(count)]
    assert torch.equal(tokens, torch.cat([one[0] for one in one_by_one]))
    assert torch.equal(targets, tokens + 1)  # the text counts upwards
