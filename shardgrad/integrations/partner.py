"""What `BoundOptimizer` asks of a partner, and what partners have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from shardgrad.errors import OptimizerParameterError, OptionError
from shardgrad.integrations.aliases import Alias
from shardgrad.integrations.probe import Probe

__all__ = ["MOMENTS", "Partner"]

MOMENTS = ("exp_avg", "exp_avg_sq")
_HALVES = (torch.float16, torch.bfloat16)


class Partner(ABC):
    """One release of one project's FusedAdam, and the options it is to be built with.

    Args:
        probe: what was found.
        options: keyword arguments of the constructor, without those that a group has.
        device_types: of the devices it runs on.

    Attributes:
        name: of the optimizer, for messages.
        capturable: as in `options`.
    """

    def __init__(self, probe: Probe, options: Mapping[str, Any], device_types: Sequence[str]) -> None:
        self._probe = probe
        self._factory = probe.require()
        probe.require_options(options)
        self._options = dict(options)
        self._device_types = device_types
        self.name = f"{probe.name} {probe.release}"
        self.capturable = bool(options.get("capturable", False))
        self.has_masters = bool(options.get("master_weights", False))

    # -- before it exists -------------------------------------------------------------------------------

    @property
    def attribute(self) -> str:
        """The attribute of a parameter that it reads gradients from."""
        return "decoupled_grad" if self._options.get("use_decoupled_grad") else "grad"

    def agree(self, aliases: Sequence[Alias]) -> None:
        """Refuses to read gradients from another attribute than the one the engine binds.

        A partner skips a parameter whose gradient is None, so a disagreement would train nothing, silently.

        Raises:
            OptionError: naming a parameter.
        """
        for alias in aliases:
            if alias.is_sharded and alias.attribute != self.attribute:
                raise self.disagrees(alias, "GradientPolicy(decoupled=False), or shardgrad.optim.AdamW")

    def disagrees(self, alias: Alias, fix: str) -> OptionError:
        """Returns the error for a gradient that would be looked for in the wrong place."""
        return OptionError(
            f"{self.name} would read param.{self.attribute}, and the engine binds param.{alias.attribute}",
            expected="one attribute for both: param.grad, or param.decoupled_grad",
            got=f"a GradientPolicy with decoupled={alias.attribute == 'decoupled_grad'}",
            where=f"parameter {alias.name}",
            fix=fix,
        )

    def check(self, groups: Sequence[Sequence[Alias]]) -> None:
        """Refuses parameters that this release cannot update, or would update wrongly.

        Raises:
            OptimizerParameterError: naming one.
        """
        for alias in (alias for group in groups for alias in group):
            dtype, device = alias.local.dtype, alias.local.device
            if device.type not in self._device_types:
                raise self.refuses(
                    alias,
                    f"a parameter on {device}",
                    f"its kernels run on {' or '.join(self._device_types)} only",
                    "shardgrad.optim.AdamW, which runs everywhere",
                )
            if dtype not in (*_HALVES, torch.float32):
                raise self.refuses(
                    alias,
                    f"a parameter of {dtype}",
                    "it has no kernel for this dtype",
                    "float32, bfloat16 or float16 parameters, or shardgrad.optim.AdamW",
                )
        devices = {alias.local.device: alias for group in groups for alias in group}
        if len(devices) > 1:
            raise self.refuses(
                list(devices.values())[-1],
                f"parameters on {len(devices)} devices",
                "one launch takes all parameters of a group",
                "one optimizer for each device",
            )

    def refuses(self, alias: Alias, got: str, why: str, fix: str) -> OptimizerParameterError:
        """Returns the error for a parameter that cannot be updated."""
        return OptimizerParameterError(
            f"{self.name} cannot update parameter {alias.name}: {why}",
            expected="parameters and gradients of the dtypes and devices it has kernels for",
            got=got,
            where=f"parameter {alias.name}, {alias.local.dtype}, gradient {alias.grad_dtype}",
            fix=fix,
        )

    def refuses_option(self, got: str, expected: str, fix: str) -> OptionError:
        """Returns the error for an option that this release cannot have."""
        return OptionError(f"{self.name} cannot have {got}", expected=expected, got=got, fix=fix)

    # -- while it exists --------------------------------------------------------------------------------

    def build(self, groups: list[dict[str, Any]], defaults: Mapping[str, Any]) -> Optimizer:
        """Builds it over aliases, with the groups' own hyperparameters."""
        return self._factory(groups, **defaults, **self._options)

    def state_dtypes(self, alias: Alias) -> Mapping[str, torch.dtype]:
        """Returns the state a parameter has, by name, in the dtypes in which it is saved."""
        dtypes = dict.fromkeys(MOMENTS, torch.float32)
        if self.keeps_master(alias):
            dtypes["master_param"] = self.master_dtype(alias)
        return dtypes

    @abstractmethod
    def keeps_master(self, alias: Alias) -> bool:
        """Returns whether a copy of the parameter is what is really trained."""

    def master_dtype(self, alias: Alias) -> torch.dtype:
        """Returns the dtype in which a master copy is saved."""
        return torch.float32

    @abstractmethod
    def start(self, optimizer: Optimizer, alias: Alias) -> None:
        """Makes the state of a parameter, as the first step would."""

    @abstractmethod
    def read(self, optimizer: Optimizer, alias: Alias) -> Mapping[str, torch.Tensor]:
        """Returns a parameter's state as it is saved, with scales taken out; tensors or views of them."""

    @abstractmethod
    def shown(self, optimizer: Optimizer, alias: Alias) -> Mapping[str, torch.Tensor]:
        """Returns those tensors of a parameter's state that say what they mean, without a scale."""

    @abstractmethod
    def write(self, optimizer: Optimizer, local: nn.Parameter, name: str, value: torch.Tensor) -> None:
        """Copies a value into a parameter's state, in place."""

    def refresh_master(self, optimizer: Optimizer, alias: Alias) -> None:
        """Makes the master copy equal to the parameter."""
        if self.keeps_master(alias) and self.master_dtype(alias) is torch.float32:
            self.write(optimizer, alias.local, "master_param", alias.local.detach().float())
