"""Errors of the training program: one sentence with what happened and what to do, and an exit
status.
"""

from __future__ import annotations

import errno
import os
import resource
from traceback import extract_tb

from shardgrad.errors import CheckpointError, CollectiveError
from shardgrad.programs.text import printable

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_MEMORY_WORDS = (
    *("out of memory", "can't allocate memory", "not enough memory"),
    "failed to map segment",  # of a library that is imported
)


class TrainingError(Exception):
    """The run cannot continue. The text is one sentence for the user."""

    exit_status = 1


class UsageError(TrainingError):
    """The settings are invalid or contradict each other. Nothing was started."""

    exit_status = 2


class CheckpointUnusable(TrainingError):
    """The checkpoint to go on from is damaged or does not fit; the text says what to do instead."""


class Interrupted(TrainingError):
    """A user or a scheduler requested the run to stop. The state is saved."""

    exit_status = 130


class PeerLost(TrainingError):
    """Another rank ended or does not answer. A consequence, reported only if no cause is known."""


class UnexpectedError(TrainingError):
    """An error that no sentence explains: its traceback is printed before it."""


def explain(error: BaseException) -> TrainingError:
    """Translates an exception into a `TrainingError`; returns the exception if it is one
    already.
    """
    if isinstance(error, TrainingError):
        return error
    if isinstance(error, CheckpointError):
        if error.__cause__ is not None:  # what happened on this rank
            return explain(error.__cause__)
        return TrainingError(
            f"The checkpoint was not written ({error.what}; {error.got}, at {error.where})."
        )
    reason = operating_system_reason(error)
    if reason is not None and reason.errno in _NO_SPACE:
        return TrainingError(
            f"The disk is full or a quota is exceeded ({_words_of(reason)}): free some space."
        )
    text = str(error).lower()
    if "too many open files" in text:  # gloo's words, too, in an error of its own
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return TrainingError(
            f"A process has too many open files (its limit is {limit}): run ulimit -n "
            f"{max(1024, 2 * limit)}, and start again."
        )
    if "unable to find address for" in text:  # gloo's words
        return UsageError(
            f"GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME')} is no network interface of "
            "this machine: correct it, or unset it."
        )
    if isinstance(error, OSError):
        return TrainingError(
            f"The operating system refused ({_words_of(error)}): remove the cause, or "
            "choose another path."
        )
    if isinstance(error, MemoryError) or any(words in text for words in _MEMORY_WORDS):
        return TrainingError(
            "Memory ran out: lower --batch-size, raise --accumulate, or add "
            "--activation-checkpointing."
        )
    if isinstance(error, CollectiveError) or any(
        call.filename.endswith("/distributed_c10d.py") for call in extract_tb(error.__traceback__)
    ):
        return PeerLost(
            f"Another rank exited, or did not respond within --timeout ({_first_line(error)}): "
            "look for its message."
        )
    return UnexpectedError(f"{type(error).__name__}: {_first_line(error)}")


def operating_system_reason(error: BaseException) -> OSError | None:
    """Returns the `OSError` that caused an error: the error itself, or the first in its chain of
    causes.
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            return link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return None


def reason_of(error: Exception) -> object:
    """Returns the system's words for what is wrong with a path, or those of Python, which knows
    paths that no file can have.
    """
    return getattr(error, "strerror", None) or error


def _words_of(error: OSError) -> str:
    if error.strerror is None or error.filename is None:
        return _first_line(error)
    return f"{error.strerror}: {printable(error.filename)}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else "no further explanation"
