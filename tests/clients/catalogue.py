"""The programs of packages that use FSDP2, in the order of the page *Clients*."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Client:
    """A program.

    Attributes:
        name: whose it is, and what it does.
        packages: that it needs.
        program: "module:function" of this folder.
        options: arguments of the function.
        is_tested: it is a test, too; others are only run for the record.
    """

    name: str
    packages: tuple[str, ...]
    program: str
    options: dict[str, Any] = field(default_factory=dict)
    is_tested: bool = False


_HF = ("transformers",)
_ACCELERATE = ("accelerate", *_HF)


def _models() -> Iterator[Client]:
    """Models of Transformers by their names, each block a unit, and what is special about some."""
    mixtral = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    first = {
        "llama": {"name": "llama"},
        "qwen": {"name": "qwen3", "head_dim": 4},
        "gpt2": {"name": "gpt2", "tie_word_embeddings": True},
        "mixtral": {"name": "mixtral", **mixtral},
    }
    for name, options in first.items():
        yield Client(f"Transformers: {name}", _HF, "programs:language_model", options, True)
    for name in ("vit", "t5"):
        yield Client(f"Transformers: {name}", _HF, f"programs:{name}", is_tested=True)
    for name in ("llama", "mixtral"):
        options = {**first[name], "bf16": True}
        what = f"Transformers: {name} in bf16"
        yield Client(what, _HF, "programs:language_model", options, True)
    for name in (
        "mistral", "qwen2", "gemma", "gemma2", "phi", "phi3", "olmo2", "gpt_neox", "stablelm",
        "granite", "cohere", "smollm3", "opt", "qwen2_moe", "falcon", "bloom",
        "gpt_oss", "glm4", "nemotron", "exaone4", "olmoe",
    ):  # fmt: skip
        yield Client(f"Transformers: {name}", _HF, "programs:language_model", {"name": name})
    for name in ("bert", "roberta"):
        options = {"name": name, "kind": "MaskedLM"}
        yield Client(f"Transformers: {name}", _HF, "programs:language_model", options)
    for name in ("whisper", "clip"):
        yield Client(f"Transformers: {name}", _HF, f"programs:{name}")


def _each(whose: str, package: str, module: str, *names: str, is_tested: bool) -> Iterator[Client]:
    """Yields programs that are called as what they do."""
    for name in names:
        what = f"{whose}: {name.replace('_', ' ')}"
        yield Client(what, (package,), f"{module}:{name}", is_tested=is_tested)


def _with_trainer(name: str, packages: tuple[str, ...], program: str, **options: Any) -> Client:
    return Client(name, packages, f"trainers:{program}", options, is_tested=True)


def _optimizers() -> Iterator[Client]:
    of = {
        "lion-pytorch": ("Lion",),
        "schedulefree": ("AdamWScheduleFree", "SGDScheduleFree"),
        "prodigyopt": ("Prodigy",),
        "pytorch_optimizer": (
            "AdaBelief", "AdEMAMix", "Tiger", "Grams", "Ranger", "Lion", "ScheduleFreeAdamW",
            "AdaPNM", "QHAdam", "Yogi",
        ),
    }  # fmt: skip
    for package, names in of.items():
        for name in names:
            options = {"package": package.replace("-", "_"), "name": name}
            yield Client(f"{package}: {name}", (package, *_HF), "programs:optimizer_of", options)


def _frameworks() -> Iterator[Client]:
    for what, package, name in (
        ("verl: FSDP2 workers", "verl", "with_verl"),
        ("SkyRL: FSDP2 workers", "skyrl", "with_skyrl"),
        ("AReaL: FSDP engine", "areal", "with_areal"),
        ("LLaMA-Factory: FSDP2Engine", "llamafactory", "with_llama_factory"),
        ("NeMo Automodel: FSDP2", "nemo-automodel", "with_nemo_automodel"),
        ("axolotl: Accelerate", "axolotl", "with_axolotl"),
        ("TRL: reference model", "trl", "with_trl"),
        ("prime-rl: trainer", "prime-rl", "with_prime_rl"),
        ("torchtune: recipes", "torchtune", "with_torchtune"),
        ("OLMo-core: transformer", "ai2-olmo-core", "with_olmo_core"),
        ("composer: FSDP2", "mosaicml", "with_composer"),
        ("VeOmni: FSDP2", "veomni", "with_veomni"),
    ):
        yield Client(what, (package,), f"frameworks:{name}")
    for name in ("Muon", "NorMuon", "Dion", "Dion2"):
        yield Client(f"dion: {name}", ("dion",), "frameworks:with_dion", {"name": name})


CLIENTS = [
    *_models(),
    *_each(
        "Transformers",
        "transformers",
        "programs",
        *("sharded_while_it_is_loaded", "checkpointed_activations", "generates_between_steps"),
        is_tested=True,
    ),
    _with_trainer("Accelerate: FSDP2 plugin", _ACCELERATE, "with_the_plugin"),
    _with_trainer(
        "Accelerate: efficient loading", _ACCELERATE, "with_the_plugin", efficient_loading=True
    ),
    # Tested on its own: sums are rounded otherwise.
    Client("Accelerate: bf16", _ACCELERATE, "trainers:in_mixed_precision", {"reduce_dtype": None}),
    _with_trainer(
        "Accelerate: bf16, sums in fp32",
        _ACCELERATE,
        "in_mixed_precision",
        reduce_dtype=torch.float32,
    ),
    _with_trainer("Transformers: Trainer", _ACCELERATE, "with_the_trainer"),
    _with_trainer("PEFT: LoRA, float32", ("peft", *_HF), "with_adapters", dtype=torch.float32),
    _with_trainer("PEFT: LoRA, bfloat16", ("peft", *_HF), "with_adapters", dtype=torch.bfloat16),
    _with_trainer("PEFT: LoRA through Accelerate", ("peft", *_ACCELERATE), "through_accelerate"),
    _with_trainer("Lightning: ModelParallelStrategy", ("lightning",), "with_lightnings_trainer"),
    _with_trainer("torchao: float8 layers", ("torchao",), "float8_layers", gathers_float8=False),
    _with_trainer(
        "torchao: gathered in float8", ("torchao",), "float8_layers", gathers_float8=True
    ),
    Client("diffusers: UNet2DModel", ("diffusers",), "programs:diffusion"),
    Client("x-transformers: decoder", ("x-transformers",), "programs:x_transformer"),
    Client("PyTorch: nn.Transformer", ("torch",), "programs:torchs_transformer"),
    Client("PyTorch: DCP in between", ("torch",), "programs:dcp_in_between"),
    *_each(
        "PyTorch",
        "torch",
        "loops",
        *("alignment", "moving_average", "hooks_on_activations", "optimizer_in_backward"),
        "gradient_read_between",
        is_tested=True,
    ),
    *_optimizers(),
    Client("Ignite: Engine", ("pytorch-ignite", *_HF), "programs:ignite_engine"),
    *_frameworks(),
]
