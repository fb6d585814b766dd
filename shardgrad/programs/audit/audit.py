"""`shardgrad doctor --audit`: a program on several ranks against the same program without its
engine, or on one.

[Note: Audit]
The program is a function without arguments, of one of two kinds.

1. It trains for some steps, and returns the model, or a dict of tensors and numbers. It runs twice
on N ranks: as it is, and without its engine (`without_engine.py`).

2. It returns a model, its optimizer and a step:

    def build():
        torch.manual_seed(0)
        model = fully_shard(Net())
        optimizer = torch.optim.AdamW(model.parameters())

        def step(index: int, parts: list[int]) -> None:
            x = torch.cat([batch(index, part) for part in parts])
            loss(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

On N ranks, rank r trains on part r of each batch: `parts` is `[r]`. On one rank, `parts` is all of
them. For a loss that is a mean and parts of one size, both should give the same gradients and
parameters: this finds what a program does wrong by itself, too.

Every rank is a new process; the default process group is made before the function is called.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    first_difference,
    last_difference,
)
from shardgrad.programs.audit.without_engine import remove_engines
from shardgrad.programs.function_named import function_named

Step = Callable[[int, list[int]], object]

_WRAPPERS = re.compile(r"\b(module|_fsdp_wrapped_module)\.")
_STEPS_TOLD = 10  # of a program that makes its steps by itself: both runs keep copies
_TIMEOUT_S = 60.0  # of a collective, and of what the other ranks may take once one has ended


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        ranks: number of ranks.
        steps: number of steps; 0 if the program made them by itself.
        parameters: number of parameters compared, or of what the program returned.
        difference: the first; None if there is none, or ranks failed.
        failure: what a rank raised, or that none of them made progress; empty if all steps ran.
    """

    ranks: int
    steps: int
    parameters: int
    difference: Difference | None = None
    failure: str = ""

    @property
    def passed(self) -> bool:
        """Whether the runs agree."""
        return self.difference is None and not self.failure

    def __str__(self) -> str:
        if self.failure:
            return f"The program runs on one rank and fails on {self.ranks}: {self.failure}"
        if self.difference is not None:
            what = "depart from one" if self.steps else "do not end as they do without an engine"
            return f"{self.ranks} ranks {what}. First in {self.difference}."
        if not self.steps:
            return (
                f"{self.ranks} ranks end as they do without an engine: {self.parameters} values "
                "agree."
            )
        return (
            f"{self.ranks} ranks train as one does: gradients and values of {self.parameters} "
            f"parameters agree over {self.steps} steps."
        )


def audit(target: str, *, ranks: int = 2, steps: int = 3) -> Audit:
    """Runs a program on `ranks` ranks, and without its engine or on one rank, and compares.

    Args:
        target: `module:function`; see [Note: Audit]. The module is imported from the current
            directory too.
        ranks: number of processes on this machine, joined by gloo, or by the accelerator's backend
            if there is a device for each.
        steps: number of steps, of a program that returns one.

    Raises:
        OptionError: the target cannot be loaded, returns something else, or fails without its
            engine or on one rank.
    """
    function_named(target, flag="--audit")
    everything = list(range(ranks))
    own = [[rank] for rank in everything]
    runs = _run(target, ranks, steps, own)
    traces = [run for run in runs if isinstance(run, Trace)]
    trains_itself = any(trace.returned for trace in traces)
    if trains_itself and len(traces) == ranks:
        reference = _run(target, ranks, steps, own, engine=False)[0]
        how, fix = "without its engine", "use what plain tensors and modules have as well"
    else:
        (reference,) = _run(target, 1, steps, [everything])
        how, fix = "on one rank", f"make step(0, {everything}) run in one process first"
    if isinstance(reference, _Failed):
        raise OptionError(
            f"the program fails {how}, so there is nothing to compare with",
            expected=f"{target} to run {how}"
            + ("" if trains_itself else f" with parts {everything}"),
            got=reference.message,
            where=reference.where,
            fix=reference.fix or fix,
        )
    failed = [(rank, run) for rank, run in enumerate(runs) if isinstance(run, _Failed)]
    if failed:
        rank, first = min(failed, key=lambda each: each[1].time_s)
        return Audit(
            ranks,
            steps,
            len(reference.initial),
            failure=f"rank {rank}, {first.where}: {first.message}",
        )
    if trains_itself:
        return Audit(ranks, 0, len(reference.returned), last_difference(reference, traces))

    def alone() -> Sequence[Trace]:
        runs = [_run(target, 1, 1, [part])[0] for part in own]
        return [run for run in runs if isinstance(run, Trace)]

    return Audit(ranks, steps, len(reference.initial), first_difference(reference, traces, alone))


# -- processes


@dataclass(frozen=True)
class _Failed:
    """A rank that did not end its steps: at which moment, doing what, why."""

    time_s: float
    where: str
    message: str
    fix: str = ""


_processes: Any = multiprocessing.get_context("spawn")


def _run(
    target: str, world: int, steps: int, parts: Sequence[list[int]], *, engine: bool = True
) -> list[Trace | _Failed]:
    """Runs the program in `world` new processes; returns what each left."""
    with tempfile.TemporaryDirectory(prefix="shardgrad-audit-") as folder:
        processes = [
            _processes.Process(
                target=_rank,
                args=(target, rank, world, steps, parts[rank], folder, engine),
                daemon=True,
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


def _rank(
    target: str,
    rank: int,
    world: int,
    steps: int,
    parts: list[int],
    folder: str,
    engine: bool = True,
) -> None:
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
        built: object = function_named(target, flag="--audit")()
        if isinstance(built, nn.Module | Mapping):
            where = "what the program returned"
            trace.returned = dict(_returned(built))
            if isinstance(built, nn.Module):
                _name(trace, params, built)
        else:
            model, optimizer, step = _checked(built, target)
            trace = Trace()
            found: list[Snapshot] = []
            optimizer.register_step_pre_hook(
                lambda *_: found.append(_snapshot(model, gradients=True))
            )
            trace.initial = _snapshot(model)
            for index in range(steps):
                where = f"step {index}"
                step(index, parts)
                trace.gradients.append(found[0] if found else None)
                trace.parameters.append(_snapshot(model))
                found.clear()
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
    for snapshot in filter(None, steps):
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


def _checked(built: Any, target: str) -> tuple[nn.Module, Optimizer, Step]:
    """Checks what the program's function returned.

    Raises:
        OptionError: it is not a model, an optimizer and a step.
    """
    if isinstance(built, tuple) and len(built) == 3:
        model, optimizer, step = built
        if isinstance(model, nn.Module) and isinstance(optimizer, Optimizer) and callable(step):
            return model, optimizer, step
    kinds = [type(each).__name__ for each in (built if isinstance(built, tuple) else [built])]
    got = f"({', '.join(kinds)})" if isinstance(built, tuple) else kinds[0]
    raise OptionError(
        f"{target} returned {got}",
        expected="(model, optimizer, step): an nn.Module, a torch Optimizer, a function of (index, "
        "parts); or the model that was trained, or a dict of values",
        got=got,
        where=target,
        fix="return model, optimizer, step",
    )


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


def _snapshot(model: nn.Module, *, gradients: bool = False) -> Snapshot:
    """Copies what this rank holds of parameters, or of their gradients; without a collective."""
    params = model.named_parameters()
    return _pieces({name: param.grad if gradients else param for name, param in params})


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
