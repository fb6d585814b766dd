"""adam_ and sgd_, in both backends, against float64, torch.optim, and each other."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardgrad.ops.segments import segment_rows
from tests.support.segments import (
    ADAM,
    DTYPES,
    SGD,
    UNTOUCHED,
    Segment,
    assert_same,
    assert_same_bits,
    needs_library,
    run_adam,
    run_sgd,
)

RUN = {"adam": run_adam, "sgd": run_sgd}
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "adam": ({}, {"decoupled": False}, {"maximize": True}),
    "sgd": (
        {},
        {"momentum": False},
        {"nesterov": True},
        {"decoupled": True, "maximize": True},
    ),
}
CASES = [(rule, options) for rule, several in OPTIONS.items() for options in several]
HALVES = (torch.bfloat16, torch.float16)
# Gradients and states are stored independently, so each has to meet each dtype, but not in every
# pair.
STORED = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.float64, torch.float16),
    (torch.float32, torch.float64),
)


def truth(
    rule: str, w: Tensor, g: Tensor, a: Tensor, b: Tensor, t: int, **options: Any
) -> tuple[Tensor, ...]:
    """One step in float64, written out from the papers: the new weight and states."""
    w, g, a, b = (x.double() for x in (w, g, a, b))
    decay = (ADAM if rule == "adam" else SGD)[-1]
    lr = 1e-2
    g = -g if options.get("maximize") else g
    if options.get("decoupled", rule == "adam"):
        w = w * (1 - lr * decay)
    else:
        g = g + decay * w
    if rule == "adam":
        _, beta1, beta2, eps, _ = ADAM
        a = beta1 * a + (1 - beta1) * g
        b = beta2 * b + (1 - beta2) * g**2
        mean, variance = a / (1 - beta1**t), b / (1 - beta2**t)
        return w - lr * mean / (variance.sqrt() + eps), a, b
    _, momentum, dampening, _ = SGD
    if options.get("momentum", True):
        a = g if t == 1 else momentum * a + (1 - dampening) * g
        g = g + momentum * a if options.get("nesterov") else a
    return w - lr * g, a, b


def within(actual: Tensor, exact: Tensor, scale: Tensor, compute: torch.dtype) -> bool:
    """Whether a stored number is the exact one but for twelve roundings of arithmetic on numbers as
    large as `scale` and the rounding where it is stored, which below the normal range is absolute.
    """
    stored = torch.finfo(actual.dtype)
    bound = (
        12 * torch.finfo(compute).eps * scale + stored.eps * exact.abs() + stored.tiny * stored.eps
    )
    return bool(((actual.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rule", "options"), CASES, ids=str)
def test_one_step_is_the_papers_in_every_dtype(
    backend: str, rule: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Some rows take their first step, others a later one; those without a gradient, none."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    dead = {0: 0.0, 2: -1.0, 5: math.nan}
    for grad, state in STORED:
        s = Segment.of(param=dtype, grad=grad, state=state)
        for i, piece in enumerate(s.pieces):
            s.steps[piece[4]] = 3 * (i % 2)
            s.touched[piece[5]] = dead.get(i, 1.0)
        before = s.clone()
        RUN[rule](backend, s, **options)
        for now, was in zip(s.written().values(), before.written().values(), strict=True):
            assert (now == UNTOUCHED).sum() == (was == UNTOUCHED).sum()  # between the rows
        for i, piece in enumerate(s.pieces):
            old = [before.params()[i], before.grads()[i]]
            old += [before.states(x)[i] for x in (before.first, before.second)]
            new = [s.params()[i], s.states(s.first)[i], s.states(s.second)[i]]
            t = before.steps[piece[4]].item() + (i not in dead)
            assert s.steps[piece[4]] == t
            if i in dead:
                assert all(map(torch.equal, new, (old[0], *old[2:])))
                continue
            exact = truth(rule, *old, t=int(t), **options)
            size = 1 + sum(x.double().abs() for x in old)
            sizes = (size, size, size * (1 + old[1].double().abs()))
            for ours, right, of_size in zip(new, exact, sizes, strict=True):
                assert within(ours, right, of_size, compute)
        assert s.ticket.item() == 0


@pytest.mark.parametrize("rule", RUN)
def test_pieces_of_a_parameter_in_rows_of_their_own_take_one_step_together(
    backend: str, rule: str
) -> None:
    whole = Segment.of()
    cut = [
        (*(offset + begin for offset in piece[:3]), end - begin, *piece[4:])
        for piece in whole.pieces
        for begin, end in itertools.pairwise((0, piece[3] // 3, piece[3] // 3, piece[3]))
    ]
    rows, tiles = segment_rows(cut)
    pieces = replace(whole.clone(), rows=rows, tiles=tiles)
    for s in (whole, pieces):
        for _ in range(2):
            RUN[rule](backend, s)
    assert_same(pieces, whole)


@needs_library
@pytest.mark.parametrize("param", DTYPES, ids=str)
@pytest.mark.parametrize(("rule", "options"), CASES, ids=str)
def test_the_backends_agree_bit_for_bit(
    rule: str, options: dict[str, Any], param: torch.dtype
) -> None:
    masters = {
        torch.bfloat16: (None, torch.float32, torch.int16),
        torch.float16: (None, torch.float32),
    }
    for (grad, state), master in itertools.product(STORED, masters.get(param, (None,))):
        s = Segment.of(param=param, grad=grad, state=state, master=master, taken=0)
        other = s.clone()
        for step in range(3):
            scale = torch.tensor(0.37) if step else None
            for backend, each in (("reference", s), ("compiled", other)):
                each.touched[3] = step == 1  # so its steps are not those of the rows before
                RUN[rule](
                    backend,
                    each.with_gradients(step),
                    scale=scale,
                    stochastic_rounding=True,
                    seed=5,
                    **options,
                )
            if param == torch.float64 and rule == "adam":
                # The reference's square root is torch's, at most an ulp off. The update is small,
                # so in each of three steps the weight, below 8, can only come out one of its own
                # ulps off.
                torch.testing.assert_close(other.param, s.param, rtol=0, atol=3 * 8 * 2.2e-16)
                other = replace(other, param=s.param.clone())
            assert_same(other, s)


@needs_library
@pytest.mark.parametrize("rule", RUN)
def test_the_backends_agree_on_infinities_nans_and_subnormals(rule: str) -> None:
    special = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 3.4e38, -3.4e38, 1e-20, 1.0]
    )
    # A NaN, next to -0.0.
    all_ones = torch.tensor([2**31 - 1], dtype=torch.int32).view(torch.float32)
    special = torch.cat([special, all_ones])
    grads, params = (x.flatten() for x in torch.meshgrid(special, special, indexing="ij"))
    rows, tiles = segment_rows([(0, 0, 0, grads.numel(), 0, 0)])
    for param, master in itertools.product(
        (torch.float32, torch.bfloat16), (None, torch.float32, torch.int16)
    ):
        if param == torch.float32 and master is not None:
            continue
        exact = None if master is None else params.clone()
        if master == torch.int16:
            exact = torch.zeros(params.shape, dtype=torch.int16)
        s = replace(
            Segment.of((1,), taken=0), param=params.to(param, copy=True), grad=grads,
            first=torch.zeros_like(params), second=torch.zeros_like(params), master=exact,
            rows=rows, tiles=tiles,
        )  # fmt: skip
        other = s.clone()
        for is_stochastic in (False, True):
            RUN[rule]("reference", s, stochastic_rounding=is_stochastic)
            RUN[rule]("compiled", other, stochastic_rounding=is_stochastic)
            assert_same(other, s)


@pytest.mark.parametrize("steps", [1, 20])
def test_float32_adamw_is_a_few_ulps_from_the_truth_and_no_farther_than_any_of_torchs(
    backend: str, steps: int
) -> None:
    s = Segment.of((100_000,), taken=0)
    ways = ({"fused": True}, {"foreach": True}, {"foreach": False})
    theirs = [s.params()[0].clone().requires_grad_() for _ in ways]
    optimizers = [
        torch.optim.AdamW([param], lr=1e-2, weight_decay=0.1, **way)
        for param, way in zip(theirs, ways, strict=True)
    ]
    exact = s.params()[0].double()
    moments = (torch.zeros_like(exact), torch.zeros_like(exact))
    for t in range(1, steps + 1):
        s = s.with_gradients(t, deviation=10.0 ** (t % 5 - 2))
        for param, optimizer in zip(theirs, optimizers, strict=True):
            param.grad = s.grads()[0].clone()
            optimizer.step()
        exact, *moments = truth("adam", exact, s.grads()[0], *moments, t=t)
        run_adam(backend, s)
    off = (s.params()[0].double() - exact).abs()
    # A step rounds the weight three times: the factor of its decay, its product, the difference.
    # What is taken off is smaller by lr, so its own roundings vanish beside these.
    assert (off <= steps * 1.5 * torch.finfo(torch.float32).eps * (1 + exact.abs())).all()
    # The roundings of the weight make most of either error, so chance decides the third digit.
    for param in theirs:
        assert off.mean() <= 1.01 * (param.detach().double() - exact).abs().mean()


@pytest.mark.parametrize("rule", RUN)
@pytest.mark.parametrize("flag", [1.0, math.inf, math.nan, -1.0])
def test_found_inf_leaves_everything_as_it_is(backend: str, rule: str, flag: float) -> None:
    s = Segment.of(param=torch.bfloat16, master=torch.float32)
    before = s.clone()
    RUN[rule](backend, s, found_inf=torch.tensor([flag]))
    assert_same(s, before)
    RUN[rule](backend, s, found_inf=torch.tensor([0.0]))
    RUN[rule](backend, before)
    assert_same(s, before)


@pytest.mark.parametrize("rule", RUN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_scale_is_a_factor_of_the_gradients(backend: str, rule: str, dtype: torch.dtype) -> None:
    s = Segment.of()
    other = s.clone()
    other.grad.mul_(0.3)
    grad = s.grad.clone()
    RUN[rule](backend, s, scale=torch.tensor([0.3], dtype=dtype))
    RUN[rule](backend, other)
    assert_same(s, other)
    assert_same_bits(s.grad, grad)


@pytest.mark.parametrize("rule", RUN)
@pytest.mark.parametrize(
    ("half", "master"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.int16),
    ],
    ids=str,
)
def test_an_exact_weight_goes_the_way_of_a_float32_parameter(
    backend: str, rule: str, half: torch.dtype, master: torch.dtype
) -> None:
    s = Segment.of((3000, 5), param=half, master=master, taken=0)
    plain = replace(Segment.of((3000, 5), taken=0), param=s.param.float())
    for step in range(20):
        RUN[rule](backend, s.with_gradients(step))
        RUN[rule](backend, plain.with_gradients(step))
        for exact, expected, stored in zip(s.exact(), plain.params(), s.params(), strict=True):
            assert_same_bits(exact, expected)
            if master == torch.float32:
                assert_same_bits(stored, exact.to(half))
            else:  # of two neighbors equally near, the larger
                assert (
                    (stored.float() - exact).abs() <= (exact.to(half).float() - exact).abs()
                ).all()


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_who_writes_the_parameter_last_wins_over_the_master(
    backend: str, half: torch.dtype
) -> None:
    s = Segment.of((100, 3000), param=half, master=torch.float32, taken=0)
    run_adam(backend, s)
    s.param[10:50] = 50.0  # as loading a checkpoint does; far from what any master rounds to
    other = s.clone()
    other.master[9:49] = 50.0  # the same elements: row 0 begins at 3 there, at 2 here
    run_adam(backend, s)
    run_adam(backend, other)
    assert_same(s, other)


def test_stochastic_rounding_is_right_on_average(backend: str) -> None:
    numel, lr = 40_000, 2.0**-10
    # A quarter of the way from 1 to its upper neighbor in bfloat16, 1 + 2**-7; the step itself is
    # exact.
    s = Segment.of((numel,), param=torch.bfloat16, taken=0)
    s.param.fill_(1.0)
    s.grad.fill_(-2.0)
    run_sgd(backend, s, (lr, 0.0, 0.0, 0.0), momentum=False, stochastic_rounding=True, seed=1)
    (after,) = s.params()
    up = after == 1 + 2.0**-7
    assert (up | (after == 1)).all()
    deviation = math.sqrt(0.25 * 0.75 / numel)
    assert abs(up.double().mean().item() - 0.25) < 5 * deviation
    # Neighbors toss coins of their own: P(both up) is the square, whatever the distance.
    for distance in (1, 2, 16, 256):
        both = (up[distance:] & up[:-distance]).double().mean().item()
        assert abs(both - 0.0625) < 5 * math.sqrt(0.0625 * 0.9375 / numel) * 2


def test_stochastic_rounding_depends_on_seed_step_and_place_and_on_nothing_else(
    backend: str,
) -> None:
    def once(seed: int, taken: int = 0, sizes: tuple[int, ...] = (4000,)) -> Tensor:
        s = Segment.of(sizes, param=torch.bfloat16, taken=taken)
        s.param.fill_(1.0)
        s.grad.fill_(-2.0)
        run_sgd(backend, s, (2.0**-9, 0, 0, 0), momentum=False, stochastic_rounding=True, seed=seed)
        return s.param[3:2003].clone()  # row 0 begins at 3

    base = once(1)
    assert torch.equal(once(1), base)
    assert torch.equal(once(1, sizes=(2000, 5, 7000)), base)
    for other in (once(2), once(-1), once(1, taken=1), once(1, taken=2)):
        assert 0.4 < (other == base).double().mean() < 0.6


def test_stochastic_rounding_tells_elements_apart_that_are_four_billion_away(
    backend: str, tmp_path: Path
) -> None:
    numel, far = 1000, 2**32
    sparse = torch.from_file(
        str(tmp_path / "x"), shared=True, size=far + numel, dtype=torch.bfloat16
    )
    found = []
    for first in (0, far):
        s = Segment.of((numel,), taken=0)
        rows, tiles = segment_rows([(first, *s.pieces[0][1:])])
        s = replace(s, param=sparse, rows=rows, tiles=tiles)
        sparse[first : first + numel] = 1.0
        s.grad.fill_(-2.0)
        run_sgd(backend, s, (2.0**-9, 0, 0, 0), momentum=False, stochastic_rounding=True)
        found.append(sparse[first : first + numel].clone())
    assert 0.4 < (found[0] == found[1]).double().mean() < 0.6


def test_stochastic_rounding_keeps_what_is_exact_and_what_is_not_finite(backend: str) -> None:
    s = Segment.of((7,), param=torch.bfloat16, taken=0)
    values = torch.tensor(
        [1.0, -0.0, math.inf, -math.inf, math.nan, 3.0, 2.0**-126], dtype=torch.bfloat16
    )
    s.params()[0].copy_(values)
    s.grad.zero_()
    run_sgd(backend, s, (0.1, 0.0, 0.0, 0.0), momentum=False, stochastic_rounding=True)
    assert_same_bits(s.params()[0], values)


@pytest.mark.parametrize(
    ("rule", "values", "options"),
    [("adam", (*ADAM[:-1], 0.0), {"decoupled": False}), ("sgd", (*SGD[:-1], 0.0), {})],
    ids=["adam", "sgd"],
)
def test_infinite_parameters_that_do_not_decay_stay_as_they_are(
    backend: str, rule: str, values: tuple[float, ...], options: dict[str, Any]
) -> None:
    s = Segment.of((4,), taken=0)
    infinite = torch.tensor([math.inf, -math.inf])
    s.params()[0][:2] = infinite
    RUN[rule](backend, s, values, **options)
    assert torch.equal(s.params()[0][:2], infinite)


def test_a_segment_without_elements_still_counts_steps(backend: str) -> None:
    s = Segment.of((0, 0))
    run_adam(backend, s)
    run_sgd(backend, s)
    assert (s.steps == 5).all()
    run_adam(backend, Segment.of(()))
