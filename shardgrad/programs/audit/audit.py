"""`shardgrad doctor --audit`: a program on several ranks against the same program without its
engine.

[Note: Audit]
The program is a function without arguments, which trains for some steps, and returns the model, or
a dict of tensors and numbers. It runs twice on N ranks: as it is, and without its engine
(`without_engine.py`). What it does wrong by itself, it does in both. What it returns is compared.

Every rank is a new process; the default process group is made before the function is called.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessException, start_processes

from shardgrad.errors import OptionError
from shardgrad.programs.audit.without_engine import remove_engines
from shardgrad.programs.function_named import function_named
from shardgrad.programs.text import listed

_WRAPPERS = re.compile(r"\b(module|_fsdp_wrapped_module)\.")
_START = "spawn"  # how processes are started
_TIMEOUT_S = 60.0  # of a collective, and of what other ranks may take once one has ended

# What a program returned, whole and on the host, by name; what cannot be compared is described.
_Values = dict[str, torch.Tensor | str]


def audit(target: str, *, ranks: int) -> tuple[bool, str]:
    """Runs a program on `ranks` ranks, with its engine and without, and compares.

    Args:
        target: `module:function`; see [Note: Audit]. The module is imported from the current
            directory too.
        ranks: number of processes on this machine, joined by gloo, or by the accelerator's backend
            if there is a device for each.

    Returns:
        Whether the runs agree, and a sentence.

    Raises:
        OptionError: the target cannot be loaded, returns something else, or fails without its
            engine.
    """
    runs, failure = _run(target, ranks)
    references, why = _run(target, ranks, engine=False)
    if why:
        raise OptionError(
            "the program fails without its engine, so there is nothing to compare with",
            expected=f"{target} to run without its engine",
            got=why,
            where=f"{target.rpartition(':')[2]}()",
            fix="use only methods that plain tensors and modules have too",
        )
    reference = references[0]
    odd = [kind for kind in reference.values() if isinstance(kind, str)]
    if odd or not reference:
        raise OptionError(
            f"what {target} returned cannot be compared",
            expected="the model that was trained, or a dict of tensors and numbers",
            got=listed(odd or ["nothing"]),
            fix="return model",
        )
    if failure:
        return False, f"The program runs without its engine but fails with it: {failure}"
    difference = _difference(references, runs)
    if difference:
        what = "do not reproduce the run without an engine"
        return False, f"{ranks} ranks {what}. First difference: {difference}."
    return (
        True,
        f"{ranks} ranks reproduce the run without an engine: {len(reference)} values agree.",
    )


# -- comparing


def _difference(expected: Sequence[_Values], ranks: Sequence[_Values]) -> str:
    """Returns the first value that is not on each rank what it is there without an engine, and how
    it differs. A loss, for example, is another on each rank.

    Two tensors agree if the norm of their difference is below the root of the dtype's precision
    times the norm of the expected one, that is in half of their digits: sums over ranks have
    another order, and optimizers amplify.
    """
    # Without an engine, layers are averaged in this order: a mistake of both runs would agree.
    if any(list(values) != list(expected[0]) for values in expected):
        return "the order or the names of the values, which differ between ranks"
    names = dict.fromkeys(name for values in (*expected, *ranks) for name in values)
    differing = {}
    for name in names:
        words = _how(
            [(own.get(name), held.get(name)) for own, held in zip(expected, ranks, strict=True)]
        )
        if words:
            differing[name] = words
    if not differing:
        return ""
    name, words = next(iter(differing.items()))
    more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
    return f"{name}{more}: {words}"


def _how(pairs: Sequence[tuple[torch.Tensor | str | None, torch.Tensor | str | None]]) -> str:
    """Returns how what ranks have of a value differs from what each is expected to have, if it
    does.
    """
    tensors = []
    for expected, held in pairs:
        if not (isinstance(expected, torch.Tensor) and isinstance(held, torch.Tensor)):
            return "it does not exist on every rank in both runs"
        if held.shape != expected.shape:
            return f"it has shape {tuple(held.shape)} instead of {tuple(expected.shape)}"
        tensors.append((expected, held))
    off = max(_off(held, expected) for expected, held in tensors)
    if not off:
        return ""
    how = f"off by {off:.2%}" if off < math.inf else "zero or not finite in one of the runs"
    first_expected, first_held = tensors[0]
    if any(_off(expected, first_expected) for expected, _ in tensors):
        return f"it is {how}"
    if any(_off(held, first_held) for _, held in tensors):
        return f"it is {how}, and ranks have different values, as when gradients are not averaged"
    return f"it is {how}, equally on all ranks"


def _off(values: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns by how much of its norm a value is off; 0 if that is within the precision, infinity
    if other elements are finite, or only one is zero. Those that are not finite are not compared.
    """
    dtypes = [
        each.dtype for each in (values, expected) if each.is_floating_point() or each.is_complex()
    ]
    precision = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0) ** 0.5
    ours, theirs = values.to(torch.complex128), expected.to(torch.complex128)
    is_finite = theirs.isfinite()
    if not torch.equal(ours.isfinite(), is_finite):
        return math.inf
    off, norm = (ours - theirs)[is_finite].norm(), theirs[is_finite].norm()
    return 0.0 if off <= precision * norm else float(off / norm)


