"""apex's FusedAdam on sharded parameters.

[Note: Local parameters]
apex's kernels take addresses, and a DTensor has none. So apex's optimizer gets a *local parameter*
for each parameter: a plain one over this rank's shard. Before a step, its gradient is set to the
view of the gradient shard. A launch of apex does nothing at all if its last tensor is empty, so an
empty shard gets no gradient: kernels skip it, and step counts advance as on other ranks.

[Note: Limits of apex]
apex has had one version number, 0.1, for years, so nothing here depends on the version.

* PyPI's `apex` is another project, and NVIDIA's needs its native library `amp_C`: both are checked.
* It reads `param.grad` only, and assumes without a check that it has the parameter's dtype.
  Decoupled gradients and other dtypes raise.
* Its master weights are copied when it is built, and are not saved. They raise.
* Kernels count elements in 32 bits and would update only a part of a longer shard. That raises.
* With `capturable`, gradients are divided by the scale of a loss scaler in place.

Source: `apex/optimizers/fused_adam.py`, `csrc/multi_tensor_adam.cu` and
`csrc/multi_tensor_apply.cuh` in NVIDIA/apex, commit 6424da3b.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from shardgrad.engine.param_group import managed_by
from shardgrad.engine.replaced_params import adopt_given
from shardgrad.errors import (
    DeepcopyError,
    OptimizerParameterError,
    OptionError,
    PartnerUnavailableError,
    unsupported,
)
from shardgrad.optim.selection import plain_gradient, select
from shardgrad.optim.state import copies_of_all
from shardgrad.sharding.dtensor import dtensor_like, local_of

_DEVICES = ["cuda"]  # ROCm calls its devices cuda too

# Exceptions from importing packages that are broken, or another project's: missing libraries, and
# Python 2 sources.
_BROKEN = (ImportError, OSError, RuntimeError, AttributeError, SyntaxError)


class FusedAdam(Optimizer):
    """A torch optimizer over sharded parameters whose steps apex's FusedAdam takes.

    `param_groups` and `state` hold the parameters of the model, so schedulers, `clip_grad_norm_`,
    loss scalers and checkpoints work as with any optimizer. See [Note: Local parameters] and
    [Note: Limits of apex].

    Args:
        params_or_model: a model, whose trainable parameters are used; or as for any torch
            optimizer.
        lr: learning rate.
        capturable: for CUDA graphs: learning rate and step count are device tensors, and a step
            with non-finite gradients is skipped on the device, on all ranks alike.
        **options: other options of apex's FusedAdam.

    Raises:
        PartnerUnavailableError: apex is missing or unusable.
        OptionError: apex refuses the options.
        OptimizerParameterError: apex cannot update a parameter.
    """

    def __init__(
        self,
        params_or_model: nn.Module | Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        *,
        capturable: bool = False,
        **options: Any,
    ) -> None:
        factory = _found()
        params: Any = params_or_model
        if isinstance(params_or_model, nn.Module):
            params = [param for param in params_or_model.parameters() if param.requires_grad]
        super().__init__(params, {"lr": lr})
        self.capturable = self._step_supports_amp_scaling = capturable
        adopt_given(self._params())
        for number, param in enumerate(self._params()):
            _refuse_unreachable(param, number)
        if options.get("master_weights"):
            raise OptionError(
                "apex's FusedAdam does not save its master weights",
                expected="master_weights=False",
                got="master_weights=True",
                fix='shardgrad.optim.AdamW(model.parameters(), master="float32")',
            )
        self._locals = {
            param: nn.Parameter(_memory_of(param), requires_grad=False) for param in self._params()
        }
        self._device = next(iter(self._locals.values())).device
        for group in self.param_groups if capturable else ():
            rate = torch.as_tensor(group["lr"], dtype=torch.float32, device=self._device)
            group["lr"] = rate.clone()  # schedulers fill it
        with self._lent():
            groups = list(map(dict, self.param_groups))
        try:
            self._apex = factory(groups, capturable=capturable, **options)
        except (TypeError, RuntimeError) as error:
            raise OptionError(
                f"apex's FusedAdam cannot be built: {error}",
                expected="options that apex accepts together",
                got=", ".join(f"{key}={value}" for key, value in options.items()),
                fix="use other options, or shardgrad.optim.AdamW",
            ) from error
        for group, theirs in zip(self.param_groups, self._apex.param_groups, strict=True):
            group |= {**theirs, "params": group["params"]}
        self._apex.param_groups = self.param_groups

    def _params(self) -> Iterator[nn.Parameter]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group while the optimizer is built; not supported afterwards.

        Raises:
            UnsupportedError: called after construction. apex's state does not grow with its groups.
        """
        if hasattr(self, "_apex"):
            raise unsupported(
                "add_param_group of apex's FusedAdam",
                instead="build the optimizer with all groups; a group with lr=0 does not train",
            )
        super().add_param_group(param_group)

    # -- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Streams: runs on the current stream of the parameters' device, which backward has made wait
        for the gradients.
        Capture: safe with `capturable=True`, after one step outside of the capture.

        Raises:
            OptimizerParameterError, ForeignParameterError: before anything is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for param, local in self._locals.items():
            _require_same_memory(param, local)
        nonfinite = self._bind_gradients()
        self._start()
        for group in self.param_groups if self.capturable else ():
            # The program may have assigned a number.
            rate = torch.as_tensor(group["lr"], dtype=torch.float32, device=self._device)
            group["lr"] = rate
        with self._lent():
            self._apex.step(**self._scaler(nonfinite))
        for local in self._locals.values():
            local.grad = None  # the view would keep alive memory that is freed between steps
        return loss

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """Replaces the parameters in the groups by the local ones inside the context."""
        given = [group["params"] for group in self.param_groups]
        for group, params in zip(self.param_groups, given, strict=True):
            group["params"] = [self._locals[param] for param in params]
        try:
            yield
        finally:
            for group, params in zip(self.param_groups, given, strict=True):
                group["params"] = params

    def _bind_gradients(self) -> list[torch.Tensor]:
        """Sets the gradients of the local parameters. Returns device scalars, each above zero if a
        non-finite value was found among some of these gradients.
        """
        selections = select(self._locals).selections
        # Compared by identity, as every DTensor operator would be a dispatch.
        views = {
            id(chosen.shard.params[place]): chosen.shard.views[place]
            for chosen in selections
            for place in chosen.live
        }
        for param, local in self._locals.items():
            grad = views.get(id(param)) if managed_by(param) else plain_gradient(param)
            local.grad = grad if local.numel() else None
        return [v for chosen in selections for v in chosen.shard.verdicts(self._locals)]

    def _scaler(self, nonfinite: list[torch.Tensor]) -> dict[str, Any]:
        """Returns the `grad_scaler` argument that tells a capturable step the gradients' scale and
        whether to skip; no argument if no gradient was checked or scaled.
        """
        # Loss scalers set these two attributes for the duration of a step.
        verdict: torch.Tensor | None = getattr(self, "found_inf", None)
        grad_scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        found = [v.detach().reshape(()).float() for v in (verdict, *nonfinite) if v is not None]
        if not self.capturable or (not found and grad_scale is None):
            return {}
        one = torch.ones((), device=self._device)
        skip = (sum(found, 0 * one) > 0).float()
        scale = one if grad_scale is None else grad_scale.detach().reshape(()).float()
        # The two methods of a loss scaler that apex calls, with results known already. A real one
        # would check this rank's gradients only, and ranks would decide differently.
        scaler = SimpleNamespace(
            _check_inf_per_device=lambda optimizer: {skip.device: skip},
            _get_scale_async=lambda: scale,
        )
        return {"grad_scaler": scaler}

    # -- state

    def _start(self) -> None:
        """Creates all state when it is first needed, as the first step would."""
        if self._apex.state:
            return
        for group in self.param_groups:
            zero = torch.zeros(1, dtype=torch.int, device=self._device)
            group["step"] = zero if self.capturable else 0
        for param, local in self._locals.items():
            for name in ("exp_avg", "exp_avg_sq"):
                moment = torch.zeros_like(local.detach(), dtype=torch.float32)
                self._apex.state[local][name] = moment
                self.state[param][name] = (
                    dtensor_like(moment, param) if isinstance(param, DTensor) else moment
                )

    def state_dict(self) -> dict[str, Any]:
        """See `torch.optim.Optimizer.state_dict`: moments are sharded like the parameters."""
        self._start()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class, in place.

        Raises:
            OptimizerStateError: the state does not fit; nothing was changed.
        """
        self._start()
        for into, value in copies_of_all(self.param_groups, self.state, state_dict):
            into.copy_(value)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for key in saved.keys() - {"params"}:
                value = saved[key]
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(float(value))  # a graph reads it
                else:
                    group[key] = value.item() if isinstance(value, torch.Tensor) else value

    def __getstate__(self) -> NoReturn:
        """Refuses pickling and copying, since local parameters are views of the model's buffers."""
        raise DeepcopyError(
            "apex's FusedAdam over sharded parameters cannot be copied or pickled",
            expected="state_dict()",
            got="copy.deepcopy or pickle of the optimizer",
            fix="build a second optimizer and load optimizer.state_dict() into it",
        )


