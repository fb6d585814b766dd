"""Knows which optimizers have a step that a CUDA graph can repeat.

A graph repeats kernels, not Python. An optimizer that reads from the device to decide what to do
next fails during a capture, sometimes with a message that names neither the optimizer nor the
reason. One that counts steps or creates its state on the host is captured without an error, and
every replay repeats that one step. An optimizer over sharded parameters falls into one of three
classes:

* it can be captured: the optimizers of `shardgrad.optim`; any with `capturable=True`; SGD and Muon
  once their momentum exists;
* torch refuses it: Adadelta, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop and Rprop without
  `capturable=True`. The error raised here names a parameter as well;
* it cannot be captured: LBFGS, Adagrad, Adafactor and SparseAdam, which have no `capturable`;
  another library's FusedAdam without it; and SGD with momentum, and Muon, before their first step.

Numbers among the hyperparameters are constants of a graph with every optimizer; a learning rate can
be a tensor. Other optimizers are unknown, and their steps are captured.
"""

from __future__ import annotations

from torch import optim
from torch.optim.optimizer import Optimizer

from shardgrad.checks.untrained_params import params_of
from shardgrad.engine.param_group import managed_by
from shardgrad.errors import CaptureError

_READS_HOST: tuple[tuple[type[Optimizer], str], ...] = (
    (optim.LBFGS, "it reads losses and directions on the host to choose the step length"),
    (optim.Adafactor, "it reads norms and step counts on the host"),
    (optim.Adagrad, "it counts steps on the host"),
    (optim.SparseAdam, "it counts steps on the host"),
)


def _why_not_capturable(optimizer: Optimizer) -> str | None:
    """Returns why the optimizer's next step must not be captured; None if no reason is known."""
    for kind, why in _READS_HOST:
        if isinstance(optimizer, kind):
            return why
    if getattr(optimizer, "capturable", None) is False:
        return "it was built with capturable=False, so its step counts would be frozen"
    for group in optimizer.param_groups:
        if group.get("capturable") is False:
            return "one of its groups has capturable=False, so its step counts would be frozen"
    if isinstance(optimizer, (optim.SGD, optim.Muon)) and _makes_momentum(optimizer):
        return (
            "its first step creates the momentum buffers, and every replay would create them again"
        )
    return None


def _cure(optimizer: Optimizer) -> str:
    """Returns what to use instead of an optimizer whose step no graph can repeat."""
    name = type(optimizer).__name__
    cures = ["an optimizer from shardgrad.optim; or shardgrad.graphs.outside(optimizer.step)"]
    if name in ("Adam", "AdamW", "Muon", "SGD"):
        cures = [f"shardgrad.optim.{name}"]
    if "capturable" in optimizer.defaults:
        cures.append(f"{name}(..., capturable=True)")
    if isinstance(optimizer, (optim.SGD, optim.Muon)):
        cures.append("one eager step before the capture, to create the momentum buffers")
    return "; or ".join(cures)


def _makes_momentum(optimizer: Optimizer) -> bool:
    return any(
        group["momentum"] != 0 and optimizer.state.get(param, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for param in group["params"]
        if param.grad is not None
    )


def refuse_uncapturable_step(optimizer: Optimizer) -> None:
    """Refuses a step that no graph can repeat.

    Args:
        optimizer: an optimizer with parameters of a sharded model that is about to step in a
            capture.

    Raises:
        CaptureError: the step cannot be part of the graph.
    """
    managed = next((m for p in params_of(optimizer) if (m := managed_by(p)) is not None), None)
    why = None if managed is None else _why_not_capturable(optimizer)
    if managed is None or why is None:
        return
    raise CaptureError(
        f"a step of {type(optimizer).__name__} cannot be part of a CUDA graph: {why}",
        expected="shardgrad.optim.AdamW, Adam or SGD; or an optimizer built with capturable=True",
        got=type(optimizer).__name__,
        where=f"parameter {managed.name}",
        fix=_cure(optimizer),
    )
