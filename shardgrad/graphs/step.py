"""A training step as one graph: warm-up, capture, replay.

Calls with the same input key (structure, shapes and dtypes) and equal guards (host state) share a
graph. Such calls run in four phases:

    eager -> captured -> captured again and compared -> replayed from then on

Every call is one training step in each of them.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from operator import call
from typing import Any, Generic, Literal, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.backends.cuda import (
    cudnn_sdp_enabled,
    flash_sdp_enabled,
    math_sdp_enabled,
    mem_efficient_sdp_enabled,
)
from torch.utils._pytree import tree_flatten, tree_map_only

from shardgrad.engine.streams import is_capturing
from shardgrad.errors import CaptureError, CollectiveError, OptionError, listed
from shardgrad.graphs.capturable import CaptureAgain, capturable, difference, host_snapshot
from shardgrad.graphs.captured import CapturedStep, Key
from shardgrad.graphs.closed_over import changed_numbers
from shardgrad.graphs.comparison import frozen_values
from shardgrad.graphs.eager_regions import handle_eager_calls, is_in_step
from shardgrad.graphs.inputs import InputBuffers, Inputs, flatten_inputs
from shardgrad.graphs.lifetime import has_graphs
from shardgrad.graphs.outputs import apart_from, detached, used_on
from shardgrad.graphs.pool import GraphPool
from shardgrad.graphs.preflight import (
    cause_of,
    environment_issues,
    harmful_settings,
    require_launch_order,
    watched,
)
from shardgrad.graphs.program_line import line_that_raised
from shardgrad.graphs.reads import Reads
from shardgrad.graphs.recomputation import Redraws

_P = ParamSpec("_P")
_R = TypeVar("_R")

_LOST = 3  # consecutive uncompared graphs after which capture is refused
_MANY = 16  # graphs after which the program is warned if they are hardly replayed
_IN_A_ROW = 7  # consecutive calls with something new after which the program is warned


class UncapturableStepWarning(UserWarning):
    """A step could not be captured and runs eagerly."""


def graphed_step(
    *capturables: Any,
    warmup: int = 3,
    pool: GraphPool | None = None,
    max_graphs: int = 8,
    on_uncapturable: Literal["raise", "eager"] = "raise",
) -> Callable[[Callable[_P, _R]], GraphedStep[_P, _R]]:
    """Makes a training step one graph: its launches are captured once and replayed from then on.

    Use it as a decorator, or call it on a function:
    `step = graphed_step(model, optimizer)(function)`. For a method, do that in `__init__`:
    `self.step = graphed_step(...)(self.step)`. The function may contain the whole step, from the
    forward to `zero_grad`, with any number of micro-batches. The graph computes the same numbers as
    the function, bit for bit.

    The first `warmup` calls run eagerly; they are normal training steps. A later call is captured
    if an earlier one had the same input key (structure, shapes and dtypes of the inputs) and equal
    guards. Otherwise it runs eagerly, and the next call with this key and these guards is captured.
    Guards are the host state that decides what a step launches: for example which parameters
    require a gradient, which gradients are not None, training mode, and the numbers in the param
    groups of an optimizer that is not from `shardgrad.optim`, except the learning rate of torch's
    Adam and AdamW with `capturable=True`. The graph reads a tensor that the
    function closes over at its address. If the program replaces that tensor, or changes a number
    or function that the step's code names, the step is captured again; if it does so before each
    call, an error says so.

    An operation that a graph cannot contain raises at its line. Exceptions of the function other
    than RuntimeError pass through a capture unchanged, and the call can be repeated. To find values
    that a capture would freeze, such as a Python number that changes from call to call, the first
    call after a capture captures the step again: both graphs run from the same state and must
    produce the same bits. This call counts as one step. On a device without graphs, such as the
    CPU, every call runs eagerly, with the same rules for inputs and outputs. The first one warns,
    and names what a graph would not repeat, as far as that shows there: lines that read a tensor on
    the host, and numbers that the function closes over and changes, as `schedule.step()` does.

    For example:

        @shardgrad.graphed_step(model, optimizer)
        def step(tokens, targets):
            loss = model.loss(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

    Args:
        capturables: every module, optimizer and `shardgrad.GradScaler` that the step uses. The
            state of objects that are not passed is neither guarded nor restored. A step that uses a
            sharded module or trains a parameter that is not passed is refused.
        warmup: number of eager calls before the first capture, at least 1.
        pool: the `GraphPool` of another graphed step that uses the same models; None for a new one.
        max_graphs: number of graphs to keep. Beyond it, the least recently used one is dropped. The
            next call of its kind runs eagerly, as that of a new kind does.
        on_uncapturable: what to do if a capture fails, once all state is restored: "raise" a
            CaptureError, or warn and run the call "eager". In both cases, later calls with the same
            input key run eagerly. Ranks must capture together: if only some can, the collectives of
            the others fail or time out.

    Returns:
        A decorator that turns a function into a `GraphedStep`. The next call, of any step with the
        same pool, overwrites the tensors that a call returned.

    Streams: a replay runs on the caller's current stream, after earlier calls. An eager step or a
        capture runs on the pool's stream: this stream first waits for the caller's, which waits for
        it afterwards. Outputs may be used on the caller's stream.
    Capture: not safe; inside a step or capture, call the function itself.

    Raises:
        OptionError: an option is out of range, or there is no `Capturable` adapter for an object.
    """
    if (
        not all(isinstance(each, int) and each > 0 for each in (warmup, max_graphs))
        or on_uncapturable not in ("raise", "eager")
        or not isinstance(pool, GraphPool | None)
    ):
        raise OptionError(
            "graphed_step does not accept these options",
            expected="whole numbers from 1 on for warmup and max_graphs; on_uncapturable='raise' "
            "or 'eager'; a GraphPool or None",
            got=f"warmup={warmup!r}, max_graphs={max_graphs!r}, "
            f"on_uncapturable={on_uncapturable!r}, pool={pool}",
        )
    for each in capturables:
        capturable(each)  # raises for an unknown class now, and not when a function is decorated
    return lambda function: GraphedStep(
        function, capturables, warmup, pool, max_graphs, raises=on_uncapturable == "raise"
    )


class GraphedStep(Generic[_P, _R]):
    """A function that is captured and replayed as a graph. `graphed_step` returns it.

    Attributes:
        pool: the stream and memory of the graphs. Pass it to another `graphed_step` that uses the
            same models.
        eager_steps: number of calls that ran eagerly since the last reset.
        captures: number of graphs captured since the last reset.
        replays: number of calls that were replays since the last reset.
    """

    # By input key: why calls always run eagerly.
    _refused: dict[Hashable, str]
    # The keys of the latest eager calls, each with the random numbers that the call's recomputed
    # regions drew, and with why it prepares no capture, or "".
    _seen: dict[Key, tuple[Redraws, str]]
    # Places of constants that two captures in a row have found unchanged, and the keys of graphs
    # that were compared and then dropped because a constant changed. Another comparison would
    # replay twice, and the constant may have changed on this rank alone.
    _steady: set[Hashable]
    _agreed: set[Key]
    _found: list[str]  # on a device without graphs: what a capture would not repeat
    _before: Key  # of the latest call

    def __init__(
        self,
        function: Callable[_P, _R],
        objects: Sequence[Any],
        warmup: int,
        pool: GraphPool | None,
        max_graphs: int,
        *,
        raises: bool,
    ) -> None:
        if not callable(function):
            raise OptionError(
                "graphed_step must be applied to a function",
                expected="the function that runs a step",
                got=f"a {type(function).__name__}",
                fix="graphed_step(model, optimizer)(step), not graphed_step(...)(step(batch))",
            )
        functools.update_wrapper(self, function)
        self._function = function
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._warmup, self._max_graphs, self._raises = warmup, max_graphs, raises
        self._modules = [each for each in objects if isinstance(each, nn.Module)]
        generators = [each for each in objects if isinstance(each, torch.Generator)]
        self._generators = [each for each in generators if each.device.type != "cpu"]
        # A graph cannot draw from these: a comparison finds what it froze of them.
        self._host_generators = [each for each in generators if each.device.type == "cpu"]
        self._capturables = list(map(capturable, objects))
        devices = (tensor.device for tensor in self._tensors())
        self.pool = pool or GraphPool(next(devices, None))
        self._graphs: list[CapturedStep] = []  # in order of use, the most recently used last
        # The buffers of the graphs, by input key.
        self._buffers: WeakValueDictionary[Hashable, InputBuffers] = WeakValueDictionary()
        self._thread_id = threading.get_ident()
        self._closed = False
        self.reset()

    # -- a call

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Takes one step; see `graphed_step`."""
        self._require_callable_here()
        inputs = flatten_inputs(args, kwargs)
        self.pool.follow()
        for each in self._capturables:
            if why := each.begin_call():
                self._seen = {key: (redraws, why) for key, (redraws, _) in self._seen.items()}
        key = inputs.key, self._guards()
        captured = self._look_up(key)
        self._news = self._what_is_new(key, captured)
        self._before = key
        if captured and captured.is_compared and not self._news:
            self._with_news = 0
            outputs: _R = self._replay(captured, inputs)
        else:
            with self.pool.turn():
                outputs = self._run_on_pool(captured, inputs)
        return outputs

    def _run_on_pool(self, captured: CapturedStep | None, inputs: Inputs) -> Any:
        """Runs a call without a graph, with a graph that is not compared yet, or with one that must
        not be replayed.
        """
        known = captured
        is_warm = self.eager_steps >= self._warmup and self.pool.can_capture
        if not (known or self._news or inputs.key in self._refused) and is_warm:
            captured = self._capture_or_refuse(inputs, self._seen[self._before][0])
            if captured is not None:
                self.captures += 1
                if captured.key in self._agreed:
                    captured.is_compared = True
                    captured.reads.guard_constants(self._steady)
                self._news = captured.why_not()
                if self.captures % _MANY == 0 and self.replays < 4 * self.captures:
                    self._warn(
                        f"is captured too often to gain from it: {self.captures} graphs for "
                        f"{self.replays} replays. Each kind of call has its own graph: pad shapes, "
                        "pass numbers as tensors, and write into tensors instead of replacing them."
                    )
        self._with_news = self._with_news + 1 if self._news else 0
        if self._with_news == _IN_A_ROW:
            self._warn(
                f"runs eagerly and is not captured: in each of the last {_IN_A_ROW} calls, "
                f"something that selects its graph was new. In the last call: {self._news}."
            )
        if captured is None or self._news:
            return self._run_eagerly(inputs)
        if known is not None:
            # It waits for the whole device, which another thread's capture must not see.
            with self.pool.lock:
                return self._compare(known, inputs)
        return self._replay(captured, inputs)

    def _replay(self, captured: CapturedStep, inputs: Inputs) -> Any:
        self.replays += 1
        captured.buffers.load(inputs)
        outputs = captured.replay()
        captured.buffers.write_back(inputs, outputs)
        return outputs

    def _what_is_new(self, key: Key, captured: CapturedStep | None) -> str:
        """Describes why a replay has to wait, if the call's graph is known, or else a difference to
        earlier calls for which a capture has to wait. Returns "" if there is none: if an eager call
        had the same key and guards and did the lazy initialization. Always "" for inputs that are
        not captured.
        """
        if captured and ((why := captured.why_not()) or captured.is_compared):
            return why
        if key[0] in self._refused:
            return ""
        seen = [guards for given, guards in self._seen if given == key[0]]
        if not seen:
            return (
                f"shapes or numbers in its arguments: {difference(self._before[0], key[0])}. Pad "
                "shapes, round numbers or pass them as tensors, and register the classes of "
                "objects: torch.utils._pytree.register_pytree_node"
            )
        if key[1] not in seen:
            return (
                f"state that a graph would freeze: {difference(seen[-1], key[1])}. For an "
                "optimizer's numbers, use shardgrad.optim, which keeps them on the device, or, for "
                "a learning rate, torch's Adam or AdamW with capturable=True; for its state, write "
                "into the existing tensors"
            )
        return self._seen[key][1]

    def _run_eagerly(self, inputs: Inputs) -> Any:
        changed = ""

        def call_region(region: Callable[[], Any]) -> None:
            nonlocal changed
            before = self._guards()
            region()
            if (now := self._guards()) != before:
                changed = f"state that a call in `outside` has changed: {difference(before, now)}"

        # The program's own tensors where they are on the device, so that writes reach it, also
        # through other tensors that share the memory; and copies of the others.
        args, kwargs = tree_map_only(
            torch.Tensor,
            lambda given: given.detach().to(self.pool.device, non_blocking=True),
            inputs.arguments,
        )
        redraws = Redraws(self.pool, self._generators)
        is_told = not (self.pool.can_capture or self.eager_steps)
        watch = watched(self._function, self._modules, self._found) if is_told else nullcontext()
        with handle_eager_calls(call_region), redraws.active(), watch:
            outputs = detached(self._function(*args, **kwargs), self.pool.device)
        for each in self._capturables:
            each.at_eager_border()
        self.eager_steps += 1
        if is_told:
            self._warn(f"{self._without_graphs()}.")
        self._seen[self._before] = redraws, changed
        # Those that have a graph may be among them, so as many others are kept.
        if len(self._seen) > 2 * self._max_graphs:
            del self._seen[next(iter(self._seen))]
        return used_on(outputs, self.pool.caller)

    def _look_up(self, key: Hashable) -> CapturedStep | None:
        # A list, since hashing thousands of guards is slower than comparing them.
        for captured in reversed(self._graphs):
            if captured.key == key and not captured.reads.changed():
                self._graphs.remove(captured)
                if names := captured.reads.changed_constants():
                    self._drop(captured, f"state that a graph has frozen: {listed(names)} changed")
                    self._agreed.add(captured.key)
                    return None
                self._graphs.append(captured)
                return captured
        return None

    def _drop(self, captured: CapturedStep, why: str) -> None:
        """Destroys a graph. The next call of its kind runs eagerly, so that kinds of calls in turn
        do not capture every time.
        """
        self._seen[captured.key] = captured.redraws, why
        captured.reset()

    def status(self) -> str:
        """Returns one sentence: how many calls ran which way since the last reset, and why the
        latest kind of call runs eagerly, if it does.
        """
        refused = self._refused.get(self._before[0])
        why = refused if self.pool.can_capture else self._without_graphs()
        return (
            f"{self._name}: {self.captures} graphs captured, {self.replays} calls replayed, "
            f"{self.eager_steps} eager; "
        ) + (f"it {why}" if why else f"new in the latest call: {self._news or 'nothing'}")

    def _without_graphs(self) -> str:
        why = (
            f"runs eagerly on every call, because {self.pool.device.type} has no graphs. The "
            "results are the same"
        )
        found = listed(list(dict.fromkeys(self._found)), separator="; ")
        return f"{why}. A graph could not repeat its work on the host: {found}" if found else why

    # -- capturing

    def _capture_or_refuse(self, inputs: Inputs, redraws: Redraws) -> CapturedStep | None:
        """Captures a step. Drops the least recently used graphs beyond `max_graphs`.

        Returns:
            The captured step, or None if the call has to run eagerly: `_news` says why if only this
            call does, and `_refused` if all later calls with the same input key do, too.
        """
        try:
            for issue in harmful_settings(self.pool.device):
                raise issue
            self._refuse_reads_of_one_call()
            captured = self._capture(inputs, redraws)
        except CollectiveError:
            raise  # another rank did not join, so an eager step would fail as well
        except CaptureAgain as again:
            self._news = str(again)  # raised on all ranks, so all of them run eagerly
            return None
        # torch, the device and shardgrad raise a RuntimeError for what a graph cannot contain. Any
        # other exception is the program's, and passes through as in an eager call.
        except RuntimeError as error:
            self._refuse(error)
            return None
        self._graphs.append(captured)
        while len(self._graphs) > self._max_graphs:
            why = f"its graph was dropped, since max_graphs={self._max_graphs} others were newer"
            self._drop(self._graphs.pop(0), why)
        return captured

    def _compare(self, first: CapturedStep, inputs: Inputs) -> Any:
        """Captures the step a second time and compares both graphs from the same state. A result
        that differs depends on a value that was frozen, such as a number that Python has changed
        since the first capture.
        """
        restore_host = self._host_snapshot()
        changed = list(changed_numbers(first.reads.numbers))
        self._graphs.remove(first)
        try:
            again = self._capture_or_refuse(inputs, first.redraws)
            if again is None:
                return self._run_eagerly(inputs)
            again.is_compared = True
            self._steady |= again.reads.steady_since(first.reads)
            again.reads.guard_constants(self._steady)
            # A comparison replays both graphs, but functions passed to `outside` must run only
            # once.
            if first.has_eager_regions:
                return self._replay(again, inputs)
            self.replays += 1
            drawn = host_snapshot([], torch.device("cpu"), self._host_generators)
            written = chain(first.reads.written(), again.reads.written())
            outputs, frozen, restore = frozen_values(
                first.replay,
                again.replay,
                self._state,
                written,
                again.reads.groups,
                self.pool.device,
                restore_host,
            )
            drawn()  # the comparison was one call, which has drawn what the second capture drew
            if frozen:
                self._graphs.remove(again)
                again.reset()
                if self._raises:
                    restore()
                self._refuse(
                    CaptureError(
                        "it would be wrong as a graph: captured again in the next call, it "
                        f"computed different values of {listed(frozen)}",
                        where=f"between the two captures, {listed(changed)}" if changed else None,
                        fix="pass values that change between calls as arguments, and numbers as "
                        "tensors; step schedulers between calls; draw random numbers on the "
                        "device; pass state that the step writes to graphed_step(...) as a "
                        "shardgrad.graphs.Capturable",
                    )
                )
            again.buffers.write_back(inputs, outputs)
            return outputs
        finally:
            first.reset()
            torch.get_device_module(self.pool.device).empty_cache()

    def _capture(self, inputs: Inputs, redraws: Redraws) -> CapturedStep:
        """Captures a step. Restores all state if that fails."""
        buffers = self._buffers.get(inputs.key) or InputBuffers(inputs, self.pool.device)
        self._buffers[inputs.key] = buffers
        # Code that runs kernels while it is captured, such as autotuning, needs valid indices.
        buffers.load(inputs)
        captured = CapturedStep(
            self._before, self.pool, self._capturables, self._generators, redraws, buffers
        )
        args, kwargs = buffers.for_capture()
        captured.reads = reads = Reads(
            self._function,
            self._modules,
            buffers.objects,
            self.pool,
            self._tensors(),
            buffers.buffers,
            self._generators,
            [place for each in self._graphs for place in each.reads.places],
        )
        with captured.captured(self._host_snapshot()), reads:
            outputs = detached(self._function(*args, **kwargs), self.pool.device)
            left = reads.left_on_host()
            buffers.note_writes(reads, inputs)
            if self.pool.device.type == "cuda":
                require_launch_order(reads.groups)
            if _modes(self.pool.device) != self._before[1][0]:
                raise CaptureError(
                    "it leaves a mode of torch changed, such as torch.set_grad_enabled or the "
                    "default dtype, which a replay would not do",
                    fix="change modes between calls, or in a with block",
                )
            # The state after the function ran: gradients may have been allocated in the capture.
            outputs = apart_from(chain(self._tensors(), buffers.buffers), outputs)
            captured.outputs = tree_flatten(outputs)
        captured.parts += reads.assignments(left)
        reads.close()
        has_graphs(self)
        return captured

    def _refuse_reads_of_one_call(self) -> None:
        """Refuses a capture after several graphs that read what the program replaced or freed
        before the next call, so that none of them could be compared.
        """
        latest = [each for each in self._graphs if each.key == self._before][-_LOST:]
        if len(latest) == _LOST and not any(each.is_compared for each in latest):
            raise CaptureError(
                "it uses memory that was replaced or freed before the next call, "
                f"{_LOST} times in a row",
                where=listed(latest[-1].reads.changed()),
                fix="pass the tensor as an argument, or keep one tensor and write into it",
            )

    def _host_snapshot(self) -> Callable[[], None]:
        generators = [*self._generators, *self._host_generators]
        return host_snapshot(self._capturables, self.pool.device, generators)

    def _guards(self) -> tuple[Hashable, ...]:
        """Returns what a graph freezes: the modes of torch, and the guards of all capturables."""
        return _modes(self.pool.device), *[each.guards() for each in self._capturables]

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) for the state of all capturables."""
        for number, each in enumerate(self._capturables):
            for name, tensor in each.tensors():
                yield f"{name} (capturable {number})", tensor

    def _tensors(self) -> Iterator[torch.Tensor]:
        return (tensor for _, tensor in self._state())

    def _refuse(self, error: Exception) -> None:
        """Makes all later calls with this input key run eagerly, and raises or warns. Names the
        program's line that raised.
        """
        cause, line = cause_of(error), line_that_raised(error, self._modules)
        where = "; ".join(filter(None, (cause.where, line)))
        issues = () if cause is error else environment_issues(self.pool.device)
        added = "".join(f"\n{each}" for each in issues)
        what = f"could not be captured: {cause.what}"
        self._refused[self._before[0]] = what
        if not self._raises:
            place = f" [{where}]" if where else ""
            self._warn(f"{what}{place}. It runs eagerly.{added}")
            return
        fix = cause.fix or "move the call that raises before or after the step"
        raise CaptureError(
            f"{self._name} {what}{added}",
            expected="a step that launches the same work every time and never waits for the device",
            got="a step that a replay cannot repeat; this call changed no model, optimizer or "
            "random state",
            where=where or None,
            fix=f"{fix}; or on_uncapturable='eager'. Further calls run eagerly",
        ) from error

    def _warn(self, what: str) -> None:
        """Warns, with the line of the program that called the step."""
        level = 2
        while sys._getframe(level - 1).f_code.co_filename == __file__:
            level += 1
        warnings.warn(f"shardgrad: {self._name} {what}", UncapturableStepWarning, stacklevel=level)

    def _require_callable_here(self) -> None:
        if self._closed:
            why, fix = "it was closed", "build another graphed_step"
        elif threading.get_ident() != self._thread_id:
            why = "it was built in another thread"
            fix = "build a graphed_step in each thread, or call it from one thread"
        elif is_in_step() or is_capturing(self.pool.device):
            why = "it was called inside another step or capture"
            fix = "call the undecorated function there: step.__wrapped__"
        else:
            return
        raise CaptureError(
            f"{self._name} cannot be called: {why}",
            expected="one call at a time, in the thread that built it, before close()",
            got=why,
            fix=fix,
        )

    # -- the end

    def reset(self) -> None:
        """Destroys all graphs and input buffers. The next calls run eagerly before the step is
        captured again.

        Streams: the host waits for the device, since a graph must not be destroyed while it runs.
        """
        while self._graphs:
            self._graphs.pop().reset()
        self._refused, self._seen, self._found = {}, {}, []
        self._steady, self._agreed = set(), set()
        self._before = (), ()
        self._news = ""  # what was new in the last call, so that it was not captured; or ""
        self._with_news = 0  # consecutive calls with something new
        self.eager_steps = self.captures = self.replays = 0

    def close(self) -> None:
        """Destroys all graphs; the step cannot be called again.

        Called automatically before the default process group is destroyed, and at exit.
        """
        self.reset()
        self._closed = True


_MODES: tuple[Callable[[], Hashable], ...] = (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch.get_default_dtype,
    # torch.get_float32_matmul_precision raises once a program has set this.
    lambda: torch.backends.cuda.matmul.fp32_precision == "tf32",
    torch.are_deterministic_algorithms_enabled,
    flash_sdp_enabled,
    mem_efficient_sdp_enabled,
    math_sdp_enabled,
    cudnn_sdp_enabled,
)


def _modes(device: torch.device) -> Hashable:
    """Returns the modes of torch that change what code launches. They are guards of every step."""
    kind = device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return autocast, *map(call, _MODES)
