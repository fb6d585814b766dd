"""Typed errors with one format: what happened, then expected / got / where / try.

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
    """Base of every error that this package raises on purpose.

    Args:
        what: what happened, in one sentence.
        expected: what would have been right.
        got: what was found instead.
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
    """The engine cannot shard over this device mesh, or there are no ranks to create one from."""


class MeshNamesError(ShardgradError, AssertionError):
    """A two-dimensional mesh has no axis names."""


class OptionError(ShardgradError, ValueError):
    """An argument has a value outside its range."""


class OptionTypeError(ShardgradError, TypeError):
    """An argument has the wrong type."""


class CustomCommError(ShardgradError, AssertionError):
    """Two settings of a unit's collectives exclude each other."""


class UnsupportedError(ShardgradError, NotImplementedError):
    """A part of FSDP2's surface that this version does not offer yet."""


class UnsupportedParameterError(ShardgradError, ValueError, NotImplementedError):
    """A parameter that cannot be sharded as it is: scalar, non-contiguous, sparse or by dtype."""


class PlacementError(ShardgradError, ValueError, AssertionError):
    """A parameter cannot be sharded along the requested dim, or over the mesh it is on."""


class DeviceError(ShardgradError, ValueError):
    """The parameters are on several devices, or on one that the mesh or the kernels lack."""


class ParameterClaimedError(ShardgradError, ValueError):
    """A parameter already belongs to another unit."""


class AlreadyShardedError(ShardgradError, AssertionError):
    """`fully_shard` was called twice on one module."""


class AsleepError(ShardgradError, RuntimeError):
    """Weights or optimizer states were used while their memory is released."""

    @classmethod
    def of(cls, what: str) -> AsleepError:
        """Returns the error for a model, an optimizer or a pool of graphs."""
        return cls(
            f"{what} is asleep: its memory was released",
            expected="no use between sleep() and wake(), or offload() and reload()",
            fix="shardgrad.wake(model, optimizer, pool), or optimizer.reload()",
        )


class EngineError(ShardgradError, ValueError):
    """Another data-parallel engine (DDP, FSDP1, torch's FSDP2) manages the module, or is
    about to.
    """


class TiedParameterError(ShardgradError, ValueError):
    """Two units share a parameter and no unit contains both, or it was tied after `fully_shard`."""


class RootError(ShardgradError, RuntimeError):
    """A call that only the root unit accepts, or a model without a single root."""


class BackwardFinalizationError(ShardgradError, RuntimeError):
    """`finalize_backward`, or a call that belongs to it, was made at the wrong time."""


class DeepcopyError(ShardgradError, AssertionError):
    """A sharded module was deep-copied."""


class PickleError(ShardgradError, pickle.PicklingError, TypeError):
    """A sharded module was pickled, as by `torch.save(model)`."""


class MetaParameterError(ShardgradError, RuntimeError):
    """Parameters that are needed now are still on the meta device."""


class ExtensionError(ShardgradError, AssertionError):
    """A tensor subclass implements the all-gather protocol in part, or returned unusable values."""


class ForeignParameterError(ShardgradError, RuntimeError):
    """A sharded parameter or gradient was replaced by a tensor that its unit cannot adopt."""


class UnownedParameterError(ShardgradError, RuntimeError):
    """A trainable parameter that no unit owns: every rank would train its own copy."""


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
    """A parameter that an optimizer cannot update, or can no longer update."""


class OptimizerStateError(ShardgradError, ValueError):
    """A saved optimizer state that does not fit the optimizer; nothing was loaded."""


class CheckpointError(ShardgradError, RuntimeError, ValueError):
    """A checkpoint that is incomplete, damaged or does not fit, or cannot be saved."""


class PartnerUnavailableError(ShardgradError, ImportError):
    """An optional package is missing, broken, too old, or another package of the same name."""


class GradientError(ShardgradError, RuntimeError):
    """A gradient that cannot be used: sparse, of another shape, or non-finite where refused."""


class LostWorkWarning(UserWarning):
    """A shard cannot take the program's writes to an unsharded parameter."""


class CaptureError(ShardgradError, RuntimeError):
    """An operation that cannot be part of a CUDA graph was called during a capture."""


class StepInputError(ShardgradError, ValueError, TypeError):
    """A graphed step was called with an argument that cannot be an input of a graph."""


class StepOutputError(ShardgradError, TypeError):
    """A graphed step returned something that a replay cannot update."""


class ReplayMismatchError(ShardgradError, RuntimeError):
    """A replay consumed another amount of random numbers than the eager step."""


def listed(names: Sequence[object], most: int = 3, separator: str = ", ") -> str:
    """Returns the first names in one line, with the number of further ones."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(map(str, names[:most])) + more


def unsupported(name: str, *, instead: str) -> UnsupportedError:
    """Returns the error for a name of FSDP2's API that is not supported yet."""
    return UnsupportedError(
        f"shardgrad does not yet support {name}",
        expected="an option that this version supports",
        got=name,
        fix=instead,
    )
