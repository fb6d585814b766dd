"""Warm-up: the eager steps before the first capture, the last two of them watched for issues."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from shardgrad.graphs.eager_regions import handle_eager_calls
from shardgrad.graphs.preflight.closed_over import Place
from shardgrad.graphs.preflight.environment import environment_issues
from shardgrad.graphs.preflight.issues import Issue
from shardgrad.graphs.preflight.op_trace import StepTrace, differences
from shardgrad.graphs.preflight.watch import watch

__all__ = ["WarmUp"]

_T = TypeVar("_T")

# A capture succeeds in spite of these, and its replays are wrong. The capture itself refuses the
# others.
_SILENT = frozenset(
    (
        "another operation",
        "another shape",
        "changed number",
        "moved tensor",
        "replaced tensor",
        "seed",
        "unregistered generator",
    )
)
_WATCHED = 2


class WarmUp:
    """Runs eager steps, and watches the last two of the first `steps`.

    Args:
        function: of the steps.
        modules: whose names issues have.
        optimizers: checked for whether they can be captured.
        eager_optimizers: optimizers that step in eager regions; they are not watched.
        generators: that a graph registers.
        device: of the steps.
        steps: eager steps before the first capture.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        eager_optimizers: Sequence[Optimizer],
        generators: Sequence[torch.Generator],
        device: torch.device,
        steps: int,
    ) -> None:
        self._function = function
        self._generators = list(generators)
        self._modules: Mapping[str, nn.Module] = (
            {"": modules[0]}
            if len(modules) == 1
            else {f"{type(module).__name__} {i}": module for i, module in enumerate(modules)}
        )
        self._optimizers = list(optimizers)
        self._eager_optimizers = list(eager_optimizers)
        self._device = device
        self._steps = steps
        self._traces: list[tuple[Hashable, StepTrace]] = []
        self._closed_over: dict[str, Place] = {}

    def run(
        self,
        step: Callable[[], _T],
        key: Hashable,
        earlier: int,
        persistent: Callable[[], Iterable[torch.Tensor]],
        before_region: Callable[[], None],
    ) -> _T:
        """Runs an eager step, watched if it is one of the last two before a capture.

        Args:
            step: the step.
            key: of the graph that this step would be; steps with equal keys are compared.
            earlier: number of eager steps so far.
            persistent: returns the memory that stays from step to step.
            before_region: called before each eager region.
        """

        def call_unwatched(call: Callable[[], Any]) -> None:
            before_region()
            with _disable_current_modes():
                call()

        with handle_eager_calls(self._eager_optimizers, call_unwatched):
            # The very first step initializes what later steps find.
            if not max(1, self._steps - _WATCHED) <= earlier < self._steps:
                return step()
            result, trace = watch(
                step,
                self._modules,
                self._device,
                persistent=persistent(),
                generators=self._generators,
                function=self._function,
            )
        self._traces.append((key, trace))
        found = (tensor.closed_over for op in trace.ops for tensor in op.tensors)
        self._closed_over.update((each[0].name, each[0]) for each in found if each is not None)
        return result

    def closed_over(self) -> tuple[Hashable, ...]:
        """Returns where tensors lie now that watched steps have read without being given them."""
        return tuple([place.key() for place in self._closed_over.values()])

    def issues(self, key: Hashable) -> list[Issue]:
        """Returns the known issues of capturing a step with this key."""
        traces = [trace for known, trace in self._traces if known == key]
        found = environment_issues(self._device, self._optimizers)
        if traces:
            found += traces[-1].issues
        if len(traces) == _WATCHED:
            found += differences(*traces)
        return found

    def silent_issues(self, key: Hashable) -> list[Issue]:
        """Returns the issues in spite of which a capture would succeed, with wrong replays."""
        found = self.issues(key)
        silent = [issue for issue in found if issue.kind in _SILENT]
        # What such an optimizer freezes shows up as numbers of its operations: name it instead.
        optimizers = [issue for issue in found if issue.kind == "uncapturable optimizer"]
        if silent and optimizers:
            return optimizers + [issue for issue in silent if issue.kind != "changed number"]
        return silent

    def reset(self) -> None:
        """Drops what was watched."""
        self._traces.clear()
        self._closed_over.clear()
