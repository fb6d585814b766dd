"""What a person is told of an exception."""

from __future__ import annotations

import errno
import resource
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardgrad.errors import CheckpointError
from shardgrad.programs.train.failure import PeerLost, explain

SHORT = timedelta(seconds=0.1)


def told_again(own: Exception) -> Exception:
    """An error as it comes out of a save: raised once more while its consequence was being
    handled.
    """
    try:
        try:
            raise CheckpointError("a rank failed in its part") from own
        except CheckpointError:
            raise own from None
    except Exception as error:
        return error


def test_an_error_that_is_the_cause_of_its_own_context_is_explained() -> None:
    own = CheckpointError("this is no checkpoint")
    assert told_again(own).__context__ is not None
    assert "this is no checkpoint" in str(explain(told_again(own)))


def test_a_full_disk_is_found_behind_what_it_led_to() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert str(explain(told_again(full))).startswith("The disk is full")
    behind = CheckpointError("a rank failed in its part")
    behind.__cause__ = full
    assert str(explain(behind)).startswith("The disk is full")
    apart = ValueError("raised from None")
    apart.__context__, apart.__suppress_context__ = full, True
    assert "disk" not in str(explain(apart))


def test_too_many_open_files_name_the_limit_whoever_met_it() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    gloo = RuntimeError(
        "[enforce fail at loop.cc:48] rv != -1. -1 vs -1. pipe: Too many open files"
    )
    for met in (gloo, OSError(errno.EMFILE, "Too many open files", "ascii.py")):
        said = str(explain(met))
        assert f"(its limit is {limit}): run ulimit -n " in said
        assert "enforce" not in said


def test_what_the_store_or_a_collective_of_torch_raises_is_another_ranks_end() -> None:
    with pytest.raises(RuntimeError) as caught:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=1, world_size=2, timeout=SHORT)
    failure = explain(caught.value)
    assert isinstance(failure, PeerLost)
    assert str(failure).startswith("Another rank exited, or did not respond within --timeout (")


def test_a_network_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope")
    with pytest.raises(RuntimeError) as caught:
        dist.ProcessGroupGloo.create_device(interface="nope")
    assert "GLOO_SOCKET_IFNAME=nope is no network interface" in str(explain(caught.value))
