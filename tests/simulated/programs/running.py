"""Runs scenarios: under the engine on simulated devices, and without streams or shards on the
CPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import shardgrad
from shardgrad.sharding import zero_copy
from tests.simulated.accelerator import device
from tests.simulated.accelerator.virtual_ranks import VirtualRanks, one_at_a_time
from tests.simulated.programs.scenarios import (
    LARGE,
    SIDE_STREAMS,
    WIDTH,
    Model,
    Places,
    Plan,
    Scenario,
    moved,
)

ROWS = 2
# Whose losses are compared: later, training has enlarged roundings to the size of mistakes.
TOLD_STEPS = 24


class OnPurposeError(RuntimeError):
    """Raised in a backward that a plan wants to fail."""


# -- streams


@cache
def _side_streams(index: int) -> tuple[torch.Stream, ...]:
    # Kept for the process, since a device's pool is small and the engine's streams come from it
    # too.
    return tuple(torch.Stream(torch.device(device.NAME, index)) for _ in range(SIDE_STREAMS))


class Streams:
    """The streams of a scenario on one rank, used as a careful program uses them."""

    def __init__(self, index: int) -> None:
        default = torch.get_device_module(device.NAME).default_stream(index)
        self._streams = (default, *_side_streams(index))

    def at(self, place: int) -> torch.Stream:
        """Returns a stream."""
        return self._streams[place]

    def all(
        self, places: Sequence[int], calls: Sequence[Callable[[], Any]], *used: Tensor
    ) -> list[Any]:
        """Calls each in its stream, after the current one; afterwards the current one comes after
        them.

        The calls do not wait for each other. The allocator is told of what crosses streams.
        """
        here = torch.accelerator.current_stream()
        others = {self.at(place) for place in places} - {here}
        begin = torch.Event(here.device)
        begin.record(here)
        for other in others:
            begin.wait(other)
        results = []
        for place, call in zip(places, calls, strict=True):
            with self.at(place):
                results.append(call())
        for other in others:
            here.wait_stream(other)
            for tensor in used:
                tensor.record_stream(other)
        for result in results:
            for tensor in result if isinstance(result, tuple) else (result,):
                if isinstance(tensor, Tensor):
                    tensor.record_stream(here)
        return results

    def call(self, place: int, call: Callable[..., Any], *used: Tensor) -> Any:
        """Calls one in its stream."""
        return self.all([place], [lambda: call(*used)], *used)[0]


class NoStreams:
    """The same on the CPU."""

    def all(
        self, places: Sequence[int], calls: Sequence[Callable[[], Any]], *used: Tensor
    ) -> list[Any]:
        """Calls each."""
        return [call() for call in calls]

    def call(self, place: int, call: Callable[..., Any], *used: Tensor) -> Any:
        """Calls one."""
        return call(*used)


# -- the model


class Layer(nn.Module):
    """What is wrapped: branches side by side, each in its own stream."""

    def __init__(self, model: Model, index: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(model.branches))
        if model.direct or model.large == index:
            self.branches[-1] = nn.Sequential(nn.Linear(WIDTH, LARGE), nn.Linear(LARGE, WIDTH))
        if model.frozen:
            self.branches[0].requires_grad_(False)
        if model.unused:
            self.spare = nn.Parameter(torch.ones(3))
        self.detached = model.detached
        self.two_outputs = model.two_outputs
        self.places = Places()
        self.streams: Any = NoStreams()

    def forward(self, x: Tensor) -> Any:
        given = self.places.branches
        places = [given[min(i, len(given) - 1)] for i in range(len(self.branches))]
        inputs = [x] * len(self.branches)
        if self.detached:
            inputs[-1] = x.detach()
        calls = [
            lambda branch=branch, y=y: torch.tanh(branch(y))
            for branch, y in zip(self.branches, inputs, strict=True)
        ]
        first, second, *rest = self.streams.all(places, calls, x)
        for other in rest:
            first = first + other
        return (first, second) if self.two_outputs else first + second


class Pair(nn.Module):
    """A unit around two units."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(layers)

    def forward(
        self, x: Tensor, run: Callable[[Layer, Tensor], Tensor], chosen: Sequence[Layer]
    ) -> Tensor:
        x = x * self.gain
        for layer in chosen:
            x = run(layer, x)
        return x


