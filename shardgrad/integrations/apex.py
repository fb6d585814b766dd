"""apex' FusedAdam on sharded parameters.

[Note: Limits of apex]
apex has had one version number, 0.1, for years, so nothing here depends on the version.

* PyPI's `apex` is another project, and NVIDIA's needs its native library `amp_C`: both are checked.
* It reads `param.grad` only. A decoupled gradient raises.
* Kernels assume that the parameter has the gradient's dtype, without a check. Other dtypes raise.
* A launch does nothing if its last tensor is empty. Empty aliases are not passed.
* `master_weights` needs `capturable`, and is ignored for bfloat16. Both raise.
* Master weights are created by the constructor and not saved, so a resumed run would return to the
weights of
  that moment. Here they are copied from the parameters at the first step, and saved.
* `add_param_group` does not create master weights, so new parameters would not be trained. It
raises. * With `capturable`, a group's learning rate must be a tensor. It is converted.

Source: `apex/optimizers/fused_adam.py`, `csrc/multi_tensor_adam.cu` and
`csrc/multi_tensor_apply.cuh` in NVIDIA/apex, commit 6424da3b.
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

_KERNELS = (
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
)


def probe() -> Probe:
    """Imports apex, if it is installed, and checks that it is NVIDIA's and its FusedAdam is
    usable.
    """
    found, modules = load(
        "apex' FusedAdam",
        modules=("apex", "apex.optimizers", "amp_C"),
        where="apex.optimizers",
        keywords=("capturable", "master_weights", "adam_w_mode"),
        install="build https://github.com/NVIDIA/apex with APEX_CPP_EXT=1 APEX_CUDA_EXT=1",
    )
    why = found.why_not
    if "apex" in modules and "apex.optimizers" not in modules:
        why = f"a package called apex is installed, but not NVIDIA's with optimizers ({why})"
    elif "apex.optimizers" in modules and "amp_C" not in modules:
        why = f"apex was built without its CUDA extension ({why})"
    elif not why:
        missing = [kernel for kernel in _KERNELS if not hasattr(modules["amp_C"], kernel)]
        why = f"amp_C has no {', '.join(missing)}" if missing else ""
    return Probe(found.name, found.release, None if why else found.factory, why, found.install)


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
    **options: Any,
) -> BoundOptimizer:
    """Returns apex' FusedAdam over sharded parameters.

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
        master_weights: train float32 copies of float16 parameters; needs `capturable`.
        **options: `adam_w_mode`.

    Streams: a step runs on the current stream, which backward has made wait for the gradients.

    Capture: safe with `capturable=True`, after one step outside of the capture.

    Raises:
        PartnerUnavailableError: there is no usable apex.
        OptionError, UnsupportedError: options that it does not support, or that contradict the
            model.
        OptimizerParameterError: parameters that it cannot update. See [Note: Limits of apex].
    """
    options = {**options, "capturable": capturable, "master_weights": master_weights}
    group_defaults = {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "bias_correction": bias_correction,
    }
    return BoundOptimizer(params_or_model, group_defaults, _Apex(probe(), options, DEVICE_TYPES))


class _Apex(Partner):
    def __init__(
        self, found: Probe, options: Mapping[str, Any], device_types: Sequence[str]
    ) -> None:
        super().__init__(found, options, device_types)
        for name in ("amsgrad", "set_grad_none"):
            if options.get(name):
                raise unsupported(f"{name} of {self.name}", instead=f"leave {name} out")
        if self.has_masters and not self.capturable:
            raise self.refuses_option(
                "master_weights=True without capturable=True",
                "both, or neither",
                "capturable=True",
            )

    def check(self, groups: Sequence[Sequence[Alias]]) -> None:
        """See `Partner.check`."""
        super().check(groups)
        for alias in (alias for group in groups for alias in group):
            if alias.grad_dtype is not alias.local.dtype:
                raise self.refuses(
                    alias,
                    f"a parameter of {alias.local.dtype} with a gradient of {alias.grad_dtype}",
                    "its kernels would read the parameter as if it had the gradient's dtype",
                    "GradientPolicy(dtype=None), or shardgrad.optim.AdamW",
                )
            if self.has_masters and alias.local.dtype is torch.bfloat16:
                raise self.refuses(
                    alias,
                    "master_weights=True with a parameter of torch.bfloat16",
                    "it keeps master copies of bfloat16 parameters without ever using them",
                    'shardgrad.optim.AdamW(master="float32"), or TransformerEngine',
                )

    def keeps_master(self, alias: Alias) -> bool:
        """See `Partner.keeps_master`. Here float32 parameters are trained through their copy
        too.
        """
        return self.has_masters

    def start(self, optimizer: Optimizer, alias: Alias) -> None:
        """See `Partner.start`."""
        state = optimizer.state[alias.local]
        for name in MOMENTS:
            state[name] = torch.zeros_like(alias.local, dtype=torch.float32)

    def read(self, optimizer: Optimizer, alias: Alias) -> Mapping[str, torch.Tensor]:
        """See `Partner.read`."""
        return {name: _find(optimizer, alias.local, name) for name in self.state_dtypes(alias)}

    def shown(self, optimizer: Optimizer, alias: Alias) -> Mapping[str, torch.Tensor]:
        """See `Partner.shown`."""
        return self.read(optimizer, alias)

    def write(
        self, optimizer: Optimizer, local: nn.Parameter, name: str, value: torch.Tensor
    ) -> None:
        """See `Partner.write`."""
        _find(optimizer, local, name).copy_(value)


def _find(optimizer: Optimizer, local: nn.Parameter, name: str) -> torch.Tensor:
    """Returns a tensor of a parameter's state. Master weights are in separate groups."""
    found: torch.Tensor
    if name != "master_param":
        found = optimizer.state[local][name]
        return found
    partner: Any = optimizer
    for group, masters in zip(partner.param_groups, partner.param_groups_master, strict=True):
        for param, master in zip(group["params"], masters["params"], strict=True):
            if param is local:
                found = master
                return found
    raise KeyError(name)
