"""TransformerEngine's FusedAdam on sharded parameters.

[Note: Limits of TransformerEngine]
Limits of releases that concern a caller; numbers are those of issues and pull requests of the
project.

* Before 2.6 a kernel takes one dtype for parameter and gradient (#1888). The release is not
supported. * Before 2.13 `capturable` needs float32 moments (#2632). Others raise.
* Before 2.14 state of a DTensor parameter is not always a DTensor (#2424, #2795). Aliases are
plain. * Before 2.18 a launch does nothing if its last tensor is empty (#3207, #3212). Empty aliases
are not passed. * Before 2.20 `capturable` needs gradients in the parameter's dtype (#3358, #3414).
Others raise. * Before 2.20 a group without parameters counts no steps (#3318). Such a group gets a
placeholder.

In all releases:

* A parameter whose gradient is None is skipped silently, also if the gradient is in the other
attribute. That
  raises here.
* `capturable` takes float32 masters only, no remainders, and moments that are both float32 or both
bfloat16. * Float16 and bfloat16 in one group raise in the middle of a step. Here they raise before
it. * Float32 parameters get a master copy that nothing updates. It is not saved.
* With `capturable`, the step count follows the found_inf of the step before.

Source: `transformer_engine/pytorch/optimizers/fused_adam.py` and `common/multi_tensor/adam.cu` in
NVIDIA/TransformerEngine, tags v2.4 to v2.18 and commit d0067d0d.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from shardgrad.errors import unsupported
from shardgrad.integrations.aliases import Alias
from shardgrad.integrations.bound import BoundOptimizer
from shardgrad.integrations.partner import MOMENTS, Partner
from shardgrad.integrations.probe import Probe, load

__all__ = ["DEVICE_TYPES", "fused_adam", "probe"]

# ROCm calls its devices cuda too.
DEVICE_TYPES: Sequence[str] = ("cuda",)

_OPTIMIZERS = "transformer_engine.pytorch.optimizers"
_KEYWORDS = (
    "capturable",
    "master_weights",
    "use_decoupled_grad",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
)
_SHOWN = (torch.float32, torch.bfloat16, torch.int16)


def probe() -> Probe:
    """Imports TransformerEngine, if it is installed, and checks that its FusedAdam is usable.

    The import loads large native libraries.
    """
    found, _ = load(
        "TransformerEngine's FusedAdam",
        modules=("transformer_engine", _OPTIMIZERS),
        where=_OPTIMIZERS,
        keywords=_KEYWORDS,
        install="pip install --no-build-isolation transformer_engine[pytorch]",
    )
    release = found.release
    if found.factory is not None and release.text and not release.has(2, 6):
        why = f"release {release} is older than 2.6, where kernels take one dtype for all"
        return Probe(found.name, release, None, why, found.install)
    return found


def fused_adam(
    params_or_model: nn.Module | Iterable[Any],
    lr: float | torch.Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    bias_correction: bool = True,
    capturable: bool = False,
    master_weights: bool = False,
    use_decoupled_grad: bool | None = None,
    **options: Any,
) -> BoundOptimizer:
    """Returns TransformerEngine's FusedAdam over sharded parameters.

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
        use_decoupled_grad: None follows the model's `GradientPolicy`; True and False must agree
            with it.
        **options: other options of the installed release: `adam_w_mode`, `master_weight_dtype`,
            `exp_avg_dtype`, `exp_avg_sq_dtype`, `store_param_remainders`.

    Streams: a step runs on the current stream, which backward has made wait for the gradients.

    Capture: safe with `capturable=True`, after one step outside of the capture.

    Raises:
        PartnerUnavailableError: there is no usable TransformerEngine.
        OptionError, UnsupportedError: options that the release does not support, or that contradict
            the model.
        OptimizerParameterError: parameters that it cannot update. See [Note: Limits of
            TransformerEngine].
    """
    options = {
        **options,
        "capturable": capturable,
        "master_weights": master_weights,
        "use_decoupled_grad": use_decoupled_grad,
    }
    group_defaults = {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "bias_correction": bias_correction,
    }
    return BoundOptimizer(
        params_or_model, group_defaults, _TransformerEngine(probe(), options, DEVICE_TYPES)
    )


class _TransformerEngine(Partner):
    def __init__(
        self, found: Probe, options: Mapping[str, Any], device_types: Sequence[str]
    ) -> None:
        super().__init__(found, options, device_types)
        self._release = found.release
        for name in ("amsgrad", "set_grad_none"):
            if options.get(name):
                raise unsupported(f"{name} of {self.name}", instead=f"leave {name} out")
        self._master_dtype = options.get("master_weight_dtype", torch.float32)
        self._moments = [options.get(f"{name}_dtype", torch.float32) for name in MOMENTS]
        self._with_remainders = bool(options.get("store_param_remainders", False))
        self._check_options()

    def _check_options(self) -> None:
        moments = " and ".join(str(dtype) for dtype in self._moments)
        known = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
        if not set(self._moments) <= set(known):
            raise self.refuses_option(
                f"moments of {moments}", f"of {known}", "exp_avg_dtype=torch.float32"
            )
        if self.has_masters and self._master_dtype not in (torch.float32, torch.float16):
            raise self.refuses_option(
                f"master weights of {self._master_dtype}",
                "float32 or float16",
                "leave master_weight_dtype out",
            )
        if self._with_remainders and not (self.has_masters and self._master_dtype is torch.float32):
            raise self.refuses_option(
                "store_param_remainders without float32 master weights, which it would ignore",
                "master_weights=True, master_weight_dtype=torch.float32",
                "master_weights=True",
            )
        if not self.capturable:
            return
        if self.has_masters and self._master_dtype is not torch.float32:
            raise self.refuses_option(
                f"capturable=True with master weights of {self._master_dtype}",
                "float32 master weights",
                "leave master_weight_dtype out",
            )
        if self._with_remainders:
            raise self.refuses_option(
                "capturable=True with store_param_remainders=True",
                "one of the two",
                'shardgrad.optim.AdamW(master="remainder"), which is capturable',
            )
        pairs = [[torch.float32] * 2] + [[torch.bfloat16] * 2] * self._release.has(2, 13)
        if self._moments not in pairs:
            raise self.refuses_option(
                f"capturable=True with moments of {moments}",
                "both float32"
                + (", or both bfloat16" if len(pairs) > 1 else "; both bfloat16 from 2.13 on"),
                "exp_avg_dtype=torch.float32, exp_avg_sq_dtype=torch.float32",
            )

    def agree(self, aliases: Sequence[Alias]) -> None:
        """See `Partner.agree`. An option of None follows the policy."""
        if self._options["use_decoupled_grad"] is None:
            self._options["use_decoupled_grad"] = any(
                a.attribute == "decoupled_grad" for a in aliases
            )
        for alias in aliases:
            if alias.is_sharded and alias.attribute != self.attribute:
                is_decoupled = alias.attribute == "decoupled_grad"
                raise self.disagrees(
                    alias,
                    f"use_decoupled_grad={is_decoupled}, and the same GradientPolicy for every "
                    f"unit",
                )

    def check(self, groups: Sequence[Sequence[Alias]]) -> None:
        """See `Partner.check`."""
        super().check(groups)
        for group in groups:
            # One launch takes all 16-bit parameters of a group, another one the float32 ones.
            for members in (
                [a for a in group if _is_half(a)],
                [a for a in group if not _is_half(a)],
            ):
                self._check_launch(members)

    def _check_launch(self, members: Sequence[Alias]) -> None:
        first = members[0] if members else None
        for alias in members:
            if first is not None and alias.local.dtype is not first.local.dtype:
                raise self.refuses(
                    alias,
                    f"{first.local.dtype} and {alias.local.dtype} in one group",
                    "a launch takes parameters of one dtype",
                    "one entry of param_groups for each dtype",
                )
            if first is not None and alias.grad_dtype is not first.grad_dtype:
                raise self.refuses(
                    alias,
                    f"gradients of {first.grad_dtype} and {alias.grad_dtype} in one group",
                    "a launch takes gradients of one dtype",
                    "one entry of param_groups for each GradientPolicy",
                )
            if (
                self.capturable
                and alias.grad_dtype is not alias.local.dtype
                and not self._release.has(2, 20)
            ):
                raise self.refuses(
                    alias,
                    f"a parameter of {alias.local.dtype} with a gradient of {alias.grad_dtype}",
                    "with capturable=True, releases before 2.20 take gradients in the parameter's "
                    "dtype only",
                    "GradientPolicy(dtype=None), capturable=False, a later release, or "
                    "shardgrad.optim.AdamW",
                )

    def keeps_master(self, alias: Alias) -> bool:
        """See `Partner.keeps_master`. Float32 parameters get a copy too, which no kernel reads."""
        return self.has_masters and _is_half(alias)

    def master_dtype(self, alias: Alias) -> torch.dtype:
        """See `Partner.master_dtype`."""
        return torch.int16 if self._keeps_remainder(alias) else torch.float32

    def _keeps_remainder(self, alias: Alias) -> bool:
        return self._with_remainders and alias.local.dtype is torch.bfloat16

    def start(self, optimizer: Optimizer, alias: Alias) -> None:
        """See `Partner.start`."""
        optimizer.initialize_state(alias.local, self._keeps_remainder(alias))  # type: ignore[attr-defined]

    def read(self, optimizer: Optimizer, alias: Alias) -> Mapping[str, torch.Tensor]:
        """See `Partner.read`."""
        partner: Any = optimizer
        return {
            name: partner.get_unscaled_state(alias.local, name) for name in self.state_dtypes(alias)
        }

    def shown(self, optimizer: Optimizer, alias: Alias) -> Mapping[str, torch.Tensor]:
        """See `Partner.shown`."""
        state = optimizer.state[alias.local]
        chosen = {name: state[name] for name in self.state_dtypes(alias)}
        return {
            name: t for name, t in chosen.items() if type(t) is torch.Tensor and t.dtype in _SHOWN
        }

    def write(
        self, optimizer: Optimizer, local: nn.Parameter, name: str, value: torch.Tensor
    ) -> None:
        """See `Partner.write`."""
        # The partner scales its argument in place, so it gets a copy.
        optimizer.set_scaled_state(local, name, value.clone())  # type: ignore[attr-defined]


def _is_half(alias: Alias) -> bool:
    return alias.local.dtype in (torch.float16, torch.bfloat16)
