"""Programs that train with the parts of frameworks that call FSDP2: how they shard, load, clip,
offload and save.

The frameworks themselves start clusters and rollout engines. What is here needs no more than their
sources: `python -m tests.clients --sources FOLDER`, where `pip install --no-deps --target FOLDER`
has put them (`--ignore-requires-python` for those that want a newer one).

A client (`catalogue.py`) imports here what the framework has for FSDP2, by `alone` if the package
imports too much, after `absent` for what is not installed; builds a tiny model; lets the framework
shard it; and trains.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import CustomPolicy

from tests.clients.catalogue import client
from tests.support import tiny_models
from tests.support.parity import Tensors
from tests.support.under_patch import shared_folder, whole

framework = partial(client, is_tested=False)


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


class _Anything:
    """Can be a base, a type in an annotation, and a decorator that changes nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(self, decorated: Any) -> Any:
        return decorated


class _Absent(MetaPathFinder, Loader):
    """Finds modules of some packages, installed or not: every name in them is a class."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        known = any(f"{name}.".startswith(f"{package}.") for package in self._packages)
        return ModuleSpec(name, self, is_package=True) if known else None

    def exec_module(self, module: ModuleType) -> None:
        def a_class(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (_Anything,), {})

        vars(module)["__getattr__"] = a_class


@contextmanager
def absent(*packages: str) -> Iterator[None]:
    """Lets frameworks import from packages that are not installed, or import too much, classes of
    no use.
    """
    finder = _Absent(packages)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name, module in [*sys.modules.items()]:
            if getattr(module, "__loader__", None) is finder:
                del sys.modules[name]


def of_the_next_token(model: nn.Module, generator: torch.Generator) -> Tensor:
    """The loss of a model that returns logits."""
    tokens = torch.randint(3, 64, (3, 7), generator=generator)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def arguments(mesh: DeviceMesh) -> dict[str, Any]:
    """What trainers for reinforcement learning pass to `fully_shard`."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True
    )
    options = {"mp_policy": policy, "offload_policy": None, "reshard_after_forward": True}
    return {"mesh": mesh, **options}


@contextmanager
def cuda_is_the_cpu() -> Iterator[None]:
    """For code that asks `torch.cuda` which device is current."""
    with mock.patch.object(torch.cuda, "current_device", return_value="cpu"):
        yield


def llama_and_its_state() -> tuple[nn.Module, dict[str, Tensor]]:
    model = tiny_models.llama()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return model, state if dist.get_rank() == 0 else {}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


# -- reinforcement learning


@framework("verl: FSDP2 workers", "verl")
def with_verl() -> tuple[nn.Module, Tensors]:
    """The actor of its workers: sharded, loaded, trained, offloaded between steps, restored."""
    verl = alone("verl.utils.fsdp_utils")
    model, state = llama_and_its_state()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    options = arguments(mesh) | {"shard_placement_fn": verl.get_shard_placement_fn(fsdp_size=2)}
    with cuda_is_the_cpu():
        verl.apply_fsdp2(model, options, {"forward_prefetch": True})
        verl.fsdp2_load_full_state_dict(model, state, mesh, None)
        optimizer = adamw(model)
        steps = partial(tiny_models.train, model, optimizer, verl.fsdp2_clip_grad_norm_)
        notes = steps()
        verl.offload_fsdp2_model_to_cpu(model)
        verl.offload_fsdp_optimizer(optimizer)
        verl.load_fsdp2_model_to_gpu(model)
        verl.load_fsdp_optimizer(optimizer, "cpu")
        verl.set_reshard_after_forward(model, False)
        notes |= steps(first=2)
        kept, spec = verl.fsdp2_sharded_save_to_cpu(model)
        kept = {name: (tensor.clone(), its) for name, (tensor, its) in kept.items()}
        notes |= steps(first=4)
        verl.fsdp2_sharded_load_from_cpu(model, kept, spec)
        return model, notes | steps(first=6)


