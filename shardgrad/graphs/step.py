"""A training step as one graph: warm-up, capture, replay.

Calls with the same input key (structure, shapes and dtypes) and equal guards (host state) share a
graph:

    eager until nothing is initialized any more -> captured once -> replayed from then on

Every call is one step of training, whichever way it runs.
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
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardgrad.checks.capturable_optimizers import why_not_capturable
from shardgrad.engine.streams import Stream, is_capturing, wait_for_device
from shardgrad.errors import CaptureError, CollectiveError, OptionError, ShardgradError
from shardgrad.graphs.announcement import announce, announced
from shardgrad.graphs.capturable import Capturable, CaptureAgain, EagerOptimizer, capturable
from shardgrad.graphs.captured import CapturedStep
from shardgrad.graphs.habits import Habits
from shardgrad.graphs.inputs import InputBuffers, Inputs, flatten_inputs
from shardgrad.graphs.lifetime import graphs_captured, graphs_destroyed
from shardgrad.graphs.outputs import apart_from, clones, detached, used_on
from shardgrad.graphs.pool import GraphPool
from shardgrad.graphs.preflight.issues import Issue, explain
from shardgrad.graphs.preflight.warmup import WarmUp
from shardgrad.graphs.random_state import RandomState
from shardgrad.graphs.split_graph import SplitGraph
from shardgrad.graphs.status import StatusReader, StepStatus
from shardgrad.graphs.verify import compare_runs

__all__ = ["GraphedStep", "StepSettings", "UncapturableStepWarning", "graphed_step"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _ThreadState(threading.local):
    """The graphed step that the calling thread is inside of."""

    step: object | None = None


_thread = _ThreadState()


class UncapturableStepWarning(UserWarning):
    """A step could not be captured and runs eagerly."""


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
                    f"graphed_step was given {name}={value!r}",
                    expected="at least 1",
                    got=repr(value),
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
    """Makes a training step one graph: its launches are captured once and replayed from then on.

    A decorator, or called on a function: `step = graphed_step(model, optimizer)(function)`. The
    function may contain everything that a step consists of, from the forward to `zero_grad`, for
    any number of micro-batches. The graph computes the same numbers as the function, bit for bit.

    The first calls run eagerly and are steps of training like all others. A call is captured when
    `warmup` calls have run and one of them began with the same input key (structure, shapes and
    dtypes of the inputs) and equal guards: the host state that decides what a step launches, such
    as which parameters require a gradient, which gradients are there, training mode, and numbers in
    the groups of an optimizer that is not of `shardgrad.optim`. Otherwise the step runs eagerly
    once and is captured at its next occurrence. A tensor that the function closes over
    (`graphs/preflight/closed_over.py`) is read where it is; another one in its place is another
    graph, once it has stayed there for a call, and refused if it never stays.

    The last two of the first calls are watched for what a capture refuses, or gets wrong silently
    (`graphs/preflight/`); an error names it with the module and your line. On a device without
    graphs, such as the CPU, every call runs eagerly, with the same rules for inputs and outputs,
    and issues are a warning.

    Args:
        capturables: every module, optimizer and `shardgrad.GradScaler` that the function uses.
            State of objects that are not given is neither guarded nor restored.
        warmup: eager calls before the first capture, at least 1.
        pool: of another graphed step that uses the same models; None for a new one.
        max_graphs: graphs to keep. The least recently used one is dropped.
        accumulate: micro-batches in every call: lists and tuples among the arguments must have this
            length, tensors this many along their first dimension. None accepts any number, and each
            has a graph.
        clone_outputs: return copies. Otherwise the next call overwrites what this one returned.
        bucket: given a call's arguments, returns the (args, kwargs) to use instead: for padding
            shapes to a few sizes.
        on_uncapturable: what happens if the capture fails, after all state was restored: "raise" a
            CaptureError, or warn and run the call "eager". Later calls of this kind run eagerly.
            "split" is like "eager", but splits the graph at the steps of optimizers that no graph
            can hold, and takes those in eager regions; `outside` names them.
            (`shardgrad.graphs.outside` makes a call in an eager region under any setting.) Ranks
            capture together: if only some can, the collectives of the others fail or time out, and
            they raise a CaptureError that names a rank that could not.
        verify: this many replays are repeated eagerly, from a copy of the state, and compared bit
            for bit.
        replay_twice_every: one in this many replays is repeated from a copy of the state and
            compared: a difference is silent data corruption. 0 for never.

    Returns:
        A decorator that turns a function into a `GraphedStep`.

    Streams: every call runs on the pool's stream, after the caller's current stream, which then
    waits for
        it. Outputs may be used on the caller's stream.
    Capture: not safe; inside a step or capture, call the function itself.

    Raises:
        OptionError: a setting is outside its range, or an object is no capturable.
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
        capturable(each)  # refuses here already, before there is a function

    def decorate(function: Callable[_P, _R]) -> GraphedStep[_P, _R]:
        return GraphedStep(function, capturables, settings)

    return decorate


