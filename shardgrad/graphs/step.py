"""A training step as one graph: warm-up, capture, replay.

Life of one kind of call (same structure, shapes and dtypes of inputs, same facts of the host):

    eager until nothing is made for the first time any more -> captured once -> replayed from then on

Every call is one step of training, whichever way it runs: nothing is trained twice and nothing is lost.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, NoReturn, ParamSpec, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from shardgrad.checks.capturable_optimizers import why_not_capturable
from shardgrad.engine.streams import Stream, is_capturing
from shardgrad.errors import CaptureError, OptionError
from shardgrad.graphs.capturable import Capturable, OutsideOptimizer, capturable
from shardgrad.graphs.captured import Captured
from shardgrad.graphs.inputs import InputBuffers, Inputs, sort_inputs
from shardgrad.graphs.lifetime import keep_until_the_process_group_goes
from shardgrad.graphs.obstacles import Obstacle, explain
from shardgrad.graphs.outputs import clones, detached, used_on
from shardgrad.graphs.pieces import Pieces
from shardgrad.graphs.pool import GraphPool
from shardgrad.graphs.random_state import RandomState
from shardgrad.graphs.rehearsal import Rehearsal
from shardgrad.graphs.status import StatusWord, StepStatus
from shardgrad.graphs.trust import taken_twice

__all__ = ["GraphedStep", "StepSettings", "UncapturableStepWarning", "graphed_step"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_inside = threading.local()


class UncapturableStepWarning(UserWarning):
    """A step could not be captured, and runs eagerly."""


@dataclass(frozen=True)
class StepSettings:
    """The arguments of `graphed_step`; see there."""

    warmup: int = 3
    pool: GraphPool | None = None
    max_graphs: int = 8
    accumulate: int | None = None
    clone_outputs: bool = False
    bucket: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    on_uncapturable: Literal["raise", "eager", "split"] = "raise"
    verify: int = 0
    replay_twice_every: int = 0

    def __post_init__(self) -> None:
        for name in ("warmup", "max_graphs", "accumulate"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(
                    f"graphed_step was given {name}={value!r}", expected="at least 1", got=repr(value)
                )
        if self.on_uncapturable not in ("raise", "eager", "split"):
            raise OptionError(
                f"graphed_step was given on_uncapturable={self.on_uncapturable!r}",
                expected="'raise', 'eager' or 'split'",
                got=repr(self.on_uncapturable),
            )


def graphed_step(
    *capturables: Any,
    warmup: int = 3,
    pool: GraphPool | None = None,
    max_graphs: int = 8,
    accumulate: int | None = None,
    clone_outputs: bool = False,
    bucket: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] | None = None,
    on_uncapturable: Literal["raise", "eager", "split"] = "raise",
    verify: int = 0,
    replay_twice_every: int = 0,
) -> Callable[[Callable[_P, _R]], GraphedStep[_P, _R]]:
    """Makes a training step one graph: its launches are recorded once and repeated from then on.

    A decorator, or called on a function: `step = graphed_step(model, optimizer)(function)`. The function may
    contain whatever a step is made of, from the forward to `zero_grad`, for any number of micro-batches. It
    gives the same numbers as the function itself, bit for bit.

    The first calls run eagerly and are steps like all others. A call is captured when `warmup` calls have run
    and one of them began in the same situation: the same structure, shapes and dtypes of inputs, and the same
    facts of the host (which parameters train, which gradients are there, training mode, switches of the
    engine, numbers in the groups of an optimizer that is not of `shardgrad.optim`). In another situation the
    step runs eagerly once and is captured at its second occurrence.

    The last two of the first calls are watched for what a capture would refuse, or get wrong without a word
    (`preflight.py`); an error names it with the module and your line. On a device without graphs, such as the
    CPU, every call runs eagerly, with the same rules for inputs and outputs, and what was found is a warning.

    Args:
        capturables: every module, optimizer and `shardgrad.GradScaler` that the function uses. What is used
            and not given is not looked after.
        warmup: eager calls before the first capture, at least 1.
        pool: of another graphed step that uses the same models; None for a new one.
        max_graphs: graphs to keep. The one that was not used for the longest time is dropped.
        accumulate: micro-batches in every call: lists and tuples among the arguments must have this length,
            tensors this many along their first dimension. None accepts any, and another number of
            micro-batches is another graph.
        clone_outputs: return copies. Otherwise the next call overwrites what this one returned.
        bucket: given a call's arguments, returns the (args, kwargs) to go on with: for padding shapes to a
            few sizes.
        on_uncapturable: what happens if the capture fails, after everything was put back: "raise" a
            CaptureError, or warn and run the call "eager". Later calls of this kind run eagerly. "split" is
            as "eager", but cuts the graph around the steps of optimizers that no graph can hold, and takes
            those eagerly between the pieces; `outside` names them. (For anything else that no graph can hold,
            `shardgrad.graphs.outside` is a cut that the function makes itself, whatever is given here.)
        verify: the first so many replays are taken again eagerly, from a copy of the state, and compared bit
            for bit.
        replay_twice_every: every so many replays one is replayed again from a copy of the state and compared:
            whoever differs then has silent data corruption. 0 for never.

    Returns:
        What turns a function into a `GraphedStep`.

    Streams: every call runs on the pool's stream, after the caller's current stream, which then waits for
        it. Outputs may be used on the caller's stream.
    Capture: not safe; a step inside a step is the inner function.

    Raises:
        OptionError: a setting outside its range, or a capturable that is none.
    """
    settings = StepSettings(
        warmup,
        pool,
        max_graphs,
        accumulate,
        clone_outputs,
        bucket,
        on_uncapturable,
        verify,
        replay_twice_every,
    )
    for each in capturables:
        capturable(each)  # refuses here, and not only when the function comes

    def decorate(function: Callable[_P, _R]) -> GraphedStep[_P, _R]:
        return GraphedStep(function, capturables, settings)

    return decorate


class _Kind:
    """Calls of one kind: their buffers, and the facts that an eager step of this kind has begun with."""

    def __init__(self, choices: Hashable, buffers: InputBuffers) -> None:
        self.choices = choices
        self.buffers = buffers
        self.seen: set[Hashable] = set()
        self.refused = False


class GraphedStep(Generic[_P, _R]):
    """What `graphed_step` makes of a function: called like it, it replays a graph of it.

    Attributes:
        pool: where it runs; give it to another `graphed_step` that uses the same models.
        outside: optimizers whose steps stay outside of the graph, each with the reason.
        eager_steps: calls that ran eagerly since the last reset.
        captures: graphs made since the last reset.
        replays: calls that were replays since the last reset.
    """

    def __init__(
        self, function: Callable[_P, _R], taking_part: Sequence[Any], settings: StepSettings
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._settings = settings
        optimizers = [each for each in taking_part if isinstance(each, Optimizer)]
        self._generators = [each for each in taking_part if isinstance(each, torch.Generator)]
        self._outside: list[Optimizer] = []
        if settings.on_uncapturable == "split":
            self._outside = [each for each in optimizers if why_not_capturable(each) is not None]
        self._capturables = [
            OutsideOptimizer(each) if any(each is other for other in self._outside) else capturable(each)
            for each in taking_part
        ]
        self.pool = settings.pool or GraphPool(_device_of(self._capturables))
        self._rehearsal = Rehearsal(
            [each for each in taking_part if isinstance(each, nn.Module)],
            [each for each in optimizers if not any(each is other for other in self._outside)],
            self._outside,
            self._generators,
            self.pool.device,
            settings.warmup,
        )
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._graphs: OrderedDict[tuple[Hashable, Hashable], Captured] = OrderedDict()
        self._latest_kind: _Kind | None = None
        self._latest: tuple[tuple[Hashable, Hashable], Captured] | None = None
        self._thread = threading.get_ident()
        self._closed = False
        self._outputs: Any = None
        self._call = 0
        self._status = StatusWord(self.pool, self._capturables)
        self._forget()

    @property
    def outside(self) -> list[str]:
        """See the class."""
        return [f"{type(each).__name__}: {why_not_capturable(each)}" for each in self._outside]

    def _forget(self) -> None:
        self.eager_steps = self.captures = self.replays = 0

    # -- a call -----------------------------------------------------------------------------------------

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Takes one step; see `graphed_step`."""
        self._require_right_place()
        if self._settings.bucket is not None:
            args, kwargs = self._settings.bucket(*args, **kwargs)  # type: ignore[assignment]
        inputs = sort_inputs(args, kwargs, micro_batches=self._settings.accumulate)
        _inside.step = self
        try:
            with self.pool.turn() as caller:
                self.pool.calls = self._call = self.pool.calls + 1
                kind = self._kind(inputs)
                kind.buffers.load(inputs)
                outputs = self._outputs = self._run(kind, caller)
                if self._settings.clone_outputs:
                    outputs = used_on(clones(outputs), caller)
                return outputs  # type: ignore[no-any-return]
        finally:
            _inside.step = None

    def _run(self, kind: _Kind, caller: Stream) -> Any:
        choices = kind.choices  # equal to the call's, and often the same object as the last time
        facts = (_modes(self.pool.device), *(each.facts() for each in self._capturables))
        captured = self._look_up((choices, facts))
        if captured is None and self._is_due(kind, facts):
            captured = self._capture_or_refuse(kind, (choices, facts))
            if captured is not None:
                self._graphs[choices, facts] = captured
                self._make_room()
        if captured is None:
            args, kwargs = kind.buffers.arguments
            outputs = self._rehearsal.run(
                lambda: detached(self._function(*args, **kwargs)),
                (choices, facts),
                self.eager_steps,
                lambda: [*kind.buffers.buffers, *(t for c in self._capturables for _, t in c.tensors())],
            )
            self.eager_steps += 1
            kind.seen.add(facts)
            return used_on(outputs, caller)
        self._latest = (choices, facts), captured
        self.replays += 1
        return self._replay(captured, kind, caller)

    def _look_up(self, situation: tuple[Hashable, Hashable]) -> Captured | None:
        if self._latest is not None and self._latest[0] == situation:  # thousands of facts are hashed slowly
            return self._latest[1]
        captured = self._graphs.get(situation)
        if captured is not None:
            self._graphs.move_to_end(situation)
        return captured

    def _replay(self, captured: Captured, kind: _Kind, caller: Stream) -> Any:
        settings, capturables, device = self._settings, self._capturables, self.pool.device
        if self.replays <= settings.verify:
            args, kwargs = kind.buffers.arguments
            return taken_twice(
                captured.replay,
                lambda: used_on(detached(self._function(*args, **kwargs)), caller),
                capturables,
                device,
                self._generators,
                sides=("a replay", "an eager step"),
            )
        if settings.replay_twice_every and self.replays % settings.replay_twice_every == 0:
            return taken_twice(
                captured.replay,
                captured.replay,
                capturables,
                device,
                self._generators,
                sides=("a replay", "the same replay"),
            )
        return captured.replay()

    def poll(self) -> StepStatus | None:
        """Returns how a recent step went, without waiting for the device; None while nothing has arrived.

        A status may be older than the last call. See `StatusWord.poll`.
        """
        overwritten = self._call != self.pool.calls  # by another step of the pool
        return self._status.poll(0 if overwritten else self.eager_steps + self.replays, self._outputs)

    def _is_due(self, kind: _Kind, facts: Hashable) -> bool:
        """True once an eager step has begun the same way, so that nothing is made for the first time."""
        return self.eager_steps >= self._settings.warmup and facts in kind.seen and not kind.refused

    def _kind(self, inputs: Inputs) -> _Kind:
        choices = inputs.choices
        if self._latest_kind is not None and self._latest_kind.choices == choices:
            return self._latest_kind
        kind = self._kinds.get(choices)
        if kind is None:
            kind = self._kinds[choices] = _Kind(choices, InputBuffers(inputs, self.pool))
            self._make_room()
        self._kinds.move_to_end(choices)
        self._latest_kind = kind
        return kind

    def _make_room(self) -> None:
        """Drops what was used least recently, beyond `max_graphs`."""
        while len(self._graphs) > self._settings.max_graphs:
            torch.accelerator.synchronize(self.pool.device)  # it may be running
            self._graphs.popitem(last=False)[1].reset()
            self._latest = None
        with_graphs = {choices for choices, _ in self._graphs}
        idle = [choices for choices in self._kinds if choices not in with_graphs]
        for choices in idle[: -self._settings.max_graphs]:
            del self._kinds[choices]

    # -- capturing --------------------------------------------------------------------------------------

    def _capture_or_refuse(self, kind: _Kind, situation: Hashable) -> Captured | None:
        """Captures a step; None if steps of this kind run eagerly from now on."""
        if not self.pool.can_capture:
            kind.refused = True
            obstacles = self._rehearsal.obstacles(situation)
            if obstacles:
                self._warn(f"could not be captured on a device with graphs:\n{explain(obstacles)}", depth=5)
            return None
        silent = self._rehearsal.silent(situation)
        if silent:
            kind.refused = True
            self._report("would be wrong as a graph", silent, None)
            return None
        try:
            return self._capture(kind)
        except Exception as error:
            kind.refused = True
            first = "".join(f": {line}" for line in str(error).splitlines()[:1])
            obstacles = self._rehearsal.obstacles(situation)
            self._report(f"could not be captured: {type(error).__name__}{first}", obstacles, error)
            return None

    def _capture(self, kind: _Kind) -> Captured:
        """Captures a step. If that fails, everything is as it was before."""
        facts = [each.facts() for each in self._capturables]
        for each in self._capturables:
            each.rest()
        images = [each.image() for each in self._capturables]
        random = RandomState(self.pool.device, self._generators)
        pieces = Pieces(self.pool, self._capturables, self._outside, self._generators)
        args, kwargs = kind.buffers.arguments
        try:
            with _stale_streams_overridden(), pieces.recorded():
                outputs = detached(self._function(*args, **kwargs))
        except BaseException:
            for each in self._capturables:
                each.broken_off()
            for restore in images:
                restore()
            random.put_back()
            raise
        self.captures += 1
        keep_until_the_process_group_goes(self)
        return Captured(pieces, outputs, self._capturables, facts)

    def _report(self, what: str, obstacles: Sequence[Obstacle], error: Exception | None) -> None:
        """Raises, or warns, of a step that is not going to be a graph."""
        found = f"\n{explain(obstacles)}" if obstacles else ""
        if self._settings.on_uncapturable != "raise":
            self._warn(f"{what}. It runs eagerly.{found}", depth=6)
            return
        raise CaptureError(
            f"{self._name} {what}{found}",
            expected="a step that launches the same work every time and never waits for the device",
            got="another one; models, optimizers and random numbers are as before the call",
            fix="docs/how_to/migrate_to_graphed_step.md; or on_uncapturable='eager'. Calling again goes on "
            "eagerly",
        ) from error

    def _warn(self, what: str, *, depth: int) -> None:
        warnings.warn(f"shardgrad: {self._name} {what}", UncapturableStepWarning, stacklevel=depth)

    @property
    def _name(self) -> str:
        return getattr(self._function, "__qualname__", repr(self._function))

    def _require_right_place(self) -> None:
        if self._closed:
            self._refuse("it was closed", "build another graphed_step")
        if threading.get_ident() != self._thread:
            self._refuse(
                "it belongs to the thread that built it", "one graphed_step for each thread, or one thread"
            )
        if getattr(_inside, "step", None) is not None or is_capturing(self.pool.device):
            self._refuse(
                "it was called inside another step or capture",
                "call the undecorated function there: step.__wrapped__",
            )

    def _refuse(self, why: str, fix: str) -> NoReturn:
        raise CaptureError(
            f"{self._name} cannot be called: {why}",
            expected="calls one after the other, from the thread that built it, before close()",
            got=why,
            fix=fix,
        )

    # -- the end ----------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Destroys all graphs and forgets the inputs' kinds; the next calls run eagerly and capture anew.

        Streams: the host waits for the device, since a graph must not be destroyed while it runs.
        """
        if self._graphs:
            torch.accelerator.synchronize(self.pool.device)
        for captured in self._graphs.values():
            captured.reset()
        self._graphs.clear()
        self._latest = None
        self._kinds.clear()
        self._latest_kind = None
        self._rehearsal.forget()
        self._forget()
        for each in self._capturables:
            each.released()

    def close(self) -> None:
        """Destroys all graphs for good. Happens by itself before the process group is destroyed."""
        if not self._closed:
            self.reset()
            self._closed = True


def _device_of(capturables: Sequence[Capturable]) -> torch.device | None:
    """Returns the device on which the first state of all lies; None if there is none."""
    for each in capturables:
        for _, tensor in each.tensors():
            return tensor.device
    return None


def _modes(device: torch.device) -> Hashable:
    """Returns the modes of torch that decide what the same code launches."""
    kind = device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


@contextmanager
def _stale_streams_overridden() -> Iterator[None]:
    """A node that autograd made elsewhere, and somebody keeps, must not pull its stream into a capture."""
    override = getattr(torch.autograd.graph, "set_override_stale_capture_stream", None)  # from torch 2.13 on
    if override is None:
        yield
        return
    override(True)
    try:
        yield
    finally:
        override(False)