@framework("SkyRL: FSDP2 workers", "skyrl")
def with_skyrl() -> tuple[nn.Module, Tensors]:
    # Its configuration needs Python 3.12, and is only a type here.
    sys.modules.setdefault("skyrl.train.config", SimpleNamespace(FSDPConfig=object))
    skyrl = alone("skyrl.backends.skyrl_train.distributed.fsdp_utils", "skyrl.train")
    model, state = llama_and_its_state()
    options = arguments(init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    skyrl.apply_fsdp2(model, options, SimpleNamespace(wrap_policy={}))
    # It sends buffers that no state has through "cuda"; all ranks have made them here.
    with cuda_is_the_cpu(), mock.patch.object(skyrl, "_sync_non_persistent_buffers"):
        skyrl.fsdp2_load_full_state_dict(model, state)
        optimizer = adamw(model)
        notes = tiny_models.train(model, optimizer, skyrl.fsdp2_clip_grad_norm_)
        skyrl.offload_fsdp2_model_to_cpu(model)
        skyrl.offload_fsdp_optimizer(optimizer)
        skyrl.load_fsdp2_model_to_gpu(model)
        skyrl.load_fsdp_optimizer(optimizer, "cpu")
        notes |= tiny_models.train(model, optimizer, skyrl.fsdp2_clip_grad_norm_, first=2)
    full = skyrl.fsdp2_get_full_state_dict(model)
    return model, notes | {f"in the state: {name}": tensor for name, tensor in full.items()}


@framework("AReaL: FSDP engine", "areal")
def with_areal() -> tuple[nn.Module, Tensors]:
    """Its sharding, its own norm over sharded gradients, and its AdamW in mixed precision."""
    areal = alone("areal.engine.fsdp_utils", "areal.infra", "areal.utils")
    grad = importlib.import_module("areal.engine.fsdp_utils.grad")
    optimizers = importlib.import_module("areal.engine.fsdp_utils.optimizer")
    model, state = llama_and_its_state()
    mesh = init_device_mesh("cpu", (2,))
    areal.apply_fsdp2(model, arguments(mesh), None)
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

    return model, tiny_models.train(model, optimizer, clip, steps=3)


@framework("prime-rl: trainer", "prime-rl")
def with_prime_rl() -> tuple[nn.Module, Tensors]:
    names = ("distributed", "lora", "models", "parallel_dims", "world")
    parts = [f"prime_rl.trainer.{name}" for name in names]
    parts += ["prime_rl.configs", "prime_rl.utils.weights", "prime_rl.utils.utils", "torchtitan"]
    with absent(*parts):
        prime = alone("prime_rl.trainer.model")
    model, _ = llama_and_its_state()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    config = SimpleNamespace(
        reduce_dtype="float32",
        fsdp_cpu_offload=False,
        reshard_after_forward=True,
        vlm=None,
        moe_router_dtype="bfloat16",
    )
    dims = SimpleNamespace(ep_enabled=False, dp_replicate_enabled=True, get_mesh=lambda _: mesh)
    prime.setup_fsdp(model, config, dims)
    return model, tiny_models.train(model, steps=3)


# -- fine-tuning and pretraining


@framework("LLaMA-Factory: FSDP2Engine", "llamafactory")
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
    notes = tiny_models.train(model, optimizer)
    with shared_folder() as folder:
        factory.save_checkpoint(model, optimizer, folder)
        tiny_models.train(model, optimizer, first=5)
        factory.load_checkpoint(model, optimizer, folder)
    return model, notes | tiny_models.train(model, optimizer, first=2)


@framework("NeMo Automodel: FSDP2", "nemo-automodel")
def with_nemo_automodel() -> tuple[nn.Module, Tensors]:
    nemo = importlib.import_module("nemo_automodel.components.distributed.parallelizer")
    model, _ = llama_and_its_state()
    names = ("dp_replicate", "dp_shard_cp", "tp")
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=names)
    model = nemo.fsdp2_strategy_parallelize(model, mesh)
    optimizer = adamw(model)
    notes = tiny_models.train(model, optimizer)
    with nemo.unshard_fsdp2_model(model), torch.no_grad():
        notes["evaluated"] = model(**tiny_models.batch(model, 9)).loss
    return model, notes | tiny_models.train(model, optimizer, first=2)


@framework("axolotl: Accelerate", "axolotl")
def with_axolotl() -> tuple[nn.Module, Tensors]:
    """Its way to shard, in place of Accelerate's."""
    import accelerate

    from tests.support import accelerated as with_accelerate

    axolotl = importlib.import_module("axolotl.monkeypatch.accelerate.fsdp2")
    with (
        mock.patch.object(
            accelerate.accelerator, "fsdp2_prepare_model", axolotl.fsdp2_prepare_model
        ),
        with_accelerate.cpus_as_accelerators(),
    ):
        accelerator, model, *others = with_accelerate.accelerated(tiny_models.llama())
        notes = with_accelerate.train(accelerator, model, *others)
        notes |= accelerator.get_state_dict(model)
    return model, notes


@framework("TRL: reference model", "trl")
def with_trl() -> tuple[nn.Module, Tensors]:
    """A policy and the reference that it prepares, and a preference loss between them."""
    from tests.support.accelerated import accelerated, cpus_as_accelerators

    utils = importlib.import_module("trl.models.utils")
    notes: Tensors = {}
    with cpus_as_accelerators():
        reference = tiny_models.llama()
        accelerator, model, optimizer, batches = accelerated(tiny_models.llama())
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


