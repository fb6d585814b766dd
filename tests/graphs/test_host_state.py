"""What a step takes of an optimizer and of its arguments; compiled regions stay compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardgrad.graphs.capturable import capturable
from shardgrad.graphs.inputs import InputBuffers, flatten_inputs
from shardgrad.graphs.pool import GraphPool
from shardgrad.graphs.reads import Reads

CPU = torch.device("cpu")


def test_a_group_keeps_the_tensor_of_its_learning_rate_when_another_goes() -> None:
    first, second, third = (
        nn.Parameter(torch.ones(2, device=device)) for device in ("meta", "cpu", "cpu")
    )
    groups: Any = [{"params": [first], "lr": torch.tensor(0.5)}, {"params": [second], "lr": 0.25}]
    optimizer = torch.optim.AdamW(groups, capturable=True)
    state = capturable(optimizer)
    state.begin_call()
    assert groups[0]["lr"].is_meta
    rate = groups[1]["lr"]
    state.replayed()
    assert repr(groups[1]["lr"]) == "0.25"  # a number that the program may keep
    groups[1]["lr"] = 0.75
    del optimizer.param_groups[0]
    optimizer.add_param_group({"params": [third], "lr": 0.125})
    state.begin_call()
    assert groups[1]["lr"] is rate
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.75, 0.125]
    groups[1]["lr"] *= 0.5  # by the step itself, and by its replays
    state.replayed()
    assert groups[1]["lr"] is rate


def test_what_a_capture_adds_to_an_optimizer_goes_with_it() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([param])
    restore = capturable(optimizer).snapshot()
    param.sum().backward()
    optimizer.step()
    restore()
    assert not optimizer.state


def test_not_a_number_is_one_input() -> None:
    first, again = (flatten_inputs((float("nan"),), {}).key for _ in range(2))
    assert first == again


def test_a_buffer_has_the_strides_of_its_argument() -> None:
    given = torch.ones(4, 6)[:, ::2], torch.ones(1).expand(3)
    sliced, expanded = InputBuffers(flatten_inputs(given, {}), CPU).buffers
    assert [sliced.stride(), expanded.stride()] == [(6, 2), (0,)]


def test_a_compiled_region_runs_compiled_in_a_capture() -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    double = torch.compile(lambda x: x.sin() * 2, backend=backend)
    with Reads(lambda: None, [], [], GraphPool(CPU), [], [], []):
        assert torch.equal(double(torch.ones(4)), torch.ones(4).sin() * 2)
        assert compiled == [1]


def test_a_step_may_make_a_sparse_tensor() -> None:
    with Reads(lambda: None, [], [], GraphPool(CPU), [], [], []):
        assert torch.equal(torch.eye(2).to_sparse() @ torch.ones(2), torch.ones(2))
