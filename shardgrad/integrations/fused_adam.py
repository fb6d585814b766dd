"""A torch optimizer over sharded parameters whose steps are taken by another project's FusedAdam.

[Note: Aliases]
Another project's kernels take addresses. A DTensor has none, and some releases of the kernels fail
if a rank holds no row of a parameter. So the project's optimizer never sees the model's parameters.
Each has an *alias*: a plain parameter over the same memory, whose gradient is a plain view of the
gradient shard, set before each step. The alias of a parameter without elements on this rank is one
unused element that never gets a gradient, so kernels skip it while step counts advance. Both
optimizers have the same group dicts; during a step these contain the aliases in place of the
parameters.

There is one subclass for each project. It finds the project's package and knows where its optimizer
keeps state.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from torch.torch_version import TorchVersion

from shardgrad.engine.param import local_of, managed_by
from shardgrad.engine.param_group import group_of
from shardgrad.engine.replaced_params import adopt_given
from shardgrad.errors import (
    DeepcopyError,
    OptimizerParameterError,
    OptionError,
    PartnerUnavailableError,
    unsupported,
)
from shardgrad.optim.selection import plain_gradient, select
from shardgrad.optim.state import local_part, misfit
from shardgrad.sharding.dtensor import dtensor_like

__all__ = ["MASTER", "MOMENTS", "Alias", "BoundOptimizer"]

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"

# Exceptions from importing broken or foreign packages: missing libraries, version checks, Python 2
# sources.
_BROKEN = (ImportError, OSError, RuntimeError, AssertionError, AttributeError, SyntaxError)


class Alias:
    """The alias of one parameter. See [Note: Aliases].

    Args:
        param: a parameter that shardgrad shards, or a plain dense one.
        name: name for error messages, if no unit knows the qualified name.

    Attributes:
        managed: the parameter, if a unit shards it.
        attribute: attribute of the parameter that holds its gradient, "grad" or "decoupled_grad".
        grad_dtype: dtype of the gradient.
        local: plain parameter over the same memory.

    Raises:
        OptimizerParameterError: the parameter has no data yet, is not dense, or belongs to another
            engine.
    """

    def __init__(self, param: nn.Parameter, name: str) -> None:
        self.param = param
        self.managed = managed = managed_by(param)
        self.name = name if managed is None else managed.name
        self.attribute, self.grad_dtype, why = "grad", param.dtype, ""
        if param.device.type == "meta":
            why = "it is on the meta device"
        elif managed is not None:
            group = group_of(managed)
            self.attribute = group.gradient_policy.attribute
            self.grad_dtype = group.gradient_dtype
        elif isinstance(param, DTensor):
            why = "another engine shards it, or it was replaced after fully_shard"
        elif not param.is_contiguous():
            why = "it is not contiguous in memory"
        if why:
            raise OptimizerParameterError(
                f"an optimizer was given parameter {self.name}, and {why}",
                expected="contiguous parameters with data, sharded by shardgrad.fully_shard or not "
                "at all",
                got=why,
                fix="build the optimizer after fully_shard and model.to_empty(device=...)",
            )
        memory = self.memory.new_zeros(1) if self.is_empty else self.memory
        self.local = nn.Parameter(memory, requires_grad=False)

    @property
    def memory(self) -> torch.Tensor:
        """The local tensor of the parameter."""
        return self.param.detach() if self.managed is None else local_of(self.param)

    @property
    def is_empty(self) -> bool:
        """True if this rank holds no element of the parameter."""
        return self.memory.numel() == 0

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """Returns local optimizer state in the form of the parameter: a DTensor if the parameter is
        one.
        """
        if self.is_empty:
            local = local.new_empty(self.memory.shape)
        return local if self.managed is None else dtensor_like(local, cast(DTensor, self.param))

    def require_same_memory(self) -> None:
        """Checks that the alias and the parameter have the same memory.

        Raises:
            OptimizerParameterError: the parameter was replaced or moved.
        """
        is_replaced = managed_by(self.param) is not self.managed
        is_moved = self.memory.data_ptr() != self.local.data_ptr() and not self.is_empty
        if is_replaced or is_moved:
            raise OptimizerParameterError(
                f"parameter {self.name} was replaced or moved after the optimizer was built",
                expected="the parameter and the memory that the model trains",
                got="others, which a step would not reach",
                fix="build the optimizer after the last model.to(...) or "
                "load_state_dict(assign=True)",
            )


class BoundOptimizer(Optimizer):
    """A torch optimizer over sharded parameters whose steps another project's FusedAdam takes. See
    [Note: Aliases].

    `param_groups` hold the parameters of the model, so schedulers, `clip_grad_norm_`, loss scalers
    and checkpoints work as with any optimizer. `state_dict` has a DTensor for each state tensor,
    with the names that TransformerEngine uses, and step counts in the groups.

    Args:
        params_or_model: a model, whose trainable parameters are used; or as for any torch
            optimizer.
        capturable: for CUDA graphs: learning rate and step count are device tensors, and a step
            with non-finite gradients is skipped on the device.
        **options: options of the project's optimizer.

    Attributes:
        partner: the project's optimizer, over aliases.
        name: the project's name and release, for error messages.

    Raises:
        PartnerUnavailableError: the package is missing or unusable.
        OptionError, UnsupportedError: the release does not support an option, or an option
            contradicts the model.
        OptimizerParameterError: the project's optimizer cannot update a parameter.
    """

    title: ClassVar[str]
    modules: ClassVar[Sequence[str]]  # the package, the one with FusedAdam, and others it needs
    oldest: ClassVar[str] = "0"  # release that is supported
    install: ClassVar[str]
    # ROCm calls its devices cuda too.
    device_types: ClassVar[Sequence[str]] = ("cuda",)

    def __init__(
        self,
        params_or_model: nn.Module | Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        *,
        capturable: bool = False,
        **options: Any,
    ) -> None:
        factory, self.name = self.find()
        params: Any = params_or_model
        if isinstance(params_or_model, nn.Module):
            params = [param for param in params_or_model.parameters() if param.requires_grad]
        super().__init__(params, {"lr": lr})
        self.capturable = self._step_supports_amp_scaling = capturable
        adopt_given(param for group in self.param_groups for param in group["params"])
        self._aliases = [
            Alias(p, f"{i} of group {g}")
            for g, group in enumerate(self.param_groups)
            for i, p in enumerate(group["params"])
        ]
        self._device = self._aliases[0].local.device
        for alias in self._aliases:
            self.check(alias, options)
        for group in self.param_groups if capturable else ():
            rate = torch.as_tensor(group["lr"], dtype=torch.float32, device=self._device)
            group["lr"] = rate.clone()  # schedulers fill it
        with self._lent():
            groups = list(map(dict, self.param_groups))
        try:
            self.partner = factory(groups, capturable=capturable, **options)
        except (TypeError, RuntimeError) as error:
            raise OptionError(
                f"{self.name} cannot be built: {error}",
                expected="options that this release takes together",
                got=", ".join(f"{key}={value}" for key, value in options.items()),
                fix="other options, a later release, or shardgrad.optim.AdamW",
            ) from error
        for group, theirs in zip(self.param_groups, self.partner.param_groups, strict=True):
            group |= {**theirs, "params": group["params"]}
        self.partner.param_groups = self.param_groups
        is_decoupled = getattr(self.partner, "use_decoupled_grad", False)
        self._attribute = "decoupled_grad" if is_decoupled else "grad"
        for alias in self._aliases:
            self._require_attribute(alias)

    # -- implemented for each project

    @classmethod
    def find(cls) -> tuple[Callable[..., Optimizer], str]:
        """Imports the project's package, and returns its optimizer, and its name and version.

        That a package can be found proves little: a native library may be missing or built for
        another torch, and the name may belong to another project (`apex` on PyPI is a web framework
        of 2013).

        Raises:
            PartnerUnavailableError: it is missing, broken, too old or another package.
        """
        try:
            package, module, *_ = map(import_module, cls.modules)
            factory: Callable[..., Optimizer] = module.FusedAdam
            version = str(getattr(package, "__version__", "0"))
            if TorchVersion(version) < cls.oldest:
                raise ImportError(f"release {version} is older than {cls.oldest}")
        except _BROKEN as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise PartnerUnavailableError(
                f"{cls.title} cannot be used: {why}",
                expected=f"{cls.title}, built for this torch",
                got=why,
                fix=f"{cls.install}; or shardgrad.optim.AdamW, which needs no other package",
            ) from error
        return factory, f"{cls.title} {version}".removesuffix(" 0")

    def check(self, alias: Alias, options: dict[str, Any]) -> None:
        """Refuses parameters that the project's optimizer would silently update wrongly, and sets
        options that depend on the parameters.

        Raises:
            OptimizerParameterError: it would not train this parameter right.
        """
        if alias.local.device.type not in self.device_types:
            kinds = " or ".join(self.device_types)
            self.refuse(alias, f"its kernels run on {kinds} only", "shardgrad.optim.AdamW")

    @abstractmethod
    def start(self, alias: Alias) -> None:
        """Creates the state of a parameter, as the first step would."""

    def names(self, alias: Alias) -> tuple[str, ...]:
        """Returns the names of the tensors in a parameter's state that its steps read."""
        return MOMENTS

    def value(self, alias: Alias, name: str) -> torch.Tensor:
        """Returns the value of a tensor of a parameter's state in the format of checkpoints."""
        value: torch.Tensor = self.partner.state[alias.local][name]
        return value

    def write(self, alias: Alias, name: str, value: torch.Tensor) -> None:
        """Copies a value into a parameter's state, in place."""
        self.value(alias, name).copy_(value)

    # -- checks that are common to all projects

    def refuse(self, alias: Alias, why: str, fix: str) -> NoReturn:
        """Raises the error for a parameter that cannot be updated."""
        raise OptimizerParameterError(
            f"{self.name} cannot update parameter {alias.name}: {why}",
            expected="parameters and gradients of the dtypes and devices it has kernels for",
            got=f"{alias.local.dtype} on {alias.local.device}, with a gradient of "
            f"{alias.grad_dtype}",
            fix=fix,
        )

    def _require_attribute(self, alias: Alias) -> None:
        # FusedAdam skips a parameter whose gradient is None, so it would train nothing.
        if alias.managed is not None and alias.attribute != self._attribute:
            raise OptionError(
                f"{self.name} would read param.{self._attribute}, and the engine binds "
                f"param.{alias.attribute}",
                expected="one attribute for both: param.grad, or param.decoupled_grad",
                got=f"param.{alias.attribute}, by the GradientPolicy",
                where=f"parameter {alias.name}",
                fix="the same GradientPolicy(decoupled=...) for every unit as for the optimizer, "
                "or shardgrad.optim.AdamW",
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group while the optimizer is built; not supported afterwards.

        Raises:
            UnsupportedError: called after construction. A partner's state does not grow with its
                groups.
        """
        if hasattr(self, "partner"):
            raise unsupported(
                f"add_param_group of {self.name}",
                instead="build an optimizer with all groups; lr=0 keeps a group still",
            )
        super().add_param_group(param_group)

    # -- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient, with the partner's optimizer.

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
        nonfinite = self._bind_gradients()
        self._start()
        for group in self.param_groups if self.capturable else ():
            # The program may have assigned a number.
            rate = torch.as_tensor(group["lr"], dtype=torch.float32, device=self._device)
            group["lr"] = rate
        step: Any = self.partner.step
        with self._lent():
            step(**self._scaler(nonfinite))
        for alias in self._aliases:
            # A view would keep alive memory that is freed between steps.
            setattr(alias.local, self._attribute, None)
        return loss

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """Replaces the parameters in the groups by their aliases inside the context."""
        given = [group["params"] for group in self.param_groups]
        aliases = iter(self._aliases)
        for group, params in zip(self.param_groups, given, strict=True):
            group["params"] = [next(aliases).local for _ in params]
        try:
            yield
        finally:
            for group, params in zip(self.param_groups, given, strict=True):
                group["params"] = params

    def _bind_gradients(self) -> list[torch.Tensor]:
        """Sets the gradient of every alias to that of its parameter. Returns device scalars, each
        above zero if a non-finite value was found among some of these gradients.
        """
        for alias in self._aliases:
            alias.require_same_memory()
        managed = (alias.param for alias in self._aliases if alias.managed is not None)
        selections = select(managed).selections
        # Compared by identity, as every DTensor operator would be a dispatch.
        views = {
            id(chosen.shard.params[place]): chosen.shard.view(place)
            for chosen in selections
            for place in chosen.live
        }
        for alias in self._aliases:
            grad = views.get(id(alias.param))
            if alias.managed is None:
                grad = plain_gradient(alias.param)
            if grad is not None and self._attribute == "grad":
                alias.local.grad_dtype = grad.dtype
            setattr(alias.local, self._attribute, None if alias.is_empty else grad)
        found = (chosen.shard.nonfinite for chosen in selections)
        return [nonfinite for nonfinite in found if nonfinite is not None]

    def _scaler(self, nonfinite: list[torch.Tensor]) -> dict[str, Any]:
        """Returns the `grad_scaler` argument that gives a capturable partner the gradients' scale
        and whether to skip; no argument if no gradient was checked or scaled.
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
        # The two methods of a loss scaler that FusedAdam calls, with results known already. A real
        # one would check this rank's gradients only, and ranks would decide differently.
        scaler = SimpleNamespace(
            _check_inf_per_device=lambda optimizer: {skip.device: skip},
            _get_scale_async=lambda: scale,
        )
        return {"grad_scaler": scaler}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets gradients, decoupled ones included, to None, or to zero.

        Streams: zeros are written on the current stream. Capture: safe.
        """
        for alias in self._aliases:
            grad = getattr(alias.param, alias.attribute, None)
            if grad is not None and set_to_none:
                setattr(alias.param, alias.attribute, None)
            elif grad is not None:
                grad.detach().zero_()

    # -- state

    def _start(self) -> None:
        """Creates all state when it is first needed, so that masters copy the weights of
        that time.
        """
        if self.partner.state:
            return
        for group in self.param_groups:
            zero = torch.zeros(1, dtype=torch.int, device=self._device)
            group["step"] = zero if self.capturable else 0
        for alias in self._aliases:
            self.start(alias)
            stored = self.partner.state[alias.local]
            # A tensor subclass of the project, such as FP8, cannot be inside a DTensor.
            self.state[alias.param] = {
                name: alias.wrap(stored[name])
                for name in self.names(alias)
                if type(stored[name]) is torch.Tensor
            }

    def _values(self, alias: Alias) -> dict[str, torch.Tensor]:
        return {name: alias.wrap(self.value(alias, name)) for name in self.names(alias)}

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Returns state and groups in TransformerEngine's format: DTensors of float32 or int16
        remainders.
        """
        self._start()
        saved = super().state_dict()
        saved["state"] = {number: self._values(alias) for number, alias in enumerate(self._aliases)}
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class, or of TransformerEngine's FusedAdam, in place.

        Raises:
            OptimizerStateError: the state does not fit; nothing was changed.
        """
        self._start()
        saved_groups = state_dict["param_groups"]
        ours, theirs = ([len(g["params"]) for g in gs] for gs in (self.param_groups, saved_groups))
        if ours != theirs:
            raise misfit(
                "its groups are others", f"groups of {ours} parameters", f"groups of {theirs}"
            )
        keys = chain.from_iterable(group["params"] for group in saved_groups)
        parts: list[dict[str, torch.Tensor]] = []
        for number, (key, alias) in enumerate(zip(keys, self._aliases, strict=True)):
            values, saved = self._values(alias), dict(state_dict["state"].get(key, {}))
            if MASTER not in values:
                saved.pop(MASTER, None)  # TransformerEngine saves copies that nothing updates
            kinds, found = ({n: _is_bits(t) for n, t in each.items()} for each in (values, saved))
            if kinds != found:
                raise misfit(
                    f"parameter {number} has other state", f"{list(kinds)}", f"{list(found)}"
                )
            parts.append(
                {
                    name: local_part(into, saved[name], f"{name} of parameter {number}").to(into)
                    for name, into in values.items()
                }
            )
        for alias, part in zip(self._aliases, parts, strict=True):
            for name, value in part.items() if not alias.is_empty else ():
                self.write(alias, name, value)
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            for key in saved.keys() - {"params"}:
                _set(group, key, saved[key])

    def __getstate__(self) -> NoReturn:
        """Refuses pickling and copying, since the aliases are views of the model's buffers."""
        raise DeepcopyError(
            f"{self.name} over sharded parameters cannot be copied or pickled",
            expected="state_dict()",
            got="copy.deepcopy or pickle of the optimizer",
            fix="build a second optimizer and load optimizer.state_dict() into it",
        )


def _is_bits(value: Any) -> bool:
    """Returns whether state is the int16 remainder of a weight, and not a number."""
    return getattr(value, "dtype", None) is torch.int16


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group.get(key), torch.Tensor):
        group[key].fill_(float(value))  # a graph reads it
    else:
        group[key] = value.item() if isinstance(value, torch.Tensor) else value
