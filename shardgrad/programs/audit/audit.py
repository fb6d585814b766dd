"""`shardgrad doctor --audit`: a program on several ranks against the same program without its
engine.

[Note: Audit]
The program is a function without arguments, which trains for some steps, and returns the model, or
a dict of tensors and numbers. It runs twice on N ranks: as it is, and without its engine
(`without_engine.py`). What it does wrong by itself, it does in both.

Every rank is a new process; the default process group is made before the function is called.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardgrad.errors import OptionError
from shardgrad.programs.audit.first_difference import (
    Difference,
    Piece,
    Snapshot,
    Trace,
    last_difference,
)
from shardgrad.programs.audit.without_engine import remove_engines
from shardgrad.programs.function_named import function_named

_WRAPPERS = re.compile(r"\b(module|_fsdp_wrapped_module)\.")
_STEPS_TOLD = 10  # both runs keep copies
_TIMEOUT_S = 60.0  # of a collective, and of what the other ranks may take once one has ended


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        ranks: number of ranks.
        values: number of values that the program returned, which are compared.
        difference: the first; None if there is none, or ranks failed.
        failure: what a rank raised, or that none of them made progress; empty if all ended.
    """

    ranks: int
    values: int
    difference: Difference | None = None
    failure: str = ""

    @property
    def passed(self) -> bool:
        """Whether the runs agree."""
        return self.difference is None and not self.failure

    def __str__(self) -> str:
        if self.failure:
            return f"The program runs without its engine, and fails with it: {self.failure}"
        if self.difference is not None:
            what = "do not end as they do without an engine"
            return f"{self.ranks} ranks {what}. First in {self.difference}."
        return f"{self.ranks} ranks end as they do without an engine: {self.values} values agree."


def audit(target: str, *, ranks: int = 2) -> Audit:
    """Runs a program on `ranks` ranks, with its engine and without, and compares.

    Args:
        target: `module:function`; see [Note: Audit]. The module is imported from the current
            directory too.
        ranks: number of processes on this machine, joined by gloo, or by the accelerator's backend
            if there is a device for each.

    Raises:
        OptionError: the target cannot be loaded, returns something else, or fails without its
            engine.
    """
    function_named(target, flag="--audit")
    runs, reference = _run(target, ranks), _run(target, ranks, engine=False)[0]
    if isinstance(reference, _Failed):
        raise OptionError(
            "the program fails without its engine, so there is nothing to compare with",
            expected=f"{target} to run without its engine",
            got=reference.message,
            where=reference.where,
            fix=reference.fix or "use what plain tensors and modules have as well",
        )
    failed = [(rank, run) for rank, run in enumerate(runs) if isinstance(run, _Failed)]
    if failed:
        rank, first = min(failed, key=lambda each: each[1].time_s)
        failure = f"rank {rank}, {first.where}: {first.message}"
        return Audit(ranks, len(reference.returned), failure=failure)
    traces = [run for run in runs if isinstance(run, Trace)]
    return Audit(ranks, len(reference.returned), last_difference(reference, traces))


# -- processes


@dataclass(frozen=True)
class _Failed:
    """A rank that did not end: at which moment, doing what, why."""

    time_s: float
    where: str
    message: str
    fix: str = ""


_processes: Any = multiprocessing.get_context("spawn")


