"""What integrations refuse, in words and before anything is built or changed; and what is not
there.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import shardgrad
from shardgrad import GradientPolicy
from shardgrad.errors import (
    DeepcopyError,
    OptimizerParameterError,
    OptimizerStateError,
    OptionError,
    PartnerUnavailableError,
    UnsupportedError,
)
from shardgrad.integrations import apex, transformer_engine
from tests.support.parity import FSDP2, assert_same_bits
from tests.support.partners import HYPER, Plane, descend, partner, plane, weights
from tests.support.ranks import on_ranks
from tests.support.stand_ins import apex_fused_adam, te_fused_adam

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# -- there, or not


def why_unusable(package: Any) -> str:
    """Returns the words in which a package is refused."""
    with pytest.raises(PartnerUnavailableError, match="cannot be used") as raised:
        package.FusedAdam([nn.Parameter(torch.ones(1))])
    return str(raised.value)


def test_shardgrad_imports_neither_integrations_nor_partners() -> None:
    code = (
        "import sys, shardgrad; found = [m for m in sys.modules if "
        "m.startswith(('shardgrad.integrations', 'transformer_engine', 'apex', 'amp_C'))]; assert "
        "not found, found; import shardgrad.integrations.apex, "
        "shardgrad.integrations.transformer_engine; assert 'transformer_engine' not in sys.modules "
        "and 'apex' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("no module"),
        OSError("libcudnn.so.9: cannot open shared object file"),
        FileNotFoundError("Could not find shared object file"),
        RuntimeError("built for another torch"),
        AssertionError(""),
    ],
)
def test_a_broken_transformer_engine_says_why(error: Exception) -> None:
    with te_fused_adam.installed(broken=error):
        words = why_unusable(transformer_engine)
        assert type(error).__name__ in words
        assert str(error) in words
    assert issubclass(PartnerUnavailableError, ImportError)


@pytest.mark.parametrize("version", ["2.5.0", "2.17.0.dev0"])
def test_a_release_before_2_17_is_refused(version: str) -> None:
    with te_fused_adam.installed(version):
        assert "older than 2.17" in why_unusable(transformer_engine)


def test_another_project_called_apex_is_refused_with_what_to_build() -> None:
    for missing, kwargs in (
        ("apex.optimizers", {"stranger": True}),
        ("amp_C", {"with_extension": False}),
    ):
        with apex_fused_adam.installed(**kwargs):
            words = why_unusable(apex)
            assert f"ModuleNotFoundError: import of {missing} halted" in words
            assert "build https://github.com/NVIDIA/apex" in words
    with apex_fused_adam.installed():
        assert apex.FusedAdam.find()[1] == "apex' FusedAdam"


def test_a_usable_partner_has_its_version() -> None:
    with te_fused_adam.installed("2.18.0"):
        assert transformer_engine.FusedAdam.find()[1] == "TransformerEngine's FusedAdam 2.18.0"


# -- options and parameters


FLOAT32_GRADIENTS, DECOUPLED = GradientPolicy(dtype=FP32), GradientPolicy(decoupled=True)
TE = "te 2.17.1"
MASTERS = {"capturable": True, "master_weights": True}
REFUSED: list[tuple[str, dict[str, Any], list[torch.dtype], type[Exception], str]] = [
    (TE, {"use_decoupled_grad": True}, [FP32], OptionError, "would read param.decoupled_grad"),
    (
        TE,
        {"use_decoupled_grad": False, "policy": DECOUPLED},
        [FP32],
        OptionError,
        "would read param.grad",
    ),
    # What the constructor refuses is refused in its words.
    (TE, {"amsgrad": True}, [FP32], OptionError, "AMSGrad"),
    (TE, {"nonsense": 1}, [FP32], OptionError, "nonsense"),
    ("apex", {"use_decoupled_grad": True}, [FP32], OptionError, "use_decoupled_grad"),
    # The rest it would get wrong without a word.
    ("apex", {"policy": DECOUPLED}, [FP32], OptionError, "would read param.grad"),
    (
        "apex",
        {"policy": FLOAT32_GRADIENTS},
        [BF16],
        OptimizerParameterError,
        "read the parameter as if",
    ),
    ("apex", MASTERS, [FP16], OptimizerParameterError, "saves none"),
    (TE, {"store_param_remainders": True}, [BF16], OptimizerParameterError, "would ignore"),
]


@pytest.mark.parametrize(
    ("name", "kwargs", "dtypes", "error", "words"),
    REFUSED,
    ids=[f"{r[0]}: {r[4]}" for r in REFUSED],
)
@on_ranks(1)
def test_refused_before_anything_is_built(
    name: str, kwargs: dict[str, Any], dtypes: list[torch.dtype], error: type[Exception], words: str
) -> None:
    policy = kwargs.pop("policy", None)
    options = {} if policy is None else {"gradient_policy": policy}
    models = [plane((4,), dtype=dtype, **options) for dtype in dtypes]
    params = [param for model in models for param in model.parameters()]
    before = [p.detach().to_local().clone() for p in params]
    with partner(name) as fused_adam, pytest.raises(error, match=words) as raised:
        fused_adam(params, **HYPER, **kwargs)
    if issubclass(error, shardgrad.ShardgradError):
        assert raised.value.expected
        assert raised.value.got
    assert all(torch.equal(p.detach().to_local(), b) for p, b in zip(params, before, strict=True))


@on_ranks(1)
def test_parameters_it_cannot_reach_are_refused() -> None:
    with partner(TE) as fused_adam:
        with pytest.raises(OptimizerParameterError, match="meta device"):
            fused_adam([nn.Parameter(torch.empty(3, device="meta"))])
        with pytest.raises(OptimizerParameterError, match="another engine"):
            fused_adam(FSDP2.fully_shard(Plane()).parameters())
        with pytest.raises(OptimizerParameterError, match="not contiguous"):
            fused_adam([nn.Parameter(torch.zeros(3, 4).t())])
    with partner("apex") as fused_adam, pytest.raises(OptimizerParameterError, match="32 bits"):
        fused_adam([nn.Parameter(torch.empty(2**31, dtype=BF16))])  # memory that nothing touches
    model = plane()
    with (
        te_fused_adam.installed(),
        pytest.raises(OptimizerParameterError, match="run on cuda only"),
    ):
        transformer_engine.FusedAdam(model)
    with (
        apex_fused_adam.installed(),
        pytest.raises(OptimizerParameterError, match="run on cuda only"),
    ):
        apex.FusedAdam(model)


# -- later


@pytest.mark.parametrize("name", ["te 2.17.1", "apex"])
@on_ranks(1)
def test_what_comes_later_and_does_not_fit_is_refused(name: str) -> None:
    with partner(name) as fused_adam:
        model = plane()
        optimizer = fused_adam(model, **HYPER)
        with pytest.raises(UnsupportedError, match="add_param_group"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        with pytest.raises(DeepcopyError, match="cannot be copied"):
            copy.deepcopy(optimizer)
        descend(model, optimizer, range(1))
        saved = optimizer.state_dict()
        before = weights(model)
        smaller = plane((5, 3))
        other = fused_adam(smaller, **HYPER)
        with pytest.raises(OptimizerStateError, match="groups are others"):
            other.load_state_dict(saved)
        saved["state"][0] = {**saved["state"][0], "max_exp_avg_sq": torch.zeros(5, 3)}
        with pytest.raises(OptimizerStateError, match="has other state"):
            optimizer.load_state_dict(saved)
        saved["state"][0] = {"exp_avg": torch.zeros(5), "exp_avg_sq": torch.zeros(5)}
        with pytest.raises(OptimizerStateError, match="another shape"):
            optimizer.load_state_dict(saved)
        bits = torch.zeros((5, 3), dtype=torch.int16)
        saved["state"][0] = {"exp_avg": bits, "exp_avg_sq": bits}
        with pytest.raises(OptimizerStateError, match="has other state"):
            optimizer.load_state_dict(saved)
        assert_same_bits(weights(model), before)


@on_ranks(1)
def test_parameters_that_moved_are_noticed_at_the_step() -> None:
    with partner(TE) as fused_adam:
        model = plane()
        optimizer = fused_adam(model, **HYPER)
        model.weights[0] = nn.Parameter(model.weights[0].detach())  # over the same memory
        model(1).backward()
        with pytest.raises(OptimizerParameterError, match="replaced or moved"):
            optimizer.step()
        model = plane()
        model.weights[0] = nn.Parameter(2 * model.weights[0].detach())
        descend(model, fused_adam(model, **HYPER), range(1))  # right before it is built
        optimizer = fused_adam(model, **HYPER)
        model.to(torch.float64)
        model(1).backward()
        with pytest.raises(OptimizerParameterError, match="replaced or moved"):
            optimizer.step()
        plain = nn.Parameter(torch.ones(3))
        optimizer = fused_adam([plain], **HYPER)
        plain.data = torch.ones(3)
        with pytest.raises(OptimizerParameterError, match="replaced or moved"):
            optimizer.step()
