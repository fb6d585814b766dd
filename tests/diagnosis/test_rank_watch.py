"""What ranks are told that wait for each other: pure, and where a training thread is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import shardgrad
from shardgrad.diagnosis import rank_watch, training_thread
from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.diagnosis.training_thread import TrainingThread
from shardgrad.diagnosis.waiting_ranks import Post, explain
from tests.support.parity import SHARDGRAD, token_loss, tower
from tests.support.ranks import Ranks

IN_FULL = Post(0, "full_tensor() at train.py:12")
IN_FORWARD = Post(1, "forward() at train.py:30", "all-gather of layers.0")


def test_a_post_survives_the_store() -> None:
    assert Post.from_json(IN_FORWARD.to_json()) == IN_FORWARD


def test_ranks_in_different_collectives_are_told_all_places_and_the_cures() -> None:
    finding = explain({0: IN_FULL, 1: IN_FORWARD}, 2, 0)
    assert finding is not None
    assert finding.what == (
        "ranks wait for each other in different collectives: rank 0 in full_tensor() at "
        "train.py:12; "
        "rank 1 in the all-gather of layers.0, forward() at train.py:30"
    )
    assert finding.fix.startswith("full_tensor() is a collective: call it on every rank")
    assert "a forward gathers parameters from all ranks" in finding.fix
    assert not finding.is_final


def test_a_rank_that_goes_on_may_still_come() -> None:
    assert explain({0: IN_FULL, 1: IN_FORWARD}, 3, 0) is None


def test_ranks_on_one_line_that_wait_for_the_device_are_told_apart_by_what_they_have_started() -> (
    None
):
    here = Post(0, "train at train.py:30", started="reduce-scatter of layers.0, number 12")
    there = replace(here, rank=1, started="all-gather of layers.1, number 11")
    finding = explain({0: here, 1: there}, 2, 0)
    assert finding is not None
    assert finding.what == (
        "ranks wait for each other in different collectives: rank 0 in train at train.py:30, after "
        "the "
        "reduce-scatter of layers.0, number 12; rank 1 in train at train.py:30, after the "
        "all-gather of "
        "layers.1, number 11"
    )
    assert "call the same collectives in the same order" in finding.fix
    assert explain({0: here, 1: replace(here, rank=1)}, 2, 0) is None


def test_a_line_that_waits_for_the_device_after_another_rank_has_ended_is_told_of_steps() -> None:
    here = Post(0, "train at train.py:30", started="all-gather of layers.0, number 12")
    finding = explain({0: here, 1: Post(1, "", has_ended=True)}, 2, 0)
    assert finding is not None
    assert "every rank has to take as many steps" in finding.fix


def test_ranks_in_one_collective_wait_for_the_network() -> None:
    assert explain({0: replace(IN_FORWARD, rank=0), 1: IN_FORWARD}, 2, 0) is None


def test_a_rank_that_has_failed_ends_the_wait_with_its_own_fix() -> None:
    failed = Post(
        0, "forward() at train.py:30", error="UnownedParameterError: no unit owns x", fix="y"
    )
    finding = explain({0: failed, 1: IN_FORWARD}, 3, 1)
    assert finding is not None
    assert finding.is_final
    assert finding.fix == "y"
    assert "rank 0 has failed (UnownedParameterError: no unit owns x)" in finding.what


def test_a_rank_that_has_ended_ends_the_wait() -> None:
    finding = explain({0: Post(0, "", has_ended=True), 1: IN_FORWARD}, 2, 1)
    assert finding is not None
    assert finding.is_final
    assert "rank 0 has ended its program" in finding.what
    assert "shardgrad.participate(model)" in finding.fix


def test_one_that_computes_is_not_taken_for_one_that_waits() -> None:
    thread, seen = TrainingThread(), []
    watching = threading.Thread(
        target=lambda: [seen.append(thread.look()) or time.sleep(0.05) for _ in range(8)]
    )
    watching.start()
    while watching.is_alive():
        torch.ones(64, 64).mm(torch.ones(64, 64))
    watching.join()
    assert seen == [0.0] * 8


def test_a_wait_is_counted_from_where_the_last_one_that_was_known_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training_thread, "_passes_collective", lambda _: True)
    thread, seen, done = TrainingThread(), [], threading.Event()

    def look(*, is_known: bool) -> float:
        time.sleep(0.05)
        monkeypatch.setattr(recorder, "waits_in", ("world", None) if is_known else None)
        return thread.look()

    def watch() -> None:
        while look(is_known=False) == 0.0:  # until this thread stands still
            continue
        look(is_known=True)
        seen.extend([look(is_known=False), look(is_known=False)])
        done.set()

    threading.Thread(target=watch).start()
    done.wait()
    assert seen[0] == 0.0
    assert seen[1] > 0.0


def with_a_watch(program: Callable[[rank_watch._RankWatch, str], list[bool]]) -> list[bool]:
    SHARDGRAD.shard_tower(tower())
    watch = rank_watch._watches.current
    assert watch is not None
    rank_watch._watches.stop()  # its thread would take back what is posted
    dist.barrier()
    found = program(watch, str(dist.get_rank()))
    dist.barrier()
    watch._store.delete_key(rank_watch._FINAL)
    return found


def posts_are_sent_once_and_taken_back(watch: rank_watch._RankWatch, key: str) -> list[bool]:
    seen, post = [], Post(int(key), "f() at train.py:1")
    watch._post(post)
    seen.append(watch._store.check([key]))
    watch._store.delete_key(key)
    watch._post(post)
    seen.append(watch._store.check([key]))
    watch._post(replace(post, call="g() at train.py:2"))
    seen.append(watch._store.check([key]))
    watch._take_back()
    return [*seen, watch._store.check([key])]


def test_a_post_is_sent_when_it_changes_and_taken_back(two_ranks: Ranks) -> None:
    found = two_ranks.run(with_a_watch, posts_are_sent_once_and_taken_back)
    assert found == [[True, False, True, False]] * 2


def errors_of_its_own_are_posted(watch: rank_watch._RankWatch, key: str) -> list[bool]:
    watch.say_farewell(RuntimeError("no room on the disk"))
    post = Post.from_json(watch._store.get(key).decode())
    watch._take_back()
    return [post.error == "RuntimeError: no room on the disk", post.has_ended]


def test_a_rank_that_an_error_of_its_own_ends_says_so(two_ranks: Ranks) -> None:
    assert two_ranks.run(with_a_watch, errors_of_its_own_are_posted) == [[True, True]] * 2


def ends_where_no_thread_can_be_started() -> list[bool]:
    """As programs end with Python 3.12 and later."""
    SHARDGRAD.shard_tower(tower())
    watch, key = rank_watch._watches.current, str(dist.get_rank())
    assert watch is not None
    with mock.patch.object(
        threading.Thread, "start", side_effect=RuntimeError("at interpreter shutdown")
    ):
        rank_watch._say_farewell()
    post = Post.from_json(watch._store.get(key).decode())
    watch._take_back()
    dist.barrier()
    watch._store.delete_key(rank_watch._FINAL)
    return [post.has_ended, watch._thread.is_alive()]


def test_a_rank_that_ends_says_so_without_a_new_thread(two_ranks: Ranks) -> None:
    assert two_ranks.run(ends_where_no_thread_can_be_started) == [[True, False]] * 2


def what_is_known_of_a_wait() -> tuple[float, str]:
    """Rank 0 waits for a second in full_tensor, until rank 1 comes."""
    model = SHARDGRAD.shard_tower(tower())
    param = next(p for p in model.parameters() if isinstance(p, DTensor))
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(1.0)
        param.full_tensor()
        return 0.0, ""
    thread, seen = TrainingThread(), []
    watching = threading.Thread(
        target=lambda: [
            seen.append((thread.look(), thread.call())) or time.sleep(0.1) for _ in range(8)
        ]
    )
    watching.start()
    param.full_tensor()
    watching.join()
    return max(seen)


def test_one_that_waits_inside_of_torch_is_known_by_what_the_program_called(
    two_ranks: Ranks,
) -> None:
    waited_s, call = two_ranks.run(what_is_known_of_a_wait)[0]
    assert 0.3 < waited_s < 10
    assert call.startswith("full_tensor() at test_rank_watch.py:")


def nothing_is_posted() -> list[bool]:
    """Ranks train, and one is late now and then."""
    model = SHARDGRAD.shard_tower(tower())
    for step in range(3):
        token_loss(model, SHARDGRAD.tokens(step)).backward()
        time.sleep(0.6 * (dist.get_rank() == step % 2))
    watch = rank_watch._watches.current
    assert watch is not None
    return [watch._store.check([key]) for key in ("0", "1", "final")]


def test_ranks_that_go_on_post_nothing(two_ranks: Ranks) -> None:
    assert two_ranks.run(nothing_is_posted) == [[False] * 3] * 2


def a_refusal_is_taken_back() -> bool:
    model = SHARDGRAD.shard_tower(tower())
    token_loss(model, SHARDGRAD.tokens(0)).backward()
    with pytest.raises(shardgrad.ShardgradError):
        model.head(torch.ones(1))
    assert recorder.reported is not None
    token_loss(model, SHARDGRAD.tokens(0)).backward()
    return recorder.reported is None


def test_what_a_rank_refused_no_longer_counts_once_it_goes_on(two_ranks: Ranks) -> None:
    assert all(two_ranks.run(a_refusal_is_taken_back))
