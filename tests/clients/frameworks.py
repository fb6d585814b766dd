"""Programs that train with the parts of frameworks that call FSDP2: how they shard, load, clip,
offload and save.

The frameworks themselves start clusters and rollout engines. What is here needs no more than their
sources: `python -m tests.clients --sources FOLDER`, where `pip install --no-deps --target FOLDER`
has put them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.clients.programs import shard
from tests.support.parity import Tensors
from tests.support.under_patch import shared_folder, whole


def alone(name: str, *packages: str) -> ModuleType:
    """Imports a module of a framework, without what its packages, or others, import themselves."""
    for package in packages:
        _without_its_imports(package)
    _without_its_imports(name.rpartition(".")[0])
    return importlib.import_module(name)


def _without_its_imports(name: str) -> None:
    path = None
    parents = name.split(".")
    for depth in range(1, len(parents) + 1):
        package = ".".join(parents[:depth])
        if package not in sys.modules:
            found = PathFinder.find_spec(package, path)
            assert found is not None, f"{package} is not installed"
            assert found.submodule_search_locations is not None
            sys.modules[package] = ModuleType(package)
            sys.modules[package].__path__ = [*found.submodule_search_locations]
        path = sys.modules[package].__path__


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Callable[..., Any] = torch.nn.utils.clip_grad_norm_,
    *,
    first: int = 0,
    steps: int = 2,
) -> Tensors:
    from tests.support import tiny_models

    notes: Tensors = {}
    for step in range(first, first + steps):
        loss = model(**tiny_models.batch(model, step)).loss
        loss.backward()
        norm = clip(model.parameters(), 1.0)
        notes[f"norm {step}"] = whole(norm) if isinstance(norm, Tensor) else torch.tensor(norm)
        optimizer.step()
        optimizer.zero_grad()
        notes[f"loss {step}"] = loss.detach()
    return notes


@contextmanager
def cuda_is_the_cpu() -> Iterator[None]:
    """For code that asks `torch.cuda` which device is current."""
    with mock.patch.object(torch.cuda, "current_device", return_value="cpu"):
        yield


def llama_and_its_state() -> tuple[nn.Module, dict[str, Tensor]]:
    from tests.support import tiny_models

    model = tiny_models.llama()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return model, state if dist.get_rank() == 0 else {}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


# -- reinforcement learning


def with_verl() -> tuple[nn.Module, Tensors]:
    """The actor of its workers: sharded, loaded, trained, offloaded between steps, restored."""
    verl = alone("verl.utils.fsdp_utils")
    model, state = llama_and_its_state()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True
        ),
        "offload_policy": None,
        "reshard_after_forward": True,
        "shard_placement_fn": verl.get_shard_placement_fn(fsdp_size=2),
    }
    with cuda_is_the_cpu():
        verl.apply_fsdp2(model, options, {"forward_prefetch": True})
        verl.fsdp2_load_full_state_dict(model, state, mesh, None)
        optimizer = adamw(model)
        notes = trained(model, optimizer, verl.fsdp2_clip_grad_norm_)
        verl.offload_fsdp2_model_to_cpu(model)
        verl.offload_fsdp_optimizer(optimizer)
        verl.load_fsdp2_model_to_gpu(model)
        verl.load_fsdp_optimizer(optimizer, "cpu")
        verl.set_reshard_after_forward(model, False)
        notes |= trained(model, optimizer, verl.fsdp2_clip_grad_norm_, first=2)
        kept, spec = verl.fsdp2_sharded_save_to_cpu(model)
        kept = {name: (tensor.clone(), its) for name, (tensor, its) in kept.items()}
        notes |= trained(model, optimizer, verl.fsdp2_clip_grad_norm_, first=4)
        verl.fsdp2_sharded_load_from_cpu(model, kept, spec)
        return model, notes | trained(model, optimizer, verl.fsdp2_clip_grad_norm_, first=6)


def with_skyrl() -> tuple[nn.Module, Tensors]:
    # Its configuration needs Python 3.12, and is only a type here.
    sys.modules.setdefault("skyrl.train.config", SimpleNamespace(FSDPConfig=object))
    skyrl = alone("skyrl.backends.skyrl_train.distributed.fsdp_utils", "skyrl.train")
    model, state = llama_and_its_state()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True
    )
    options = {"mp_policy": policy, "offload_policy": None, "reshard_after_forward": True}
    options["mesh"] = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    skyrl.apply_fsdp2(model, options, SimpleNamespace(wrap_policy={}))
    # It sends buffers that no state has through "cuda"; all ranks have made them here.
    with cuda_is_the_cpu(), mock.patch.object(skyrl, "_sync_non_persistent_buffers"):
        skyrl.fsdp2_load_full_state_dict(model, state)
        optimizer = adamw(model)
        notes = trained(model, optimizer, skyrl.fsdp2_clip_grad_norm_)
        skyrl.offload_fsdp2_model_to_cpu(model)
        skyrl.offload_fsdp_optimizer(optimizer)
        skyrl.load_fsdp2_model_to_gpu(model)
        skyrl.load_fsdp_optimizer(optimizer, "cpu")
        notes |= trained(model, optimizer, skyrl.fsdp2_clip_grad_norm_, first=2)
    full = skyrl.fsdp2_get_full_state_dict(model)
    return model, notes | {f"in the state: {name}": tensor for name, tensor in full.items()}


def with_areal() -> tuple[nn.Module, Tensors]:
    """Its sharding, its own norm over sharded gradients, and its AdamW in mixed precision."""
    areal = alone("areal.engine.fsdp_utils", "areal.infra", "areal.utils")
    grad = importlib.import_module("areal.engine.fsdp_utils.grad")
    optimizers = importlib.import_module("areal.engine.fsdp_utils.optimizer")
    model, state = llama_and_its_state()
    mesh = init_device_mesh("cpu", (2,))
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True
        ),
        "offload_policy": None,
        "reshard_after_forward": True,
    }
    areal.apply_fsdp2(model, options, None)
    areal.fsdp2_load_full_state_dict(model, state)
    optimizer = optimizers.AnyPrecisionAdamW(
        model.parameters(),
        lr=1e-2,
        momentum_dtype="bfloat16",
        variance_dtype="bfloat16",
        use_kahan_summation=True,
    )

    def clip(params: Iterator[nn.Parameter], max_norm: float) -> float:
        found: float = grad.fsdp2_clip_grad_norm([*params], max_norm, mesh.get_group())
        return found

    return model, trained(model, optimizer, clip, steps=3)


# -- fine-tuning and pretraining


def with_llama_factory() -> tuple[nn.Module, Tensors]:
    factory = importlib.import_module("llamafactory.v1.plugins.trainer_plugins.distributed.fsdp2")
    model, _ = llama_and_its_state()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("mp_replicate", "mp_shard"))
    interface = SimpleNamespace(
        get_rank=dist.get_rank,
        get_local_rank=dist.get_rank,
        get_world_size=dist.get_world_size,
        model_device_mesh=mesh,
    )
    with (
        mock.patch.object(factory, "DistributedInterface", return_value=interface),
        mock.patch.object(factory, "get_current_accelerator", return_value=torch.device("cpu")),
    ):
        engine = factory.FSDP2Engine({"reshard_after_forward": True}, bf16=True)
        model = engine.shard_model(model)
    optimizer = adamw(model)
    notes = trained(model, optimizer)
    with shared_folder() as folder:
        factory.save_checkpoint(model, optimizer, folder)
        trained(model, optimizer, first=5)
        factory.load_checkpoint(model, optimizer, folder)
    return model, notes | trained(model, optimizer, first=2)


def with_nemo_automodel() -> tuple[nn.Module, Tensors]:
    nemo = importlib.import_module("nemo_automodel.components.distributed.parallelizer")
    model, _ = llama_and_its_state()
    names = ("dp_replicate", "dp_shard_cp", "tp")
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=names)
    model = nemo.fsdp2_strategy_parallelize(model, mesh)
    optimizer = adamw(model)
    notes = trained(model, optimizer)
    with nemo.unshard_fsdp2_model(model), torch.no_grad():
        from tests.support import tiny_models

        notes["evaluated"] = model(**tiny_models.batch(model, 9)).loss
    return model, notes | trained(model, optimizer, first=2)


def with_axolotl() -> tuple[nn.Module, Tensors]:
    """Its way to shard, in place of Accelerate's."""
    import accelerate

    from tests.support import accelerated as with_accelerate
    from tests.support.tiny_models import llama

    axolotl = importlib.import_module("axolotl.monkeypatch.accelerate.fsdp2")
    with (
        mock.patch.object(
            accelerate.accelerator, "fsdp2_prepare_model", axolotl.fsdp2_prepare_model
        ),
        with_accelerate.cpus_as_accelerators(),
    ):
        accelerator, model, *others = with_accelerate.accelerated(llama())
        notes = with_accelerate.train(accelerator, model, *others)
        notes |= accelerator.get_state_dict(model)
    return model, notes