class Net(nn.Module):
    """The root: a stem, layers or pairs of them, a head."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.stem = nn.Linear(WIDTH, WIDTH).requires_grad_(not model.frozen_root)
        layers = [Layer(model, index) for index in range(model.depth)]
        self.pairs = nn.ModuleList()
        self.alone = nn.ModuleList()
        if model.nested:
            self.pairs.extend(Pair(layers[i : i + 2]) for i in range(0, model.depth, 2))
        else:
            self.alone.extend(layers)
        self.head = nn.Linear(WIDTH, WIDTH).requires_grad_(not model.frozen_root)
        self.streams: Any = NoStreams()
        self.plan = Plan()
        self.tie()

    @property
    def layers(self) -> list[Layer]:
        """Every layer, from the input on."""
        return [*self.alone, *(layer for pair in self.pairs for layer in pair.layers)]

    def tie(self) -> None:
        """Makes the first and the last layer share a weight, if the model says so."""
        if self.model.tied:
            self.layers[-1].branches[0].weight = self.layers[0].branches[0].weight

    def follow(self, plan: Plan, streams: Any) -> None:
        """Says how the next steps run."""
        self.plan, self.streams = plan, streams
        for layer, places in zip(self.layers, plan.units, strict=True):
            layer.places, layer.streams = places, streams

    def forward(self, x: Tensor) -> Tensor:
        x = self.streams.call(self.plan.stem, self.stem, x)
        layers = self.layers
        running = [layer for i, layer in enumerate(layers) if i not in self.plan.skipped]
        if self.model.parallel:
            x = self._run_all(running, x)
        for index, layer in enumerate(self.alone):
            if layer in running and not self.model.parallel:
                x = self._run(layer, x)
            if self.plan.fails and index == 0 and x.requires_grad:
                x.register_hook(_fail)
        for pair in self.pairs:
            chosen = [layer for layer in pair.layers if layer in running]
            x = self.streams.call(
                pair.layers[0].places.runs, lambda y, p=pair, c=chosen: p(y, self._run, c), x
            )
        return self.head(x)

    def _run(self, layer: Layer, x: Tensor) -> Tensor:
        return self._run_all([layer], x)

    def _run_all(self, layers: Sequence[Layer], x: Tensor) -> Tensor:
        def run(layer: Layer) -> Any:
            if not self.model.checkpoint:
                return layer(x)
            reentrant = self.model.checkpoint == "reentrant"
            return checkpoint(layer, x, use_reentrant=reentrant, preserve_rng_state=False)

        places = [layer.places.runs for layer in layers]
        # What goes around the layers has a gradient of its own. Torch adds to one in place once
        # nobody holds it, even if the backward of a detached branch, which nobody waits for, still
        # reads it elsewhere.
        total = x * 1.0 if self.model.detached else x
        for out in self.streams.all(places, [partial(run, layer) for layer in layers], x):
            for part in out if isinstance(out, tuple) else (out,):
                total = total + part
        return total


def _fail(grad: Tensor) -> None:
    raise OnPurposeError


def _batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000 + 100 * step + 10 * micro + rank)
    x, target = torch.randn(2, ROWS, WIDTH, generator=generator)
    return x, target


def _loss(out: Tensor, target: Tensor) -> Tensor:
    return (out.float() - target).square().mean()


def _optimizer(model: Model, params: Any, *, torchs: bool = False) -> torch.optim.Optimizer:
    source: Any = torch.optim if torchs or model.optimizer_of == "torch" else shardgrad.optim
    if model.optimizer == "SGD":
        return source.SGD(params, lr=0.02, momentum=0.9)
    return source.AdamW(params, lr=0.01)


# -- on the CPU


@cache
def expected(
    model: Model,
    skipped: tuple[tuple[int, ...], ...],
    fails: tuple[bool, ...],
    weights: torch.dtype = torch.float32,
    nudge: int = 0,
) -> Tensor:
    """Returns the losses of plain training, [step, micro-batch, rank], with weights of a dtype.

    If `nudge` is not 0, it starts from weights that are off by up to a rounding to bfloat16, at
    random.
    """
    torch.manual_seed(0)
    # Which would not see the cast parameters again.
    net = Net(replace(model, checkpoint="")).to(weights)
    params = [p for p in net.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(nudge)
    for param in params if nudge else ():
        param.data *= 1 + 2**-8 * (torch.rand(param.shape, generator=generator) - 0.5)
    optimizer = _optimizer(model, params, torchs=True)
    dtype = torch.bfloat16 if model.low_precision else weights
    history = []
    for step, (skips, failing) in enumerate(zip(skipped, fails, strict=True)):
        net.plan = Plan(skipped=skips)
        losses = []
        for micro in range(model.micro_batches):
            cast = {name: p.to(dtype) for name, p in net.named_parameters()}
            of_ranks = []
            for rank in range(model.ranks):
                x, target = _batch(step, micro, rank)
                out = torch.func.functional_call(net, cast, (x.to(dtype),))
                of_ranks.append(_loss(out, target))
            if not failing:
                torch.stack(of_ranks).mean().backward()
            losses.append([loss.item() for loss in of_ranks])
        if model.clip:
            nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        history.append(losses)
    return torch.tensor(history)


# -- under the engine


def _mesh(model: Model) -> DeviceMesh:
    shape = (
        (model.ranks,) if model.replicas == 1 else (model.replicas, model.ranks // model.replicas)
    )
    return init_device_mesh(
        device.NAME, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
    )


def _sharded(model: Model, streams: Streams) -> tuple[Net, list[Tensor]]:
    """Returns the model, and what has to outlive the copies that were made of it."""
    with one_at_a_time():
        torch.manual_seed(0)
        net = Net(model)
    born = (model.born + (0,) * (model.depth + 1))[: model.depth + 1]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if model.low_precision else None
    options: dict[str, Any] = {"mesh": _mesh(model), "reshard_after_forward": model.reshard}
    options["zero_stage"] = model.stage
    if policy is not None:
        options["mp_policy"] = policy
    if model.wire:
        options["gradient_policy"] = shardgrad.GradientPolicy(wire_dtype=getattr(torch, model.wire))
    for place, layer in zip(born, net.layers, strict=False):
        streams.call(place, lambda layer=layer: layer.to(device.NAME))
    net.tie()  # moving to another kind of device makes new parameters
    originals: list[Tensor] = list(net.parameters())
    for place, layer in zip(born, net.layers, strict=False):
        streams.call(place, lambda layer=layer: shardgrad.fully_shard(layer, **options))
    streams.call(born[-1], lambda: net.to(device.NAME))
    for pair in net.pairs:
        streams.call(born[-1], lambda pair=pair: shardgrad.fully_shard(pair, **options))
    streams.call(born[-1], lambda: shardgrad.fully_shard(net, **options))
    for ahead, setter in (
        (model.forward_prefetch, "set_modules_to_forward_prefetch"),
        (model.backward_prefetch, "set_modules_to_backward_prefetch"),
    ):
        for unit, others in ahead:
            getattr(net.layers[unit], setter)([net.layers[other] for other in others])
    return net, originals


class _Training:
    """A model under the engine, on one rank."""

    def __init__(self, scenario: Scenario) -> None:
        self.model = scenario.model
        self.streams = Streams(torch.accelerator.current_device_index())
        self.net, originals = _sharded(self.model, self.streams)
        self.optimizer = _optimizer(
            self.model, [p for p in self.net.parameters() if p.requires_grad]
        )
        self._nodes: list[Any] = []
        self._hooked: set[int] = set()
        rank = dist.get_rank()
        self._batches = {
            (step, micro): tuple(t.to(device.NAME) for t in _batch(step, micro, rank))
            for step in range(len(scenario.plans))
            for micro in range(self.model.micro_batches)
        }
        # Nothing from here on makes the host wait, except what the engine does in its first step.
        torch.accelerator.synchronize()
        originals.clear()

    def step(self, number: int, plan: Plan) -> list[Tensor]:
        """Runs one step; returns the losses, not read."""
        self.net.follow(plan, self.streams)
        self._bear_nodes(plan)
        losses: list[Tensor] = []
        with contextlib.suppress(OnPurposeError):
            self.streams.call(plan.caller, lambda: self._backward(number, plan, losses))
            if self.model.update_event:
                self._update_for_the_next_forward()
            else:
                self.streams.call(self.model.update, self._update)
        self.optimizer.zero_grad()
        self._nodes.clear()
        return losses

    def _backward(self, number: int, plan: Plan, losses: list[Tensor]) -> None:
        model, net = self.model, self.net
        for micro in range(model.micro_batches):
            last = micro + 1 == model.micro_batches
            if model.moves and micro:
                net.follow(moved(plan, 2 * micro), self.streams)
            if model.deferred == "reduce":
                net.set_requires_gradient_sync(last)
            elif model.deferred == "all-reduce":
                net.set_requires_all_reduce(last)
            if model.overlapped:
                net.set_is_last_backward(last)
            x, target = self._batches[number, micro]
            joining = shardgrad.participate(net) if model.participates else contextlib.nullcontext()
            with joining:
                loss = _loss(net(x), target)
                losses.append(loss.detach())
                loss.backward()

    def _update(self) -> None:
        params = [p for p in self.net.parameters() if p.requires_grad]
        if self.model.clip == "shardgrad":
            shardgrad.clip_grad_norm_(params, 0.5)
        elif self.model.clip == "torch":
            nn.utils.clip_grad_norm_(params, 0.5)
        self.optimizer.step()

    def _update_for_the_next_forward(self) -> None:
        stream, event = self.streams.at(self.model.update), torch.Event(device.NAME)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            self._update()
            event.record()
        self.net.set_post_optim_event(event)

    def _bear_nodes(self, plan: Plan) -> None:
        """Makes the nodes that accumulate gradients, each in its stream; forward finds them
        there.
        """
        owners = [*zip(self.net.layers, plan.units, strict=True), (self.net, plan.units[-1])]
        for module, places in owners:
            whole = [p.unsharded for grads in module._unit.grad_groups for p in grads.params]
            if places.hooks is None or any(param is None for param in whole):
                continue  # not before the first step has made them
            with self.streams.at(places.hooks):
                for param in whole:
                    self._nodes.append(torch.autograd.graph.get_gradient_edge(param).node)
                    if self.model.writes_in_hooks and id(param) not in self._hooked:
                        self._hooked.add(id(param))
                        param.register_hook(lambda grad: grad * 1.0)


def _train(scenario: Scenario) -> tuple[list[list[float]], list[tuple[int, ...]]]:
    training = _Training(scenario)
    alone = scenario.model.ranks == 1
    losses, digests = [], []
    for number, plan in enumerate(scenario.plans):
        if alone:
            device.restart_schedule(keep_launches=_keeps_launches)
        losses.append(training.step(number, plan))
        if alone:
            digests.append(device.schedule_digest())
    torch.accelerator.synchronize()
    return [[loss.item() for loss in step] for step in losses], digests


_keeps_launches = False


@dataclass(frozen=True)
class Outcome:
    """What became of a scenario.

    Attributes:
        hazards: all of them.
        digests: one for each interleaving: a step of one rank, or all steps of several.
        losses: [step, micro-batch, rank].
        seconds: it took.
    """

    hazards: list[device.Hazard]
    digests: list[tuple[int, ...]]
    losses: Tensor
    seconds: float


def run(scenario: Scenario) -> Outcome:
    """Runs a scenario on virtual ranks. Hazards are found, not raised; see `require_right`."""
    started = time.monotonic()
    ranks = scenario.model.ranks
    device.restart_schedule()
    least = 1 if scenario.model.direct else zero_copy.ZERO_COPY_NBYTES
    with patch.object(zero_copy, "ZERO_COPY_NBYTES", least), device.checked(raises=False) as found:
        by_rank = VirtualRanks(ranks).run(_train, scenario)
    digests = by_rank[0][1] or [device.schedule_digest(ranks)]
    losses = torch.tensor([losses for losses, _ in by_rank]).permute(1, 2, 0)
    return Outcome(found, digests, losses, time.monotonic() - started)


def require_right(scenario: Scenario, outcome: Outcome) -> None:
    """Asserts that nothing was hazardous and that the losses are those of plain training."""
    assert not outcome.hazards, "\n".join([repr(scenario), *map(str, outcome.hazards)])
    plans = scenario.plans[:TOLD_STEPS]
    steps = tuple(plan.skipped for plan in plans), tuple(plan.fails for plan in plans)
    right, ours = expected(scenario.model, *steps), outcome.losses[: len(plans)]
    # Float32: sums in another order, a few roundings of 6e-8 in each step, which Adam's division by
    # the root of a small square enlarges. Bfloat16, of weights or on the wire: a rounding is 4e-3.
    is_low = bool(scenario.model.low_precision or scenario.model.wire)
    tolerance = 5e-2 if is_low else 1e-4
    if torch.allclose(ours, right, rtol=tolerance, atol=tolerance):
        return
    # Training may enlarge a rounding without bound. How far it has by each step, plain training
    # shows itself.
    if is_low:
        others, margin = [expected(scenario.model, *steps, nudge=nudge) for nudge in (1, 2, 3)], 3
    else:
        others, margin = [expected(scenario.model, *steps, weights=torch.float64)], 10
    apart = torch.stack([(right - other).abs().flatten(1).amax(1) for other in others]).amax(0)
    enlarged = apart.cummax(0).values[:, None, None]
    wrong = (ours - right).abs() > tolerance * (1 + right.abs()) + margin * enlarged
    assert not wrong.any(), (
        f"losses {ours[wrong].tolist()} at {wrong.nonzero().tolist()}, not {right[wrong]}"
    )
