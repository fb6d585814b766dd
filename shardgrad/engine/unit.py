"""A unit: what one call of `fully_shard` made of some modules, with its groups and switches.

What runs before and after its forward and backward is in `hooks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.grad_group import GradGroup
from shardgrad.engine.param import Owner
from shardgrad.engine.param_group import ParamGroup, ParamState
from shardgrad.sharding.mesh import DataParallelMesh

__all__ = ["UNIT", "Guest", "Unit", "attach_unit", "unit_of", "units_under"]

# Where a module keeps its unit.
UNIT = "_shardgrad_unit"


@dataclass
class Guest:
    """A parameter registered in unit `unit_name` that `owner_name` claimed; a common ancestor takes
    it.
    """

    name: str
    param: nn.Parameter
    owners: list[Owner]
    owner_name: str
    unit_name: str


class Unit:
    """One call of `fully_shard`: its modules, groups and switches.

    Attributes:
        context: the `RootContext` that all units under one root share; None before `lazy_init`,
            which the first forward calls.
        reshard_after_forward: None is True, except for the root and, on the CPU, what backward
            needs first.
        reshard_after_backward: False keeps parameters unsharded between micro-batches.
        unshard_in_backward: False skips the backward all-gather.
        forward_prefetch, backward_prefetch: units to unshard early instead of the next one in that
            direction.
        max_reductions: reductions that may be in flight; None for the default.
        partner: whose streams and staging are to be shared once this unit is a root.
        held: the program has unsharded them, and waited, or no output will say when backward comes:
            a forward with gradients leaves them so.
        is_called_around: a call of one of its parts runs, which may call forward and then goes on
            with the parameters.
        before_outermost_forward: called before an outermost forward with gradients; may refuse it.
        accept: called once ranks have agreed on the model, with all units; a collective; may refuse
            them.
        next_backward: the unit whose backward is expected after the one that runs.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParamGroup],
        mesh: DataParallelMesh,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        self.name = ""
        self.modules = tuple(modules)
        self.mesh = mesh
        self.mp_policy = mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.forward_prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] = []
        self.max_reductions: int | None = None
        self.partner: CommContext | None = None
        self.held = False
        self.is_called_around = False
        self.context: Any = None
        self.guests: list[Guest] = []
        self.before_outermost_forward: Callable[[], None] = lambda: None
        self.accept: Callable[[Sequence[Unit]], None] = lambda units: None
        self.groups: list[ParamGroup] = []
        self.grad_groups: list[GradGroup] = []
        self.set_groups(groups)
        self.outstanding = 0
        self.outstanding_before = 0  # the latest forward
        # Calls whose backward has begun and not ended; several if a module calls itself.
        self.open = 0
        self.next_backward: Unit | None = None
        self.waiting_modules: set[nn.Module] = set()
        # Forwards that have not come to their end, the innermost last.
        self.running: list[nn.Module] = []

    def set_groups(self, groups: Sequence[ParamGroup]) -> None:
        """Replaces the unit's groups and keeps what the program has set so far; only while
        building.
        """
        self.groups = list(groups)
        earlier, self.grad_groups = self.grad_groups, [GradGroup(group) for group in groups]
        # Whatever the program has set so far, such as `set_requires_gradient_sync(False)`, holds
        # for the new groups as well.
        for grads in self.grad_groups if earlier else ():
            grads.follow(earlier[0])
        self._group_of = {owner: g for g in groups for p in g.params for owner, _ in p.owners}

    def set_reshard_after_forward(self, flag: bool) -> None:
        """Changes the flag; a reshard to fewer ranks, asked for by an int, is given up."""
        self.reshard_after_forward = flag
        for group in self.groups:
            group.reshard_fully_after_forward()

    def group_owning(self, module: nn.Module) -> ParamGroup | None:
        """Returns a group that owns a parameter `module` registers, or None."""
        return self._group_of.get(module)

    @property
    def is_root(self) -> bool:
        """True once this unit has been found to be the outermost one."""
        return self.context is not None and self.context.root is self

    @property
    def is_unsharded(self) -> bool:
        """True if modules register the unsharded parameters of every group."""
        return all(group.state is ParamState.UNSHARDED for group in self.groups)

    # -- unshard and reshard

    def unshard(self, comm_ctx: CommContext) -> None:
        """Starts the all-gathers of parameters that are not unsharded."""
        for group in self.groups:
            group.unshard(comm_ctx)

    def wait_for_unshard(self, comm_ctx: CommContext) -> None:
        """Ends them; parameters are unsharded for the current stream afterwards."""
        stream = comm_ctx.streams.current()
        for group, grads in zip(self.groups, self.grad_groups, strict=True):
            group.wait_for_unshard()
            grads.unsharded_for(stream)

    def reshard(self, *, drop_kept: bool = False) -> None:
        """Reshards every group; see `ParamGroup.reshard`."""
        self.held = self.is_called_around = False
        for group in self.groups:
            group.reshard(drop_kept=drop_kept)

    def show_sharded(self) -> None:
        """Registers the sharded parameters of every group, and keeps what is gathered."""
        for group in self.groups:
            group.show_sharded()

    def refresh(self) -> bool:
        """Takes over, before an outermost forward, what changed; True if the current stream wrote
        shards.
        """
        replaced, self.outstanding_before = False, self.outstanding
        for group in self.groups:
            # A few comparisons in C for each group: a steady step pays little for what rarely
            # happens, weights that were loaded, replaced or moved. Who adopts them is imported
            # then.
            if group.shard.is_meta or not group.registration.holds():
                from shardgrad.engine.replaced_params import adopt, require_data

                replaced |= adopt(group)
                require_data(group)
            group.reshard_if_stale()
        self.refresh_trainable()
        return replaced

    def refresh_trainable(self) -> None:
        """Takes over what the program has frozen or thawed."""
        for group, grads in zip(self.groups, self.grad_groups, strict=True):
            if group.carry_requires_grad() is not grads.trainable or grads.holds_frozen:
                grads.refresh_trainable()

    def finish_backward(self, *, is_read_again: bool) -> None:
        """Frees, at the end of a backward, unsharded parameters that are not to be kept."""
        self.outstanding = self.open = 0
        self.next_backward = None
        if self.reshard_after_backward:
            self.show_sharded() if is_read_again else self.reshard()

    def abandon_forward(self) -> None:
        """Forgets a forward that failed, and the calls in it: parameters are resharded."""
        # Calls of the forward that failed get no backward. Those of forwards before it, whose
        # losses are still held, do.
        self.outstanding = min(self.outstanding, self.outstanding_before)
        self.waiting_modules.clear()
        self.running.clear()
        self.reshard(drop_kept=True)


def unit_of(module: nn.Module) -> Unit | None:
    """Returns the unit that `fully_shard` made of a module, or None."""
    unit: Unit | None = module.__dict__.get(UNIT)
    return unit


def attach_unit(unit: Unit) -> None:
    """Makes `unit_of` find it."""
    for module in unit.modules:
        # Past `__setattr__`, which a module may have its own of.
        module.__dict__[UNIT] = unit


def units_under(module: nn.Module) -> list[Unit]:
    """Returns the units in a module tree in traversal order, the module's own first; each once."""
    found: dict[Unit, None] = {}
    seen: set[Any] = {None}  # also a child, of a module that was assigned None
    # By hand, for every micro-batch: `modules()` takes five times as long.
    left: list[Any] = [module]
    while left:
        child = left.pop()
        if child not in seen:
            seen.add(child)
            if UNIT in child.__dict__:
                found[child.__dict__[UNIT]] = None
            left += reversed(child._modules.values())
    return list(found)
