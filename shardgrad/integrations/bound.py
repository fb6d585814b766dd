"""A torch optimizer over sharded parameters whose steps are taken by a partner's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from shardgrad.engine.streams import is_capturing
from shardgrad.errors import CaptureError, DeepcopyError, OptionError, unsupported
from shardgrad.integrations.aliases import Alias, bind_gradients, make_alias
from shardgrad.integrations.partner import Partner
from shardgrad.integrations.saved_state import resolve

__all__ = ["BoundOptimizer"]


class BoundOptimizer(Optimizer):
    """A torch optimizer over sharded parameters whose steps a partner takes. See [Note: Aliases].

    `param_groups` hold the parameters of the model, so schedulers, `clip_grad_norm_`, loss scalers
    and checkpoints work as with any optimizer. `state_dict` has a DTensor for each state tensor,
    with the names that TransformerEngine uses, and step counts in the groups.

    Args:
        params_or_model: a model, whose trainable parameters are used; or as for any torch
            optimizer.
        defaults: default hyperparameters of the groups.
        partner: the partner that takes the steps.

    Attributes:
        partner: the partner's optimizer, over aliases.

    Raises:
        OptionError, OptimizerParameterError: nothing was built.
    """

    def __init__(
        self, params_or_model: nn.Module | Iterable[Any], defaults: dict[str, Any], partner: Partner
    ) -> None:
        self._is_built = False
        params: Any = params_or_model
        if isinstance(params_or_model, nn.Module):
            params = [param for param in params_or_model.parameters() if param.requires_grad]
        super().__init__(params, defaults)
        self._kind = partner
        self._aliases = [
            [make_alias(p, f"{i} of group {g}") for i, p in enumerate(group["params"])]
            for g, group in enumerate(self.param_groups)
        ]
        everything = list(chain.from_iterable(self._aliases))
        _check_rates(self.param_groups)
        partner.agree(everything)
        partner.check(self._aliases)
        self._step_supports_amp_scaling = partner.capturable
        self._device = everything[0].local.device
        self._placeholders: list[nn.Parameter] = []
        self.partner = self._build()
        # Masters are copies of the parameters, which may be loaded between now and the first step.
        self._has_fresh_masters = False
        with torch.no_grad():
            for alias in everything:
                self._start(alias)
        self._is_built = True

    @property
    def capturable(self) -> bool:
        """True if a step can be part of a CUDA graph."""
        return self._kind.capturable

    def _build(self) -> Optimizer:
        """Builds the partner's optimizer over what this rank holds."""
        groups = []
        for group, aliases in zip(self.param_groups, self._aliases, strict=True):
            if self.capturable:
                # One tensor per group, which schedulers fill, and a copy for the partner.
                group["lr"] = torch.as_tensor(
                    group["lr"], dtype=torch.float32, device=self._device
                ).clone()
            shown = [alias.local for alias in aliases if not alias.is_empty]
            if not shown:
                # A group without parameters would count no steps on this rank.
                placeholder = nn.Parameter(torch.zeros(1, device=self._device), requires_grad=False)
                setattr(placeholder, self._kind.attribute, torch.zeros(1, device=self._device))
                self._placeholders.append(placeholder)
                shown = [placeholder]
            options = {key: group[key] for key in self.defaults}
            if self.capturable:
                options["lr"] = options["lr"].clone()
            groups.append({"params": shown, **options})
        defaults = {**self.defaults, "lr": float(self.defaults["lr"])}
        return self._kind.build(groups, defaults)

    def _start(self, alias: Alias) -> None:
        """Creates a parameter's state, and makes it visible in `state`."""
        if not alias.is_empty:
            self._kind.start(self.partner, alias)
        shown = (
            self._empty_state(alias) if alias.is_empty else self._kind.shown(self.partner, alias)
        )
        self.state[alias.param] = {name: alias.wrap(tensor) for name, tensor in shown.items()}

    def _empty_state(self, alias: Alias) -> Mapping[str, torch.Tensor]:
        """Returns the state of a parameter without elements on this rank."""
        dtypes = self._kind.state_dtypes(alias)
        return {
            name: torch.empty_like(alias.local.detach(), dtype=dtype)
            for name, dtype in dtypes.items()
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group while the optimizer is built; not supported afterwards.

        Raises:
            UnsupportedError: called after construction. A partner's state does not grow with its
                groups.
        """
        if self._is_built:
            raise unsupported(
                f"add_param_group of {self._kind.name}",
                instead="build an optimizer with all groups; lr=0 keeps a group still",
            )
        super().add_param_group(param_group)

    # -- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient, with the partner's optimizer.

        Streams: runs on the current stream of the parameters' device, which backward has made wait
        for the
            gradients.
        Capture: safe with `capturable=True`, after one step outside of the capture.

        Raises:
            OptimizerParameterError, ForeignParameterError, GradientError: before anything is
                changed.
            CaptureError: the first step is being captured.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        verdicts = bind_gradients(chain.from_iterable(self._aliases), self._kind.attribute)
        self._hand_over_options()
        self._refresh_masters()
        scaler = self._scaler(verdicts)
        if scaler is None:
            self.partner.step()
        else:
            step: Any = self.partner.step
            step(grad_scaler=scaler)
        for alias in chain.from_iterable(self._aliases):
            # Which would keep memory that is freed between steps.
            alias.show(None, self._kind.attribute)
        return loss

    def _hand_over_options(self) -> None:
        """Copies hyperparameters, which schedulers may have changed, into the partner's groups."""
        for group, theirs in zip(self.param_groups, self.partner.param_groups, strict=True):
            for key in self.defaults:
                mine = theirs[key]
                if isinstance(mine, torch.Tensor):
                    mine.copy_(torch.as_tensor(group[key]))
                else:
                    theirs[key] = group[key]

    def _refresh_masters(self) -> None:
        if self._has_fresh_masters:
            return
        if self._kind.has_masters and is_capturing(self._device):
            raise CaptureError(
                f"the first step of {self._kind.name} copies the parameters into its master "
                "weights, and a graph would do so in every replay",
                expected="one step before the capture",
                got="a first step while a graph is being captured",
                fix="optimizer.step() once, or more warm-up steps",
            )
        for alias in chain.from_iterable(self._aliases):
            if not alias.is_empty:
                self._kind.refresh_master(self.partner, alias)
        self._has_fresh_masters = True

    def _scaler(self, verdicts: list[torch.Tensor]) -> _Verdict | None:
        """Returns what a capturable partner asks a loss scaler; None if no gradient was checked or
        scaled.
        """
        if not self.capturable:
            return None
        # Loss scalers set these two attributes for the duration of a step.
        verdict: torch.Tensor | None = getattr(self, "found_inf", None)
        grad_scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        found = [v.detach().reshape(()).float() for v in (verdict, *verdicts) if v is not None]
        if not found and grad_scale is None:
            return None
        one = torch.ones((), device=self._device)
        skip = (sum(found, 0 * one) > 0).float()
        scale = one if grad_scale is None else grad_scale.detach().reshape(()).float()
        return _Verdict(skip, scale)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets gradients, decoupled ones included, to None, or to zero.

        Streams: zeros are written on the current stream. Capture: safe.
        """
        for alias in chain.from_iterable(self._aliases):
            alias.forget(set_to_none=set_to_none)

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Returns state and groups in TransformerEngine's format: DTensors of float32 or int16
        remainders.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        numbers = {
            id(p): i for i, p in enumerate(p for g in self.param_groups for p in g["params"])
        }
        state = {}
        with torch.no_grad():
            for alias in chain.from_iterable(self._aliases):
                found = (
                    self._empty_state(alias)
                    if alias.is_empty
                    else self._kind.read(self.partner, alias)
                )
                wrapped = {name: alias.wrap(tensor.detach()) for name, tensor in found.items()}
                state[numbers[id(alias.param)]] = wrapped
        groups = [
            {
                **group,
                "step": theirs.get("step", 0),
                "params": [numbers[id(param)] for param in group["params"]],
            }
            for group, theirs in zip(self.param_groups, self.partner.param_groups, strict=True)
        ]
        state_dict = {"state": state, "param_groups": groups}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class, of TransformerEngine's FusedAdam or of torch's AdamW.

        State is copied into the existing buffers, so a captured graph stays valid. If the saved
        state lacks master weights, they are copied from the parameters at the next step.

        Raises:
            OptimizerStateError: the state does not fit; nothing was changed.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        dtypes = {a: self._kind.state_dtypes(a) for a in chain.from_iterable(self._aliases)}
        loaded, steps = resolve(self._aliases, dtypes, state_dict)
        # If one master is missing, all are copied from the parameters: a mixture would be
        # inconsistent.
        with_master = [x for x in loaded if "master_param" in dtypes[x.alias]]
        self._has_fresh_masters = all("master_param" in x.values for x in with_master)
        for item in loaded:
            for name, dtype in dtypes[item.alias].items() if not item.alias.is_empty else ():
                value = item.values.get(name)
                if value is None:
                    value = torch.zeros_like(item.alias.local, dtype=dtype)
                self._kind.write(self.partner, item.alias.local, name, value)
        saved_groups = state_dict["param_groups"]
        for group, theirs, saved, count in zip(
            self.param_groups, self.partner.param_groups, saved_groups, steps, strict=True
        ):
            self._load_group(group, theirs, saved, count)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load_group(
        self, group: dict[str, Any], theirs: dict[str, Any], saved: Mapping[str, Any], count: int
    ) -> None:
        for key, value in saved.items():
            if key in ("params", "step"):
                continue
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(torch.as_tensor(value))
            elif key in group or key == "initial_lr":
                group[key] = float(value) if isinstance(value, torch.Tensor) else value
        if isinstance(theirs.get("step"), torch.Tensor):
            theirs["step"].fill_(count)
        elif not self.capturable:
            theirs["step"] = count
        elif count:
            theirs["step"] = torch.tensor([count], dtype=torch.int, device=self._device)

    def __getstate__(self) -> NoReturn:
        """Raises: an optimizer whose aliases are views of the model's buffers cannot be pickled or
        copied.
        """
        raise DeepcopyError(
            f"{self._kind.name} over sharded parameters cannot be copied or pickled",
            expected="state_dict()",
            got="copy.deepcopy or pickle of the optimizer",
            fix="build a second optimizer and load optimizer.state_dict() into it",
        )


class _Verdict:
    """Implements the loss scaler methods that a capturable FusedAdam calls, with results known
    already.

    The partner would check this rank's gradients only, and ranks would decide differently.

    Args:
        skip: device scalar, 1 to skip the step, else 0.
        scale: device scalar that gradients are divided by.
    """

    def __init__(self, skip: torch.Tensor, scale: torch.Tensor) -> None:
        self._skip = skip
        self._scale = scale

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, torch.Tensor]:
        return {self._skip.device: self._skip}

    def _get_scale_async(self) -> torch.Tensor:
        return self._scale


def _check_rates(groups: Iterable[Mapping[str, Any]]) -> None:
    for group in groups:
        if not (float(group["lr"]) >= 0 and group["eps"] >= 0 and group["weight_decay"] >= 0):
            raise OptionError(
                "a hyperparameter is outside its range",
                expected="lr, eps and weight_decay of at least 0",
                got=f"lr={group['lr']}, eps={group['eps']}, weight_decay={group['weight_decay']}",
            )
