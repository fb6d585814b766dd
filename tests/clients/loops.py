"""Training loops as programs write them by themselves, with torch alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.clients.catalogue import client
from tests.support.parity import (
    SHARDGRAD,
    WIDTH,
    Tensors,
    Tower,
    make_optimizer,
    token_loss,
    tower,
)
from tests.support.under_patch import whole


def sharded(model: Tower) -> Tower:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    loss = token_loss(model, SHARDGRAD.tokens(step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# -- reinforcement learning, preference learning


class Policy(nn.Module):
    """What libraries for alignment build: entry points other than forward, that share a trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = tower()
        self.critic = nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.trunk(tokens)

    def log_probabilities(self, tokens: Tensor) -> Tensor:
        logits = self(tokens)[:, :-1]
        return torch.gather(logits.log_softmax(-1), -1, tokens[:, 1:, None]).sum((1, 2))

    def value(self, tokens: Tensor) -> Tensor:
        return self.critic(self.trunk.embedding(tokens).mean(1))

    @torch.no_grad()
    def generate(self, tokens: Tensor) -> Tensor:
        for _ in range(3):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


def policy() -> Policy:
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    model = Policy()
    for layer in model.trunk.layers:
        fully_shard(layer)
    fully_shard(model)
    for method in ("log_probabilities", "value", "generate"):
        register_fsdp_forward_method(model, method)
    return model


@client("PyTorch: alignment", "torch")
def alignment() -> tuple[nn.Module, Tensors]:
    """Rolls out, scores with a frozen reference, and trains on a preference and a value loss."""
    model, reference = policy(), policy().requires_grad_(False)
    optimizer = make_optimizer("adamw", model)
    notes: Tensors = {}
    for step in range(2):
        chosen = model.generate(SHARDGRAD.tokens(2 * step)[0])
        rejected = model.generate(SHARDGRAD.tokens(2 * step + 1)[0])
        with torch.no_grad():
            margin = reference.log_probabilities(chosen) - reference.log_probabilities(rejected)
        gain = model.log_probabilities(chosen) - model.log_probabilities(rejected) - margin
        loss = -F.logsigmoid(0.1 * gain).mean() + model.value(chosen).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        notes[f"loss of step {step}"] = loss.detach()
        notes[f"rollout of step {step}"] = chosen
    return model, notes


# -- averages, hooks, steps inside backward


@client("PyTorch: moving average", "torch")
def moving_average() -> tuple[nn.Module, Tensors]:
    """A second sharded model follows the first, shard by shard."""
    model, average = sharded(tower()), sharded(tower(seed=1))
    optimizer = make_optimizer("adamw", model)
    for step in range(3):
        step_of(model, optimizer, step)
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    with torch.no_grad():
        evaluated = average(SHARDGRAD.tokens(9)[0])
    return average, {"evaluation": evaluated}


@client("PyTorch: hooks on activations", "torch")
def hooks_on_activations() -> tuple[nn.Module, Tensors]:
    """Full backward hooks on blocks, and a tensor hook that scales a gradient on its way."""
    model, seen = tower(), []

    def note(module: nn.Module, grad_input: Any, grad_output: tuple[Tensor, ...]) -> None:
        seen.append(grad_output[0].norm())

    def halve(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: 0.5 * grad)

    sharded(model)
    model.layers[1].register_full_backward_hook(note)
    model.layers[0].register_forward_hook(halve)
    optimizer = make_optimizer("adamw", model)
    losses = [step_of(model, optimizer, step) for step in range(2)]
    return model, {"losses": torch.stack(losses), "norms": torch.stack(seen)}


@client("PyTorch: optimizer in backward", "torch")
def optimizer_in_backward() -> tuple[nn.Module, Tensors]:
    """Each parameter steps, and lets its gradient go, as soon as that is there."""
    model = sharded(tower())
    optimizers = {param: torch.optim.AdamW([param], lr=1e-2) for param in model.parameters()}

    def step_now(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step_now)
    losses = []
    for step in range(3):
        loss = token_loss(model, SHARDGRAD.tokens(step))
        loss.backward()
        losses.append(loss.detach())
    return model, {"losses": torch.stack(losses)}


@client("PyTorch: gradient read between", "torch")
def gradient_read_between() -> tuple[nn.Module, Tensors]:
    """Gradients are scaled, inspected and accumulated into by hand before the step."""
    model = sharded(tower())
    optimizer = make_optimizer("sgd", model)
    notes: Tensors = {}
    for step in range(2):
        token_loss(model, SHARDGRAD.tokens(step)).backward()
        for name, param in model.named_parameters():
            param.grad.mul_(0.5).add_(param.detach(), alpha=0.01)
            notes[f"gradient of {name}"] = whole(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    return model, notes