@framework("torchtune: recipes", "torchtune")
def with_torchtune() -> tuple[nn.Module, Tensors]:
    """A decoder of its own, sharded and loaded as its recipes do."""
    with absent("torchao", "torchdata", "sentencepiece", "tiktoken", "blobfile"):
        models = importlib.import_module("torchtune.models.llama3")
        tune = importlib.import_module("torchtune.training")
    model = models.llama3(
        vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=16, max_seq_len=32,
        intermediate_dim=24,
    )  # fmt: skip
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    conditions = [partial(tune.get_shard_conditions, names_to_match=["output"])]
    tune.shard_model(model, conditions, cpu_offload=False, reshard_after_forward=True)
    tune.load_from_full_model_state_dict(
        model, state, torch.device("cpu"), strict=True, cpu_offload=False
    )
    notes = tiny_models.train(model, loss_of=partial(of_the_next_token, model))
    full = tune.gather_cpu_state_dict(model, True, device=torch.device("cpu"))
    return model, notes | {f"in the state: {name}": tensor for name, tensor in full.items()}


@framework("OLMo-core: transformer", "ai2-olmo-core")
def with_olmo_core() -> tuple[nn.Module, Tensors]:
    with absent("cached_path", "bettermap", "omegaconf", "olmo_core.io", "olmo_core.data"):
        olmo = importlib.import_module("olmo_core.nn.transformer")
    config = olmo.TransformerConfig.llama_like(
        d_model=16, vocab_size=64, n_layers=2, n_heads=4, fused_ops=False
    )
    model = config.build(init_device="cpu")
    model.apply_fsdp(dp_mesh=init_device_mesh("cpu", (2,)), prefetch_factor=1)
    model.init_weights(device=torch.device("cpu"), max_seq_len=32)
    return model, tiny_models.train(model, loss_of=partial(of_the_next_token, model))


@framework("composer: FSDP2", "mosaicml")
def with_composer() -> tuple[nn.Module, Tensors]:
    """Its sharding by a policy over modules, which it legalizes where weights are tied."""
    model, _ = llama_and_its_state()  # before Transformers could see that torchvision is absent
    with absent("torchvision", "cpuinfo", "importlib_metadata", "mcli", "coolname"):
        fsdp2 = importlib.import_module("composer.distributed.fsdp2")
        parallelism = importlib.import_module("composer.utils.parallelism")
        precision = importlib.import_module("composer.core.precision")
    units = {model, *model.model.layers}
    config = parallelism.FSDP2Config(device_mesh=init_device_mesh("cpu", (2,)))
    policy = CustomPolicy(lambda module: module in units)
    fsdp2.prepare_fully_shard(model, config, precision.Precision.AMP_BF16, policy)
    return model, tiny_models.train(model, steps=3)


@framework("VeOmni: FSDP2", "veomni")
def with_veomni() -> tuple[nn.Module, Tensors]:
    """Its sharding, from the meta device, and its clipping."""
    with absent("veomni.models", "veomni.ops", "veomni.lora"):
        veomni = alone("veomni.distributed.torch_parallelize")
    model, _ = llama_and_its_state()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    state = SimpleNamespace(
        any_extra_parallel_enabled=False, extra_parallel_names=(), fsdp_mesh=mesh, fsdp_group=None
    )
    with mock.patch.object(veomni, "get_parallel_state", return_value=state):
        veomni.parallelize_model_fsdp2(model, init_device="meta")
    return model, tiny_models.train(
        model, clip=lambda _, norm: model.clip_grad_norm_(norm), steps=3
    )


@framework("dion: Muon", "dion", name="Muon")
@framework("dion: NorMuon", "dion", name="NorMuon")
@framework("dion: Dion", "dion", name="Dion")
@framework("dion: Dion2", "dion", name="Dion2")
def with_dion(name: str, **options: Any) -> tuple[nn.Module, Tensors]:
    """An optimizer of dion for the matrices of a Llama, and its AdamW for everything else."""
    dion = importlib.import_module("dion")
    model = tiny_models.llama()
    mesh = init_device_mesh("cpu", (2,))
    tiny_models.sharded(model, mesh=mesh)
    matrices = [p for block in tiny_models.blocks(model) for p in block.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    groups = [{"params": matrices}, {"params": others, "algorithm": "adamw"}]
    its_mesh = "outer_shard_mesh" if name == "Dion" else "distributed_mesh"
    optimizer = getattr(dion, name)(groups, lr=1e-2, **{its_mesh: mesh}, **options)
    return model, tiny_models.train(model, optimizer, steps=3)
