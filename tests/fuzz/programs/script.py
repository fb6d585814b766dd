"""What the operations of a program do. Under every engine it is the same training script."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.fuzz.programs import net as nets
from tests.fuzz.programs.net import Net, Plan
from tests.fuzz.programs.program import Op, Optimizer, Program

# Large, so that a gradient that is nothing but rounding moves a parameter by no more than it is
# worth.
EPS = {"": 1e-3, "float32": 1e-3, "bfloat16": 1.0}  # by dtype of the parameters in forward
LR = 0.05
PARTIAL = 500  # the first batch of units that are called by themselves

# What an operation shows: tensors, and facts such as "None" or an exception's name.
Seen = dict[str, Any]


class Script(ABC):
    """A model and an optimizer under one engine, on one rank.

    Attributes:
        libraries: of optimizers, by the names that programs have for them.
        params: by name, what the optimizer updates and what has the final gradients.
        gradient: name of the attribute of `params` that has the final gradients.
        skips_nan: optimizers skip a step whose gradients are not finite.
    """

    params: dict[str, nn.Parameter]
    net: Net
    libraries: Any
    gradient = "grad"
    skips_nan = False

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.library = program.optimizer.library
        self.plan = Plan(rank)
        self.graphs: list[tuple[Tensor, Tensor]] = []
        self._saved: Any = None
        self._former: Any = None  # what parameters were before others were assigned
        self._left_out: list[nn.Parameter] = []
        self._hooks: dict[str, Any] = {}
        self._scalers: dict[bool, Any] = {}  # torch's, and ours
        self.call = 0  # of a graph

    # -- what differs between engines

    @abstractmethod
    def make(self) -> None:
        """Makes the model, `params`, and the optimizer."""

    @abstractmethod
    def backward_of(self, loss: Tensor, **options: Any) -> None:
        """Runs a backward; gradients are final afterwards as far as the settings say."""

    @abstractmethod
    def gradients_of(self, loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        """Runs `autograd.grad`."""

    @abstractmethod
    def clip_ours(self, params: list[nn.Parameter] | None, max_norm: float) -> Tensor:
        """Clips by `shardgrad.clip_grad_norm_`, or what stands for it; all gradients if `params` is
        None.
        """

    def kept(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a state dict as it stays after others were assigned."""
        return copied(state)

    def out(self, x: Tensor, how: str = "") -> Any:
        """Runs forward, or parts around it."""
        return self.net.parts(x, how) if "around" in how else self.net(x)

    def before_forward(self) -> None:  # noqa: B027  (most need nothing)
        """Runs before each outermost forward."""

    def batch(self, number: int) -> Tensor:
        return nets.batch(self.program.seed, number, self.rank, self.program.model.width)

    def cut(self, value: Tensor) -> Tensor:
        """Returns what this rank holds of a parameter, a gradient or a state."""
        return value

    def own(self, name: str) -> nn.Parameter:
        """Returns the parameter that modules register now."""
        module, _, attribute = name.rpartition(".")
        param: nn.Parameter = getattr(self.net.get_submodule(module), attribute)
        return param

    # -- parts

    @property
    def names(self) -> list[str]:
        return list(self.params)

    def _input(self, op: Op) -> Tensor:
        self.plan.micro = op.n
        number = op.n + 10 * self.call  # other data in each call of a graph
        return self.batch(number).requires_grad_("x" in op.how)

    def _loss(self, op: Op) -> tuple[Tensor, Tensor]:
        x = self._input(op)
        self.before_forward()
        which = 1 if "side" in op.how else 2 if "both" in op.how else 0
        return nets.loss_of(self.out(x, op.how), which), x

    def _group(self, params: list[nn.Parameter], lr: float) -> dict[str, Any]:
        return {"params": params, "lr": lr}

    def make_optimizer(self) -> torch.optim.Optimizer:
        library = self.libraries[self.library]
        chosen: Optimizer = self.program.optimizer
        last = f"blocks.{len(self.program.model.blocks) - 1}."
        split = chosen.groups == 2 or chosen.partial
        first = [p for name, p in self.params.items() if not (split and name.startswith(last))]
        second = [p for name, p in self.params.items() if split and name.startswith(last)]
        groups = [self._group(first, LR)]
        self._left_out = second if chosen.partial else []
        if second and not chosen.partial:
            groups.append(self._group(second, LR / 2))
        if chosen.kind in ("sgd", "momentum"):
            return library.SGD(groups, lr=LR, momentum=0.9 if chosen.kind == "momentum" else 0.0)
        kind = library.AdamW if chosen.kind == "adamw" else library.Adam
        return kind(groups, lr=LR, eps=EPS[self.program.sharding.param_dtype])

    # -- forward and backward

    def forward(self, op: Op) -> Seen:
        loss, x = self._loss(op)
        self.graphs.append((loss, x))
        return {"loss": loss.detach()}

    def backward(self, op: Op) -> Seen:
        loss, x = self.graphs[op.n] if op.how == "retain" else self.graphs.pop(op.n)
        x.grad = None
        self.backward_of(loss, retain_graph=op.how == "retain")
        return {} if x.grad is None else {"gradient of x": x.grad}

    def train(self, op: Op) -> Seen:
        loss, x = self._loss(op)
        self.backward_of(loss)
        return {"loss": loss.detach()} | ({} if x.grad is None else {"gradient of x": x.grad})

    def evaluate(self, op: Op) -> Seen:
        x = self._input(op)
        self.before_forward()
        if op.how == "eval":
            self.net.eval()
        is_kept = op.how == "grad"
        with torch.inference_mode() if op.how == "inference" else torch.set_grad_enabled(is_kept):
            out = self.out(x, op.how)
        self.net.train()
        return {"out": nets.whole(out).detach()}

    def partial(self, op: Op) -> Seen:
        """Calls a unit by itself, not through the root."""
        self.plan.micro = op.n
        x = self.batch(PARTIAL + op.n)
        self.before_forward()
        if op.how == "no_grad":
            with torch.no_grad():
                return {"out": nets.whole(self.net.blocks[op.n](x))}
        loss = nets.loss_of(nets.whole(self.net.blocks[op.n](x)), 0)
        self.backward_of(loss)
        return {"loss": loss.detach()}

    def input_grad(self, op: Op) -> Seen:
        loss, x = self._loss(Op("train", op.n, "x"))
        (grad,) = self.gradients_of(loss, [x])
        return {"gradient of x": grad}

    def hand(self, op: Op) -> Seen:
        """Puts gradients on unsharded parameters, as zero-bubble schedules do."""
        loss, _ = self._loss(Op("train", op.n))
        params = [
            self.own(f"{part}.{kind}") for part in ("stem", "head") for kind in ("weight", "bias")
        ]
        params = [p for p in params if p.requires_grad]
        for param, grad in zip(params, self.gradients_of(loss, params), strict=True):
            param.grad = grad if param.grad is None else param.grad + grad
        return {"loss": loss.detach()}

    def fail_forward(self, op: Op) -> Seen:
        x = self._input(op)
        self.before_forward()
        if op.how == "shape":
            self.out(x[:, 1:])
        elif "around" in op.how:
            self.out(x, op.how)
        else:
            self.plan.fails = ("forward", 0)
            try:
                self.out(x)
            finally:
                self.plan.fails = None
        return {}

    def fail_backward(self, op: Op) -> Seen:
        self.plan.fails = ("backward", op.n)
        try:
            loss, _ = self._loss(Op("train", op.n))
        finally:
            self.plan.fails = None
        self.backward_of(loss)
        return {}

    def skip(self, op: Op) -> Seen:
        """From now on a block does not run, or runs again."""
        self.plan.skipped ^= {op.n}
        return {}

    def move(self, op: Op) -> Seen:
        """From now on blocks are in other streams."""
        return {}

    # -- gradients

    def zero(self, op: Op) -> Seen:
        if "model" in op.how:  # which drops what waits, too
            self.net.zero_grad(set_to_none="zeros" not in op.how)
            return {}
        self.optimizer.zero_grad(set_to_none=op.how != "zeros")
        for param in self._left_out:
            setattr(param, self.gradient, None)
        return {}

    def clip(self, op: Op) -> Seen:
        max_norm = (float("inf"), 1.0, 0.1, 0.01)[op.n % 4]
        if op.how == "torch":
            norm = nn.utils.clip_grad_norm_(list(self.params.values()), max_norm)
            return {"norm": norm.full_tensor() if hasattr(norm, "full_tensor") else norm}
        params = None if op.how == "ours" else list(self.params.values())[:: 1 + op.n % 3]
        return {"norm": self.clip_ours(params, max_norm)}

    def write(self, op: Op) -> Seen:
        """Writes the gradient of a parameter of the optimizer."""
        param = self._param(op.n)
        if op.how == "none":
            setattr(param, self.gradient, None)
        elif op.how == "ones":
            setattr(param, self.gradient, torch.ones_like(param).detach())
        elif (gradient := self._gradient(param)) is not None:
            gradient.mul_(2.0)
        return {}

    def _gradient(self, param: nn.Parameter) -> Any:
        return getattr(param, self.gradient, None)

    def freeze(self, op: Op) -> Seen:
        self.own(self._name(op.n)).requires_grad_(op.how == "un")
        return {}

    def hook(self, op: Op) -> Seen:
        """Halves a gradient whenever it has been reduced, or refuses it; once more takes the hook
        away. On what is "shown", an unsharded parameter, it comes before the reduction.
        """
        name = self._name(op.n)
        if name in self._hooks:
            self._hooks.pop(name).remove()
        else:
            hook = self._refuse if op.how == "refuses" else self._halve
            param = self.own(name) if op.how == "shown" else self.params[name]
            self._hooks[name] = param.register_post_accumulate_grad_hook(hook)
        return {}

    def _refuse(self, param: Any) -> None:
        kind = ArithmeticError if param.ndim > 1 else LookupError
        raise kind("a hook of the program refuses the gradient")

    def _halve(self, param: Any) -> None:
        self._gradient(param).mul_(0.5)

    # -- parameters

    def step(self, op: Op) -> Seen:
        self.optimizer.step()
        return {}

    def poke(self, op: Op) -> Seen:
        """Changes a parameter in place; torch may count that as a version of another tensor, or
        not at all.
        """
        param: Any = self._param(op.n)
        parts = {"local": getattr(param, "_local_tensor", param), "data": param.data}
        with torch.no_grad():
            if op.how == "at once":
                torch._foreach_mul_([param], 0.9)
            else:
                parts.get(op.how, param).mul_(0.9)
        return {}

    def nan(self, op: Op) -> Seen:
        """A step in which one rank has a NaN, clipped, and zeroed; shardgrad's optimizers skip it,
        unless other gradients are assigned after the norm was computed.
        """
        loss, _ = self._loss(Op("train", op.n))
        self.backward_of(loss * (float("nan") if self.rank == 0 else 1.0))
        self.clip_ours(None, 0.1)
        for n in range(len(self.names) if op.how == "assigned" else 0):
            if self._gradient(self._param(n)) is not None:
                self.write(Op("write", n, "ones"))
        if op.how == "assigned" or self.skips_nan:
            self.optimizer.step()
        return self.zero(op)

    def scaled(self, op: Op) -> Seen:
        """A step of a loss scaler, ours or torch's; an infinite gradient skips it on all ranks."""
        scaler = self._scaler("torch" in op.how)
        loss, _ = self._loss(Op("train", op.n))
        self.backward_of(scaler.scale(loss))
        seen: Seen = {}
        gradient = self._gradient(self._param(op.n))
        is_bad = "inf" in op.how and gradient is not None
        if is_bad:
            gradient.mul_(float("inf"))
        if "clip" in op.how or "part" in op.how:
            scaler.unscale_(self.optimizer)
            params = list(self.params.values())[::2] if "part" in op.how else None
            norm = self.clip_ours(params, 0.1)
            seen = {} if is_bad else {"norm": norm}
        scaler.step(self.optimizer)
        scaler.update()
        self.zero(Op("zero", how="zeros" if op.n % 2 else ""))
        return seen | {"scale": self.scale(scaler)}

    def _scaler(self, is_torchs: bool) -> Any:
        if is_torchs not in self._scalers:
            make = partial(torch.amp.GradScaler, "cpu") if is_torchs else self.make_scaler
            self._scalers[is_torchs] = make(init_scale=8.0, growth_interval=2)
        return self._scalers[is_torchs]

    def make_scaler(self, **options: Any) -> Any:
        """Makes what stands for `shardgrad.GradScaler`."""
        return torch.amp.GradScaler("cpu", **options)

    def scale(self, scaler: Any) -> Any:
        """Returns the scale, without waiting for a device."""
        return torch.tensor(scaler.get_scale())

    def edit(self, op: Op) -> Seen:
        groups = self.optimizer.param_groups
        if op.how == "lr":
            groups[0]["lr"] *= 0.5
        elif op.how == "add":
            self.optimizer.add_param_group(self._group(self._left_out, LR / 4))
            self._left_out = []
        elif op.how == "remove":
            self._left_out = list(groups[-1]["params"])
            del groups[-1]
        else:
            self.optimizer.state.clear()
        return {}

    def renew(self, op: Op) -> Seen:
        """From now on another optimizer updates, perhaps of the other library."""
        if op.how == "other":
            self.library = "torch" if self.library == "shardgrad" else "shardgrad"
        self.optimizer = self.make_optimizer()
        return {}

    # -- graphs

    def graphed(self, op: Op) -> Seen:
        """Calls a graph of operations some times."""
        seen: Seen = {}
        for self.call in range(op.n):
            for key, value in self.call_graph(op.inside).items():
                seen[f"call {self.call}, {key}"] = value.detach().clone()
        self.call = 0
        return seen

    def call_graph(self, inside: tuple[Op, ...]) -> Seen:
        """Does the operations; the graph that stands for them is another engine's."""
        seen: Seen = {}
        for place, op in enumerate(inside):
            shown = getattr(self, op.do)(op)
            seen |= {f"operation {place}, {key}": value for key, value in shown.items()}
        return seen

    # -- state

    def save(self, op: Op) -> Seen:
        self._saved = copied(self.model_state()), copied(self.optimizer.state_dict())
        return {}

    def load(self, op: Op) -> Seen:
        model, optimizer = copied(self._saved[0]), copied(self._saved[1])
        self.load_model(model)
        if op.how != "model":
            self.optimizer.load_state_dict(optimizer)
        return {}

    def resume(self, op: Op) -> Seen:
        """Builds everything again, and loads what was saved."""
        trainable = {name: param.requires_grad for name, param in self.params.items()}
        self._hooks.clear()
        self.make()
        for name, requires_grad in trainable.items():
            self.own(name).requires_grad_(requires_grad)
        return self.load(op)

    def assign(self, op: Op) -> Seen:
        """Loads with `assign=True`, and builds the optimizer again: what was saved, what is there,
        a copy of that, or what was there before.
        """
        now = self.model_state()
        known = {"saved": (self._saved or [None])[0], "former": self._former}
        state = known.get(op.how, now)
        if op.how != "own":
            self._former = self.kept(now)
        is_copied = op.how not in ("own", "former")
        self.load_model(copied(state) if is_copied else state, assign=True)
        while self._hooks:  # new parameters have none
            self._hooks.popitem()[1].remove()
        self.optimizer = self.make_optimizer()
        if op.how == "saved":
            self.optimizer.load_state_dict(copied(self._saved[1]))
        return {}

    @abstractmethod
    def model_state(self) -> Mapping[str, Any]:
        """Returns the state dict."""

    @abstractmethod
    def load_model(self, state: Mapping[str, Any], *, assign: bool = False) -> None:
        """Loads a state dict."""

    # -- looking

    def look(self, op: Op) -> Seen:
        """Shows gradients, parameters, optimizer states and buffers, as this rank holds them."""
        seen: Seen = {}
        for name, param in self.params.items():
            gradient = self._gradient(param)
            seen[f"{name}.grad"] = "None" if gradient is None else self.cut(gradient)
            if op.how != "grads":
                seen[name] = self.cut(param)
                seen.update(self._state_of(name, param))
        for name, buffer in self.net.named_buffers():
            seen[name] = buffer.detach()
        return seen

    def _state_of(self, name: str, param: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        for key, value in self.optimizer.state.get(param, {}).items():
            if key in ("exp_avg", "exp_avg_sq", "momentum_buffer") and value is not None:
                yield f"{name}.{key}", self.cut(value)

    def do(self, op: Op) -> Seen:
        """Does an operation, and returns copies of what it shows; an exception is shown, too."""
        try:
            seen = getattr(self, op.do)(op)
        except Exception as error:
            return {"error": type(error), "message": f"{type(error).__name__}: {error}"}
        return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in seen.items()}

    def _name(self, n: int) -> str:
        return self.names[n % len(self.names)]

    def _param(self, n: int) -> nn.Parameter:
        return self.params[self._name(n)]


def copied(state: Any) -> Any:
    copies = copy.copy(tree_map_only(Tensor, lambda t: t.detach().clone(), state))
    if any(t.device.type != "cpu" for t in tree_leaves(copies) if isinstance(t, Tensor)):
        torch.accelerator.synchronize()  # as a file on the host would
    return copies