def _run(target: str, world: int, *, engine: bool = True) -> list[Trace | _Failed]:
    """Runs the program in `world` new processes; returns what each left."""
    with tempfile.TemporaryDirectory(prefix="shardgrad-audit-") as folder:
        processes = [
            _processes.Process(
                target=_rank, args=(target, rank, world, folder, engine), daemon=True
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        wait([process.sentinel for process in processes])  # for the first
        end_s = time.monotonic() + _TIMEOUT_S
        for process in processes:
            process.join(max(0.0, end_s - time.monotonic()))
        late = [process.is_alive() for process in processes]
        for process in processes:
            process.kill()
            process.join()
        return [
            _left(Path(folder), rank, None if late[rank] else process.exitcode)
            for rank, process in enumerate(processes)
        ]


def _left(folder: Path, rank: int, status: int | None) -> Trace | _Failed:
    path = folder / f"{rank}.pt"
    if path.exists():
        left: Trace | _Failed = torch.load(path, weights_only=False)  # our own process wrote it
        return left
    message = f"the process ended with status {status}"
    if status is None:
        message = f"it still waited {_TIMEOUT_S:.0f} s after another rank had ended"
    return _Failed(time.monotonic(), "at an unknown place", message)


def _rank(target: str, rank: int, world: int, folder: str, engine: bool) -> None:
    for kind in ("", "LOCAL_"):
        os.environ |= {f"{kind}RANK": str(rank), f"{kind}WORLD_SIZE": str(world)}
    trace, where = Trace(), f"{target.rpartition(':')[2]}()"
    try:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
        store = dist.FileStore(f"{folder}/store", world)  # type: ignore[attr-defined]
        dist.init_process_group(
            _backend(rank, world),
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=_TIMEOUT_S),
        )
        for name in ("init_process_group", "destroy_process_group"):
            setattr(dist, name, _done)  # a script's own calls: the group is there until the end
        if not engine:
            remove_engines()
        params = _note_steps(trace)
        torch.manual_seed(0)
        result: object = function_named(target, flag="--audit")()
        where = "what the program returned"
        if not isinstance(result, nn.Module | Mapping):
            raise OptionError(
                f"{target} returned {type(result).__name__}",
                expected="the model that was trained, or a dict of tensors and numbers",
                where=target,
                fix="return model",
            )
        trace.returned = dict(_returned(result))
        if isinstance(result, nn.Module):
            _name(trace, params, result)
        left: Trace | _Failed = trace
    except BaseException as error:
        if not isinstance(error, OptionError):  # which says itself what to type
            traceback.print_exc()
        message = f"{type(error).__name__}: {getattr(error, 'what', error)}".strip()
        left = _Failed(time.monotonic(), where, message, getattr(error, "fix", None) or "")
    torch.save(left, f"{folder}/{rank}.tmp")
    os.replace(f"{folder}/{rank}.tmp", f"{folder}/{rank}.pt")
    os._exit(isinstance(left, _Failed))  # backends' threads may wait for ranks that have ended


def _note_steps(trace: Trace) -> dict[torch.Tensor, str]:
    """Notes what the first steps of all optimizers find and leave; returns the parameters that they
    have met, with names.
    """
    names: dict[torch.Tensor, str] = {}

    def held(optimizer: Optimizer) -> dict[str, torch.Tensor]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return {names.setdefault(param, f"parameter {len(names)}"): param for param in params}

    def before(optimizer: Optimizer, *_: Any) -> None:
        if len(trace.gradients) < _STEPS_TOLD:
            params = held(optimizer)
            trace.initial = _pieces(params) | trace.initial
            trace.gradients.append(_pieces({name: param.grad for name, param in params.items()}))

    def after(optimizer: Optimizer, *_: Any) -> None:
        if len(trace.parameters) < len(trace.gradients):
            trace.parameters.append(_pieces(held(optimizer)))

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    return names


def _name(trace: Trace, params: Mapping[torch.Tensor, str], model: nn.Module) -> None:
    """Names what was noted of parameters as the model does."""
    names = {
        params[param]: _WRAPPERS.sub("", name)
        for name, param in model.named_parameters()
        if param in params
    }
    steps = (trace.initial, *trace.gradients, *trace.parameters)
    for snapshot in steps:
        named = {names.get(name, name): piece for name, piece in snapshot.items()}
        snapshot.clear()
        snapshot.update(named)


def _done(*_: Any, **__: Any) -> None:
    """Stands in for what the audit does itself."""


def _backend(rank: int, world: int) -> str:
    """Chooses gloo, or the accelerator's backend if each rank has a device, which becomes the
    current one.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or torch.accelerator.device_count() < world:
        return "gloo"
    torch.accelerator.set_device_index(rank)
    return f"cpu:gloo,{found.type}:{dist.get_default_backend_for_device(found)}"


def _returned(result: Any, name: str = "") -> Iterator[tuple[str, Piece]]:
    """Yields what a program returned as whole tensors, by name; a collective."""
    if isinstance(result, nn.Module):
        with ExitStack() as gathered:
            _gather(result, gathered)
            for inside, param in result.named_parameters():
                # As the model itself names it; engines' wrappers add to that.
                yield from _returned(param, _WRAPPERS.sub("", inside))
    elif isinstance(result, Mapping):
        for key, value in result.items():
            yield from _returned(value, f"{name}.{key}" if name else str(key))
    elif isinstance(result, torch.Tensor):
        whole = result.detach()
        yield name, _piece(whole.full_tensor() if isinstance(whole, DTensor) else whole)
    elif isinstance(result, int | float):
        yield name, _piece(torch.tensor(float(result)))


def _gather(model: nn.Module, until: ExitStack) -> None:
    """Makes a model's parameters whole or `DTensor`s, as its engine does."""
    modules = list(model.modules())
    for module in modules:
        if callable(reshard := getattr(module, "reshard", None)):
            reshard()
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        until.enter_context(FullyShardedDataParallel.summon_full_params(model))
    if any(hasattr(param, "ds_id") for param in model.parameters()):
        deepspeed: Any = import_module("deepspeed")
        until.enter_context(deepspeed.zero.GatheredParameters(list(model.parameters())))


def _pieces(tensors: Mapping[str, torch.Tensor | None]) -> Snapshot:
    return {
        name: _piece(tensor.detach()) if tensor is not None and _has_memory(tensor) else None
        for name, tensor in tensors.items()
    }


def _has_memory(tensor: torch.Tensor) -> bool:
    """Returns False of what an engine has freed, as a parameter that it has replaced by shards."""
    if isinstance(tensor, DTensor) or tensor.layout is not torch.strided:
        return True
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0


def _piece(tensor: torch.Tensor) -> Piece:
    if not isinstance(tensor, DTensor):
        values = tensor.to_dense().cpu().clone()  # of a sparse gradient
        return Piece(values, tuple(tensor.shape), (0,) * tensor.dim())
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Piece(tensor.to_local().cpu().clone(), tuple(tensor.shape), tuple(offset))
