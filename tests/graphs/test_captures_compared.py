"""Two captures of a step are compared, where kernels give other bits now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from shardgrad.graphs import Capturable
from shardgrad.graphs.capturable import nothing
from shardgrad.graphs.comparison import _on_any_rank, frozen_values
from tests.support.ranks import on_ranks


class Weight(Capturable):
    def __init__(self) -> None:
        self.value = torch.zeros(3)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", self.value


def run_of(weight: Weight, bits: str) -> tuple[Callable[[], None], list[str]]:
    """Returns a step that adds what the next digit says, the last one from then on, and the digits
    that were taken.
    """
    taken: list[str] = []

    def run() -> None:
        taken.append(bits[min(len(taken), len(bits) - 1)])
        weight.value += int(taken[-1])

    return run, taken


def compared(first: str, second: str, groups: object = ()) -> tuple[list[str], int]:
    """Returns what was always different, and how often the second ran."""
    weight = Weight()
    (one, _), (other, taken) = run_of(weight, first), run_of(weight, second)
    _, found, _ = frozen_values(
        one,
        other,
        weight.tensors,
        [],
        groups,
        torch.device("cpu"),
        nothing,  # type: ignore[arg-type]
    )
    assert weight.value.tolist() == [int(taken[-1])] * 3  # from the same state, and no run besides
    return found, len(taken)


@pytest.mark.parametrize(
    ("first", "second", "times"),
    [
        pytest.param("1", "1", 1, id="equal"),
        pytest.param("1", "21", 2, id="the second once"),
        pytest.param("1", "22221", 5, id="the second, rarely as the first"),
        pytest.param("113", "2", 3, id="the first with itself"),
    ],
)
def test_what_differs_by_chance_is_not_taken_for_frozen(
    first: str, second: str, times: int
) -> None:
    assert compared(first, second) == ([], times)


def test_what_differs_every_time_is_named() -> None:
    assert compared("1", "2") == (["weight"], 6)


@on_ranks(2)
def test_all_ranks_repeat_what_differs_on_one() -> None:
    # Only rank 1 finds something, and it is by chance; rank 0 has to join what its replays send.
    second = "1" if dist.get_rank() == 0 else "221"
    world = dist.group.WORLD
    assert compared("1", second, [world]) == ([], 3)


def differing(one: torch.Tensor, other: torch.Tensor) -> list[str]:
    """Returns what differs between two steps that return these."""
    return frozen_values(lambda: one, lambda: other, list, [], (), torch.device("cpu"), nothing)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5)])
def test_a_step_that_changes_one_element_of_any_tensor_differs(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    output = torch.ones(shape, dtype=dtype)
    last = torch.ones(max(1, output.numel()), dtype=dtype)
    last[-1] = 0
    assert differing(output, output.clone()) == []
    other = last[: output.numel()].view(shape)
    assert differing(output, other) == (["output"] if output.numel() else [])
    assert bool(output.all())  # nothing has written it


def test_zeros_of_either_sign_differ_and_equal_nans_do_not() -> None:
    output = torch.tensor([float("nan"), 0.0])
    assert differing(output, torch.tensor([float("nan"), -0.0])) == ["output"]
    assert differing(output, output.clone()) == []


def test_an_element_far_behind_is_seen() -> None:
    far = torch.zeros(2**23 + 3)  # beyond one piece
    other = far.clone()
    other[-1] = 1
    assert differing(far, other) == ["output"]


@on_ranks(4)
def test_what_one_rank_has_seen_reaches_all_of_a_mesh_in_any_order_of_its_groups() -> None:
    rank = dist.get_rank()
    made = [(ranks, dist.new_group(ranks)) for ranks in ([1, 3], [0, 1], [2, 3], [0, 2])]
    groups = [group for ranks, group in made if rank in ranks]
    assert _on_any_rank(not rank, groups, torch.device("cpu"))
