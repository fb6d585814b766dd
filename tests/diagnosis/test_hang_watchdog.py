"""The thread that answers for a rank ends when it is told to, and not in the middle of a look."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from shardgrad.diagnosis.hang_watchdog import HangWatchdog


def test_closing_waits_for_a_look_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that comes back from the store while the interpreter ends would abort the
    process.
    """
    is_looking = threading.Event()

    def slow_round(watchdog: HangWatchdog, store: dist.Store) -> tuple[int, int, bool]:
        is_looking.set()
        time.sleep(4 * watchdog.period_s)
        return 0, 0, False

    monkeypatch.setattr(HangWatchdog, "_round", slow_round)
    watchdog = HangWatchdog(dist.HashStore(), 0, 1).start()
    assert is_looking.wait(10)
    watchdog.close()
    assert watchdog.closed


@pytest.mark.parametrize(("ranks", "period_s"), [(1, 0.5), (256, 0.5), (4096, 8.0)])
def test_all_ranks_together_ask_the_store_no_more_often_than_one_host_can_answer(
    ranks: int, period_s: float
) -> None:
    assert HangWatchdog(dist.HashStore(), 0, ranks).period_s == period_s
