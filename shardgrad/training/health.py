"""Faults without noise: numbers that are not finite, replicas that differ, parameters that do not move."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardgrad.checks.replica_report import checksum, replica_report
from shardgrad.engine.pending_scale import OwedGradient
from shardgrad.training.checkpoint import TrainState
from shardgrad.training.failure import TrainingError
from shardgrad.training.parallel import Place

_SHOWN = 3  # names in one sentence


@dataclass(frozen=True)
class StepResult:
    """What a step leaves on the device, unread; the next step may overwrite it.

    Args:
        loss: this rank's mean over its micro-batches, fp32 scalar.
        grad_norm: of all gradients before clipping; a DTensor where the gradients are.
        grad_sums: sum of this rank's part of each parameter's gradient, fp32 `[parameters]`.
        lr: the learning rate that was used.
    """

    loss: Tensor
    grad_norm: Tensor
    grad_sums: Tensor
    lr: float


def gradient_sums(parameters: list[Tensor]) -> Tensor:
    """The sum of each parameter's local gradient, fp32 `[parameters]`, on the device.

    Not finite where the gradient is not, so that it can be said which one it was; one pass over them.
    """
    sums = [_memory_of(parameter).sum(dtype=torch.float32) for parameter in parameters]
    return torch.stack(sums) if sums else torch.zeros(0)


def _memory_of(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    if grad is None:
        return torch.zeros((), device=parameter.device)
    if isinstance(grad, OwedGradient):  # what it owes is finite only if it is
        return grad.unpaid()
    return grad.to_local() if isinstance(grad, DTensor) else grad


class Health:
    """Remembers, on the device, the first step of this rank that was not finite, and what of it was not.

    Reading a loss waits for the device, so a step does not; the answer is read with the metrics, and before a
    checkpoint, so that no checkpoint holds numbers that are lost. Meanwhile the optimizers of
    `shardgrad.optim` skip such steps by themselves.

    Args:
        names: of the parameters, in the order of `StepResult.grad_sums`.
        policy: `stop`, `skip` or `dump`; see `TrainConfig.on_nonfinite`.
        folder: of the run, for dumps.
        place: this rank.
    """

    def __init__(self, names: list[str], policy: str, folder: Path, place: Place) -> None:
        self._names = names
        self._policy = policy
        self._folder = folder
        self._place = place
        self._forget()

    def _forget(self) -> None:
        device = self._place.device
        self._first_bad = torch.full((), -1, dtype=torch.int64, device=device)
        self._loss = torch.zeros((), device=device)
        self._sums = torch.zeros(len(self._names), device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def watch(self, step: int, result: StepResult) -> None:
        """Look at a step without waiting for it."""
        norm = result.grad_norm
        norm = norm.to_local() if isinstance(norm, DTensor) else norm
        bad = ~(torch.isfinite(result.loss) & torch.isfinite(norm))
        is_first = bad & (self._first_bad < 0)
        self._first_bad.masked_fill_(is_first, step)
        self._loss = torch.where(is_first, result.loss, self._loss)
        self._sums = torch.where(is_first, result.grad_sums, self._sums)
        self._count += bad

    def examine(self) -> str | None:
        """Read what was remembered, on all ranks together; waits for the device.

        Returns:
            Under the policy `skip`, a remark on the steps that were skipped since the last time, if any were.

        Raises:
            TrainingError: under the other policies, on every rank, if there was such a step.
        """
        bad = self._first_bad.item()
        rows = self._place.gather(
            [
                float(bad),
                float(torch.isfinite(self._loss)),
                float(self._first_name() if bad >= 0 else -1),
                float(self._count),
            ]
        )
        steps = [int(row[0]) for row in rows if row[0] >= 0]
        if not steps:
            return None
        first = min(steps)
        words = self._in_words([row if int(row[0]) == first else [-1.0, 1.0, -1.0, 0.0] for row in rows])
        if self._policy == "skip":
            skipped = int(max(row[3] for row in rows))
            self._forget()
            return f"Skipped {skipped} step(s) that were not finite, the first {first}: {words}."
        if self._policy == "dump":
            words += f"; what there was is in {self._dump(first)}"
        raise TrainingError(
            f"The loss or the gradients stopped being finite at step {first}: {words}. Lower --lr or --clip, "
            "or use --precision fp32."
        )

    def _first_name(self) -> int:
        """The place of the first gradient that is not finite here, or -1."""
        found = (~torch.isfinite(self._sums)).nonzero().flatten().tolist()
        return int(found[0]) if found else -1

    def _in_words(self, rows: list[list[float]]) -> str:
        losses = [str(rank) for rank, row in enumerate(rows) if not row[1]]
        places = [(int(row[2]), rank) for rank, row in enumerate(rows) if row[2] >= 0]
        words = []
        if losses:
            words.append(f"the loss of rank {', '.join(losses)}")
        if places:
            number, rank = min(places)
            words.append(f"the gradient of parameter {self._names[number]}, which lies on rank {rank}")
        return " and ".join(words) or "the norm of the gradients, each of which is finite"

    def _dump(self, step: int) -> Path:
        folder = self._folder / f"nonfinite_step_{step:06d}"
        folder.mkdir(exist_ok=True)
        found = {
            "step": torch.tensor(step),
            "loss": self._loss.cpu(),
            "gradient_sums": dict(zip(self._names, self._sums.cpu().unbind(), strict=True)),
        }
        torch.save(found, folder / f"rank_{self._place.rank}.pt")
        return folder


class Vigil:
    """Looks now and then, and before checkpoints, for what neither the loss nor an error tells.

    Args:
        state: what the steps change.
        place: this rank.
    """

    def __init__(self, state: TrainState, place: Place) -> None:
        self._state = state
        self._place = place
        self._names = [name for name, p in state.model.named_parameters() if p.requires_grad]
        self._sums: Tensor | None = None
        self._since = state.step
        self._told: set[str] = set()

    def compare_replicas(self) -> None:
        """Compare the replicas of parameters and optimizer state.

        Raises:
            TrainingError: on every rank, naming what differs first, and where.
        """
        report = replica_report(self._state.model, self._state.optimizer)
        if not self._place.any(bool(report.differing)):
            return
        words = "; ".join(str(report).splitlines()[:_SHOWN]) if report.differing else ""
        told = next(filter(None, self._place.tell_each_other(words)))
        raise TrainingError(
            f"Replicas have drifted apart, found after step {self._state.step}: {told}. A rank computes or "
            "remembers wrongly (failing memory or device?): resume, without that machine if it happens again."
        )

    def standing_still(self) -> str | None:
        """A remark on parameters that no step has moved since the last look; each is named once."""
        params = [p for p in self._state.model.parameters() if p.requires_grad]
        sums = torch.stack([checksum(_shard_of(p)) for p in params]).cpu()
        before, since = self._sums, self._since
        self._sums, self._since = sums, self._state.step
        if before is None:
            return None
        rows = self._place.gather((sums != before).double().tolist())
        moved = torch.tensor(rows).any(0).tolist()
        still = [name for name, has in zip(self._names, moved, strict=True) if not has]
        fresh = [name for name in still if name not in self._told]
        self._told.update(fresh)
        if not fresh:
            return None
        more = f" and {len(fresh) - _SHOWN} more" if len(fresh) > _SHOWN else ""
        return (
            f"Not moved by any step since step {since}: {', '.join(fresh[:_SHOWN])}{more}. "
            "Do their gradients reach them, and does the optimizer have them?"
        )


def _shard_of(parameter: Tensor) -> Tensor:
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()
