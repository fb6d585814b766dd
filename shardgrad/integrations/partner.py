"""The interface between `BoundOptimizer` and a partner's optimizer, and what partners have in
common.
"""

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
    """One release of a project's FusedAdam, with the options to build it.

    Args:
        probe: result of importing the package.
        options: keyword arguments of the constructor, without those of a parameter group.
        device_types: device types it runs on.

    Attributes:
        name: name and release of the optimizer, for error messages.
        capturable: whether a step can be captured, as in `options`.
        has_masters: whether it trains master copies of parameters, as in `options`.
    """

    def __init__(
        self, probe: Probe, options: Mapping[str, Any], device_types: Sequence[str]
    ) -> None:
        self._probe = probe
        self._factory = probe.require()
        probe.require_options(options)
        self._options = dict(options)
        self._device_types = device_types
        self.name = f"{probe.name} {probe.release}"
        self.capturable = bool(options.get("capturable", False))
        self.has_masters = bool(options.get("master_weights", False))

    # -- before it exists

    @property
    def attribute(self) -> str:
        """The attribute of a parameter that the optimizer reads gradients from."""
        return "decoupled_grad" if self._options.get("use_decoupled_grad") else "grad"

    def agree(self, aliases: Sequence[Alias]) -> None:
        """Checks that the optimizer reads gradients from the attribute that the engine sets.

        A partner skips a parameter whose gradient is None, so a mismatch would silently train
        nothing.

        Raises:
            OptionError: the attributes differ; names a parameter.
        """
        for alias in aliases:
            if alias.is_sharded and alias.attribute != self.attribute:
                raise self.disagrees(
                    alias, "GradientPolicy(decoupled=False), or shardgrad.optim.AdamW"
                )

    def disagrees(self, alias: Alias, fix: str) -> OptionError:
        """Returns the error for a gradient that is in another attribute."""
        return OptionError(
            f"{self.name} would read param.{self.attribute}, and the engine binds "
            f"param.{alias.attribute}",
            expected="one attribute for both: param.grad, or param.decoupled_grad",
            got=f"a GradientPolicy with decoupled={alias.attribute == 'decoupled_grad'}",
            where=f"parameter {alias.name}",
            fix=fix,
        )

    def check(self, groups: Sequence[Sequence[Alias]]) -> None:
        """Checks that this release updates all parameters correctly.

        Raises:
            OptimizerParameterError: it does not; names a parameter.
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
        """Returns the error for an option that this release does not support."""
        return OptionError(f"{self.name} cannot have {got}", expected=expected, got=got, fix=fix)

    # -- while it exists

    def build(self, groups: list[dict[str, Any]], defaults: Mapping[str, Any]) -> Optimizer:
        """Builds the optimizer over parameter groups of aliases."""
        return self._factory(groups, **defaults, **self._options)

    def state_dtypes(self, alias: Alias) -> Mapping[str, torch.dtype]:
        """Returns the names of a parameter's state tensors, with the dtypes in which they are
        saved.
        """
        dtypes = dict.fromkeys(MOMENTS, torch.float32)
        if self.keeps_master(alias):
            dtypes["master_param"] = self.master_dtype(alias)
        return dtypes

    @abstractmethod
    def keeps_master(self, alias: Alias) -> bool:
        """Returns whether the optimizer trains a master copy of the parameter."""

    def master_dtype(self, alias: Alias) -> torch.dtype:
        """Returns the dtype in which a master copy is saved."""
        return torch.float32

    @abstractmethod
    def start(self, optimizer: Optimizer, alias: Alias) -> None:
        """Creates the state of a parameter, as the first step would."""

    @abstractmethod
    def read(self, optimizer: Optimizer, alias: Alias) -> Mapping[str, torch.Tensor]:
        """Returns a parameter's unscaled state as it is saved; tensors or views of them."""

    @abstractmethod
    def shown(self, optimizer: Optimizer, alias: Alias) -> Mapping[str, torch.Tensor]:
        """Returns those tensors of a parameter's state that are stored without a scale."""

    @abstractmethod
    def write(
        self, optimizer: Optimizer, local: nn.Parameter, name: str, value: torch.Tensor
    ) -> None:
        """Copies a value into a parameter's state, in place."""

    def refresh_master(self, optimizer: Optimizer, alias: Alias) -> None:
        """Makes the master copy equal to the parameter."""
        if self.keeps_master(alias) and self.master_dtype(alias) is torch.float32:
            self.write(optimizer, alias.local, "master_param", alias.local.detach().float())
