"""Plain torch: a copy of the model on each rank, and gradients averaged by hand.

The copy computes; what the optimizer updates, and what has the final gradients, are *masters* in
float64, as under mixed precision. Gradients of the copy go into a sum of what waits on this rank,
and from there, averaged over the ranks, into the masters' gradients, when the settings say that a
backward reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.programs import net as nets
from tests.fuzz.programs.net import FuzzBlock, Net
from tests.fuzz.programs.program import Op, Program
from tests.fuzz.programs.script import Script, Seen

# Sums a tensor over all ranks. With simulated devices it is no collective, which would order
# streams.
Exchange = Callable[[Tensor], Tensor]


class Plain(Script):
    """See the module's docstring."""

    libraries = {"torch": torch.optim, "shardgrad": torch.optim}  # noqa: RUF012

    def __init__(self, program: Program, rank: int, exchange: Exchange) -> None:
        super().__init__(program, rank)
        self._exchange = exchange
        sharding = program.sharding
        self._dtype = getattr(torch, sharding.param_dtype or "float64")
        self._reduce_dtype = getattr(
            torch, sharding.reduce_dtype or str(self._dtype).removeprefix("torch.")
        )
        self._wire_dtype = (
            getattr(torch, sharding.wire_dtype) if sharding.wire_dtype else self._reduce_dtype
        )
        self.make()

    def make(self) -> None:
        self.net = nets.build(self.program, self.plan)
        self.params = {n: nn.Parameter(p.detach().clone()) for n, p in self.net.named_parameters()}
        for name, param in self.net.named_parameters():
            self.params[name].requires_grad_(param.requires_grad)
            param.data = param.data.to(self._dtype)
        self._copies = dict(self.net.named_parameters())
        for name, module in self.net.named_modules():
            if isinstance(module, FuzzBlock) and module.block.kind == "shrinks":
                module.register_forward_hook(partial(self._take_over, f"{name}.lin.weight"))
        self._waiting: dict[str, Tensor] = {}
        self.units = list(_owned(self.net).values())[::-1]  # the root first
        # By unit, the parameters that have had a gradient to wait for, or still have one.
        self._placed = [{n for n in unit if self._copies[n].requires_grad} for unit in self.units]
        self._waits = [False] * len(self.units)
        self._sync = [True] * len(self.units)
        self._all_reduce = [True] * len(self.units)
        self._divide = [self.program.sharding.divide or self.program.ranks] * len(self.units)
        self._is_last = True
        self.optimizer = self.make_optimizer()

    def out(self, x: Tensor, how: str = "") -> Any:
        return super().out(x.to(self._dtype), how)

    def before_forward(self) -> None:
        for unit, names in enumerate(self.units):
            placed = self._placed[unit]
            trains = {name for name in names if self._copies[name].requires_grad}
            # A parameter that begins to require grad reduces what waits in its unit.
            if self._waits[unit] and not trains <= placed:
                self._average(names)
                self._waits[unit] = False
            if not (self.graphs or self._waits[unit]):
                placed.intersection_update(n for n in names if self.params[n].grad is not None)
            placed |= trains
        if not self.graphs:
            for name, copy in self._copies.items():
                copy.data.copy_(self.params[name].detach())

    def _take_over(self, name: str, *_: Any) -> None:
        self.params[name].data.copy_(self._copies[name])

    def partial(self, op: Op) -> Seen:
        with _casting(self.net.blocks[op.n], self._dtype):
            return super().partial(op)

    # -- backward

    def backward_of(self, loss: Tensor, **options: Any) -> None:
        try:
            loss.backward(**options)
        except Exception:
            for copy in self._copies.values() if loss.requires_grad else ():  # or none has begun
                copy.grad = None
            raise
        self._collect()

    def gradients_of(self, loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        grads = list(torch.autograd.grad(loss, inputs))
        self._collect()
        return grads

    def _collect(self) -> None:
        for name, copy in self._copies.items():
            grad, copy.grad = copy.grad, None
            if grad is not None:
                grad = grad.detach().to(self._reduce_dtype)
                waiting = self._waiting.get(name)
                self._waiting[name] = grad if waiting is None else waiting + grad
        self._waits = [not self._reduces(unit) for unit in range(len(self.units))]
        reduced = [n for u, names in enumerate(self.units) if not self._waits[u] for n in names]
        if reduced:
            self._average(reduced)

    def _reduces(self, unit: int) -> bool:
        sharding = self.program.sharding
        is_whole = self._all_reduce[unit] or sharding.mesh == "flat"
        return self._sync[unit] and is_whole and (self._is_last or sharding.stage != 1)

    def _average(self, names: list[str]) -> None:
        shapes = {name: self.params[name].shape for name in names}
        flags = torch.tensor([float(name in self._waiting) for name in names], dtype=torch.float64)
        parts = [
            self._waiting.pop(name, torch.zeros(shape)).to(self._wire_dtype).double().reshape(-1)
            for name, shape in shapes.items()
        ]
        summed = self._exchange(torch.cat([*parts, flags]))
        sums, flags = summed[: -len(names)], summed[-len(names) :]
        divisors = {n: by for unit, by in zip(self.units, self._divide, strict=True) for n in unit}
        totals = sums.split([shape.numel() for shape in shapes.values()])
        for name, total, flag in zip(names, totals, flags, strict=True):
            if flag == 0:
                continue
            master, average = self.params[name], total.view(shapes[name]) / divisors[name]
            master.grad = average.clone() if master.grad is None else master.grad + average
            for hook in (master._post_accumulate_grad_hooks or {}).values():
                hook(master)

    def participate(self, op: Op) -> Seen:
        self.plan.by_rank = True
        seen: Seen = {}
        if op.how == "all" or (self.rank + op.n) % 2 == 0:
            loss, _ = self._loss(Op("train", op.n))
            loss.backward()
            seen = {"loss": loss.detach()}
        self.plan.by_rank = False
        self._collect()
        return seen

    def lose(self, units: list[int]) -> None:
        """Gradients of these units are None, as a warning after a failed backward has said."""
        for unit in units:
            for name in self.units[unit]:
                self.params[name].grad = None

    # -- the rest

    def zero(self, op: Op) -> Seen:
        if "model" in op.how:
            self._waiting.clear()
            self.net.zero_grad()
        return super().zero(replace(op, how=op.how.removeprefix("model").strip()))

    def freeze(self, op: Op) -> Seen:
        name = self._name(op.n)
        self.params[name].requires_grad_(op.how == "un")
        self._copies[name].requires_grad_(op.how == "un")
        return {}

    def resume(self, op: Op) -> Seen:
        trainable = {name: param.requires_grad for name, param in self.params.items()}
        seen = super().resume(op)
        for name, requires_grad in trainable.items():
            self.params[name].requires_grad_(requires_grad)
        return seen

    def clip_ours(self, params: list[nn.Parameter] | None, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(
            list(self.params.values()) if params is None else params, max_norm
        )

    def model_state(self) -> Mapping[str, Any]:
        return {**self.params, **dict(self.net.named_buffers())}

    def load_model(self, state: Mapping[str, Any], *, assign: bool = False) -> None:
        with torch.no_grad():
            for name, into in self.model_state().items():
                into.copy_(state[name])
                into.grad = None if assign else into.grad

    def cast(self, op: Op) -> Seen:
        dtype = getattr(torch, op.how)
        for value in self.model_state().values():
            for each in (value, value.grad):
                if each is not None:
                    each.data.copy_(each.data.to(dtype))
        return {}

    # -- settings

    def sync(self, op: Op) -> Seen:
        self._sync = [bool(op.n)] * len(self.units)
        self._all_reduce = list(self._sync)
        return {}

    def sync_unit(self, op: Op) -> Seen:
        unit = op.n // 2 % len(self.units)
        self._sync[unit] = self._all_reduce[unit] = bool(op.n % 2)
        return {}

    def all_reduce(self, op: Op) -> Seen:
        self._all_reduce = [bool(op.n)] * len(self.units)
        return {}

    def divide(self, op: Op) -> Seen:
        self._divide[op.n // 2 % len(self.units)] = (1.0, 3.0)[op.n % 2]
        return {}

    def last(self, op: Op) -> Seen:
        self._is_last = bool(op.n)
        return {}

    def keep(self, op: Op) -> Seen:
        return {}

    whole = unshard = reshard = keep


class _casting:
    """Casts a module's inputs, as a unit with `param_dtype` does."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._handle = module.register_forward_pre_hook(
            lambda _, args: (args[0].to(dtype), *args[1:])
        )

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


def _owned(net: Net) -> dict[tuple[nn.Module, ...], list[str]]:
    """Returns the parameters of each unit: those that it is the innermost unit around all users
    of.
    """
    units = [tuple(unit) for unit in nets.units(net)]  # innermost first
    covered = {unit: {m for module in unit for m in module.modules()} for unit in units}
    found: dict[tuple[nn.Module, ...], list[str]] = {unit: [] for unit in units}
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in net.modules():
        for param in module._parameters.values():
            if param is not None:
                users.setdefault(param, []).append(module)
    for name, param in net.named_parameters():
        found[next(unit for unit in units if covered[unit].issuperset(users[param]))].append(name)
    return found
