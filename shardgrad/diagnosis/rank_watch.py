"""The rank watch: tells every program within seconds why its ranks wait for each other, and what to
type.

[Note: Rank watch]
`fully_shard` starts a thread with the first model that several ranks share. Twice a second it looks
where the training thread is. A rank that stands still in a collective for two seconds, refuses to
go on, or comes to its end, posts that in the store of the process group, and takes it back when it
goes on. A rank that waits reads what the others have posted. A collective of the engine that cannot
end any more, because a rank that has to join it has failed or ended, is given up with a
`CollectiveError`. Everything else is a warning: of what looks stuck, some might still end, and a
thread that waits inside of torch cannot be interrupted.

Over NCCL hosts wait for the device, not in a collective: there a rank counts as standing still
after 30 s on one line, and says which collective it has started last, so that ranks on the same
line are told apart.

While ranks go on nothing is sent, and no step pays for anything. `shardgrad train` has a watchdog
which finds out more (`hang_watchdog.py`), and reads what this thread does not: journals of the
collectives, and stacks.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from operator import attrgetter

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.diagnosis.training_thread import TrainingThread, call_in, passes_collective
from shardgrad.diagnosis.waiting_ranks import Finding, Post, explain
from shardgrad.errors import CollectiveError

__all__ = ["WaitingRanksWarning", "leave_to_program", "watch_ranks"]

_PREFIX = "shardgrad/rank_watch"
_FINAL = "final"  # the last rank that has failed or ended
_WATCHES = "watches"
_PERIOD_S = 0.5
_BLOCKED_S = 2.0  # after which a rank posts, and begins to read
_FAREWELL_S = 2.0  # a store whose host cannot be reached does not answer
_NEVER_CAME_S = 5.0  # after which ranks without a watch are looked for
_READERS = 8  # of the lowest ranks; all of many would read too much
_BACKENDS = ("gloo", "nccl", "xccl", "hccl")


class WaitingRanksWarning(UserWarning):
    """Ranks wait for each other in different collectives, or for a rank that has ended."""


class _RankWatch:
    """The thread of one process, for one world. See [Note: Rank watch]."""

    def __init__(self, world: dist.ProcessGroup, *, is_device_waited_for: bool) -> None:
        store = dist.distributed_c10d._get_default_store()
        another_connection = getattr(store, "clone", lambda: store)
        self._store = PrefixStore(f"{_PREFIX}/{world.group_name}", another_connection())
        self._world = weakref.ref(world)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._is_device_waited_for = is_device_waited_for
        self._training = TrainingThread(is_device_waited_for=is_device_waited_for)
        self._has_posted = ""
        self._suspected: Finding | None = None
        self._is_closing = threading.Event()
        self._farewell: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="shardgrad rank watch", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the world is still the default process group."""
        return dist.group.WORLD is not None and dist.group.WORLD is self._world()

    def close(self) -> None:
        """Ends the thread: one that returned from the store while the interpreter ends would abort
        it.
        """
        self._is_closing.set()
        self._thread.join(10 * _PERIOD_S)

    def end(self, error: BaseException | None) -> None:
        """Ends the thread with a farewell, which it says itself: an interpreter that ends starts no
        other.
        """
        self._farewell = partial(self.say_farewell, error)
        self._is_closing.set()
        self._thread.join(_FAREWELL_S)

    def _run(self) -> None:
        ask_at_s = _BLOCKED_S
        with suppress(Exception):
            self._store.set(f"{_WATCHES}/{self._rank}", "")
        while not self._is_closing.wait(_PERIOD_S) and self.is_current:
            with suppress(
                Exception
            ):  # of a store that is gone, and of warnings that are made errors
                blocked_s = self._training.look()
                if recorder.reported is not None:
                    error, fix = recorder.reported
                    self._post(Post(self._rank, self._training.call(), error=error, fix=fix))
                elif blocked_s < _BLOCKED_S:
                    self._take_back()
                    ask_at_s = _BLOCKED_S
                else:
                    post = self._waiting()
                    self._post(post)
                    if blocked_s >= ask_at_s and self._tell(post, blocked_s):
                        ask_at_s = 10 * blocked_s
        self._is_closing.wait()
        if self._farewell is not None:
            with suppress(Exception):
                self._farewell()

    def _waiting(self) -> Post:
        call, waits_in = self._training.call(), recorder.waits_in
        if waits_in is None or waits_in[1] is None:
            started = _last_started() if self._is_device_waited_for else ""
            return Post(self._rank, call, started=started)
        return Post(self._rank, call, waits_in[1].name, waits_in[0].ranks)

    def _post(self, post: Post) -> None:
        text = post.to_json()
        if text != self._has_posted:
            self._store.set(str(self._rank), text)
            self._has_posted = text
            if post.error or post.has_ended:
                self._store.set(_FINAL, str(self._rank))

    def _take_back(self) -> None:
        self._suspected = None
        if self._has_posted:
            self._has_posted = ""
            self._store.delete_key(str(self._rank))

    def _tell(self, own: Post, blocked_s: float) -> bool:
        """Raises where the training thread waits, or warns; returns False if there was nothing to
        say.
        """
        finding = explain(self._read(own), self._world_size, self._rank)
        if finding is None and blocked_s > _NEVER_CAME_S:
            finding = self._who_never_came()
        if finding is None or finding != self._suspected:
            self._suspected = (
                finding  # what was posted may be about to be taken back: it has to last
            )
            return False
        waits_in = recorder.waits_in
        if finding.is_final and waits_in is not None and waits_in[1] is not None:
            recorder.verdict = waits_in[1], _error(finding, own)
        else:
            _warn(finding)
        return True

    def _read(self, own: Post) -> dict[int, Post]:
        """Returns the posts of all ranks if all have posted, else that of one that has failed or
        ended.
        """
        posts = {self._rank: own}
        others = [str(rank) for rank in range(self._world_size) if rank != self._rank]
        if self._rank >= _READERS or not self._store.check(others):
            others = [self._store.get(_FINAL).decode()] if self._store.check([_FINAL]) else []
        for key in others:
            if key != str(self._rank) and self._store.check([key]):
                posts[int(key)] = Post.from_json(self._store.get(key).decode())
        return posts

    def _who_never_came(self) -> Finding | None:
        """Returns which rank has no watch: a rank that waits for all others waits for it too."""
        keys = [f"{_WATCHES}/{rank}" for rank in range(self._world_size)]
        if self._rank >= _READERS or self._store.check(keys):
            return None
        missing = next(rank for rank, key in enumerate(keys) if not self._store.check([key]))
        return Finding(
            f"rank {missing} has not called fully_shard, and rank {self._rank} waits for it",
            "fully_shard(model) on every rank: take it out of `if rank == 0:`",
        )

    def say_farewell(self, error: BaseException | None) -> None:
        """Tells the ranks that wait for this one; explains a collective's error that ends this
        program.
        """
        call = self._training.call() if error is None else call_in(error)
        own = Post(self._rank, call, has_ended=True)
        if isinstance(error, RuntimeError) and passes_collective(error):
            finding = explain(self._read(own), self._world_size, self._rank)
            if finding is not None:
                _warn(finding)
            return
        if isinstance(error, Exception):
            line = str(error).partition("\n")[0]
            fix = str(getattr(error, "fix", None) or "")
            own = replace(own, error=f"{type(error).__name__}: {line}", fix=fix)
        self._post(own)