# -- processes


def _run(target: str, world: int, *, engine: bool = True) -> tuple[list[_Values], str]:
    """Runs the program in `world` new processes.

    Returns:
        What each returned, and why the first failed that did.
    """
    name = f"{target.rpartition(':')[2]}()"
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # says whom it ends
    with tempfile.TemporaryDirectory(prefix="shardgrad-audit-") as folder:
        ranks = start_processes(
            _rank,
            (target, world, folder, engine),
            world,
            join=False,
            daemon=True,
            start_method=_START,
        )
        try:
            left, limit_s = world, None
            while not ranks.join(limit_s):
                if len(ranks.sentinels) == left:
                    waited = f"{left} of {world} ranks still waited after the others ended"
                    return [], f"at an unknown place in {name}: {waited}"
                left, limit_s = len(ranks.sentinels), _TIMEOUT_S
        except ProcessException as error:
            print(error.msg, file=sys.stderr)
            # A traceback ends with the error; what an error says more is indented, too.
            last = error.msg.rpartition("Traceback (most recent call last):")[2].splitlines()
            first = next(line for line in last if line and not line[0].isspace())
            return [], f"rank {error.error_index}, {name}: {first}"
        finally:
            for process in ranks.processes:
                process.kill()
        # Our own processes wrote these.
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(world)], ""


def _rank(rank: int, target: str, world: int, folder: str, engine: bool) -> None:
    for kind in ("", "LOCAL_"):
        os.environ |= {f"{kind}RANK": str(rank), f"{kind}WORLD_SIZE": str(world)}
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    store = dist.FileStore(f"{folder}/store", world)  # type: ignore[attr-defined]
    dist.init_process_group(
        _backend(rank, world),
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    # A program without collectives may end here before another rank has connected to it.
    dist.all_reduce(torch.zeros(1))
    for name in ("init_process_group", "destroy_process_group"):
        setattr(dist, name, _done)  # a script's own calls: the group is there until the end
    if not engine:
        remove_engines()
    torch.manual_seed(0)
    result: object = function_named(target, flag="--audit")()
    torch.save(dict(_returned(result)), f"{folder}/{rank}")
    os._exit(0)  # backends' threads may wait for ranks that have ended


def _done(*_: Any, **__: Any) -> None:
    """Stands in for what the audit does itself."""


def _backend(rank: int, world: int) -> str:
    """Chooses gloo, or the accelerator's backend if each rank has a device, which becomes the
    current one.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or torch.accelerator.device_count() < world:
        return "gloo"
    torch.accelerator.set_device_index(rank)
    return f"cpu:gloo,{found.type}:{dist.get_default_backend_for_device(found)}"


def _returned(result: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor | str]]:
    """Yields what a program returned as whole tensors, by name; a collective."""
    if isinstance(result, nn.Module):
        with ExitStack() as gathered:
            _gather(result, gathered)
            # As the model itself names them; engines' wrappers add to that.
            params = {_WRAPPERS.sub("", own): param for own, param in result.named_parameters()}
            yield from _returned(params, name)
    elif isinstance(result, Mapping):
        for key, value in result.items():
            yield from _returned(value, f"{name}.{key}" if name else str(key))
    elif isinstance(result, torch.Tensor):
        whole = result.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        yield name, whole.to_dense().cpu().clone()  # it may be gathered for now only
    elif isinstance(result, int | float):
        yield name, torch.tensor(float(result))
    elif result is not None:  # the gradient of a parameter that had none
        yield name, f"{type(result).__name__} {name}".rstrip()


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