def with_trl() -> tuple[nn.Module, Tensors]:
    """A policy and the reference that it prepares, and a preference loss between them."""
    from tests.support.accelerated import accelerated, cpus_as_accelerators
    from tests.support.tiny_models import llama

    utils = importlib.import_module("trl.models.utils")
    notes: Tensors = {}
    with cpus_as_accelerators():
        reference = llama()
        accelerator, model, optimizer, batches = accelerated(llama())
        reference = utils.prepare_fsdp(reference, accelerator)
        for i, inputs in enumerate(batches):
            with torch.no_grad():
                against = reference(**inputs).loss
            loss = -torch.nn.functional.logsigmoid(against - model(**inputs).loss)
            accelerator.backward(loss)
            notes[f"norm {i}"] = whole(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
            notes[f"loss {i}"] = loss.detach()
    return model, notes


def with_dion(name: str, **options: Any) -> tuple[nn.Module, Tensors]:
    """An optimizer of dion for the matrices of a Llama, and its AdamW for everything else."""
    from tests.support import tiny_models

    dion = importlib.import_module("dion")
    model = tiny_models.llama()
    mesh = init_device_mesh("cpu", (2,))
    shard(model, tiny_models.blocks(model), mesh=mesh)
    matrices = [p for block in tiny_models.blocks(model) for p in block.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    groups = [{"params": matrices}, {"params": others, "algorithm": "adamw"}]
    its_mesh = "outer_shard_mesh" if name == "Dion" else "distributed_mesh"
    optimizer = getattr(dion, name)(groups, lr=1e-2, **{its_mesh: mesh}, **options)
    return model, trained(model, optimizer, steps=3)
