"""apex' FusedAdam as its documentation and its checks describe it.

Signature, attribute names, states and refusals are those of `apex/optimizers/fused_adam.py`, commit
6424da3b, written anew in plain torch. Its kernels take the parameter's dtype from the gradient and
check nothing, which here raises, so that a test that would read garbage fails.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer


class FusedAdam(Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
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
        self.adam_w_mode = adam_w_mode
        self.capturable = capturable
        self.master_weights = master_weights
        self.param_groups_master = [
            {
                "params": [
                    p.clone().detach().float() if master_weights else None for p in group["params"]
                ]
            }
            for group in self.param_groups
        ]
        if capturable:
            for group in self.param_groups:
                if group["params"]:
                    group["lr"] = group["lr"].to(device=group["params"][0].device)
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int)

    @torch.no_grad()
    def step(
        self,
        closure: Any = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> Any:
        loss = None if closure is None else closure()
        for group, masters in zip(self.param_groups, self.param_groups_master, strict=False):
            if not group["params"]:
                continue
            if "step" in group:
                group["step"] += (
                    (self._dummy_overflow_buf != 1).to(torch.int) if self.capturable else 1
                )
            else:
                group["step"] = torch.tensor([1], dtype=torch.int) if self.capturable else 1
            self._step_group(group, masters["params"], grad_scaler)
        return loss

    def _step_group(self, group: dict[str, Any], masters: list[Any], grad_scaler: Any) -> None:
        lists: dict[torch.dtype, list[list[Tensor]]] = {}
        for param, master in zip(group["params"], masters, strict=True):
            if param.grad is None:
                continue
            state = self.state[param]
            if len(state) == 0:
                state["exp_avg"] = torch.zeros_like(param.data).float()
                state["exp_avg_sq"] = torch.zeros_like(param.data).float()
            row = [param.grad, param, state["exp_avg"], state["exp_avg_sq"]]
            if self.master_weights and param.dtype != torch.bfloat16:
                row.append(master)
            lists.setdefault(param.dtype, []).append(row)
        inverse_scale = None
        if self.capturable:
            found: Any = 0.0
            inverse_scale = torch.ones(1)
            if grad_scaler is not None:
                found = grad_scaler._check_inf_per_device(self)[group["params"][0].device]
                inverse_scale = grad_scaler._get_scale_async().double().reciprocal().float()
            self._dummy_overflow_buf.copy_(torch.as_tensor(found))
            if self._dummy_overflow_buf.item() == 1:
                return
        for rows in lists.values():
            columns = [list(column) for column in zip(*rows, strict=True)]
            assert {each.dtype for each in columns[1]} == {columns[0][0].dtype}
            adam(
                launch(columns),
                group["lr"],
                group["betas"],
                group["eps"],
                group["step"],
                decoupled=self.adam_w_mode,
                bias_correction=group["bias_correction"],
                weight_decay=group["weight_decay"],
                inverse_scale=inverse_scale,
            )


Lists = Sequence[Sequence[Tensor]]


def launch(lists: Lists) -> Lists:
    """Checks what every launch checks, and returns what it works on.

    A launch is issued when the last chunk of the last tensor is reached. An empty last tensor has
    no chunk, so nothing is issued at all: the silent skip of TransformerEngine #3207.
    """
    for tensors in lists:
        if len(tensors) != len(lists[0]):
            raise RuntimeError("tensor lists differ in length")
        for tensor, first in zip(tensors, lists[0], strict=True):
            if isinstance(tensor, DTensor):
                raise RuntimeError("a DTensor has no address")
            if not tensor.is_contiguous() or tensor.numel() != first.numel():
                raise RuntimeError("a tensor is not contiguous, or has another size")
    return [[] for _ in lists] if lists[0][-1].numel() == 0 else lists


def adam(
    lists: Lists,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    step: int | Tensor,
    *,
    decoupled: bool,
    bias_correction: bool,
    weight_decay: float,
    inverse_scale: Tensor | None = None,
) -> None:
    """Updates `lists`: gradients, parameters, two moments, perhaps masters. Computes in float32.

    With `inverse_scale` (the capturable kernels) gradients are multiplied by it and written back.
    """
    beta1, beta2 = betas
    for grad, param, exp_avg, exp_avg_sq, *master in zip(*lists, strict=True):
        g = grad.float()
        if inverse_scale is not None:
            g = g * inverse_scale
            grad.copy_(g)
        p = master[0].float() if master else param.float()
        if not decoupled:
            g = g + weight_decay * p
        m = beta1 * exp_avg.float() + (1 - beta1) * g
        v = beta2 * exp_avg_sq.float() + (1 - beta2) * g * g
        exp_avg.copy_(m)
        exp_avg_sq.copy_(v)
        count = float(step) if bias_correction else float("inf")
        m_hat, v_hat = m / (1 - beta1**count), v / (1 - beta2**count)
        update = m_hat / (v_hat.sqrt() + eps) + (weight_decay * p if decoupled else 0.0)
        p = p - lr * update
        if master:
            master[0].copy_(p)
        param.copy_(p)


@contextmanager
def installed(*, with_extension: bool = True, stranger: bool = False) -> Iterator[type[Optimizer]]:
    """Makes `import apex` find a stand-in: with or without its native library, or another
    project.
    """
    names = ("apex", "apex.optimizers", "amp_C")
    before = {name: sys.modules.get(name) for name in names}
    modules: list[Any] = [ModuleType(name) for name in names]
    modules[0].__path__ = []
    modules[1].FusedAdam = FusedAdam
    if not with_extension:
        modules[2] = None  # None in sys.modules makes an import raise
    if stranger:
        modules[1] = modules[2] = None
    sys.modules.update(zip(names, modules, strict=True))
    try:
        yield FusedAdam
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
