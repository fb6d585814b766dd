"""TransformerEngine's FusedAdam trains sharded parameters as under FSDP2, without an adapter.

The package needs a GPU: a stand-in reads parameters and writes state as it does, in plain torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import shardgrad
from shardgrad import GradientPolicy
from tests.support.parity import (
    SHARDGRAD,
    Engine,
    Tensors,
    as_under_fsdp2,
    token_loss,
    tower,
    unchanged,
)
from tests.support.ranks import on_ranks
from tests.support.stand_ins.apex_fused_adam import adam
from tests.support.two_engines import take_steps

# A step of Adam hardly depends on the scale of a gradient; with a large epsilon it does.
HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-2, "weight_decay": 0.1}


class FusedAdam(Optimizer):
    """What release 2.18 does with a DTensor, in the files `fused_adam.py` and
    `multi_tensor_apply.py` of `transformer_engine/pytorch/optimizers`: states are DTensors like the
    parameter, kernels get the local tensors, and those without elements are left out.
    """

    def __init__(self, params: Any, *, use_decoupled_grad: bool = False, **options: Any) -> None:
        self.attribute = "decoupled_grad" if use_decoupled_grad else "grad"
        self.master_weights = options.pop("master_weights", False)
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            numbers = {name: group[name] for name in (*HYPER, "step")}
            for param in group["params"]:
                grad = getattr(param, self.attribute, None)
                state = self.state[param]
                if not state:
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = torch.zeros_like(param, dtype=torch.float32)
                    if self.master_weights:
                        state["master_param"] = param.detach().clone().float()
                if grad is None:
                    continue
                assert isinstance(param, DTensor) == isinstance(grad, DTensor)
                tensors = [grad.data, param.data, *state.values()]
                tensors = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
                if tensors[0].numel():
                    adam([[t] for t in tensors], **numbers, decoupled=True, bias_correction=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        assert set_to_none
        for group in self.param_groups:
            for param in group["params"]:
                setattr(param, self.attribute, None)


@on_ranks(2)
@as_under_fsdp2
def test_it_gives_the_bits_of_fsdp2(engine: Engine) -> Tensors:
    model = engine.shard_tower(tower())
    optimizer = FusedAdam(model.parameters(), **HYPER)
    take_steps(engine, model, optimizer, range(3))
    states = optimizer.state_dict()["state"]
    moments = {f"{n}.{key}": t.full_tensor() for n, s in states.items() for key, t in s.items()}
    return {**engine.snapshot(model), **moments}


@pytest.mark.parametrize("decoupled", [False, True])
@on_ranks(2)
def test_it_reads_float32_gradients_of_bfloat16_weights_wherever_they_are_bound(
    decoupled: bool,
) -> None:
    policy = GradientPolicy(dtype=torch.float32, decoupled=decoupled)
    ours, theirs = (
        SHARDGRAD.shard_tower(tower().to(torch.bfloat16), gradient_policy=policy) for _ in range(2)
    )
    optimizers = (
        shardgrad.optim.AdamW(ours.parameters(), **HYPER, master="float32"),
        FusedAdam(theirs.parameters(), **HYPER, use_decoupled_grad=decoupled, master_weights=True),
    )
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        for step in range(2):
            token_loss(model, SHARDGRAD.tokens(step)).backward()
            shardgrad.clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
    for right, param in zip(ours.parameters(), theirs.parameters(), strict=True):
        main = optimizers[1].state[param]["master_param"].full_tensor()
        expected = optimizers[0].state[right]["master"].full_tensor()
        # Two updates of at most 2 lr, with fewer than 16 roundings each.
        torch.testing.assert_close(main, expected, rtol=2.0**-22, atol=32 * 2.0**-24 * 0.02)


@on_ranks(2)
def test_our_scaler_skips_its_step_on_all_ranks() -> None:
    model = SHARDGRAD.shard_tower(tower())
    optimizer, scaler = FusedAdam(model.parameters(), **HYPER), shardgrad.GradScaler()
    with unchanged(model.parameters()):
        scaler.scale(token_loss(model, SHARDGRAD.tokens(0))).backward()
        if torch.distributed.get_rank() == 1:
            # rank 0 sees finite numbers only
            model.layers[0].up.weight.grad.to_local()[0] = float("inf")
        scaler.step(optimizer)
