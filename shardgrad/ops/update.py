"""Optimizer updates of a whole segment in one launch: `adam_` and `sgd_`.

The terms are those of `segments.py` and of [Note: Exact weights] in `weights.py`. Both ops share:

Dtypes: parameters, gradients and states are float32, bfloat16, float16 or float64, independently.
    Arithmetic runs in float32, or in float64 if the parameter is float64; what depends on the step
    only (bias corrections, `1 - lr * weight_decay`) runs in float64. Each stored number is rounded
    once. The gradient is read as it is, and never written: no copy in another dtype is made.

Numbers that change from step to step (`hyper`, `steps`, `scale`, `found_inf`, `touched`) are read
from device memory by the kernel, so a captured graph that holds an update follows a learning-rate
schedule.

Autograd: none, and no version counter moves, as in `movement.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardgrad.ops.arithmetic import compute_dtype, divide_
from shardgrad.ops.library import declare
from shardgrad.ops.segments import Row, live_rows
from shardgrad.ops.weights import dither_key, load_weight, store_weight


class _Update(NamedTuple):
    """The arguments that both rules have in common."""

    param: Tensor
    grad: Tensor
    states: tuple[Tensor, ...]
    master: Tensor | None
    steps: Tensor
    touched: Tensor
    rows: Tensor
    scale: Tensor | None
    seed: int | None


# `.data` has its own version counter, so a write through it does not bump the caller's.


def _take_steps(
    update: _Update, *, maximize: bool
) -> Iterator[tuple[float, Tensor, Tensor, tuple[Tensor, ...]]]:
    """Yields t, the exact weight, the gradient and the states of each live row, in the dtype of
    arithmetic.

    When the caller requests the next row, stores what it has written to the weight and the states,
    and advances the step count.
    """
    compute = compute_dtype(update.param)
    times = update.steps.tolist()
    for row in live_rows(update.touched, update.rows):
        t = times[row.step_index] + 1
        param, master, stored = _pieces(update, row)
        weight = load_weight(param, master, compute)
        grad = update.grad.narrow(0, row.grad_offset, row.numel).to(compute, copy=True)
        if update.scale is not None:
            grad.mul_(update.scale.view(()).to(compute))
        if maximize:
            grad.neg_()
        states = tuple(state.to(compute, copy=True) for state in stored)
        yield t, weight, grad, states
        key = None if update.seed is None else dither_key(update.seed, int(t))
        store_weight(weight, param, master, key, row.param_offset)
        for piece, state in zip(stored, states, strict=True):
            piece.copy_(state)
        update.steps.data[row.step_index] = t


def _pieces(update: _Update, row: Row) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    param = update.param.data.narrow(0, row.param_offset, row.numel)
    of_states = [
        None if state is None else state.data.narrow(0, row.state_offset, row.numel)
        for state in (update.master, *update.states)
    ]
    return param, of_states[0], tuple(state for state in of_states[1:] if state is not None)


def _is_off(found_inf: Tensor | None) -> bool:
    return found_inf is not None and bool(found_inf != 0)


def _seed(param: Tensor, master: Tensor | None, stochastic_rounding: bool, seed: int) -> int | None:
    return (
        seed if stochastic_rounding and master is None and param.dtype == torch.bfloat16 else None
    )


# Each product and sum is a separate op, so that it is rounded as in the compiled kernels. torch's
# `alpha` and `addcdiv` may be contracted to fused multiply-adds.


@torch.no_grad()
def adam_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None,
    steps: Tensor,
    ticket: Tensor,
    touched: Tensor,
    rows: Tensor,
    tiles: int,
    hyper: Tensor,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    decoupled: bool = True,
    maximize: bool = False,
    stochastic_rounding: bool = False,
    seed: int = 0,
) -> None:
    """Updates the live rows of a segment by Adam, or AdamW if `decoupled`.

    Args:
        param: the parameters, 1-D; updated.
        grad: the gradients, 1-D.
        exp_avg: first moments, 1-D; updated.
        exp_avg_sq: second moments, 1-D; updated.
        steps: float32, 1-D; a live row's becomes `t = steps[step_index] + 1`.
        ticket: int32, 1 element that is zero before its first use; its own afterwards. Calls whose
            order is not fixed, on several streams, need one each.
        touched: 1-D, any of the four dtypes; says which rows are live.
        rows: the segment's table, on the device.
        tiles: of the table.
        hyper: float64, [lr, beta1, beta2, eps, weight_decay].
        master: float32, as long as the states, for bfloat16 and float16 parameters; or int16, for
            bfloat16 parameters; or None. Updated. See [Note: Exact weights].
        scale: float32 or float64, 1 element: what gradients are multiplied by. None is 1.
        found_inf: float32, 1 element: if it is not 0, nothing at all is changed. None is 0.
        decoupled: shrink the parameter by `lr * weight_decay`; else add `weight_decay * param` to
            the gradient.
        maximize: go the other way.
        stochastic_rounding: for a bfloat16 parameter without a master; else it changes nothing.
        seed: of stochastic rounding.

    Streams:
        Runs on the current stream of the device of `param`.

    Capture:
        Safe: the compiled kernel allocates nothing, and nothing is read back. (The reference does
        both.) The addresses are recorded, the numbers behind them are not.

    Source: Kingma and Ba, "Adam", 2015; Loshchilov and Hutter, "Decoupled weight decay
    regularization", 2019.
    """
    noise = _seed(param, master, stochastic_rounding, seed)
    update = _Update(param, grad, (exp_avg, exp_avg_sq), master, steps, touched, rows, scale, noise)
    if _is_off(found_inf):
        return
    lr, beta1, beta2, eps, weight_decay = hyper.tolist()
    for t, weight, g, (m, v) in _take_steps(update, maximize=maximize):
        bias1, bias2 = 1 - beta1**t, 1 - beta2**t
        if decoupled:
            weight.mul_(1 - lr * weight_decay)
        elif weight_decay != 0:
            g.add_(weight * weight_decay)
        m.add_((g - m) * (1 - beta1))
        v.mul_(beta2).add_(g * (1 - beta2) * g)
        # In float64, since torch's sqrt on the CPU may use a vector library that is off by an ulp.
        denominator = v.double().sqrt().to(v.dtype)
        divide_(denominator, math.sqrt(bias2))
        weight.sub_(m * (lr / bias1) / denominator.add_(eps))


@torch.no_grad()
def sgd_reference(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    master: Tensor | None,
    steps: Tensor,
    ticket: Tensor,
    touched: Tensor,
    rows: Tensor,
    tiles: int,
    hyper: Tensor,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    nesterov: bool = False,
    decoupled: bool = False,
    maximize: bool = False,
    stochastic_rounding: bool = False,
    seed: int = 0,
) -> None:
    """Updates the live rows of a segment by stochastic gradient descent, as `torch.optim.SGD` does.

    Args:
        param: the parameters, 1-D; updated.
        grad: the gradients, 1-D.
        momentum_buffer: 1-D; updated. None: no momentum, whatever `hyper` says.
        steps: as in `adam_`. A row's first step fills its momentum buffer with the gradient.
        ticket: as in `adam_`.
        touched: as in `adam_`.
        rows: as in `adam_`.
        tiles: of the table.
        hyper: float64, [lr, momentum, dampening, weight_decay].
        master: as in `adam_`.
        scale: as in `adam_`.
        found_inf: as in `adam_`.
        nesterov: look ahead; only with a momentum buffer.
        decoupled: as in `adam_`.
        maximize: as in `adam_`.
        stochastic_rounding: as in `adam_`.
        seed: as in `adam_`.

    Streams:
        Runs on the current stream of the device of `param`.

    Capture:
        Safe, as `adam_` is.
    """
    noise = _seed(param, master, stochastic_rounding, seed)
    states = () if momentum_buffer is None else (momentum_buffer,)
    update = _Update(param, grad, states, master, steps, touched, rows, scale, noise)
    if _is_off(found_inf):
        return
    lr, momentum, dampening, weight_decay = hyper.tolist()
    for t, weight, g, buffers in _take_steps(update, maximize=maximize):
        if decoupled:
            weight.mul_(1 - lr * weight_decay)
        elif weight_decay != 0:
            g.add_(weight * weight_decay)
        for buffer in buffers:  # one or none
            if t == 1:
                buffer.copy_(g)
            else:
                buffer.mul_(momentum).add_(g * (1 - dampening))
            g = g + buffer * momentum if nesterov else buffer
        weight.sub_(g * lr)


_TAIL = (
    "Tensor touched, Tensor rows, int tiles, Tensor hyper, Tensor? scale=None, Tensor? "
    "found_inf=None, {flags}, bool maximize=False, bool stochastic_rounding=False, int seed=0)"
)
adam_ = declare(
    "adam_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? "
    "master, Tensor(e!) steps, Tensor(f!) ticket, " + _TAIL.format(flags="bool decoupled=True"),
    adam_reference,
)
sgd_ = declare(
    "sgd_(Tensor(a!) param, Tensor grad, Tensor(b!)? momentum_buffer, Tensor(c!)? master, "
    "Tensor(d!) steps, Tensor(e!) ticket, "
    + _TAIL.format(flags="bool nesterov=False, bool decoupled=False"),
    sgd_reference,
)
