"""A folder of checkpoints has one writer, which others can name; and `latest` is always there, and
no older than before.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from shardgrad import checkpoint
from shardgrad.errors import CheckpointError
from shardgrad.programs.checkpoint import Series
from shardgrad.programs.checkpoint.folder import published
from tests.checkpoint.test_checkpoint import number_in, small


def save(series: Series, step: int, *, number: int | None = None) -> None:
    path = series.path_of(step)
    checkpoint.save(
        small(step if number is None else number), path, then=lambda: series.publish(path)
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


@contextmanager
def elsewhere(work: Callable[[], object]) -> Iterator[int]:
    """Does something in another process, which then lives until the end of the block; gives its
    number.
    """
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
            os.write(tells, b"done")
            signal.pause()
        finally:
            os._exit(1)
    os.close(tells)
    try:
        assert os.read(told, 4) == b"done"
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)


def no_other_may_save_into(folder: Path) -> None:
    def refused() -> None:
        with pytest.raises(CheckpointError, match=f"process {os.getppid()} "):
            save(Series(folder), 9)

    with elsewhere(refused):
        pass


# -- the lock


def test_a_second_process_is_told_who_writes_and_since_when(tmp_path: Path) -> None:
    series = Series(tmp_path)
    (tmp_path / ".lock").write_text("a writer before, with more to say of itself" * 2)
    with elsewhere(lambda: save(Series(tmp_path), 1)) as holder:
        os.kill(holder, signal.SIGSTOP)  # it keeps the lock while it stands still
        words = rf"process {holder} on {socket.gethostname()}, since {time.strftime('%Y-')}.*\d\n"
        for work in (
            series.acquire,
            series.recover,
            lambda: save(series, 2),
            lambda: series.publish(series.path_of(1)),
        ):
            with pytest.raises(CheckpointError, match=words):
                work()
        assert names(tmp_path) == ["step_000001"], "refused before anything was written"
        assert series.latest() == series.path_of(1), "reading is free"
    save(series, 2)
    assert series.latest() == series.path_of(2)


def test_of_two_that_save_under_one_name_the_first_gets_it_whole(tmp_path: Path) -> None:
    def save_late() -> None:
        with published(tmp_path / "c") as late:
            (late / "mine").write_text("late")
            with published(tmp_path / "c") as first:
                (first / "mine").write_text("first")

    with pytest.raises(OSError, match="not empty"):
        save_late()
    assert names(tmp_path) == ["c"]
    assert (tmp_path / "c" / "mine").read_text() == "first"


def test_a_process_may_take_its_lock_again_and_gives_it_back_for_all(tmp_path: Path) -> None:
    first, second = Series(tmp_path), Series(tmp_path / "link")
    second.folder.symlink_to(tmp_path)
    save(first, 1)
    save(second, 2)
    first.release()
    with elsewhere(Series(tmp_path).acquire):
        pass
    save(second, 3)
    no_other_may_save_into(tmp_path)
    no_other_may_save_into(tmp_path)  # what a forked process did has not unlocked it


def test_another_process_does_not_clear_away_what_is_being_saved_where_a_series_is(
    tmp_path: Path,
) -> None:
    series = Series(tmp_path)
    save(series, 1)
    series.release()
    with published(tmp_path / "by_hand"):
        no_other_may_save_into(tmp_path)


def test_a_lock_outlives_the_children_that_it_was_not_meant_for(tmp_path: Path) -> None:
    """A process that was forked by a writer and lives on does not keep its folder locked."""

    def write_and_fork() -> None:
        Series(tmp_path).acquire()
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)

    with elsewhere(write_and_fork):
        pass
    Series(tmp_path).acquire()


def test_a_lock_that_was_removed_under_a_run_is_taken_again(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    series = Series(folder)
    series.acquire()
    shutil.rmtree(folder)  # by a person who wants the space, or by a clean-up job
    save(series, 1)
    no_other_may_save_into(folder)
    assert series.latest() == series.path_of(1)


def test_a_run_whose_removed_lock_another_process_took_is_refused(tmp_path: Path) -> None:
    series = Series(tmp_path)
    save(series, 1)
    (tmp_path / ".lock").unlink()
    with elsewhere(lambda: save(Series(tmp_path), 5)) as holder:
        with pytest.raises(CheckpointError, match=f"process {holder} "):
            save(series, 2)
        series.release()
        assert (tmp_path / ".lock").exists()  # it is the other one's
        assert names(tmp_path) == ["step_000001", "step_000005"]


def test_a_file_system_without_locks_is_named(tmp_path: Path) -> None:
    with (
        mock.patch.object(os, "lockf", side_effect=OSError(errno.ENOLCK, "No locks available")),
        pytest.warns(UserWarning, match=r"without locks \(No locks available\)"),
    ):
        Series(tmp_path).acquire()
    Series(tmp_path).release()


# -- latest


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_what_a_run_that_went_back_abandoned_is_neither_latest_nor_kept_for_it(
    tmp_path: Path, keep: int
) -> None:
    series = Series(tmp_path, keep=4)
    for step in (10, 20, 30, 40):
        save(series, step)
    (tmp_path / "latest").write_text("step_000020\n")
    again = Series(tmp_path, keep=keep)  # another process, or the same one
    with pytest.raises(CheckpointError, match=r"step_000030 already exists(.|\n)*recover"):
        save(again, 30, number=31)
    again.recover()
    assert names(tmp_path) == ["step_000010", "step_000020"]
    save(again, 30, number=31)
    assert again.latest() == again.path_of(30)
    assert number_in(again.path_of(30)) == 31
    kept = ["step_000010", "step_000020", "step_000030"]
    assert names(tmp_path) == kept[-keep:]
    (tmp_path / "latest").unlink()
    assert again.latest() == again.path_of(30)
    save(again, 70)
    assert names(tmp_path) == [*kept, "step_000070"][-keep:]


def test_a_reader_between_the_name_and_its_removal_finds_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has read the name; before it looks, two newer checkpoints are saved and the one it
    read is removed.
    """
    series = Series(tmp_path, keep=1)
    save(series, 1)
    read = Series._named
    later = iter([2, 3])

    def slow(self: Series) -> str:
        name = read(self)
        for step in later:
            save(series, step)
        return name

    reader = Series(tmp_path)
    monkeypatch.setattr(Series, "_named", lambda self: slow(self) if self is reader else read(self))
    # Each that it lists is removed before it looks at it.
    monkeypatch.setattr(reader, "complete", list)
    assert reader.latest() == series.path_of(3)
