"""Typed errors with one shape: what happened, then expected / got / where / try.

Every error is a `ShardgradError` and also the builtin type that FSDP2 raises in the same situation,
so `except` clauses written for FSDP2 keep working.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

__all__ = [
    "AlreadyShardedError",
    "AsleepError",
    "BackwardFinalizationError",
    "CaptureError",
    "CheckpointError",
    "CheckpointSaveError",
    "CheckpointVersionError",
    "CollectiveError",
    "ContainerError",
    "CustomCommError",
    "DeepcopyError",
    "DesyncError",
    "DeviceError",
    "EngineError",
    "ExtensionError",
    "ForeignParameterError",
    "ForwardMethodError",
    "GradientError",
    "LostWorkWarning",
    "MeshError",
    "MeshNamesError",
    "MetaParameterError",
    "OptimizerParameterError",
    "OptimizerStateError",
    "OptionError",
    "OptionTypeError",
    "ParameterClaimedError",
    "ParticipationError",
    "PartnerUnavailableError",
    "PickleError",
    "PlacementError",
    "RankDisagreementError",
    "ReplayMismatchError",
    "RootError",
    "ShardgradError",
    "StepInputError",
    "StepOutputError",
    "TiedParameterError",
    "UnownedParameterError",
    "UnsupportedError",
    "UnsupportedParameterError",
    "listed",
    "unsupported",
]


class ShardgradError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        what: one sentence, what happened.
        expected: what would have been right.
        got: what came instead.
        where: rank, unit, fully qualified parameter or module name.
        fix: what to type next.
    """

    def __init__(
        self,
        what: str,
        *,
        expected: str | None = None,
        got: str | None = None,
        where: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.what = what
        self.expected = expected
        self.got = got
        self.where = where
        self.fix = fix
        rows = (("expected", expected), ("got", got), ("where", where), ("try", fix))
        super().__init__(
            "\n".join([what, *(f"  {label + ':':<10}{text}" for label, text in rows if text)])
        )


class ContainerError(ShardgradError, ValueError):
    """`fully_shard` was given a container that has no forward."""


class MeshError(ShardgradError, ValueError):
    """The device mesh has a shape the engine cannot shard over, or there are no ranks to make one
    of.
    """


class MeshNamesError(ShardgradError, AssertionError):
    """A two-dimensional mesh came without axis names."""


class OptionError(ShardgradError, ValueError):
    """An argument has a value outside its range."""


class OptionTypeError(ShardgradError, TypeError):
    """An argument has the wrong type."""


class CustomCommError(ShardgradError, AssertionError):
    """Two requests about a unit's collectives exclude each other."""


class UnsupportedError(ShardgradError, NotImplementedError):
    """A part of FSDP2's surface that this version does not offer yet."""


class UnsupportedParameterError(ShardgradError, ValueError, NotImplementedError):
    """A parameter that cannot be sharded as it is (scalar, non-contiguous, integer, sparse)."""


class PlacementError(ShardgradError, ValueError, AssertionError):
    """A parameter cannot be sharded along the requested dim, or over the mesh it is on."""


class DeviceError(ShardgradError, ValueError):
    """Parameters of one call are on several devices, or on one that mesh or kernels lack."""


class ParameterClaimedError(ShardgradError, ValueError):
    """A parameter already belongs to another unit."""


class AlreadyShardedError(ShardgradError, AssertionError):
    """`fully_shard` was called twice on one module."""


class AsleepError(ShardgradError, RuntimeError):
    """Weights or optimizer states were used whose memory is given back."""

    @classmethod
    def of(cls, what: str) -> AsleepError:
        """Returns the error for a model, an optimizer or a pool of graphs."""
        return cls(
            f"{what} is asleep: its memory is given back",
            expected="a model, an optimizer and graphs that are awake",
            got="a use of them between sleep() and wake(), or offload() and reload()",
            fix="shardgrad.wake(model, optimizer, pool), or optimizer.reload()",
        )


class EngineError(ShardgradError, ValueError):
    """A module that another data-parallel engine has, or is about to take: DDP, FSDP1 or torch's
    FSDP2.
    """


class TiedParameterError(ShardgradError, ValueError):
    """Two units share a parameter and no unit contains both, or it was tied after `fully_shard`."""


class RootError(ShardgradError, RuntimeError):
    """A call that only the root unit can answer, or a model without a single root."""


class BackwardFinalizationError(ShardgradError, RuntimeError):
    """`finalize_backward` and what belongs to it, called where it cannot be."""


class DeepcopyError(ShardgradError, AssertionError):
    """A sharded module was deep-copied."""


class PickleError(ShardgradError, pickle.PicklingError, TypeError):
    """A sharded module was pickled, as by `torch.save(model)`."""


class MetaParameterError(ShardgradError, RuntimeError):
    """Parameters are still on the meta device when they are needed."""


class ExtensionError(ShardgradError, AssertionError):
    """A tensor subclass follows the all-gather protocol in part, or answered what cannot be
    gathered.
    """


class ForeignParameterError(ShardgradError, RuntimeError):
    """A sharded parameter was replaced by something its unit cannot take over."""


class UnownedParameterError(ShardgradError, RuntimeError):
    """A trainable parameter that no unit owns: every rank would train it apart."""


class ForwardMethodError(ShardgradError, ValueError):
    """`register_fsdp_forward_method` was given a name the module does not have."""


class RankDisagreementError(ShardgradError, RuntimeError):
    """Ranks built different models."""


class CollectiveError(ShardgradError, RuntimeError):
    """A collective failed or timed out."""


class DesyncError(CollectiveError):
    """Ranks called different collectives, or a message belongs to another unit or phase."""


class ParticipationError(ShardgradError, RuntimeError):
    """`participate` was used in a way that other ranks cannot join."""


class OptimizerParameterError(ShardgradError, ValueError, TypeError):
    """A parameter that an optimizer cannot update, or cannot update any more."""


class OptimizerStateError(ShardgradError, ValueError):
    """A saved optimizer state that does not fit the optimizer; nothing was loaded."""


class CheckpointError(ShardgradError, RuntimeError, ValueError):
    """A checkpoint that is incomplete or damaged, or does not fit; or a state that cannot become
    one.
    """


class CheckpointSaveError(ShardgradError, RuntimeError):
    """A checkpoint could not be written; those written before are untouched."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint that another version of shardgrad wrote, in a format that this one does not
    read.
    """


class PartnerUnavailableError(ShardgradError, ImportError):
    """An optional package is missing, broken, too old, or another package of the same name."""


class GradientError(ShardgradError, RuntimeError):
    """A gradient that cannot be used: sparse, of another shape, or not finite where that is
    forbidden.
    """


class LostWorkWarning(UserWarning):
    """A shard cannot take what a program has written to an unsharded parameter."""


class CaptureError(ShardgradError, RuntimeError):
    """An operation that cannot be part of a CUDA graph was called during a capture."""


class StepInputError(ShardgradError, ValueError, TypeError):
    """A graphed step was called with an argument that cannot be an input of a graph."""


class StepOutputError(ShardgradError, TypeError):
    """A graphed step returned something that a replay cannot update."""


class ReplayMismatchError(ShardgradError, RuntimeError):
    """A replay drew another amount of random numbers than the eager step."""


def listed(names: Sequence[object], most: int = 3, separator: str = ", ") -> str:
    """Returns the first names in one line, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(map(str, names[:most])) + more


def unsupported(name: str, *, instead: str) -> UnsupportedError:
    """Returns the error for a name of FSDP2's surface that is not offered yet."""
    return UnsupportedError(
        f"shardgrad does not support {name} yet",
        expected="a call that this version supports",
        got=name,
        fix=instead,
    )
