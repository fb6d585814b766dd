"""What adam_ and sgd_ promise torch, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from shardgrad import ops
from tests.support.segments import (
    ADAM,
    BACKENDS,
    SGD,
    Segment,
    adam_of,
    hyper,
    needs_library,
    run_adam,
    run_sgd,
    sgd_of,
)

RUN = {"adam": run_adam, "sgd": run_sgd}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def example_arguments(rule: str) -> tuple[Any, ...]:
    s = Segment.of((5, 3000), param=torch.bfloat16, master=torch.float32)
    common = (s.steps, s.ticket, s.touched, s.rows, s.tiles)
    extras = (torch.tensor(0.5), torch.tensor(0.0))
    if rule == "adam":
        return (
            s.param,
            s.grad,
            s.first,
            s.second,
            s.master,
            *common,
            hyper(*ADAM),
            *extras,
            *[True] * 3,
            7,
        )
    return (s.param, s.grad, s.first, s.master, *common, hyper(*SGD), *extras, *[True] * 4, 7)


@pytest.mark.parametrize("rule", RUN)
def test_the_operators_keep_torchs_contract(rule: str) -> None:
    operator = (adam_of if rule == "adam" else sgd_of)("compiled")
    torch.library.opcheck(operator, example_arguments(rule))
    with FakeTensorMode():
        assert operator(*example_arguments(rule)) is None


@pytest.mark.parametrize("rule", RUN)
def test_neither_version_counters_nor_autograd_notice(backend: str, rule: str) -> None:
    s = Segment.of(param=torch.bfloat16, master=torch.float32)
    s.param.requires_grad_()
    before = {name: tensor._version for name, tensor in s.written().items()}
    RUN[rule](backend, s)
    assert {name: tensor._version for name, tensor in s.written().items()} == before
    assert s.param.grad_fn is None


@needs_library
@pytest.mark.parametrize("rule", RUN)
def test_the_compiled_kernels_allocate_nothing(rule: str) -> None:
    s = Segment.of(param=torch.bfloat16, grad=torch.bfloat16, master=torch.float32)
    values = hyper(*(ADAM if rule == "adam" else SGD))
    common: dict[str, Any] = {
        "steps": s.steps,
        "ticket": s.ticket,
        "touched": s.touched,
        "rows": s.rows,
        "tiles": s.tiles,
        "hyper": values,
        "master": s.master,
    }
    with torch.profiler.profile(profile_memory=True) as profile:
        if rule == "adam":
            ops.adam_(s.param, s.grad, s.first, s.second, **common)
        else:
            ops.sgd_(s.param, s.grad, s.first, **common)
    assert any(event.key == f"shardgrad::{rule}_" for event in profile.key_averages())
    assert all(event.cpu_memory_usage == 0 for event in profile.events())


def freed(numel: int) -> Tensor:
    """A tensor whose storage was taken away, as resharding does."""
    tensor = torch.zeros(numel)
    tensor.untyped_storage().resize_(0)
    return tensor


def row(*values: int) -> Tensor:
    return torch.tensor([values], dtype=torch.int64)


@pytest.mark.parametrize("rule", RUN)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"param": torch.zeros(8, dtype=torch.int32)}, "param must be float32"),
        ({"param": freed(8)}, "param lies in a storage that was freed or shrunk"),
        ({"param": torch.zeros(16)[::2]}, "param must be contiguous"),
        ({"grad": torch.zeros(8).bool()}, "grad must be float32"),
        ({"grad": freed(8)}, "grad lies in a storage"),
        ({"first": torch.zeros(8).int()}, "states must be float32"),
        ({"first": freed(8)}, "states lies in a storage"),
        ({"steps": torch.zeros(1).double()}, "steps must be float32"),
        ({"ticket": torch.zeros(1)}, "ticket must be int32"),
        ({"ticket": torch.zeros(2).int()}, "ticket must"),
        ({"touched": torch.ones(1).bool()}, "touched must be float32"),
        ({"rows": torch.zeros(1, 7)}, "rows must be int64 of shape"),
        ({"rows": torch.zeros(1, 6).long()}, "rows must be int64 of shape"),
        ({"rows": row(1, 0, 0, 8, 0, 0, 0)}, "row 0 does not fit"),
        ({"rows": row(0, 1, 0, 8, 0, 0, 0)}, "row 0 does not fit"),
        ({"rows": row(0, 0, 1, 8, 0, 0, 0)}, "row 0 does not fit"),
        ({"rows": row(0, 0, 0, 9, 0, 0, 0)}, "row 0 does not fit"),
        ({"rows": row(0, 0, 0, -1, 0, 0, 0)}, "row 0 does not fit"),
        ({"rows": row(0, 0, 0, 8, 1, 0, 0)}, "row 0 does not fit"),
        ({"rows": row(0, 0, 0, 8, 0, -1, 0)}, "row 0 does not fit"),
        ({"rows": row(0, 0, 0, 8, 0, 0, 1)}, "row 0 does not fit"),
        ({"rows": row(2**62, 0, 0, 8, 0, 0, 0)}, "row 0 does not fit"),
        ({"tiles": 2}, "rows have 1 tiles, but tiles says 2"),
        ({"master": torch.zeros(8)}, "master must be float32 for a bfloat16 or float16 param"),
        (
            {"param": torch.zeros(8).half(), "master": torch.zeros(8).short()},
            "master must be float32",
        ),
        (
            {"param": torch.zeros(8).half(), "master": torch.zeros(9)},
            "share one number of elements",
        ),
    ],
)
def test_arguments_that_would_leave_their_memory_are_refused(
    backend: str, rule: str, change: dict[str, Any], message: str
) -> None:
    rows, tiles = ops.segment_rows([(0, 0, 0, 8, 0, 0)])
    flat = [torch.zeros(8) for _ in range(4)]
    s = Segment(
        (8,),
        (),
        *flat,
        None,
        torch.zeros(1),
        torch.zeros(1, dtype=torch.int32),
        torch.ones(1),
        rows,
        tiles,
    )
    with pytest.raises(RuntimeError, match=message):
        RUN[rule](backend, replace(s, **change))


@pytest.mark.parametrize("rule", RUN)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run, backend, s: run(backend, s, (1.0, 2.0)), "hyper"),
        (
            lambda run, backend, s: run(backend, s, scale=torch.ones(2)),
            "scale must be float32 or float64",
        ),
        (
            lambda run, backend, s: run(backend, s, scale=torch.ones(1).half()),
            "scale must be float32 or",
        ),
        (
            lambda run, backend, s: run(backend, s, found_inf=torch.ones(1).double()),
            "found_inf must be float32",
        ),
    ],
)
def test_numbers_on_the_device_must_have_their_dtype(
    backend: str, rule: str, call: Callable[..., None], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(RUN[rule], backend, Segment.of((8,)))
