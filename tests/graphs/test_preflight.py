"""The preflight: each issue with its line and module, what differs between two steps, and words."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardgrad
from shardgrad.graphs.preflight import StepTrace, differences, watch
from shardgrad.graphs.preflight.closed_over import Place, tensors_closed_over
from shardgrad.graphs.preflight.environment import environment_issues
from shardgrad.graphs.preflight.issues import Issue, explain

CPU = torch.device("cpu")
OTHERS = torch.Generator().manual_seed(1)


class Layer(nn.Module):
    """Does something to its activations, on a line that the test finds by its mark."""

    def __init__(self, work: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.work = work

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        out = self.work(y)
        return out if isinstance(out, torch.Tensor) and out.shape == y.shape else y


def line_of(function: Callable[..., Any]) -> str:
    """Returns the place of a function of one line, or of the line that ends in `# here`."""
    lines, first = inspect.getsourcelines(function)
    offset = next((i for i, line in enumerate(lines) if line.endswith("# here\n")), len(lines) - 1)
    name = function.__name__
    return f"{__file__}:{first + offset} in {name}"


def model_with(work: Callable[[torch.Tensor], Any]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Identity(), Layer(work))


def recorded(
    step: Callable[[], Any], model: nn.Module | None = None, persistent: Sequence[torch.Tensor] = ()
) -> StepTrace:
    return watch(step, {} if model is None else {"net": model}, CPU, persistent=persistent)[1]


def issues_of(work: Callable[[torch.Tensor], Any]) -> tuple[Issue, ...]:
    model = model_with(work)
    return recorded(lambda: model(torch.ones(2, 3)).sum().backward(), model).issues


# -- one step


def item(y: torch.Tensor) -> Any:
    return y.sum().item()


def branch(y: torch.Tensor) -> Any:
    if y.sum() > 0:  # here
        return y * 2
    return y


def number(y: torch.Tensor) -> Any:
    return float(y.detach()[0, 0])


def comparison(y: torch.Tensor) -> Any:
    return torch.equal(y, y)


def tolist(y: torch.Tensor) -> Any:
    return y.tolist()


def array(y: torch.Tensor) -> Any:
    return y.detach().numpy()


def to_host(y: torch.Tensor) -> Any:
    return y.detach().cpu().sum()


def printed(y: torch.Tensor) -> Any:
    print(y)


def formatted(y: torch.Tensor) -> Any:
    return f"{y.mean():.3f}"


def checked_solution(y: torch.Tensor) -> Any:
    return torch.linalg.solve(torch.eye(3), torch.ones(3))


@pytest.mark.parametrize(
    "work",
    [
        item,
        branch,
        number,
        comparison,
        tolist,
        array,
        to_host,
        printed,
        formatted,
        checked_solution,
    ],
    ids=lambda work: work.__name__,
)
def test_a_host_read_is_named_with_its_line_and_module(work: Callable[[torch.Tensor], Any]) -> None:
    (found,) = issues_of(work)
    assert (found.kind, found.module, found.location) == ("host read", "net.1", line_of(work))
    assert "return the tensor from the step" in found.fix


def positions(y: torch.Tensor) -> Any:
    return torch.nonzero(y)


def selected(y: torch.Tensor) -> Any:
    return y[y > 0]


def written_by_mask(y: torch.Tensor) -> Any:
    torch.zeros(2, 3)[y > 0] = y.detach()[y > 0]  # here


def routed(y: torch.Tensor) -> Any:
    return torch.repeat_interleave(y, y.argmax(0)[:2], 0)


def distinct(y: torch.Tensor) -> Any:
    return y.unique()


@pytest.mark.parametrize(
    "work", [positions, selected, written_by_mask, routed, distinct], ids=lambda work: work.__name__
)
def test_a_size_that_depends_on_values_is_named_with_its_line_and_module(
    work: Callable[[torch.Tensor], Any],
) -> None:
    (found,) = issues_of(work)
    assert (found.kind, found.module, found.location) == (
        "data-dependent shape",
        "net.1",
        line_of(work),
    )
    assert "capacity" in found.fix


def made_of_numbers(y: torch.Tensor) -> Any:
    return y + torch.tensor([0.5, 1.5, 2.5])


def drawn_by_others(y: torch.Tensor) -> Any:
    return y + torch.rand(3, generator=OTHERS)


def waited(y: torch.Tensor) -> Any:
    torch.cpu.synchronize()


def seeded(y: torch.Tensor) -> Any:
    torch.manual_seed(3)


@pytest.mark.parametrize(
    ("work", "kind", "what"),
    [
        (made_of_numbers, "copy from the host", "a tensor float32[3] is made of Python values"),
        (drawn_by_others, "unregistered generator", "aten.rand.generator draws from a generator"),
        (waited, "synchronisation", "torch.cpu.synchronize() is called"),
        (seeded, "seed", "the random seed is set"),
    ],
)
def test_other_issues_are_named_with_their_line_and_module(
    work: Callable[[torch.Tensor], Any], kind: str, what: str
) -> None:
    (found,) = issues_of(work)
    assert (found.kind, found.module, found.location) == (kind, "net.1", line_of(work))
    assert found.what.startswith(what)


@pytest.mark.parametrize(
    "harmless",
    [
        lambda y: torch.where(y > 0, y, 0.0),
        lambda y: y.detach().clone().__setitem__(y > 0, 0.0),  # one number: a masked fill
        lambda y: y[torch.argmax(y, 0)],
        lambda y: nn.functional.dropout(y, 0.5),
        lambda y: torch.rand(3, generator=torch.default_generator),
        lambda y: torch.repeat_interleave(
            y, torch.ones(2, dtype=torch.int64), 0, output_size=2
        ).sum(),
        lambda y: y + torch.full((3,), 0.5),
        lambda y: nn.utils.clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0),
    ],
)
def test_what_a_graph_can_record_is_no_obstacle(harmless: Callable[[torch.Tensor], Any]) -> None:
    assert issues_of(harmless) == ()


def test_a_generator_that_the_graph_will_know_is_no_obstacle() -> None:
    _, trace = watch(lambda: torch.rand(3, generator=OTHERS), {}, CPU, generators=[OTHERS])
    assert trace.issues == ()


def logged(grad: torch.Tensor) -> None:
    print(grad.norm().item())


def test_a_read_in_a_hook_of_an_activation_names_the_module_whose_gradient_it_is() -> None:
    (found,) = issues_of(lambda y: y.register_hook(logged))
    assert (found.kind, found.module, found.location) == (
        "host read",
        "net.1.linear",
        line_of(logged),
    )


def test_a_hook_names_the_module_although_the_next_module_makes_no_node_first() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3))
    model[0].register_forward_hook(lambda module, args, y: y.register_hook(logged) and None)
    (found,) = recorded(lambda: model(torch.ones(2, 3)).sum().backward(), model).issues
    assert (found.module, found.location) == ("net.0", line_of(logged))


def test_a_read_in_a_hook_of_a_parameter_names_the_module_that_used_it() -> None:
    model = model_with(lambda y: y)
    model[1].linear.weight.register_hook(logged)
    found = recorded(lambda: model(torch.ones(2, 3)).sum().backward(), model).issues
    assert [(o.module, o.location) for o in found] == [("net.1.linear", line_of(logged))]


def test_one_line_is_reported_once_and_outside_of_modules_there_is_no_name() -> None:
    values = torch.arange(4.0)

    def read() -> None:
        for value in values:
            float(value)  # here

    (found,) = recorded(read).issues
    assert (found.module, found.location) == ("", line_of(read))


def test_a_root_without_a_key_goes_by_its_class() -> None:
    model = Layer(item)
    _, trace = watch(lambda: model(torch.ones(2, 3)), {"": model}, CPU)
    assert [o.module for o in trace.issues] == ["Layer"]


def test_an_error_of_the_step_passes_through_and_nothing_stays_patched() -> None:
    before = torch.manual_seed, torch.cpu.synchronize, torch.Tensor.__repr__
    with pytest.raises(ZeroDivisionError):
        recorded(lambda: 1 // 0)
    assert (torch.manual_seed, torch.cpu.synchronize, torch.Tensor.__repr__) == before
    assert not {"tolist", "numpy", "cpu"} & set(vars(torch.Tensor))


# -- two steps


def two_steps(
    step: Callable[[], Any], model: nn.Module | None = None, persistent: Sequence[torch.Tensor] = ()
) -> list[Issue]:
    step()
    return differences(recorded(step, model, persistent), recorded(step, model, persistent))


def test_a_python_number_that_changes_is_named_with_both_values() -> None:
    model = model_with(lambda y: y * next(factors))
    factors = iter((1.0, 2.0, 3.0))
    (found,) = two_steps(lambda: model(torch.ones(2, 3)), model)
    assert (found.kind, found.module) == ("changed number", "net.1")
    assert found.what == "other of aten.mul.Tensor was 2.0 in the first step and 3.0 in the second"
    assert found.location.startswith(f"{__file__}:")
    assert found.location.endswith(" in <lambda>")


def test_a_number_in_a_fresh_tensor_that_changes_is_named() -> None:
    counter = iter(range(9))
    (found,) = two_steps(lambda: torch.ones(2) * torch.tensor(next(counter)))
    assert (found.kind, found.what) == (
        "changed number",
        "a number in a CPU tensor of aten.lift_fresh.default was 1 in the first step and 2 in the "
        "second",
    )


def test_a_learning_rate_that_a_stock_optimizer_gets_as_a_number_is_found_at_the_step() -> None:
    model = model_with(lambda y: y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)

    def update() -> None:
        optimizer.step()  # here
        optimizer.param_groups[0]["lr"] *= 0.5

    model(torch.ones(2, 3)).sum().backward()
    (found,) = two_steps(update, model)
    assert (found.kind, found.location) == ("changed number", line_of(update))
    assert (
        found.what
        == "alpha of aten.add_.Tensor was -0.25 in the first step and -0.125 in the second"
    )


def test_a_gradient_that_is_bound_anew_is_named() -> None:
    model = nn.Linear(3, 1, bias=False)
    kept = []

    def step() -> None:
        model(torch.ones(2, 3)).sum().backward()
        kept.append(model.weight.grad)  # so that its memory is not given to the next
        model.weight.grad = model.weight.grad.clone()

    (found,) = two_steps(step, model)
    assert (found.kind, found.module) == ("moved tensor", "net")
    assert "used gradient of net.weight at another address than in the step before" in found.what


def test_a_buffer_that_is_made_anew_is_named() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.history: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.history.append(self.mean)
            self.mean = self.mean * 0.9 + x.mean(0) * 0.1
            return x - self.mean

    model = Running()
    x = torch.ones(2, 3)
    (found,) = two_steps(lambda: model(x), model)
    assert (found.kind, found.module) == ("moved tensor", "net")
    assert "buffer net.mean" in found.what
    assert "x.copy_(new)" in found.fix


def test_a_size_that_changes_is_named_where_it_arises_and_ends_the_comparison() -> None:
    rows = iter((1, 2, 3))
    model = model_with(lambda y: y)
    (found,) = two_steps(lambda: model(torch.ones(next(rows), 3)).sum(), model)
    assert found.kind == "another shape"
    assert found.what.endswith(
        "had a tensor float32[2, 3] in the first step and float32[3, 3] in the second"
    )


def test_another_operation_is_named_with_both_sides() -> None:
    turns = iter((0, 0, 1))

    def step() -> torch.Tensor:
        x = torch.ones(3)
        if next(turns):
            return x.sin()
        return x.cos()

    (found,) = two_steps(step)
    assert found.kind == "another operation"
    assert "the first step had aten.cos.default at " in found.what
    assert "the second had aten.sin.default at " in found.what


def test_a_step_that_ends_early_is_another_course() -> None:
    lengths = iter((2, 2, 1))

    def step() -> None:
        for _ in range(next(lengths)):
            torch.ones(3)

    (found,) = two_steps(step)
    assert found.what.endswith("the second had ended")


# -- tensors that a step closes over


targets = torch.zeros(2)  # of the steps below, as a global variable


class Trainer:
    """A program's own object, with the batch in its attributes."""

    def __init__(self) -> None:
        self.batch = {"targets": [torch.ones(2), torch.ones(2)]}

    def step(self) -> torch.Tensor:
        return self.batch["targets"][1] * 2

    __call__ = step


