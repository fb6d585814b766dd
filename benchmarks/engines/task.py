"""What is asked of every engine, and for how long."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from shardgrad.programs.plan.request import mesh_shape
from shardgrad.programs.train.failure import UsageError

PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Task:
    """A training step, the same for all engines.

    Attributes:
        preset: a key of `PRESETS`.
        precision: `fp32`; `bf16` computes in it, reduces gradients and updates in fp32.
        ranks: processes that share the work.
        hosts: machines that the ranks are spread over evenly.
        mesh: `2x2` for HSDP; None shards over all ranks.
        accumulate: micro-batches per step; gradients are reduced after the last.
        batch_size: sequences per rank and micro-batch.
        seq_len: tokens per sequence.
        clip: largest gradient norm; 0 does not clip.
        device: `cpu` or `cuda`.
        share_device: ranks share one GPU, which shows that things work but not how fast.
    """

    preset: str = "tiny"
    precision: str = "fp32"
    ranks: int = 2
    hosts: int = 1
    mesh: str | None = None
    accumulate: int = 1
    batch_size: int = 8
    seq_len: int = 128
    clip: float = 0.0
    device: str = "cpu"
    share_device: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that one step consumes on all ranks together."""
        return self.ranks * self.accumulate * self.batch_size * self.seq_len

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Ranks along each axis, the shards' axis last."""
        return mesh_shape(self.mesh) or (self.ranks,)


@dataclass(frozen=True)
class Length:
    """How long to measure.

    Attributes:
        rounds: in each of them every engine has a turn.
        steps: of a turn.
        warmup: steps of each engine before the first round; enough for every capture.
        limit_s: after half of it no engine is started, after all of it no round, but for the two
            that a median needs.
        answer_s: seconds that ranks may take over a call before they count as hung.
        smoke: the numbers mean nothing.
    """

    rounds: int = 40
    steps: int = 5
    warmup: int = 8
    limit_s: float = 3600.0
    answer_s: float = 120.0
    smoke: bool = False


def smoke(task: Task, length: Length) -> tuple[Task, Length]:
    """The same in seconds: two rounds of one step, of one short sequence."""
    return (
        dataclasses.replace(task, batch_size=1, seq_len=16),
        dataclasses.replace(length, rounds=2, steps=1, warmup=5, smoke=True),
    )


def check(task: Task) -> None:
    """Refuses a task that no engine can do.

    Raises:
        UsageError: a mesh that does not hold the ranks, fewer GPUs than ranks.
    """
    if math.prod(task.mesh_shape) != task.ranks:
        raise UsageError(
            f"--mesh {task.mesh} has room for {math.prod(task.mesh_shape)} ranks, not "
            f"{task.ranks}: use --ranks {math.prod(task.mesh_shape)}, or another mesh."
        )
    if task.device == "cuda" and not task.share_device:
        import torch

        found, wanted = torch.cuda.device_count(), task.ranks // task.hosts
        if found < wanted:
            raise UsageError(
                f"{wanted} ranks need as many GPUs, and {found} can be seen here: use "
                f"{f'--ranks {found}, or --share-device' if found else '--device cpu'}."
            )