def _found() -> Callable[..., Any]:
    """Returns apex's FusedAdam.

    That a package can be found proves little: its native library may be missing or built for
    another torch, and `apex` on PyPI is a web framework of 2013.

    Raises:
        PartnerUnavailableError: apex is missing, broken or another package.
    """
    try:
        import_module("amp_C")
        factory: Callable[..., Any] = import_module("apex.optimizers").FusedAdam
    except _BROKEN as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise PartnerUnavailableError(
            f"apex's FusedAdam cannot be used: {why}",
            expected="NVIDIA's apex, built for this torch",
            got=why,
            fix="build https://github.com/NVIDIA/apex with APEX_CPP_EXT=1 APEX_CUDA_EXT=1; or "
            "shardgrad.optim.AdamW, which needs no other package",
        ) from error
    return factory


def _memory_of(param: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a parameter."""
    return param.detach() if managed_by(param) is None else local_of(param)


def _refuse_unreachable(param: nn.Parameter, number: int) -> None:
    """Refuses a parameter that apex would not update, or would silently update wrongly."""
    managed = managed_by(param)
    group = None if managed is None else managed.group
    fix = "shardgrad.optim.AdamW"
    if param.device.type == "meta":
        why, fix = "it is on the meta device", "model.to_empty(device=...) first"
    elif managed is None and isinstance(param, DTensor):
        why = "another engine shards it, or it was replaced after fully_shard"
        fix = "build the optimizer after fully_shard"
    elif managed is None and not param.is_contiguous():
        why, fix = "it is not contiguous in memory", "param.data = param.data.contiguous()"
    elif param.device.type not in _DEVICES:
        why = f"its kernels run on {_DEVICES[0]} only"
    elif group is not None and group.gradient_policy.decoupled:
        why, fix = "it reads param.grad only", "GradientPolicy(decoupled=False)"
    elif group is not None and group.gradient_dtype is not param.dtype:
        why = f"it would read the gradient, which is {group.gradient_dtype}, as {param.dtype}"
        fix = "GradientPolicy(dtype=None), or shardgrad.optim.AdamW"
    elif _memory_of(param).numel() > 2**31 - 1:
        why = "its kernels count elements in 32 bits, and would update only a part"
        fix = "use more ranks, or shardgrad.optim.AdamW"
    else:
        return
    raise OptimizerParameterError(
        f"apex's FusedAdam cannot update parameter {number if managed is None else managed.name}: "
        f"{why}",
        expected="contiguous parameters on a GPU, with gradients in their dtype",
        got=f"{param.dtype} of shape {tuple(param.shape)} on {param.device}",
        fix=fix,
    )


def _require_same_memory(param: nn.Parameter, local: nn.Parameter) -> None:
    """Refuses a parameter that was replaced or moved since the optimizer was built."""
    memory = _memory_of(param)
    is_known = managed_by(param) is not None or not isinstance(param, DTensor)
    if not is_known or (memory.numel() and memory.data_ptr() != local.data_ptr()):
        raise OptimizerParameterError(
            f"a parameter of shape {tuple(param.shape)} was replaced or moved after the optimizer "
            "was built",
            expected="the parameter and the memory that the model trains",
            got="another parameter or other memory, which a step would not update",
            fix="build the optimizer after the last model.to(...) or load_state_dict(assign=True)",
        )