class Masked(nn.Module):
    """A module with a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self._mask = torch.ones(2)

    def forward(self) -> torch.Tensor:
        return self._mask * 2


def reads_a_global() -> torch.Tensor:
    return targets * 2


def new_global() -> None:
    global targets
    targets = torch.ones(2)


def in_a_global() -> tuple[str, Callable[[], Any], Callable[[], Any]]:
    return "targets", reads_a_global, new_global


def in_a_function_that_is_called() -> tuple[str, Callable[[], Any], Callable[[], Any]]:
    return "targets", lambda: reads_a_global() + 1, new_global


def in_a_closure() -> tuple[str, Callable[[], Any], Callable[[], Any]]:
    mine = torch.ones(2)

    def replace() -> None:
        nonlocal mine
        mine = torch.ones(2)

    return "mine", lambda: mine * 2, replace


def in_an_object() -> tuple[str, Callable[[], Any], Callable[[], Any]]:
    trainer = Trainer()

    def replace() -> None:
        trainer.batch = Trainer().batch

    return "trainer.batch['targets'][1]", lambda: trainer.batch["targets"][1] * 2, replace


def in_the_object_of_a_method() -> tuple[str, Callable[[], Any], Callable[[], Any]]:
    trainer = Trainer()

    def replace() -> None:
        trainer.batch["targets"][1] = torch.ones(2)

    return "self.batch['targets'][1]", trainer.step, replace


def in_a_callable_object() -> tuple[str, Callable[[], Any], Callable[[], Any]]:
    trainer = Trainer()

    def replace() -> None:
        trainer.batch["targets"] = [torch.ones(2), torch.ones(2)]

    return "self.batch['targets'][1]", trainer, replace


def in_a_module() -> tuple[str, Callable[[], Any], Callable[[], Any]]:
    model = nn.Sequential(Masked())

    def replace() -> None:
        model[0]._mask = torch.ones(2)

    return "model.0._mask", lambda: model[0]() + 1, replace


def in_a_partial() -> tuple[str, Callable[[], Any], Callable[[], Any]]:
    held = [torch.ones(2)]

    def replace() -> None:
        held[0] = torch.ones(2)

    return "self.args[0][0]", functools.partial(lambda given: given[0] * 2, held), replace


@pytest.mark.parametrize(
    "case",
    [
        in_a_global,
        in_a_function_that_is_called,
        in_a_closure,
        in_an_object,
        in_the_object_of_a_method,
        in_a_callable_object,
        in_a_module,
        in_a_partial,
    ],
)
def test_a_tensor_that_is_replaced_between_steps_is_named_where_the_step_finds_it(
    case: Callable[[], tuple[str, Callable[[], Any], Callable[[], Any]]],
) -> None:
    name, step, replace = case()
    first = recorded(step)
    before = found_in(first)[0].key()
    replace()
    second = recorded(step)
    (found,) = differences(first, second)
    assert (found.kind, found.what) == (
        "replaced tensor",
        f"aten.mul.Tensor read {name}, which is not an argument, and was another tensor in the "
        f"step before",
    )
    assert "pass it as an argument" in found.fix
    # The place of the first step shows what is there now.
    assert found_in(first)[0].key() == found_in(second)[0].key() != before


def found_in(trace: StepTrace) -> list[Place]:
    return [
        tensor.closed_over[0] for op in trace.ops for tensor in op.tensors if tensor.closed_over
    ]


def test_a_tensor_that_stays_or_is_written_or_made_by_the_step_is_not_replaced() -> None:
    stays, running, made = torch.ones(2), torch.zeros(2), torch.ones(2)

    def step() -> None:
        nonlocal made
        made = torch.arange(2.0)
        running.lerp_(stays * made, 0.1)

    first, second = recorded(step), recorded(step)
    assert {place.name for place in found_in(first)} == {"stays", "running"}
    assert differences(first, second) == []


def test_what_a_step_keeps_for_the_next_one_is_replaced() -> None:
    hidden = torch.zeros(2)

    def step() -> None:
        nonlocal hidden
        hidden = torch.tanh(hidden + 1)

    (found,) = two_steps(step)
    assert (found.kind, "read hidden," in found.what) == ("replaced tensor", True)


def test_a_place_to_which_no_way_leads_any_more_has_no_key() -> None:
    held: dict[str, Any] = {"a": {"b": torch.ones(2)}}
    (place,) = {
        place.name: place for place in found_in(recorded(lambda: held["a"]["b"] * 2))
    }.values()
    assert place.key() is not None
    for gone in ({"b": 3}, {}, None):
        held["a"] = gone
        assert place.key() is None


def test_large_and_circular_objects_are_looked_through_in_part() -> None:
    numbers: list[Any] = [torch.ones(1) for _ in range(5_000)]
    numbers[0] = numbers
    near = torch.ones(2)
    found = dict(tensors_closed_over(lambda: (numbers, near), {}))
    assert any(tensor is near for tensor in found.values())
    assert 500 < len(found) < 1_500


# -- the engine


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def training(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.25), nn.Linear(4, 4))
    for module in (model[0], model):
        shardgrad.fully_shard(module, mesh=init_device_mesh("cpu", (1,)), **options)
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.linspace(-1, 1, 12).reshape(3, 4)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        shardgrad.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["reshard", "keep"])
def test_a_clean_step_of_the_engine_has_no_obstacle(options: dict[str, Any]) -> None:
    model, optimizer, step = training(**options)
    step()
    first, second = recorded(step, model), recorded(step, model)
    assert explain([*first.issues, *differences(first, second)]) == ""
    assert environment_issues(CPU, [optimizer]) == []
    assert len(first.ops) > 10


@pytest.mark.usefixtures("one_rank")
def test_the_engine_repeats_addresses_but_a_moved_batch_is_found() -> None:
    model, _, _ = training()
    batches = [torch.ones(3, 4), torch.ones(3, 4)]
    turns = iter((0, 0, 1))

    def step() -> None:
        model(batches[next(turns)]).sum().backward()
        model.zero_grad()

    found = two_steps(step, model, batches)
    assert {o.kind for o in found} == {"moved tensor"}
    assert [o.module for o in found] == ["net.0"]
    assert "a tensor float32[3, 4] at another address" in found[0].what


@pytest.mark.usefixtures("one_rank")
def test_a_watched_step_has_the_same_numbers_bit_for_bit() -> None:
    results = []
    for watched in (False, True):
        model, _, step = training()
        losses = [watch(step, {"": model}, CPU)[0] if watched else step() for _ in range(4)]
        results.append(
            (torch.stack(losses), [p.full_tensor().detach() for p in model.parameters()])
        )
    (plain, weights), (seen, watched_weights) = results
    assert torch.equal(plain, seen)
    assert all(map(torch.equal, weights, watched_weights))


@pytest.mark.usefixtures("one_rank")
def test_a_read_that_the_engine_was_asked_for_is_the_askers() -> None:
    model, _, _ = training()

    def ask() -> None:
        model(torch.ones(3, 4)).sum().backward()
        shardgrad.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)  # here

    (found,) = recorded(ask, model).issues
    assert (found.kind, found.location) == ("host read", line_of(ask))


def test_a_compiled_region_stays_compiled_under_a_watch() -> None:
    calls = []

    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            calls.append(len(args))
            return graph.forward(*args)

        return run

    compiled = torch.compile(lambda x: (x * 2).cos(), backend=backend)
    for _ in range(2):
        recorded(lambda: compiled(torch.ones(3)))
    compiled(torch.ones(3))
    assert len(calls) == 3


# -- words


def test_an_obstacle_is_a_sentence_with_its_place_and_a_line_with_what_to_type() -> None:
    issue = Issue("host read", "it waits", "net.1", "train.py:3 in f", "leave it out")
    assert str(issue) == "it waits [module net.1, train.py:3 in f]\n  try: leave it out"
    assert str(Issue("environment", "it waits")) == "it waits"


def test_explain_numbers_the_issues_and_counts_those_it_leaves_out() -> None:
    issues = [Issue("seed", f"the {i}th", fix="set it") for i in range(3)]
    assert explain(issues, limit=2) == (
        "1. the 0th\n     try: set it\n2. the 1th\n     try: set it\nand 1 more"
    )
