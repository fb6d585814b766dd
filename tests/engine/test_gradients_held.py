"""A gradient that the program keeps does not change with the next one, as in plain torch."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardgrad
from shardgrad.errors import ForeignParameterError
from tests.support.parity import hsdp_mesh, sharded_mlp
from tests.support.ranks import on_ranks

SIZE = 6


def backward(model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    model(torch.randn(4, SIZE, dtype=torch.float64, generator=generator)).square().mean().backward()


def forget(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def value(held: Any) -> Tensor:
    held = torch.from_numpy(held) if isinstance(held, numpy.ndarray) else held
    tensor = held.full_tensor() if isinstance(held, DTensor) else held
    return tensor.detach().clone()


def without_grad(grad: Any) -> Any:
    with torch.no_grad():
        return grad.to_local()


HOLDS: dict[str, Callable[[Any], Any]] = {
    "the gradient": lambda grad: grad,
    "the gradient, detached": lambda grad: grad.detach(),
    "its local tensor": lambda grad: grad.to_local(),
    "its local tensor, without grad mode": without_grad,
    "a view": lambda grad: grad.to_local().view(-1)[1:],
    "a view of a view as numbers": lambda grad: torch.view_as_real(
        torch.view_as_complex(grad.to_local()[:, :2])
    ),
    "a transposed view": lambda grad: grad.to_local().t(),
    "the whole": lambda grad: grad.full_tensor(),
    "a NumPy array": lambda grad: grad.to_local().numpy(),
    "what DLPack shares": lambda grad: torch.from_dlpack(grad.to_local()),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("name", HOLDS)
@on_ranks(2)
def test_what_a_program_keeps_of_a_gradient_outlives_the_next_ones(
    name: str, clips: bool, ranks: int
) -> None:
    model = sharded_mlp(**({} if ranks > 1 else {"mesh": hsdp_mesh(2, 1)["shard"]}))
    backward(model, 0)
    tasks = []
    for number in range(1, 4):
        forget(model)
        backward(model, number)
        if clips:
            shardgrad.clip_grad_norm_(model.parameters(), 0.01)
        held = HOLDS[name](model[1].weight.grad)
        tasks.append((held, value(held)))
    forget(model)
    backward(model, 4)
    for held, then in tasks:
        assert torch.equal(value(held), then)
    assert len({tuple(then.flatten().tolist()) for _, then in tasks}) == 3


@on_ranks(2)
def test_one_gradient_is_kept_and_what_is_added_to_others_is_seen_in_them() -> None:
    model = sharded_mlp()
    weight, bias = model[0].weight, model[0].bias
    backward(model, 0)
    held, then = weight.grad, value(weight.grad)
    weight.grad = None  # the others accumulate
    added_to, total = bias.grad, value(bias.grad)
    other = model[1].weight
    kept, was = other.grad, value(other.grad)
    other.grad = kept.clone()  # to which the next one is added, elsewhere
    backward(model, 0)
    assert torch.equal(value(held), then)
    assert torch.equal(value(weight.grad), then)
    assert bias.grad is added_to
    torch.testing.assert_close(value(added_to), 2 * total)
    assert torch.equal(value(kept), was)
    torch.testing.assert_close(value(other.grad), 2 * was)
    model.zero_grad(set_to_none=False)
    assert not value(added_to).any()


@on_ranks(2)
def test_a_step_that_keeps_nothing_has_the_same_gradient_objects_every_time() -> None:
    model = sharded_mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = None
    for number in range(3):
        optimizer.zero_grad()
        backward(model, number)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        shardgrad.clip_grad_norm_(model.parameters(), 0.5)
        norm = sum(param.grad.full_tensor().norm() for param in model.parameters())  # type: ignore[union-attr]
        optimizer.step()
        now = [id(param.grad) for param in model.parameters()]
        assert ids in (None, now)
        ids = now
        assert norm > 0


@on_ranks(2)
def test_a_persistent_gradient_has_one_address() -> None:
    model = sharded_mlp(gradient_policy=shardgrad.GradientPolicy(persistent=True))
    params = list(model.parameters())
    found = []
    for number in range(3):
        forget(model)
        backward(model, number)
        kept, *_ = grads = [param.grad for param in params]
        found.append([(id(grad), grad.to_local().data_ptr()) for grad in grads])  # type: ignore[union-attr]
        assert found[-1] == found[0]
    then = value(kept)
    forget(model)
    backward(model, 9)
    assert not torch.equal(value(kept), then)  # which is what it costs
    params[0].grad = kept * 2  # type: ignore[operator]
    shardgrad.clip_grad_norm_(model, 1e9)
    assert params[0].grad.to_local().data_ptr() == found[0][0][1]  # type: ignore[union-attr]
    params[0].grad, params[2].grad = params[2].grad, params[0].grad
    with pytest.raises(
        ForeignParameterError, match=r"(?s)memory of another gradient.*parameter 0\.weight"
    ):
        shardgrad.clip_grad_norm_(model, 1e9)


@on_ranks(2)
def test_a_graph_over_a_gradient_goes_backward_after_the_next_one() -> None:
    model = sharded_mlp()
    backward(model, 0)
    grads: Any = [layer.weight.grad.to_local() for layer in model]  # type: ignore[union-attr]
    scale = torch.ones_like(grads[0]).requires_grad_()
    rows = torch.ones(1, SIZE, dtype=torch.float64, requires_grad=True)
    product = (grads[0].view(-1) * scale.view(-1)).sum()  # keeps a view that Python made
    # Keeps a transposed view that Python never saw.
    linear = nn.functional.linear(rows, grads[1]).sum()
    expected, columns = grads[0].clone(), grads[1].sum(0, keepdim=True)
    del grads
    forget(model)
    backward(model, 1)
    product.backward()
    torch.testing.assert_close(scale.grad, expected)
    linear.backward()
    torch.testing.assert_close(rows.grad, columns)


@on_ranks(2)
def test_copies_of_what_was_kept_go_with_it() -> None:
    model = sharded_mlp()
    backward(model, 0)
    gc.collect()
    before = sum(issubclass(type(each), Tensor) for each in gc.get_objects())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            held = model[0].weight.grad.to_local()
            forget(model)
            backward(model, number)
            del held
    gc.collect()
    assert sum(issubclass(type(each), Tensor) for each in gc.get_objects()) == before