def _last_started() -> str:
    """Returns the last collective of the engine, in the process group that had most; empty without
    any.
    """
    logs = [log for log in recorder.group_logs() if log.recent]
    if not logs:
        return ""
    log = max(logs, key=attrgetter("count"))
    return f"{log.recent[-1].name}, number {log.count}"


def _error(finding: Finding, own: Post) -> CollectiveError:
    return CollectiveError(
        f"the {own.collective} cannot end: {finding.what}",
        expected="every rank to join it",
        where=f"rank {own.rank}",
        fix=finding.fix,
    )


def _warn(finding: Finding) -> None:
    warnings.warn(
        f"shardgrad: {finding.what}. Try: {finding.fix}", WaitingRanksWarning, stacklevel=2
    )


class _Watches:
    """What runs in this process."""

    def __init__(self) -> None:
        self.current: _RankWatch | None = None
        self.is_left_to_program = False

    def start(self, device: torch.device) -> None:
        world = dist.group.WORLD
        if world is None or self.is_left_to_program or dist.get_world_size() == 1:
            return
        if self.current is not None and self.current.is_current:
            return
        if any(name in dist.get_backend_config(world) for name in _BACKENDS):
            self.stop()
            self.current = _RankWatch(world, is_device_waited_for=device.type != "cpu")
            Finalize(None, _say_farewell, exitpriority=100)  # also in processes of multiprocessing

    def stop(self) -> None:
        if self.current is not None:
            self.current.close()
            self.current = None


_watches = _Watches()


def watch_ranks(device: torch.device) -> None:
    """Starts the thread, unless it runs, or the program has a watchdog.

    Args:
        device: where parameters compute. Hosts wait for one that is not the CPU, and not in
            collectives.
    """
    _watches.start(device)


def leave_to_program() -> None:
    """Says that the program has a watchdog."""
    _watches.is_left_to_program = True
    _watches.stop()


def _say_farewell() -> None:
    watch = _watches.current
    if watch is not None:
        watch.end(sys.exc_info()[1] or getattr(sys, "last_value", None))
        _watches.current = None