class _InputKind:
    """Calls with the same input key.

    Attributes:
        key: of the inputs.
        buffers: the inputs of their graphs.
        seen: guards that an eager step of this kind began with.
        is_refused: True if a capture failed: these calls run eagerly.
    """

    def __init__(self, key: Hashable, buffers: InputBuffers) -> None:
        self.key = key
        self.buffers = buffers
        self.seen: set[Hashable] = set()
        self.is_refused = False


class GraphedStep(Generic[_P, _R]):
    """A function that `graphed_step` was given: called like it, it replays a graph of it.

    Attributes:
        pool: stream and memory; give it to another `graphed_step` that uses the same models.
        outside: optimizers that step in eager regions, each with the reason.
        eager_steps: calls that ran eagerly since the last reset.
        captures: graphs captured since the last reset.
        replays: calls that were replays since the last reset.
    """

    def __init__(
        self, function: Callable[_P, _R], objects: Sequence[Any], settings: StepSettings
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._settings = settings
        optimizers = [each for each in objects if isinstance(each, Optimizer)]
        self._generators = [each for each in objects if isinstance(each, torch.Generator)]
        self._eager_optimizers: list[Optimizer] = []
        if settings.on_uncapturable == "split":
            self._eager_optimizers = [
                each for each in optimizers if why_not_capturable(each) is not None
            ]
        self._capturables = [
            EagerOptimizer(each)
            if any(each is other for other in self._eager_optimizers)
            else capturable(each)
            for each in objects
        ]
        self.pool = settings.pool or GraphPool(_device_of(self._capturables))
        self._warmup = WarmUp(
            function,
            [each for each in objects if isinstance(each, nn.Module)],
            [
                each
                for each in optimizers
                if not any(each is other for other in self._eager_optimizers)
            ],
            self._eager_optimizers,
            self._generators,
            self.pool.device,
            settings.warmup,
        )
        self._kinds: OrderedDict[Hashable, _InputKind] = OrderedDict()
        self._graphs: OrderedDict[tuple[Hashable, Hashable], CapturedStep] = OrderedDict()
        self._latest_kind: _InputKind | None = None
        self._latest: tuple[tuple[Hashable, Hashable], CapturedStep] | None = None
        self._closed_over: tuple[Hashable, ...] = ()  # at the end of the last call
        self._thread_id = threading.get_ident()
        self._closed = False
        self._outputs: Any = None
        self._call = 0
        self._status = StatusReader(self.pool, self._capturables)
        self._habits = Habits(optimizers, self._warn)
        self.eager_steps = self.captures = self.replays = 0

    @property
    def outside(self) -> list[str]:
        """See the class."""
        return [
            f"{type(each).__name__}: {why_not_capturable(each)}" for each in self._eager_optimizers
        ]

    # -- a call

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Takes one step; see `graphed_step`."""
        self._require_callable_here()
        if self._settings.bucket is not None:
            args, kwargs = self._settings.bucket(*args, **kwargs)  # type: ignore[assignment]
        inputs = flatten_inputs(args, kwargs, micro_batches=self._settings.accumulate)
        _thread.step = self
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
            _thread.step = None

    def _run(self, kind: _InputKind, caller: Stream) -> Any:
        for each in self._capturables:
            each.begin_call(caller)
        # The kind's key equals the call's, and is often the same object as the last time.
        guards = (_modes(self.pool.device), *(each.guards() for each in self._capturables))
        key = kind.key, guards
        closed_over = self._warmup.closed_over()
        graph_key = kind.key, (*guards, *closed_over)
        captured = self._look_up(graph_key)
        is_new = captured is None and bool(kind.seen) and guards not in kind.seen
        self._habits.guarded(guards, is_new=is_new)
        if captured is None and self._is_due(kind, guards):
            try:
                captured = self._capture_or_refuse(
                    kind, key, is_settled=closed_over == self._closed_over
                )
                if captured is None:
                    return self._run_eagerly(kind, key, caller)
            except CollectiveError as error:
                self._require_same_on_all_ranks(error)
                raise
            self._graphs[graph_key] = captured
            self._evict()
        if captured is None or not captured.prepare():
            return self._run_eagerly(kind, key, caller)
        self._latest, self._closed_over = (graph_key, captured), closed_over
        self.replays += 1
        return self._replay(captured, kind, caller)

    def _run_eagerly(self, kind: _InputKind, key: tuple[Hashable, Hashable], caller: Stream) -> Any:
        args, kwargs = kind.buffers.arguments
        outputs = self._warmup.run(
            lambda: detached(self._function(*args, **kwargs)),
            key,
            self.eager_steps,
            lambda: [*kind.buffers.buffers, *self._state()],
            self._note_border,
        )
        self._note_border()
        self.eager_steps += 1
        if self.eager_steps == 2:  # the first may begin with gradients of the program's
            self._habits.stepped_eagerly()
        kind.seen.add(key[1])
        self._closed_over = self._warmup.closed_over()
        return used_on(outputs, caller)

    def _note_border(self) -> None:
        for each in self._capturables:
            each.at_eager_border()

    def _look_up(self, key: tuple[Hashable, Hashable]) -> CapturedStep | None:
        if (
            self._latest is not None and self._latest[0] == key
        ):  # hashing thousands of guards is slow
            return self._latest[1]
        captured = self._graphs.get(key)
        if captured is not None:
            self._graphs.move_to_end(key)
        return captured

    def _replay(self, captured: CapturedStep, kind: _InputKind, caller: Stream) -> Any:
        settings, capturables, device = self._settings, self._capturables, self.pool.device
        if self.replays <= settings.verify:
            args, kwargs = kind.buffers.arguments
            return compare_runs(
                captured.replay,
                lambda: used_on(detached(self._function(*args, **kwargs)), caller),
                capturables,
                device,
                self._generators,
                names=("a replay", "an eager step"),
            )
        if settings.replay_twice_every and self.replays % settings.replay_twice_every == 0:
            return compare_runs(
                captured.replay,
                captured.replay,
                capturables,
                device,
                self._generators,
                names=("a replay", "the same replay"),
            )
        return captured.replay()

    def poll(self) -> StepStatus | None:
        """Returns the status of a recent step without waiting for the device; None until one has
        arrived.

        The status may be older than the last call. See `StatusReader.poll`.
        """
        overwritten = self._call != self.pool.calls  # by another step of the pool
        return self._status.poll(
            0 if overwritten else self.eager_steps + self.replays, self._outputs
        )

    def _is_due(self, kind: _InputKind, guards: Hashable) -> bool:
        """True once an eager step with these guards has run: a capture initializes nothing then."""
        return (
            self.eager_steps >= self._settings.warmup
            and guards in kind.seen
            and not kind.is_refused
        )

    def _kind(self, inputs: Inputs) -> _InputKind:
        key = inputs.key
        if self._latest_kind is not None and self._latest_kind.key == key:
            self._habits.called(key, is_new=False)
            return self._latest_kind
        kind = self._kinds.get(key)
        self._habits.called(key, is_new=kind is None)
        if kind is None:
            kind = self._kinds[key] = _InputKind(key, InputBuffers(inputs, self.pool))
            self._evict()
        self._kinds.move_to_end(key)
        self._latest_kind = kind
        return kind

    def _evict(self) -> None:
        """Drops the least recently used graphs and input buffers beyond `max_graphs`."""
        while len(self._graphs) > self._settings.max_graphs:
            wait_for_device(self.pool.device)  # the graph may be running
            self._graphs.popitem(last=False)[1].reset()
            self._latest = None
        with_graphs = {key for key, _ in self._graphs}
        idle = [key for key in self._kinds if key not in with_graphs]
        for key in idle[: -self._settings.max_graphs]:
            del self._kinds[key]

    # -- capturing

    def _capture_or_refuse(
        self, kind: _InputKind, key: Hashable, *, is_settled: bool
    ) -> CapturedStep | None:
        """Captures a step; None if this call, or all of this kind from now on, run eagerly.

        Args:
            kind: of the call.
            key: of the warm-up's steps like it.
            is_settled: False if a tensor that the step closes over has been replaced since the last
                call.
        """
        if not self.pool.can_capture:
            kind.is_refused = True
            issues = self._warmup.issues(key)
            if issues:
                self._warn(
                    f"could not be captured on a device with graphs:\n{explain(issues)}", depth=5
                )
            return None
        silent = self._warmup.silent_issues(key)
        if silent:
            kind.is_refused = True
            self._report("would be wrong as a graph", silent, None)
            return None
        self._habits.reached_capture(is_settled=is_settled)
        if not is_settled:
            return None
        try:
            return self._capture(kind)
        except CollectiveError:
            raise  # another rank did not join, and would not join an eager step either
        except CaptureAgain:
            return None  # all ranks have found the same; a later call of this kind is captured
        except Exception as error:
            kind.is_refused = True
            first = "".join(f": {line}" for line in str(error).splitlines()[:1])
            issues = self._warmup.issues(key)
            self._report(f"could not be captured: {type(error).__name__}{first}", issues, error)
            return None

    def _capture(self, kind: _InputKind) -> CapturedStep:
        """Captures a step. If that fails, all state is restored."""
        guards = [each.guards() for each in self._capturables]
        for each in self._capturables:
            each.quiesce()
        before_replays = [each.before_replays() for each in self._capturables]
        snapshots = [each.snapshot() for each in self._capturables]
        random = RandomState(self.pool.device, self._generators)
        graph = SplitGraph(self.pool, self._capturables, self._eager_optimizers, self._generators)
        args, kwargs = kind.buffers.arguments
        try:
            with _stale_streams_overridden(), graph.captured():
                outputs = detached(self._function(*args, **kwargs))
                outputs = apart_from(
                    self._state(), outputs
                )  # of now: gradients may have got memory inside
        except BaseException:
            for each in self._capturables:
                each.abort_capture()
            for restore in snapshots:
                restore()
            random.restore()
            raise
        self.captures += 1
        graphs_captured(self)
        return CapturedStep(graph, outputs, self._capturables, guards, before_replays)

    def _state(self) -> list[torch.Tensor]:
        """Returns the memory in which the step's state lives."""
        return [tensor for each in self._capturables for _, tensor in each.tensors()]

    def _report(self, what: str, issues: Sequence[Issue], error: Exception | None) -> None:
        """Raises or warns: the step runs eagerly."""
        announce(f"{self._name} {what}")
        found = f"\n{explain(issues)}" if issues else ""
        if self._settings.on_uncapturable != "raise":
            self._warn(f"{what}. It runs eagerly.{found}", depth=6)
            return
        known = error if isinstance(error, ShardgradError) else None
        cure = (
            known.fix
            if known is not None and known.fix
            else "docs/how_to/migrate_to_graphed_step.md"
        )
        raise CaptureError(
            f"{self._name} {what}{found}",
            expected="a step that launches the same work every time and never waits for the device",
            got="a step that does not; models, optimizers and random numbers are as before the "
            "call",
            where=None if known is None else known.where,
            fix=f"{cure}; or on_uncapturable='eager'. Calling again goes on eagerly",
        ) from error

    def _require_same_on_all_ranks(self, error: CollectiveError) -> None:
        """Explains a collective that failed because a rank could not capture, or runs what others
        capture.
        """
        what = announced()
        if what:
            raise CaptureError(
                f"ranks did not capture {self._name} together. On {what}",
                expected="a capture on every rank, or on none",
                got=str(error).splitlines()[0],
                where=f"rank {dist.get_rank()}",
                fix="look at that rank: what it does in a step has to be what the others do",
            ) from error

    def _warn(self, what: str, *, depth: int) -> None:
        warnings.warn(f"shardgrad: {self._name} {what}", UncapturableStepWarning, stacklevel=depth)

    @property
    def _name(self) -> str:
        return getattr(self._function, "__qualname__", repr(self._function))

    def _require_callable_here(self) -> None:
        if self._closed:
            self._refuse("it was closed", "build another graphed_step")
        if threading.get_ident() != self._thread_id:
            self._refuse(
                "it belongs to the thread that built it",
                "one graphed_step for each thread, or one thread",
            )
        if _thread.step is not None or is_capturing(self.pool.device):
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

    # -- the end

    def reset(self) -> None:
        """Destroys all graphs and input buffers; the next calls run eagerly, and later ones capture
        again.

        Streams: the host waits for the device, since a graph must not be destroyed while it runs.
        """
        if self._graphs:
            wait_for_device(self.pool.device)
        for captured in self._graphs.values():
            captured.reset()
        self._graphs.clear()
        self._latest = None
        self._kinds.clear()
        self._latest_kind = None
        self._closed_over = ()
        self._warmup.reset()
        self.eager_steps = self.captures = self.replays = 0
        graphs_destroyed(self)
        for each in self._capturables:
            each.released()

    def close(self) -> None:
        """Destroys all graphs; the step cannot be called again.

        Called automatically before the default process group is destroyed, and at exit.
        """
        if not self._closed:
            self.reset()
            self._closed = True


def _device_of(capturables: Sequence[Capturable]) -> torch.device | None:
    """Returns the device of the first tensor of all; None if there is none."""
    for each in capturables:
        for _, tensor in each.tensors():
            return tensor.device
    return None


def _modes(device: torch.device) -> Hashable:
    """Returns the modes of torch that decide what the same code launches: guards of every step."""
    kind = device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


@contextmanager
def _stale_streams_overridden() -> Iterator[None]:
    """Autograd nodes of other streams, kept by the program, must not join the capture with their
    stream.
    """
    override = getattr(
        torch.autograd.graph, "set_override_stale_capture_stream", None
    )  # from torch 2.13 on
    if override is None:
        yield
        return
    override(True)
    try:
        yield
    finally:
        override(False)
