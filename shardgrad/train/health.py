"""Checks for silent faults: non-finite numbers, replicas that differ, parameters that no step
changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardgrad.checks.replica_report import checksum, replica_report
from shardgrad.train.checkpoint import TrainState
from shardgrad.train.failure import TrainingError
from shardgrad.train.parallel import World

_SHOWN = 3  # names in one sentence


@dataclass(frozen=True)
class StepResult:
    """The results of a step, on the device. The next step may overwrite them.

    Args:
        loss: this rank's mean loss over its micro-batches, fp32 scalar.
        grad_norm: norm of all gradients before clipping, a scalar; a DTensor if the gradients are.
        grad_sums: sum of the local part of each parameter's gradient, fp32 `[parameters]`.
        lr: learning rate of the step.
    """

    loss: Tensor
    grad_norm: Tensor
    grad_sums: Tensor
    lr: float


def gradient_sums(parameters: list[Tensor]) -> Tensor:
    """Returns the sum of each parameter's local gradient, fp32 `[parameters]`, on the device.

    A sum is not finite if the gradient is not, so that a report can name the parameter. One pass
    over the gradients; does not wait for the device.
    """
    sums = [_memory_of(parameter).sum(dtype=torch.float32) for parameter in parameters]
    return torch.stack(sums) if sums else torch.zeros(0)


def _memory_of(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    if grad is None:
        return torch.zeros((), device=parameter.device)
    return grad.to_local() if isinstance(grad, DTensor) else grad


class NonfiniteCheck:
    """Records, on the device, the first step of this rank with a non-finite loss or gradient.

    Reading a loss waits for the device. So steps do not read it: :meth:`examine` does, together
    with the metrics and before a checkpoint, so that no checkpoint has non-finite values. Until
    then the optimizers of `shardgrad.optim` skip such steps.

    Args:
        names: names of the parameters, in the order of `StepResult.grad_sums`.
        policy: `stop`, `skip` or `dump`; see `TrainConfig.on_nonfinite`.
        folder: folder of the run, for dumps.
        world: this rank.
    """

    def __init__(self, names: list[str], policy: str, folder: Path, world: World) -> None:
        self._names = names
        self._policy = policy
        self._folder = folder
        self._world = world
        self._forget()

    def _forget(self) -> None:
        device = self._world.device
        self._first_bad = torch.full((), -1, dtype=torch.int64, device=device)
        self._loss = torch.zeros((), device=device)
        self._sums = torch.zeros(len(self._names), device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def watch(self, step: int, result: StepResult) -> None:
        """Records a step, without waiting for the device."""
        norm = result.grad_norm
        norm = norm.to_local() if isinstance(norm, DTensor) else norm
        bad = ~(torch.isfinite(result.loss) & torch.isfinite(norm))
        is_first = bad & (self._first_bad < 0)
        self._first_bad.masked_fill_(is_first, step)
        self._loss = torch.where(is_first, result.loss, self._loss)
        self._sums = torch.where(is_first, result.grad_sums, self._sums)
        self._count += bad

    def examine(self) -> str | None:
        """Reads the record. A collective; waits for the device.

        Returns:
            With the policy `skip`, a message about the steps skipped since the last call; None if
            none were.

        Raises:
            TrainingError: with the other policies, on every rank, if any rank had a non-finite
                step.
        """
        bad = self._first_bad.item()
        rows = self._world.gather(
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
        words = self._in_words(
            [row if int(row[0]) == first else [-1.0, 1.0, -1.0, 0.0] for row in rows]
        )
        if self._policy == "skip":
            skipped = int(max(row[3] for row in rows))
            self._forget()
            return f"Skipped {skipped} step(s) that were not finite, the first {first}: {words}."
        if self._policy == "dump":
            words += f"; the values are in {self._dump(first)}"
        raise TrainingError(
            f"The loss or the gradients stopped being finite at step {first}: {words}. Lower --lr "
            f"or --clip, "
            "or use --precision fp32."
        )

    def _first_name(self) -> int:
        """Returns the index of the first non-finite gradient on this rank, or -1."""
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
            words.append(
                f"the gradient of parameter {self._names[number]}, which lies on rank {rank}"
            )
        return " and ".join(words) or "the norm of the gradients, each of which is finite"

    def _dump(self, step: int) -> Path:
        folder = self._folder / f"nonfinite_step_{step:06d}"
        folder.mkdir(exist_ok=True)
        found = {
            "step": torch.tensor(step),
            "loss": self._loss.cpu(),
            "gradient_sums": dict(zip(self._names, self._sums.cpu().unbind(), strict=True)),
        }
        torch.save(found, folder / f"rank_{self._world.rank}.pt")
        return folder


class SilentFaultCheck:
    """Checks for faults that neither the loss nor an error shows.

    Args:
        state: the state that steps change.
        world: this rank.
    """

    def __init__(self, state: TrainState, world: World) -> None:
        self._state = state
        self._world = world
        self._names = [name for name, p in state.model.named_parameters() if p.requires_grad]
        self._sums: Tensor | None = None
        self._since = state.step
        self._reported: set[str] = set()

    def compare_replicas(self) -> None:
        """Compares the replicas of parameters and optimizer state. A collective.

        Raises:
            TrainingError: on every rank, naming the first tensors that differ, and their ranks.
        """
        report = replica_report(self._state.model, self._state.optimizer)
        if not self._world.any(bool(report.differing)):
            return
        words = "; ".join(str(report).splitlines()[:_SHOWN]) if report.differing else ""
        told = next(filter(None, self._world.all_gather_text(words)))
        raise TrainingError(
            f"Replicas have drifted apart, found after step {self._state.step}: {told}. A rank "
            f"computes or "
            "remembers wrongly (failing memory or device?): resume, without that machine if it "
            "happens again."
        )

    def unchanged_parameters(self) -> str | None:
        """Returns a message about parameters that no step has changed since the last call. A
        collective.

        Returns:
            None if there are none. Each parameter is named once in a run.
        """
        params = [p for p in self._state.model.parameters() if p.requires_grad]
        sums = torch.stack([checksum(_shard_of(p)) for p in params]).cpu()
        before, since = self._sums, self._since
        self._sums, self._since = sums, self._state.step
        if before is None:
            return None
        rows = self._world.gather((sums != before).double().tolist())
        moved = torch.tensor(rows).any(0).tolist()
        still = [name for name, has in zip(self._names, moved, strict=True) if not has]
        fresh = [name for name in still if name not in self._reported]
        self._reported.update(fresh)
        if not fresh:
            return None
        more = f" and {len(fresh) - _SHOWN} more" if len(fresh) > _SHOWN else ""
        return (
            f"Not moved by any step since step {since}: {', '.join(fresh[:_SHOWN])}{more}. "
            "Do their gradients reach them, and does the optimizer have them?"
        )


def _shard_of(parameter: Tensor) -> Tensor:
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()
