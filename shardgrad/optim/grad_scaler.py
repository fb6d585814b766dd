"""Loss scaling for float16 gradients, without a host read."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from shardgrad.engine.streams import is_capturing
from shardgrad.engine.tracing import outside_graphs
from shardgrad.errors import CaptureError, OptionError
from shardgrad.optim.flat import FlatOptimizer
from shardgrad.optim.norms import find_nonfinite
from shardgrad.optim.selection import select


class _ScalerState(NamedTuple):
    """The scale, float32, and the number of good steps in a row, int32; device scalars."""

    scale: torch.Tensor
    good_steps: torch.Tensor


class GradScaler:
    """Scales a loss so that float16 gradients do not underflow, and unscales gradients.

    Use it like `torch.amp.GradScaler`: `scale(loss).backward()`, optionally `unscale_(optimizer)`
    and clipping, `step(optimizer)`, `update()`. The scale, its growth and the decision to skip stay
    on the device.

    For example:

        scaler = shardgrad.GradScaler()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Args:
        device: accepted as in torch, and ignored: the scale is on the device of the scaled tensor.
        init_scale: initial scale.
        growth_factor: factor of the scale after `growth_interval` consecutive good steps.
        backoff_factor: factor of the scale after a skipped step.
        growth_interval: number of steps.
        enabled: if False, methods only do what an unscaled loop needs.

    Raises:
        OptionError: a factor is outside its range.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        settings: Any = (init_scale, growth_factor, backoff_factor, growth_interval)
        if not (
            all(isinstance(each, Real) and each < math.inf for each in settings)
            and growth_factor > 1.0
            and 0.0 < backoff_factor < 1.0
            and init_scale > 0
            and growth_interval > 0
        ):
            raise OptionError(
                "a setting of the loss scaler is outside its range",
                expected="finite numbers: init_scale > 0, growth_factor > 1, "
                "0 < backoff_factor < 1, growth_interval > 0",
                got=repr(settings),
                fix="shardgrad.GradScaler()",
            )
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._enabled = enabled
        self._initial = (init_scale, 0)
        self._state: _ScalerState | None = None
        self._found: weakref.WeakKeyDictionary[Optimizer, torch.Tensor | None] = (
            weakref.WeakKeyDictionary()
        )
        # Each optimizer's verdict has a constant address, since `unscale_`, `step` and `update` may
        # be in different graphs.
        self._verdicts: weakref.WeakKeyDictionary[Optimizer, torch.Tensor] = (
            weakref.WeakKeyDictionary()
        )

    def scale(self, outputs: Any) -> Any:
        """Returns `outputs`, a tensor or a tree of tensors, multiplied by the scale.

        Streams: the current stream of each tensor. Capture: safe after the first call.
        """
        if not self._enabled:
            return outputs

        def scaled(output: Any) -> Any:
            is_tensor = isinstance(output, torch.Tensor)
            return output * self._on(output.device) if is_tensor else output

        return tree_map(scaled, outputs)

    @torch.no_grad()
    @outside_graphs
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients of an optimizer's parameters by the scale, in place, and checks
        them: if one is not finite on any rank, `step` skips, whatever changes them until then.

        Call it at most once between two updates.

        Streams: one pass over the gradients and one all-reduce of two numbers, on the current
            stream. A collective.
        Capture: safe.

        Raises:
            OptionError: called twice since the last `update`.
        """
        if not self._enabled:
            return
        if optimizer in self._found:
            raise OptionError(
                "unscale_() has already been called on this optimizer since the last update().",
                expected="one unscale_ between two updates",
                got="a second one, or one after step()",
                fix="scaler.update() at the end of the iteration",
            )
        params = _params(optimizer)
        select(params).multiply(self._on(params[0].device).reciprocal())
        found = _find_nonfinite(optimizer)
        if optimizer not in self._verdicts:
            self._verdicts[optimizer] = torch.empty_like(found)
        self._verdicts[optimizer].copy_(found)
        self._found[optimizer] = None

    @outside_graphs
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Takes an optimizer step, or skips it on every rank if any rank's gradient is not finite.

        Optimizers of `shardgrad.optim` skip on the device. For others, the host waits for the
        result of the check.

        Streams: unless `unscale_` or clipping has checked the gradients as they are, one pass over
            them and one all-reduce of two numbers, on the current stream. A collective.
        Capture: safe with an optimizer of `shardgrad.optim`.

        Raises:
            OptionError: called twice since the last `update`, or with a closure.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if args or "closure" in kwargs:
            raise OptionError(
                "Closure use is not currently supported if GradScaler is enabled.",
                expected="step(optimizer)",
                got="a closure, whose gradients would be scaled",
                fix="compute the gradients before step()",
            )
        if self._found.get(optimizer) is not None:
            raise OptionError(
                "step() has already been called since the last update().",
                expected="one step of each optimizer between two updates",
                got=f"a second one of {type(optimizer).__name__}",
                fix="scaler.update() at the end of the iteration",
            )
        if optimizer not in self._found:
            self.unscale_(optimizer)
        # Gradients may have been clipped or written since they were unscaled. Clamping hides an
        # infinity, so the verdict from before counts, too.
        found = self._found[optimizer] = self._verdicts[optimizer].add_(_find_nonfinite(optimizer))
        if isinstance(optimizer, FlatOptimizer):
            optimizer.found_inf = found  # type: ignore[attr-defined]
            try:
                return optimizer.step(**kwargs)
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]
        return None if found.item() else optimizer.step(**kwargs)

    @torch.no_grad()
    @outside_graphs
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Updates the scale: shrinks it after a skipped step, grows it after many good ones.

        Args:
            new_scale: sets the scale instead.

        Streams: the current stream. Capture: safe.

        Raises:
            OptionError: no step since the last update.
        """
        if not self._enabled:
            return
        verdicts = [found for found in self._found.values() if found is not None]
        self._found.clear()
        if new_scale is not None:
            if self._state is None:
                self._initial = (float(new_scale), self._initial[1])
            elif isinstance(new_scale, torch.Tensor):
                self._state.scale.copy_(new_scale)
            else:
                self._state.scale.fill_(new_scale)
            return
        if not verdicts or self._state is None:
            raise OptionError(
                "No inf checks were recorded prior to update.",
                expected="scaler.scale(loss) and scaler.step(optimizer) before scaler.update()",
                got="neither, since the last update",
                fix="scaler.step(optimizer)",
            )
        scale = self._state.scale
        # The verdict on offloaded gradients is a CPU tensor.
        first, *others = (verdict.to(scale.device) for verdict in verdicts)
        torch._amp_update_scale_(
            scale,
            self._state.good_steps,
            sum(others, first),
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
        )

    def _on(self, device: torch.device) -> torch.Tensor:
        """Returns the float32 scale on a device; the first call creates it there."""
        if self._state is None:
            if is_capturing(device):
                raise CaptureError(
                    "a loss scaler scaled its first loss during a capture",
                    expected="one iteration before the capture",
                    got="a new scale, which every replay would reset",
                    fix="run one iteration before the capture",
                )
            scale, good_steps = self._initial
            self._state = _ScalerState(
                torch.full((), scale, dtype=torch.float32, device=device),
                torch.full((), good_steps, dtype=torch.int32, device=device),
            )
        return self._state.scale.to(device)

    # -- for graphs

    def guards(self) -> Hashable:
        """Returns the host state that decides what a step launches: the settings, and which
        optimizers were unscaled or stepped since the last `update`.
        """
        settings = self._enabled, self._growth_factor, self._backoff_factor, self._growth_interval
        found = tuple((id(each), verdict is None) for each, verdict in self._found.items())
        return settings, found

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that restores the present host state."""
        found = dict(self._found)

        def restore() -> None:
            self._found.clear()
            self._found.update(found)

        return restore

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the scale and the count of good steps."""
        if self._state is not None:
            yield "loss scale", self._state.scale
            yield "good steps of the loss scale", self._state.good_steps

    # -- reading and saving

    def get_scale(self) -> float:
        """Returns the scale; the host waits for the device."""
        if not self._enabled:
            return 1.0
        return self._initial[0] if self._state is None else float(self._state.scale.item())

    def is_enabled(self) -> bool:
        """Returns whether the scaler does anything."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for `load_state_dict`, with the keys of `torch.amp.GradScaler`."""
        if not self._enabled:
            return {}
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._initial[1]
            if self._state is None
            else int(self._state.good_steps.item()),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state of this class or of `torch.amp.GradScaler`, in place.

        Raises:
            OptionError: the state is empty, that of a disabled scaler.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise OptionError(
                "The source state dict is empty, possibly because it was saved from a disabled "
                "GradScaler.",
                expected="the state of an enabled scaler",
                got="{}",
                fix="GradScaler(enabled=False)",
            )
        self._growth_factor = float(state_dict["growth_factor"])
        self._backoff_factor = float(state_dict["backoff_factor"])
        self._growth_interval = int(state_dict["growth_interval"])
        self._initial = (float(state_dict["scale"]), int(state_dict["_growth_tracker"]))
        if self._state is not None:
            self._state.scale.fill_(self._initial[0])
            self._state.good_steps.fill_(self._initial[1])


def _params(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@torch.no_grad()
def _find_nonfinite(optimizer: Optimizer) -> torch.Tensor:
    """Returns a float32 device scalar, above zero if a gradient of the optimizer is not finite."""
    params = _params(optimizer)
    return find_nonfinite(select(params), params[0].device)
