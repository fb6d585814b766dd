"""The base class of all optimizers here: groups, segments, state, and the order of a step."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from shardgrad.engine.param_group import FSDPParam, ParamGroup, is_claimed, managed_by
from shardgrad.engine.replaced_params import adopt_given
from shardgrad.engine.streams import is_capturing, streams_for, wait_for_device
from shardgrad.engine.tracing import outside_graphs
from shardgrad.errors import (
    AsleepError,
    CaptureError,
    DeepcopyError,
    OptimizerParameterError,
)
from shardgrad.optim.contents import Contents
from shardgrad.optim.host_states import through_chunks
from shardgrad.optim.hyper import Hyper, OptimGroup
from shardgrad.optim.norms import find_nonfinite
from shardgrad.optim.precision import Precision
from shardgrad.optim.segment import Launch, PlainSegment, Segment, ShardedSegment
from shardgrad.optim.selection import select
from shardgrad.optim.state import copies_into, load_state

# The numbers stand for the group's device mirrors and the segment's buffers: a group or a segment
# that replaces another has new ones. Read at every call.
_GUARDS = attrgetter("options.number", "number", "is_allocated")


class Update(NamedTuple):
    """One segment of a step under way.

    Attributes:
        segment: the segment to update.
        state: its flat state buffers by name, on the device.
        launch: the tensors with the parameters and gradients.
        hyper: the hyperparameters of the group, on the device.
        scale: device scalar by which gradients are multiplied, or None.
        skip: device scalar, above zero if the step must be skipped, or None.
    """

    segment: Segment
    state: Mapping[str, torch.Tensor]
    launch: Launch
    hyper: torch.Tensor
    scale: torch.Tensor | None
    skip: torch.Tensor | None

    def arguments(self, precision: Precision) -> dict[str, Any]:
        """Returns the arguments that all kernels have in common, by name."""
        segment, launch = self.segment, self.launch
        return {
            "steps": segment.steps,
            "ticket": segment.ticket,
            "touched": launch.touched,
            "rows": launch.rows,
            "tiles": launch.tiles,
            "hyper": self.hyper,
            "master": precision.exact(self.state),
            "scale": self.scale,
            "found_inf": self.skip,
            "decoupled": segment.options["decoupled_weight_decay"],
            "maximize": segment.options["maximize"],
            "stochastic_rounding": precision.stochastic_rounding,
            "seed": segment.seed(precision.seed),
        }


class FlatOptimizer(Optimizer):
    """The base class of the optimizers here: one launch per segment. See [Note: Segments].

    Groups, `state_dict`, schedulers, hooks and closures work as in torch; state is a DTensor for
    each parameter, cut out of flat buffers. Everything a step depends on is in device memory:
    hyperparameters ([Note: Hyperparameters]), step counts, loss scale, clip coefficient, and
    whether to skip the step.

    Args:
        params: parameters, (name, parameter) pairs, or dictionaries of groups, as for any torch
            optimizer.
        defaults: default hyperparameters.
        precision: the state kept for each parameter, and its precision.
        check_finite: check gradients for infinities and NaNs before every step, unless
            `clip_grad_norm_` or `shardgrad.GradScaler` has, and skip the step if there are any.
        states_on_host: keep states in pinned host memory between steps; see [Note: States on the
            host].

    Attributes:
        skipped_steps: float32 device scalar, the number of steps skipped because a gradient was not
            finite.

    Raises:
        OptionError: a hyperparameter is outside its range.
        OptimizerParameterError: a parameter cannot be updated.
    """

    # Defined by subclasses: the keys that are mirrored on the device, in the order of the kernel,
    # and the keys that are host arguments of a launch.
    hypers: ClassVar[Sequence[Hyper]]
    fixed: ClassVar[Sequence[str]] = ("maximize",)
    # Keys that only torch's optimizer of this name uses. Groups have them so that checkpoints,
    # which contain every key, load in both directions.
    torch_keys: ClassVar[Mapping[str, Any]] = {}

    # Makes torch's scaler set `grad_scale` and `found_inf` as attributes during a step instead of
    # reading them on the host.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        precision: Precision,
        *,
        check_finite: bool,
        states_on_host: bool,
    ) -> None:
        self._precision = precision
        self.keeps_small_steps = precision.keeps_small_steps
        self._segments: list[Segment] = []
        self._segments_made = 0
        # Each parameter's original entry of `state`. A program may clear or replace the public one.
        self._entries: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._skipped: torch.Tensor | None = None
        self._check_finite = check_finite
        self._away: list[torch.Tensor] = []  # states whose memory is released until `reload`
        # If states are on the host: this optimizer's own streams for their copies.
        self._host_streams = cache(streams_for) if states_on_host else None
        self._contents = Contents([], {})
        super().__init__(params, defaults)
        # Whether the program has read `state`: otherwise it cannot have edited it.
        self._is_state_read = False

    # -- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters with its hyperparameters; see
        `torch.optim.Optimizer.add_param_group`.

        Raises:
            OptionError, OptimizerParameterError: nothing was added.
        """
        self._follow_program()
        super().add_param_group(param_group)
        plain = self.param_groups.pop()
        group = self._mirrored(plain)
        segments = self._new_segments(group, len(self.param_groups))
        self.param_groups.append(group)
        self._segments += segments
        self._allocate_new()
        self._follow_state()

    def _mirrored(self, group: Mapping[str, Any]) -> OptimGroup:
        """Returns a group whose hyperparameters have mirrors on the device."""
        return OptimGroup(
            {**self.torch_keys, **self.defaults, **group},
            self.hypers,
            self.fixed,
            self.validate_group,
        )

    def _new_segments(self, group: OptimGroup, index: int) -> list[Segment]:
        """Makes a group's segments. If a parameter or an option is refused, nothing is changed."""
        segments = self._segments_of(group, index)
        for segment in segments:
            self.state_dtypes(segment, group)
        if "capturable" in self.torch_keys and any(
            segment.device.type != "cpu" for segment in segments
        ):
            # Tells torch's code that step counts are on the device. torch refuses it on the CPU.
            group["capturable"] = True
        for segment in segments:
            segment.options = group
            segment.number = self._segments_made
            self._segments_made += 1
        return segments

    def _segments_of(self, group: OptimGroup, index: int) -> list[Segment]:
        """Sorts a group's parameters into segments, in the order in which they were given."""
        names = group.get("param_names", ())
        adopt_given(group["params"])  # a replaced parameter must be in the flat shard by now
        # The group has no names, or the program has replaced the parameters but not the names.
        if len(names) != len(group["params"]):
            names = [f"{i} of group {index}" for i in range(len(group["params"]))]
        sharded: dict[ParamGroup, list[FSDPParam]] = {}
        plain: list[Segment] = []
        for param, name in zip(group["params"], names, strict=True):
            managed = managed_by(param)
            self._validate_param(param, name if managed is None else managed.name, managed)
            if managed is None:
                plain.append(PlainSegment(param, name))
            else:
                sharded.setdefault(managed.group, []).append(managed)
        self._refuse_two_engines(group)
        return [
            *(ShardedSegment(g, members) for g, members in sharded.items()),
            *plain,
        ]

    def _validate_param(self, param: torch.Tensor, name: str, managed: FSDPParam | None) -> None:
        if not param.is_floating_point():
            what = "complex" if param.is_complex() else str(param.dtype)
            raise self._cannot_update(
                name,
                f"it is {what}",
                "pass only floating-point parameters; torch.optim supports others",
            )
        if managed is not None and not managed.group.is_flat:
            raise self._cannot_update(
                name,
                "its shard is a tensor subclass (fsdp_pre_all_gather)",
                "use torch.optim for it",
            )
        if is_claimed(param):
            raise self._cannot_update(
                name,
                "fully_shard has replaced it",
                "pass model.parameters() after fully_shard",
            )

    def _refuse_two_engines(self, group: OptimGroup) -> None:
        everything = [*(p for g in self.param_groups for p in g["params"]), *group["params"]]
        foreign = [p for p in everything if isinstance(p, DTensor) and managed_by(p) is None]
        if foreign and len(foreign) < sum(isinstance(p, DTensor) for p in everything):
            raise self._cannot_update(
                f"of shape {tuple(foreign[0].shape)}",
                "another engine shards it, or it was replaced after fully_shard",
                "build one optimizer for each engine's parameters",
            )

    @staticmethod
    def _cannot_update(param: Any, why: str, fix: str) -> OptimizerParameterError:
        return OptimizerParameterError(
            f"the optimizer cannot update parameter {param}: {why}",
            expected="dense floating-point parameters, sharded by shardgrad or unsharded",
            got=why,
            fix=fix,
        )

    # -- what a program edits by hand

    def _follow_program(self) -> None:
        """Applies edits of `param_groups` and `state` by the program, as torch's optimizers do; see
        `contents.py`.

        A removed state entry starts again from zero, and a replacement is copied into the buffers.
        Groups may be removed, replaced, or have other parameters.

        Streams: copies go to the current stream.
        Capture: nothing may have been edited.

        Raises:
            AsleepError, CaptureError, OptimizerParameterError, OptimizerStateError, OptionError:
            nothing was changed.
        """
        self._allocate_new()  # the model may have been on meta
        same_groups = self._contents.same_groups(self.param_groups)
        if same_groups and (not self._is_state_read or self._contents.same_state(self._state)):
            return
        self._require_here()
        if any(is_capturing(segment.device) for segment in self._segments):
            raise CaptureError(
                "the optimizer's groups or state were edited during a capture",
                expected="the groups and the state from before the capture",
                got="an entry that was removed or replaced, which every replay would repeat",
                fix="edit optimizer.param_groups and optimizer.state between calls of the graphed "
                "step",
            )
        if not same_groups:
            self._follow_groups()
        self._follow_state()

    def _follow_groups(self) -> None:
        """Makes segments for the present groups. Keeps each segment that has the same parameters
        and the state that its group needs.
        """
        groups = [g if isinstance(g, OptimGroup) else self._mirrored(g) for g in self.param_groups]
        params = [param for group in groups for param in group["params"]]
        if len(set(map(id, params))) < len(params):
            raise self._cannot_update(
                "of two groups", "it would be updated twice", "put each parameter in one group"
            )
        new = [
            segment
            for index, group in enumerate(groups)
            for segment in self._new_segments(group, index)
        ]
        before = {tuple(map(id, segment.params)): segment for segment in self._segments}
        self.param_groups[:] = groups
        self._segments = []
        for like in new:
            segment = before.get(tuple(map(id, like.params)), like)
            if self.state_dtypes(like, like.options).keys() - segment.state.keys():
                segment = like  # the former group had no momentum
            segment.options = like.options
            self._segments.append(segment)
        self._allocate_new()

    def _follow_state(self) -> None:
        """Copies entries that the program has put into `state`, and zeroes those it has removed."""
        self._wait_for_host_states()
        allocated = [
            param for segment in self._segments if segment.is_allocated for param in segment.params
        ]
        edited = {}
        for number, param in enumerate(allocated):
            entry, public = self._entries[param], self._state.get(param, {})
            # What is no tensor is the program's own, as in torch.
            given = {k: v for k, v in public.items() if k in entry or isinstance(v, torch.Tensor)}
            if given.keys() != entry.keys() or any(given[key] is not entry[key] for key in entry):
                edited[param] = list(copies_into(number, entry, given))
        with torch.no_grad():
            for into, value in chain.from_iterable(edited.values()):
                into.copy_(value)
        for param in edited:
            self._state[param] = {**self._state.get(param, {}), **self._entries[param]}
        self._contents = Contents(self.param_groups, self._state)

    # -- state

    @property
    def state(self) -> defaultdict[Any, Any]:
        """As in `torch.optim.Optimizer`. From the first time that it is read, each step looks for
        edits.
        """
        self._is_state_read = True
        return self._state

    @state.setter
    def state(self, value: defaultdict[Any, Any]) -> None:
        self._state, self._is_state_read = value, True

    @abstractmethod
    def state_dtypes(self, segment: Segment, group: Mapping[str, Any]) -> Mapping[str, torch.dtype]:
        """Returns the state buffers a segment needs, by name."""

    def validate_group(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Raises an OptionError for a combination of options that is not allowed. Subclasses
        override it.

        Args:
            old: the values that the group was built with.
            new: the values that it would have.
        """

    def _allocate_new(self) -> None:
        """Allocates the state of segments that have none, unless they are on the meta device."""
        for segment in self._segments:
            if not segment.is_allocated and segment.has_data:
                self._allocate(segment)

    def _allocate(self, segment: Segment) -> None:
        dtypes = self.state_dtypes(segment, segment.options)
        segment.allocate(dtypes, on_host=self._host_streams is not None)
        pieces = {name: segment.local_views(flat) for name, flat in segment.state.items()}
        for i, param in enumerate(segment.params):
            entry = {
                "step": segment.steps[i],
                **{name: segment.face(i, views[i]) for name, views in pieces.items()},
            }
            self._entries[param] = entry
            # An entry that exists is of a parameter that moved from another group. `_follow_state`
            # copies it.
            self._state.setdefault(param, dict(entry))
        _ = self.skipped_steps  # allocated before a capture, each replay of which would zero it

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this optimizer or of torch's optimizer of the same name.

        State is copied into the existing buffers, so captured graphs stay valid. Its tensors may be
        DTensors with any placements, or unsharded.

        Raises:
            OptimizerStateError, OptionError, UnsupportedError: the state does not fit, or has
                invalid hyperparameters; nothing was changed.
            ForeignParameterError: a tensor was saved by another rank.
        """
        self._require_here()
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        self._follow_program()
        for segment in self._segments:
            if not segment.is_allocated:
                raise self._cannot_update(
                    segment.names[0],
                    "it is on the meta device",
                    "model.to_empty(device=...), and initialize it, first",
                )
        load_state(
            self.param_groups,  # type: ignore[arg-type]
            self._entries,
            state_dict,
            ignored=self.torch_keys,
        )
        saved, present = (
            chain.from_iterable(group["params"] for group in groups)
            for groups in (state_dict["param_groups"], self.param_groups)
        )
        params = dict(zip(saved, present, strict=True))
        # With what is the program's own, of a parameter or not, which torch loads, too.
        for key, entry in state_dict["state"].items():
            param = params.get(key, key)
            kept = self._entries.get(param)
            self._state[param] = entry if kept is None else {**entry, **kept}
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    # -- releasing memory, and mapping it again at the same addresses

    def offload(self) -> None:
        """Copies the states to the host and releases their device memory until `reload`.

        Until then forward and backward still work, but a step, a replay of one, and `state_dict`
        raise. States of parameters that no unit shards stay on the device. States that are on the
        host anyway stay there.

        Streams: the host waits for the device. Capture: not safe.

        Raises:
            OptionError: the units were not made with `offload_policy=SleepPolicy()`.
        """
        from shardgrad.ops.virtual_memory import give_back, require_virtual

        if self._away or self._host_streams is not None:
            return
        states = [
            flat
            for segment in self._segments
            if segment.is_allocated and isinstance(segment, ShardedSegment)
            for flat in segment.state.values()
        ]
        require_virtual(states)
        give_back(states)
        self._away = states

    def reload(self) -> None:
        """Maps the states' memory again at the same addresses, and copies the states back.

        Streams: filled on the current one. Capture: not safe.
        """
        from shardgrad.ops.virtual_memory import bring_back

        bring_back(self._away)

    def state_dict(self) -> dict[str, Any]:
        """See `torch.optim.Optimizer.state_dict`. If states are on the host, waits for their
        copies. Has no state of parameters whose group was removed, for which torch raises.

        Raises:
            AsleepError: after `offload`.
        """
        self._require_here()
        self._wait_for_host_states()
        state, present = self.state, {p for group in self.param_groups for p in group["params"]}
        gone = self._entries.keys() - present
        self.state = defaultdict(dict, {k: entry for k, entry in state.items() if k not in gone})
        try:
            return super().state_dict()
        finally:
            self.state = state

    def _require_here(self) -> None:
        if self._away:
            raise AsleepError.of(f"the optimizer {type(self).__name__}")

    def _wait_for_host_states(self) -> None:
        """Blocks the host until all copies from and to states on the host are done."""
        if self._host_streams is not None:
            for device in {segment.device for segment in self._segments}:
                wait_for_device(device)

    def __getstate__(self) -> NoReturn:
        """Refuses pickling and copying, since the state's buffers belong to the model's shards."""
        raise DeepcopyError(
            f"{type(self).__name__} cannot be copied or pickled",
            expected="state_dict()",
            got="copy.deepcopy or pickle of the optimizer",
            fix="build a second optimizer and load optimizer.state_dict() into it",
        )

    # -- a step

    def update(self, update: Update) -> None:
        """Launches the kernel for one segment. Not needed by an optimizer that overrides
        `update_all`.
        """
        raise NotImplementedError

    @torch.no_grad()
    @outside_graphs
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Streams: runs on the current stream of the parameters' device, which backward has made wait
            for the gradients. The host does not wait.
        Capture: safe once state exists.

        Raises:
            OptimizerParameterError, ForeignParameterError, GradientError: a parameter or gradient
                cannot be used; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        launches = self._launches()
        skip, scale = self._skip(launches), self._inverse_of_loss_scale()
        self.update_all(
            [
                Update(
                    segment,
                    segment.state,
                    launch,
                    segment.options.on(segment.device),
                    None if scale is None else scale.to(segment.device),
                    None if skip is None else skip.to(segment.device),
                )
                for segment, launch in launches
            ]
        )
        if skip is not None:
            self.skipped_steps.add_(skip > 0)
        return loss

    def _launches(self) -> list[tuple[Segment, Launch]]:
        """Returns the segments to update, each with its launch. All errors of a step are raised
        here, before anything changes.
        """
        self._require_here()
        self._follow_program()
        settled = [(segment, segment.settle()) for segment in self._segments]
        return [(segment, launch) for segment, launch in settled if launch is not None]

    def update_all(self, updates: Sequence[Update]) -> None:
        """Launches the kernels of a step. Overridden if segments depend on each other."""
        for update in self.with_states(updates):
            self.update(update)

    def with_states(
        self, updates: Sequence[Update], names: Collection[str] | None = None
    ) -> Iterable[Update]:
        """Yields each update when its states with these names (None for all) are on the device."""
        if self._host_streams is None:
            return updates
        return through_chunks(updates, names, self._host_streams)

    def _skip(self, launches: Sequence[tuple[Segment, Launch]]) -> torch.Tensor | None:
        """Returns a device scalar, above zero if the gradients are not finite; None if they were
        not checked.
        """
        # torch's scaler sets the number 0, not a tensor, if it found no gradient.
        of_scaler = [getattr(self, "found_inf", None)]
        verdicts_there = chain(of_scaler, *(launch.verdicts for _, launch in launches))
        found = {id(x): x for x in verdicts_there if isinstance(x, torch.Tensor)}
        if self._check_finite and launches:
            params = [param for segment, _ in launches for param in segment.params]
            checked = find_nonfinite(select(params), launches[0][0].device)
            found[id(checked)] = checked
        verdicts = [verdict.detach().reshape(()).float() for verdict in found.values()]
        return sum(verdicts[1:], verdicts[0]) if verdicts else None

    def _inverse_of_loss_scale(self) -> torch.Tensor | None:
        """Returns the factor on gradients if torch's GradScaler calls the step; else None."""
        grad_scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        return None if grad_scale is None else grad_scale.detach().reshape(()).float().reciprocal()

    @property
    def skipped_steps(self) -> torch.Tensor:
        """Float32 device scalar, updated in place; reading it on the host waits for the device."""
        if self._skipped is None:
            device = self._segments[0].device if self._segments else torch.device("cpu")
            self._skipped = torch.zeros((), dtype=torch.float32, device=device)
        return self._skipped

    @outside_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets gradients, decoupled ones included, to None, or to zero.

        Streams: zeros are written on the current stream. Capture: safe.
        """
        self._follow_program()
        for segment in self._segments:
            segment.forget_gradients(set_to_none=set_to_none)

    # -- for graphs

    def guards(self) -> Hashable:
        """Returns the host state that decides what a step launches: the segments, and the host
        arguments of their launches.
        """
        self._require_here()
        self._follow_program()
        segments = tuple(map(_GUARDS, self._segments))
        groups: list[OptimGroup] = self.param_groups  # type: ignore[assignment]
        constants = tuple([group.constants() for group in groups])
        return segments, constants

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) of all state."""
        yield "skipped steps", self.skipped_steps
        for segment in self._segments:
            if segment.is_allocated:
                yield f"step counts of segment {segment.number}", segment.steps
                for name, flat in segment.state.items():
                    yield f"{name} of segment {segment.number}", flat

    def tables(self) -> list[torch.Tensor]:
        """Returns the device tables of the launches. They are replaced when the layout of a
        gradient shard changes, so a graph has to keep them alive.
        """
        sharded = (each for each in self._segments if isinstance(each, ShardedSegment))
        return [each.table.rows for each in sharded if each.table is not None]
