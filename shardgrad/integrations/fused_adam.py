"""A torch optimizer over sharded parameters whose steps are taken by another project's FusedAdam.

The subclasses, one for each project, know how its package is found, what it cannot do, and where it
keeps state.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.torch_version import TorchVersion

from shardgrad.engine.replaced_params import adopt_given
from shardgrad.engine.streams import is_capturing
from shardgrad.errors import (
    CaptureError,
    DeepcopyError,
    OptimizerParameterError,
    OptionError,
    PartnerUnavailableError,
    unsupported,
)
from shardgrad.integrations.aliases import Alias, bind_gradients
from shardgrad.optim.state import copies_into, local_tensor, misfit

__all__ = ["MOMENTS", "BoundOptimizer"]

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"

# What broken or foreign packages raise when imported: missing libraries, version checks, Python 2
# sources.
_BROKEN = (ImportError, OSError, RuntimeError, AssertionError, AttributeError, SyntaxError)


class BoundOptimizer(Optimizer):
    """A torch optimizer over sharded parameters whose steps another project's FusedAdam takes. See
    [Note: Aliases].

    `param_groups` hold the parameters of the model, so schedulers, `clip_grad_norm_`, loss scalers
    and checkpoints work as with any optimizer. `state_dict` has a DTensor for each state tensor,
    with the names that TransformerEngine uses, and step counts in the groups.

    Args:
        params_or_model: a model, whose trainable parameters are used; or as for any torch
            optimizer.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: number added to the root of the second moment.
        weight_decay: weight decay, decoupled unless `adam_w_mode=False`.
        bias_correction: correct the bias of the moments.
        capturable: for CUDA graphs: learning rate and step count are device tensors, and a step
            with non-finite gradients is skipped on the device.
        master_weights: train float32 copies of 16-bit parameters.
        **options: other options of the project's optimizer.

    Attributes:
        partner: the project's optimizer, over aliases.
        name: name and release of it, for error messages.

    Raises:
        PartnerUnavailableError: there is no usable package.
        OptionError, UnsupportedError: options that its release does not support, or that contradict
            the model.
        OptimizerParameterError: parameters that it cannot update.
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
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        **options: Any,
    ) -> None:
        self._is_built = False
        factory, self._release = self.find()
        self.name = f"{self.title} {self._release}".removesuffix(" 0")
        params: Any = params_or_model
        if isinstance(params_or_model, nn.Module):
            params = [param for param in params_or_model.parameters() if param.requires_grad]
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "bias_correction": bias_correction,
            },
        )
        for group in self.param_groups:
            _require_in_range(group)
        self.capturable = self._step_supports_amp_scaling = capturable
        self._has_masters = master_weights
        adopt_given(param for group in self.param_groups for param in group["params"])
        self._groups = [
            [Alias(p, f"{i} of group {g}") for i, p in enumerate(group["params"])]
            for g, group in enumerate(self.param_groups)
        ]
        self._aliases = list(chain.from_iterable(self._groups))
        self._device = self._aliases[0].local.device
        for alias in self._aliases:
            self._require_kernel(alias)
        options = {**options, "capturable": capturable, "master_weights": master_weights}
        self.check(options)
        self.partner = self._build(factory, options)
        is_decoupled = getattr(self.partner, "use_decoupled_grad", False)
        self._attribute = "decoupled_grad" if is_decoupled else "grad"
        for alias in self._aliases:
            self._require_attribute(alias)
        # Masters are copies of the parameters, which may be loaded between now and the first step.
        self._has_fresh_masters = False
        with torch.no_grad():
            for alias in self._aliases:
                self.start(alias)
                stored = {name: self.stored(alias, name) for name in self.state_names(alias)}
                # A tensor of a class of the project's, such as FP8, cannot be a DTensor's.
                self.state[alias.param] = {
                    name: alias.wrap(t) for name, t in stored.items() if type(t) is torch.Tensor
                }
        self._is_built = True

    # -- what a project has to say

    @classmethod
    def find(cls) -> tuple[Callable[..., Optimizer], TorchVersion]:
        """Imports the project's package, and returns its optimizer and its version.

        That a package can be found proves little: a native library may be missing or built for
        another torch, and the name may belong to another project (`apex` on PyPI is a web framework
        of 2013).

        Raises:
            PartnerUnavailableError: it is missing, broken, too old or another package.
        """
        try:
            package, module, *_ = map(import_module, cls.modules)
            factory: Callable[..., Optimizer] = module.FusedAdam
            version = str(getattr(package, "__version__", ""))
            # A version that is none counts as the oldest.
            release = TorchVersion(version if version[:1].isdigit() else "0")
            if release < cls.oldest:
                raise ImportError(f"release {release} is older than {cls.oldest}")
        except _BROKEN as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise PartnerUnavailableError(
                f"{cls.title} cannot be used: {why}",
                expected=f"{cls.title}, built for this torch",
                got=why,
                fix=f"{cls.install}; or shardgrad.optim.AdamW, which needs no other package",
            ) from error
        return factory, release

    @abstractmethod
    def check(self, options: dict[str, Any]) -> None:
        """Checks what the project's optimizer would get wrong without saying so.

        Raises:
            OptionError, OptimizerParameterError: it would not train these parameters right.
        """

    @abstractmethod
    def keeps_master(self, alias: Alias) -> bool:
        """Returns whether the optimizer trains a master copy of the parameter."""

    @abstractmethod
    def start(self, alias: Alias) -> None:
        """Creates the state of a parameter, as the first step would."""

    def stored(self, alias: Alias, name: str) -> torch.Tensor:
        """Returns a tensor of a parameter's state itself."""
        tensors: Mapping[str, torch.Tensor] = self.partner.state[alias.local]
        return tensors[name]

    def value(self, alias: Alias, name: str) -> torch.Tensor:
        """Returns what a tensor of a parameter's state stands for, as it is saved."""
        return self.stored(alias, name)

    def write(self, alias: Alias, name: str, value: torch.Tensor) -> None:
        """Copies a value into a parameter's state, in place."""
        self.stored(alias, name).copy_(value)

    # -- what all of them cannot do

    def refuse(self, alias: Alias, why: str, fix: str) -> NoReturn:
        """Raises the error for a parameter that cannot be updated."""
        local = alias.local
        raise OptimizerParameterError(
            f"{self.name} cannot update parameter {alias.name}: {why}",
            expected="parameters and gradients of the dtypes and devices it has kernels for",
            got=f"{alias.memory.numel()} elements of {local.dtype} on {local.device}, with a "
            f"gradient of {alias.grad_dtype}",
            fix=fix,
        )

    def _require_kernel(self, alias: Alias) -> None:
        local = alias.local
        if local.device.type not in self.device_types:
            kinds = " or ".join(self.device_types)
            fix = "shardgrad.optim.AdamW, which runs everywhere"
            self.refuse(alias, f"its kernels run on {kinds} only", fix)
        if local.device != self._device:
            why = f"one launch takes all parameters of a group, and others are on {self._device}"
            self.refuse(alias, why, "one optimizer for each device")
        if local.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            fix = "float32, bfloat16 or float16 parameters, or shardgrad.optim.AdamW"
            self.refuse(alias, "it has no kernel for this dtype", fix)

    def require_countable(self, alias: Alias) -> None:
        """Refuses a shard of more elements than 32 bits can count, of which a kernel would update
        some, or others.
        """
        if alias.memory.numel() > 2**31 - 1:
            why = "its kernels count the elements of a tensor in 32 bits"
            self.refuse(alias, why, "more ranks, a later release, or shardgrad.optim.AdamW")

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

    def _build(self, factory: Callable[..., Optimizer], options: dict[str, Any]) -> Optimizer:
        if options.get("set_grad_none") is not None:
            raise unsupported(f"set_grad_none of {self.name}", instead="zero_grad(set_to_none)")
        groups = []
        for group, aliases in zip(self.param_groups, self._groups, strict=True):
            theirs = {key: group[key] for key in self.defaults}
            if self.capturable:
                # One tensor per group, which schedulers fill, and a copy for the partner.
                rate = torch.as_tensor(group["lr"], dtype=torch.float32, device=self._device)
                group["lr"], theirs["lr"] = rate.clone(), rate.clone()
            groups.append({"params": [alias.local for alias in aliases], **theirs})
        try:
            return factory(groups, **options)
        except (TypeError, RuntimeError) as error:
            raise OptionError(
                f"{self.name} cannot be built: {error}",
                expected="options that this release takes together",
                got=", ".join(f"{key}={value}" for key, value in options.items()),
                fix="other options, a later release, or shardgrad.optim.AdamW",
            ) from error

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group while the optimizer is built; not supported afterwards.

        Raises:
            UnsupportedError: called after construction. A partner's state does not grow with its
                groups.
        """
        if self._is_built:
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
            OptimizerParameterError, ForeignParameterError, GradientError: before anything is
                changed.
            CaptureError: the first step is being captured.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        nonfinite = bind_gradients(self._aliases, self._attribute)
        self._hand_over_options()
        self._refresh_masters()
        step: Any = self.partner.step
        step(**self._scaler(nonfinite))
        for alias in self._aliases:
            # A view would keep memory that is freed between steps.
            setattr(alias.local, self._attribute, None)
        return loss

    def _hand_over_options(self) -> None:
        """Copies hyperparameters, which schedulers may have changed, into the partner's groups."""
        for group, theirs in zip(self.param_groups, self.partner.param_groups, strict=True):
            for key in self.defaults:
                if isinstance(theirs[key], torch.Tensor):
                    theirs[key].copy_(torch.as_tensor(group[key]))
                else:
                    theirs[key] = group[key]

    def _refresh_masters(self) -> None:
        if self._has_fresh_masters or not self._has_masters:
            return
        if is_capturing(self._device):
            raise CaptureError(
                f"the first step of {self.name} copies the parameters into its master "
                "weights, and a graph would do so in every replay",
                expected="one step before the capture",
                got="a first step while a graph is being captured",
                fix="optimizer.step() once, or more warm-up steps",
            )
        for alias in filter(self.keeps_master, self._aliases):
            # A remainder of 16 bits is 0 for a parameter as it is.
            if self.stored(alias, MASTER).dtype is not torch.int16:
                self.write(alias, MASTER, alias.local.detach().float())
        self._has_fresh_masters = True

    def _scaler(self, nonfinite: list[torch.Tensor]) -> dict[str, Any]:
        """Returns the argument by which a capturable partner learns the scale of the gradients and
        whether to skip; none if no gradient was checked or scaled.
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

    def state_names(self, alias: Alias) -> tuple[str, ...]:
        """Returns the names of a parameter's state tensors."""
        return (*MOMENTS, MASTER) if self.keeps_master(alias) else MOMENTS

    def _values(self, alias: Alias) -> dict[str, torch.Tensor]:
        names = self.state_names(alias)
        return {name: alias.wrap(self.value(alias, name).detach()) for name in names}

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Returns state and groups in TransformerEngine's format: DTensors of float32 or int16
        remainders.
        """
        saved = super().state_dict()
        saved["state"] = {number: self._values(alias) for number, alias in enumerate(self._aliases)}
        for group, theirs in zip(saved["param_groups"], self.partner.param_groups, strict=True):
            group["step"] = theirs.get("step", 0)
        return saved

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
        saved_groups = state_dict["param_groups"]
        ours, theirs = ([len(g["params"]) for g in gs] for gs in (self.param_groups, saved_groups))
        if ours != theirs:
            raise misfit(
                "its groups are others", f"groups of {ours} parameters", f"groups of {theirs}"
            )
        keys = chain.from_iterable(group["params"] for group in saved_groups)
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        loaded, counts, has_masters = [], [], True
        for number, (key, alias) in enumerate(zip(keys, self._aliases, strict=True)):
            values, saved = self._values(alias), dict(state_dict["state"].get(key, {}))
            counts.append(int(saved.pop("step", 0)))
            if MASTER not in values:
                saved.pop(MASTER, None)  # TransformerEngine saves copies that nothing updates
            elif MASTER not in saved:
                has_masters = False
            for name in values.keys() & saved.keys():
                _require_alike(number, name, values[name], saved[name])
            copies += copies_into(number, values, saved)
            loaded.append(values)
        # If one master is missing, all are copied from the parameters: a mixture would be
        # inconsistent.
        self._has_fresh_masters = has_masters
        for into, value in copies:
            into.copy_(value)
        for alias, values in zip(self._aliases, loaded, strict=True):
            for name, value in values.items() if not alias.is_empty else ():
                self.write(alias, name, local_tensor(value))
        taken = iter(counts)
        for group, inner, saved in zip(
            self.param_groups, self.partner.param_groups, saved_groups, strict=True
        ):
            # torch counts steps in each parameter's state.
            count = max(islice(taken, len(group["params"])), default=0)
            self._load_group(group, inner, saved, int(saved.get("step", count)))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load_group(
        self, group: dict[str, Any], theirs: dict[str, Any], saved: Mapping[str, Any], count: int
    ) -> None:
        for key in (group.keys() | {"initial_lr"}) & saved.keys() - {"params"}:
            value = saved[key]
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(float(value))
            else:
                group[key] = float(value) if isinstance(value, torch.Tensor) else value
        if not self.capturable:
            theirs["step"] = count
        elif "step" in theirs:
            theirs["step"].fill_(count)  # a graph reads it
        else:
            theirs["step"] = torch.tensor([count], dtype=torch.int, device=self._device)

    def __getstate__(self) -> NoReturn:
        """Raises: an optimizer whose aliases are views of the model's buffers cannot be pickled or
        copied.
        """
        raise DeepcopyError(
            f"{self.name} over sharded parameters cannot be copied or pickled",
            expected="state_dict()",
            got="copy.deepcopy or pickle of the optimizer",
            fix="build a second optimizer and load optimizer.state_dict() into it",
        )


def _require_alike(number: int, name: str, ours: torch.Tensor, saved: Any) -> None:
    """Refuses to take the bits of an int16 remainder for a number, or the other way round."""
    theirs = getattr(saved, "dtype", ours.dtype)
    if (ours.dtype is torch.int16) != (theirs is torch.int16):
        what = f"{name} of parameter {number} is kept otherwise"
        raise misfit(what, str(ours.dtype), str(theirs))


def _require_in_range(group: Mapping[str, Any]) -> None:
    if not (float(group["lr"]) >= 0 and group["eps"] >= 0 and group["weight_decay"] >= 0):
        raise OptionError(
            "a hyperparameter is outside its range",
            expected="lr, eps and weight_decay of at least 0",
            got=f"lr={group['lr']}, eps={group['eps']}, weight_decay={group['weight_decay']}",
        )
