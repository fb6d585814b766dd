"""FSDP2's private names that other parts of torch use, as thin views of this engine.

Pipeline schedules accumulate without reducing and, when a stage has seen its last micro-batch, ask
each of its units to reduce: `fully_shard.state(module)._state_ctx.all_states`, their
`_fsdp_param_groups`, `post_backward()` and `_root_post_backward_final_callback()`; from torch 2.15
on, the public methods of `backward_finalization.py`. torch's `FSDPMemTracker` looks at parameters
under `fsdp_params`, and wraps the functions that run before and after a unit's forward and
backward. Views hold no state.

Source: torch/distributed/pipelining/stage.py (`perform_reduce_grad`), and
torch/distributed/_tools/fsdp2_mem_tracker.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.utils.hooks import RemovableHandle

from shardgrad.engine.lazy_init import lazy_init
from shardgrad.engine.param_group import FSDPParam, ParamGroup
from shardgrad.engine.unit import Unit
from shardgrad.errors import unsupported


class _ParamView:
    """Stands for FSDP2's `FSDPParam`."""

    def __init__(self, managed: FSDPParam) -> None:
        self._managed = managed

    @property
    def sharded_param(self) -> nn.Parameter:
        """The sharded parameter."""
        return self._managed.sharded

    @property
    def unsharded_param(self) -> nn.Parameter:
        """The unsharded parameter, which exists after the first unshard."""
        return self._managed.require_unsharded()

    @property
    def _unsharded_param(self) -> nn.Parameter:
        return self._managed.require_unsharded()


class _GroupView:
    """Stands for FSDP2's `FSDPParamGroup`."""

    def __init__(self, unit: Unit, group: ParamGroup) -> None:
        self._unit = unit
        self._group = group

    @property
    def fsdp_params(self) -> list[_ParamView]:
        """One view per parameter."""
        return [_ParamView(managed) for managed in self._group.params]

    @property
    def mesh_info(self) -> FSDPMeshInfo:
        """The unit's mesh, from which torch creates the values of `post_forward_mesh_info`."""
        mesh = self._unit.mesh.mesh
        if mesh.ndim == 1:
            return FSDPMeshInfo(mesh, shard_mesh_dim=0)
        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    @property
    def post_forward_mesh_info(self) -> FSDPMeshInfo | None:
        """None if parameters stay unsharded after forward; any other value makes them reshard."""
        return None if self._unit.reshard_after_forward is False else self.mesh_info

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, mesh_info: FSDPMeshInfo | None) -> None:
        is_kept = self._unit.reshard_after_forward is False
        # A unit that reshards keeps doing it as before, perhaps to fewer ranks.
        if self._unit.is_root or mesh_info is None or is_kept:
            self._unit.set_reshard_after_forward(mesh_info is not None)

    @property
    def reshard_after_backward(self) -> bool:
        """What `set_reshard_after_backward` sets; tiled layers turn it off between their tiles."""
        return self._unit.reshard_after_backward

    @reshard_after_backward.setter
    def reshard_after_backward(self, flag: bool) -> None:
        self._unit.reshard_after_backward = flag

    @property
    def pre_backward(self) -> Callable[..., None]:
        """The function that runs before the unit's backward; tools may assign a wrapper of it."""
        return self._unit.pre_backward

    @pre_backward.setter
    def pre_backward(self, function: Callable[..., None]) -> None:
        self._unit.pre_backward = function  # type: ignore[method-assign]

    @property
    def post_backward(self) -> Callable[..., None]:
        """The function that runs after the unit's backward; tools may assign a wrapper of it.

        If a schedule calls it after a backward, it reduces nothing. The final callback reduces
        pending gradients, in one order for all ranks.
        """
        return self._unit.post_backward

    @post_backward.setter
    def post_backward(self, function: Callable[..., None]) -> None:
        self._unit.post_backward = function  # type: ignore[method-assign]


class StateView:
    """Stands for FSDP2's `FSDPState`, and for the `FSDPStateContext` that a root's units share: a
    view of one unit.

    Args:
        unit: the unit.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def _lazy_init(self) -> None:
        """Runs lazy init as the first forward does; a collective if there is no root yet."""
        lazy_init(self._unit)

    @property
    def _state_ctx(self) -> StateView:
        return self

    @property
    def all_states(self) -> list[StateView]:
        """One view per unit under the root, the root first."""
        views = (state_of(unit.modules[0]) for unit in lazy_init(self._unit).units)
        return [view for view in views if view is not None]

    @property
    def _comm_ctx(self) -> object:
        """The state that `share_comm_ctx` shares; pipeline schedules compare its identity."""
        return lazy_init(self._unit).comm_ctx.reduce_ring

    @property
    def _fsdp_param_groups(self) -> list[_GroupView]:
        return [_GroupView(self._unit, group) for group in self._unit.groups]

    @property
    def _fsdp_param_group(self) -> _GroupView | None:
        groups = self._fsdp_param_groups
        return groups[0] if groups else None

    @property
    def _modules(self) -> tuple[nn.Module, ...]:
        return self._unit.modules

    @property
    def _pre_forward(self) -> Callable[..., Any]:
        return self._unit.pre_forward

    @property
    def _post_forward(self) -> Callable[..., Any]:
        return self._unit.post_forward

    @property
    def _pre_forward_hook_handle(self) -> RemovableHandle:
        return self._hooks()[0]

    @_pre_forward_hook_handle.setter
    def _pre_forward_hook_handle(self, handle: RemovableHandle) -> None:
        self._hooks()[0] = handle

    @property
    def _post_forward_hook_handle(self) -> RemovableHandle:
        return self._hooks()[1]

    @_post_forward_hook_handle.setter
    def _post_forward_hook_handle(self, handle: RemovableHandle) -> None:
        self._hooks()[1] = handle

    def _hooks(self) -> list[RemovableHandle]:
        if len(self._unit.hooks) > 1:
            raise unsupported(
                f"torch's FSDPMemTracker over {self._unit.name or 'root'!r}, a unit of several "
                "modules",
                instead="a unit for each module: the tracker expects the hooks of one module",
            )
        return self._unit.hooks[0]

    def _root_post_backward_final_callback(self) -> None:
        """Reduces pending gradients of earlier micro-batches and waits for them. A collective."""
        from shardgrad.compat.backward_finalization import end_backward

        end_backward(lazy_init(self._unit))


# The key under which torch's `contract` stores states.
_FUNCTION = getattr(torch_fsdp.fully_shard, "__wrapped__", torch_fsdp.fully_shard)


def show_to_torch(unit: Unit) -> None:
    """Makes `torch.distributed.fsdp.fully_shard.state(module)` return a view of the
    module's unit.
    """
    view = StateView(unit)
    for module in unit.modules:
        module.__dict__.setdefault(STATE_KEY, {})[_FUNCTION] = view


def state_of(module: nn.Module) -> StateView | None:
    """Returns the view of a sharded module's unit, the same object each time, or None."""
    view: StateView | None = module.__dict__.get(STATE_KEY, {}).get(_FUNCTION)
    return view
