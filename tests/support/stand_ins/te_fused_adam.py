"""TransformerEngine's FusedAdam as its documentation and its checks describe it, release by
release.

Signature, attribute names, states, refusals and order of events are those of
`transformer_engine/pytorch/optimizers/fused_adam.py`, tags v2.4 to v2.18 and commit d0067d0d,
written anew in plain torch. FP8 is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from tests.support.stand_ins import kernels

HALVES = (torch.float16, torch.bfloat16)


def fused_adam_of(version: tuple[int, int]) -> type[Optimizer]:
    """Returns the optimizer class of a release."""

    class FusedAdam(_FusedAdam):
        release = version

    return FusedAdam


class _FusedAdam(Optimizer):
    release = (2, 18)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        if amsgrad:
            raise RuntimeError("no AMSGrad")
        rate: Any = torch.tensor(lr, dtype=torch.float32) if capturable else lr
        super().__init__(
            params,
            {
                "lr": rate,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
            },
        )
        self.capturable = capturable
        self.master_weights = master_weights
        self.adam_w_mode = adam_w_mode
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights
        self.dtypes = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }
        self._scales: dict[Any, dict[str, Tensor]] = {}
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int)
        if capturable:
            for group in self.param_groups:
                if group["params"]:
                    group["lr"] = group["lr"].to(device=group["params"][0].device)

    # -- state

    def _keeps_remainder(self, param: Tensor, name: str) -> bool:
        return (
            self.store_param_remainders and name == "master_param" and param.dtype == torch.bfloat16
        )

    def _initialize_state(self, param: Tensor, name: str) -> None:
        local = _local(param)
        dtype = torch.int16 if self._keeps_remainder(param, name) else self.dtypes[name]
        state: Tensor = torch.zeros_like(local, dtype=dtype, requires_grad=False)
        if isinstance(param, DTensor):
            state = DTensor.from_local(
                state, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
            )
        self.state[param][name] = state
        self._scales.setdefault(param, {})[name] = torch.ones(1)

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        self._initialize_state(param, "exp_avg")
        self._initialize_state(param, "exp_avg_sq")
        if self.master_weights:
            self._initialize_state(param, "master_param")
            if not store_param_remainders:
                self.set_scaled_state(param, "master_param", _local(param).detach().clone().float())

    def get_unscaled_state(self, param: Tensor, name: str, skip_unscale: bool = False) -> Tensor:
        state = _local(self.state[param][name])
        if state.dtype == torch.float16:
            return state.float() * self._scales[param][name]
        if state.dtype == torch.bfloat16 and not skip_unscale:
            return state.float()
        return state

    def set_scaled_state(self, param: Tensor, name: str, unscaled: Tensor) -> None:
        assert unscaled.dtype == (
            torch.int16 if self._keeps_remainder(param, name) else torch.float32
        )
        if name not in self.state[param]:
            self._initialize_state(param, name)
        state = _local(self.state[param][name])
        if state.dtype == torch.float16:
            scale = unscaled.abs().max() / (torch.finfo(torch.float16).max / 2)
            self._scales[param][name].copy_(scale)
            unscaled.mul_(torch.where(scale > 0, scale.reciprocal(), 0.0))
        state.copy_(unscaled)

    # -- a step

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            if not group["params"] and self.release < (2, 20):
                continue
            self._count(group)
            if group["params"]:
                self._step_group(group, grad_scaler)
        return loss

    def _count(self, group: dict[str, Any]) -> None:
        if "step" in group:
            group["step"] += (self._dummy_overflow_buf != 1).to(torch.int) if self.capturable else 1
        else:
            group["step"] = torch.tensor([1], dtype=torch.int) if self.capturable else 1

    def _step_group(self, group: dict[str, Any], grad_scaler: Any) -> None:
        half: list[list[Any]] = []
        full: list[list[Any]] = []
        for param in group["params"]:
            if len(self.state[param]) == 0:
                self.initialize_state(
                    param, self.store_param_remainders and param.dtype == torch.bfloat16
                )
            grad = getattr(param, "decoupled_grad" if self.use_decoupled_grad else "grad", None)
            if grad is None:
                continue
            assert isinstance(param, DTensor) == isinstance(grad, DTensor), "DTensor disparity"
            row = [_local(grad.data), _local(param.data)]
            row += [self.get_unscaled_state(param, n, True) for n in ("exp_avg", "exp_avg_sq")]
            if param.dtype in HALVES:
                row += (
                    [self.get_unscaled_state(param, "master_param")] if self.master_weights else []
                )
                half.append([param, *row])
            elif param.dtype == torch.float32:
                full.append([param, *row])
            else:
                raise RuntimeError("weights in fp32, fp16 and bf16 only")
        if len({row[0].dtype for row in half}) > 1:
            raise RuntimeError("a mix of float16 and bfloat16")
        scale = None
        if self.capturable:
            found = 0.0
            scale = torch.ones(1)
            if grad_scaler is not None:
                found = grad_scaler._check_inf_per_device(self)[_local(group["params"][0]).device]
                scale = grad_scaler._get_scale_async().double().reciprocal().float()
            self._dummy_overflow_buf.copy_(torch.as_tensor(found))
        for rows in (half, full):
            if rows:
                self._launch(group, rows, scale)

    def _launch(self, group: dict[str, Any], rows: list[list[Any]], scale: Tensor | None) -> None:
        lists = [list(column) for column in zip(*(row[1:] for row in rows), strict=True)]
        if self.capturable and self._dummy_overflow_buf.item() == 1:
            return
        grads, params = lists[0], lists[1]
        kernels.require_one_dtype(grads, grads[0].dtype)
        kernels.require_one_dtype(params, params[0].dtype)
        if self.capturable and self.release < (2, 20):
            kernels.require_one_dtype(params, grads[0].dtype)
        remainders = len(lists) == 5 and lists[4][0].dtype == torch.int16
        if remainders:
            coarse, lists[4] = (
                lists[4],
                [_whole(p, r) for p, r in zip(params, lists[4], strict=True)],
            )
        lists = list(kernels.launch(lists, takes_empty=self.release >= (2, 18)))
        kernels.adam(
            lists,
            group["lr"],
            group["betas"],
            group["eps"],
            group["step"],
            decoupled=self.adam_w_mode,
            bias_correction=group["bias_correction"],
            weight_decay=group["weight_decay"],
            inverse_scale=scale,
        )
        if remainders:
            for param, remainder, master in zip(params, coarse, lists[4], strict=True):
                _split(param, remainder, master)
        for row in rows:
            self._rescale(row[0], row[3:])

    def _rescale(self, param: Tensor, unscaled: list[Tensor]) -> None:
        for name, value in zip(("exp_avg", "exp_avg_sq", "master_param"), unscaled, strict=False):
            if _local(self.state[param][name]).dtype == torch.float16:
                self.set_scaled_state(param, name, value)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _whole(param: Tensor, remainder: Tensor) -> Tensor:
    """Joins bfloat16 weights, rounded to nearest, and the 16 bits below them."""
    high = param.view(torch.int16).int() - (remainder < 0).int()
    return ((high << 16) | (remainder.int() & 0xFFFF)).view(torch.float32)


def _split(param: Tensor, remainder: Tensor, master: Tensor) -> None:
    bits = master.view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int32)
    remainder.copy_(torch.where(low >= 0x8000, low - 0x10000, low).to(torch.int16))
    param.copy_(((bits >> 16) + (remainder < 0).int()).to(torch.int16).view(torch.bfloat16))


@contextmanager
def installed(
    version: str = "2.18.0", *, broken: Exception | None = None
) -> Iterator[type[Optimizer]]:
    """Makes `import transformer_engine` find a stand-in of this version, or fail with `broken`."""
    names = (
        "transformer_engine",
        "transformer_engine.pytorch",
        "transformer_engine.pytorch.optimizers",
    )
    before = {name: sys.modules.get(name) for name in names}
    major, minor = version.split(".")[:2]
    modules: list[Any] = [ModuleType(name) for name in names]
    modules[0].__version__ = version
    modules[0].__path__ = modules[1].__path__ = []
    modules[2].FusedAdam = fused_adam_of((int(major), int(minor)))
    if broken is not None:
        modules[2] = _Broken(names[2], broken)
    sys.modules.update(zip(names, modules, strict=True))
    try:
        yield modules[2].FusedAdam if broken is None else Optimizer
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


class _Broken(ModuleType):
    """A module of which every attribute, also those the import machinery asks for, raises."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(name)
        self._error = error

    def __getattribute__(self, name: str) -> Any:
        if name in ("__spec__", "FusedAdam"):
            raise super().__getattribute__("_error")
        return super().__getattribute__(name)
