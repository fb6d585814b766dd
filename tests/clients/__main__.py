"""`python -m tests.clients`: runs programs of many packages with FSDP2 and with this engine, keeps
a record, and writes the page *Clients*.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import click
import torch

from benchmarks.records import RESULTS, ROOT, append, environment, read
from tests.clients.programs import under_both, under_fsdp2
from tests.support.processes import CONTEXT
from tests.support.ranks import RankError, Ranks

PAGE = ROOT / "docs" / "reference" / "clients.md"
RECORDS = RESULTS / "clients.jsonl"
LIMIT_S = 120.0

_PROGRAMS = "tests.clients.programs"
_FRAMEWORKS = "tests.clients.frameworks"
_HF = "transformers"

# What runs, packages it is from, `module:function`, arguments.
Client = tuple[str, tuple[str, ...], str, dict[str, Any]]


def _clients() -> Iterator[Client]:
    for name in ("llama", "qwen", "gpt2", "mixtral", "vit", "t5"):
        program = "tests.clients.test_transformers:sharded_by_hand"
        yield f"Transformers: {name}", (_HF,), program, {"name": name}
    for name in (
        "mistral", "qwen2", "gemma", "gemma2", "phi", "phi3", "olmo2", "gpt_neox", "stablelm",
        "granite", "cohere", "smollm3", "opt", "qwen2_moe", "falcon", "bloom",
        "gpt_oss", "glm4", "nemotron", "exaone4", "olmoe",
    ):  # fmt: skip
        yield f"Transformers: {name}", (_HF,), f"{_PROGRAMS}:language_model", {"name": name}
    for name in ("bert", "roberta"):
        yield f"Transformers: {name}", (_HF,), f"{_PROGRAMS}:encoder", {"name": name}
    yield "Transformers: whisper", (_HF,), f"{_PROGRAMS}:whisper", {}
    yield "Transformers: clip", (_HF,), f"{_PROGRAMS}:clip", {}
    for name in (
        "sharded_while_it_is_loaded",
        "checkpointed_activations",
        "generates_between_steps",
    ):
        program = f"tests.clients.test_transformers:{name}"
        yield f"Transformers: {name.replace('_', ' ')}", (_HF,), program, {}
    accelerate = "tests.clients.test_accelerate"
    both = ("accelerate", _HF)
    yield "Accelerate: FSDP2 plugin", both, f"{accelerate}:with_the_plugin", {}
    options = {"efficient_loading": True}
    yield "Accelerate: efficient loading", both, f"{accelerate}:with_the_plugin", options
    yield "Accelerate: bf16", both, f"{accelerate}:in_mixed_precision", {"reduce_dtype": None}
    options = {"reduce_dtype": torch.float32}
    yield "Accelerate: bf16, sums in fp32", both, f"{accelerate}:in_mixed_precision", options
    yield "Transformers: Trainer", (*both,), f"{accelerate}:with_the_trainer", {}
    peft = "tests.clients.test_peft"
    for dtype in (torch.float32, torch.bfloat16):
        what = f"PEFT: LoRA, {str(dtype).removeprefix('torch.')}"
        yield what, ("peft", _HF), f"{peft}:sharded_by_hand", {"dtype": dtype}
    yield "PEFT: LoRA through Accelerate", ("peft", *both), f"{peft}:through_accelerate", {}
    lightning = "tests.clients.test_lightning:with_lightnings_trainer"
    yield "Lightning: ModelParallelStrategy", ("lightning",), lightning, {}
    for gathers in (False, True):
        how = "gathered in float8" if gathers else "float8 layers"
        program = "tests.clients.test_torchao:float8_layers"
        yield f"torchao: {how}", ("torchao",), program, {"gathers_float8": gathers}
    yield "diffusers: UNet2DModel", ("diffusers",), f"{_PROGRAMS}:diffusion", {}
    yield "x-transformers: decoder", ("x-transformers",), f"{_PROGRAMS}:x_transformer", {}
    yield "PyTorch: nn.Transformer", ("torch",), f"{_PROGRAMS}:torchs_transformer", {}
    yield "PyTorch: DCP in between", ("torch",), f"{_PROGRAMS}:dcp_in_between", {}
    for name in (
        "alignment", "moving_average", "hooks_on_activations", "optimizer_in_backward",
        "gradient_read_between",
    ):  # fmt: skip
        yield (
            f"PyTorch: {name.replace('_', ' ')}",
            ("torch",),
            f"tests.clients.test_loops:{name}",
            {},
        )
    for package, module, name in (
        ("lion-pytorch", "lion_pytorch", "Lion"),
        ("schedulefree", "schedulefree", "AdamWScheduleFree"),
        ("schedulefree", "schedulefree", "SGDScheduleFree"),
        ("prodigyopt", "prodigyopt", "Prodigy"),
        *(
            ("pytorch_optimizer", "pytorch_optimizer", name)
            for name in (
                "AdaBelief",
                "AdEMAMix",
                "Tiger",
                "Grams",
                "Ranger",
                "Lion",
                "ScheduleFreeAdamW",
                "AdaPNM",
                "QHAdam",
                "Yogi",
            )
        ),
    ):
        options = {"package": module, "name": name}
        yield f"{package}: {name}", (package, _HF), f"{_PROGRAMS}:optimizer_of", options
    ignite = ("pytorch-ignite", _HF)
    yield "Ignite: Engine", ignite, f"{_PROGRAMS}:ignite_engine", {}
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
        yield what, (package,), f"{_FRAMEWORKS}:{name}", {}
    for name in ("Muon", "NorMuon", "Dion", "Dion2"):
        yield f"dion: {name}", ("dion",), f"{_FRAMEWORKS}:with_dion", {"name": name}


@click.command()
@click.option("--page", "only_page", is_flag=True, help="Run nothing, write the page.")
@click.option(
    "--only", multiple=True, help="Only clients with this in their name; others stay as they were."
)
@click.option("--sources", default="", help="A folder with more packages, used only by ranks.")
def main(only_page: bool, only: tuple[str, ...], sources: str) -> None:
    """Run programs of many packages on two CPU ranks, with FSDP2 and with this engine.

    What is not installed, is not in the record. tests/clients/frameworks.py says how a client is
    written.
    """
    if not only_page:
        clients = [*_clients()]
        chosen = [each for each in clients if not only or any(word in each[0] for word in only)]
        record = measured(chosen, sources)
        if only:
            record["summary"] |= _others([*read(RECORDS)][-1], record["summary"])
            names = [name for name, *_ in clients if name in record["summary"]]
            record["summary"] = {name: record["summary"][name] for name in names}
        append(RESULTS, record)
    PAGE.write_text(written([*read(RECORDS)][-1]), encoding="utf-8")
    click.echo(PAGE)


def measured(clients: list[Client], sources: str = "") -> dict[str, Any]:
    """Returns the record."""
    started, ranks, summary = environment(), Ranks(2), {}
    CONTEXT.set_forkserver_preload(["tests.support.preloaded"])
    for name, packages, program, options in clients:
        versions = {package: _version(package, sources) for package in packages}
        if None in versions.values():
            continue
        found = {"versions": versions} | _judged(ranks, program, options, sources)
        click.echo(f"{name}: {found['verdict']} {found.get('error', '')}")
        summary[name] = found
    ranks.stop()
    config = {"torch": torch.__version__, "ranks": 2}
    return {
        "benchmark": "clients",
        "environment": started,
        "config": config,
        "samples": {},
        "summary": summary,
    }


def _others(newest: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what was found before of the programs that were not run, with its commit."""
    commit = {"commit": newest["environment"]["git"]}
    return {name: commit | each for name, each in newest["summary"].items() if name not in found}


def _version(package: str, sources: str) -> str | None:
    found = importlib.metadata.distributions(name=package, path=[*sys.path, sources])
    return next((each.version for each in found), None)


def _judged(ranks: Ranks, program: str, options: dict[str, Any], sources: str) -> dict[str, Any]:
    arguments = program, options, sources
    try:
        found: dict[str, Any] = ranks.run(under_both, *arguments, timeout_s=LIMIT_S)[0]
    except RankError as error:
        said = str(error).strip().splitlines()[-1][:300]
    else:
        return found
    try:
        ranks.run(under_fsdp2, *arguments, timeout_s=LIMIT_S)
    except RankError as error:
        return {"verdict": "fails with FSDP2", "error": str(error).strip().splitlines()[-1][:300]}
    return {"verdict": "fails", "error": said}


# -- the page


def written(record: Mapping[str, Any]) -> str:
    """Returns the page of a record."""
    found = record["summary"]
    same = sum(each["verdict"] == "same bits" for each in found.values())
    lines = [
        _INTRODUCTION.format(
            count=len(found),
            same=same,
            packages=len({package for each in found.values() for package in each["versions"]}),
            torch=record["config"]["torch"],
            commit=" and ".join(dict.fromkeys(_commits(record))),
            cpu=record["environment"]["cpu"],
        ),
        "| of | programs | versions | result |",
        "| --- | --- | --- | --- |",
    ]
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, each in found.items():
        versions = ", ".join(f"{package} {number}" for package, number in each["versions"].items())
        of, _, program = name.partition(": ")
        rows.setdefault((of, versions, _words(each)), []).append(program)
    lines += [
        f"| {of} | {'; '.join(programs)} | {versions} | {result} |"
        for (of, versions, result), programs in rows.items()
    ]
    return "\n".join(lines) + "\n"


def _commits(record: Mapping[str, Any]) -> Iterator[str]:
    for each in record["summary"].values():
        yield (each.get("commit") or record["environment"]["git"] or "")[:12]


def _words(each: Mapping[str, Any]) -> str:
    if each["verdict"] == "differs":
        return f"differs by {each['off']:.1g}"
    return each["verdict"] + (f": `{each['error']}`" if "error" in each else "")


_INTRODUCTION = """\
# Clients

This page lists {count} programs from {packages} packages that use FSDP2. Each runs on two CPU ranks over gloo, once
unchanged and once inside `shardgrad.patch()`. {same} are bitwise equal: losses, gradient norms, all parameters and
buffers. If a result differs, the number is the largest difference of a value, relative to its norm. Accelerate's policy
for `bf16` lets FSDP2 round each sum of gradients to bfloat16, where shardgrad adds in float32
([why](../explanation/numerics.md)).

`python -m tests.clients` runs the programs again, with packages that are installed or in the folder given by
`--sources`, and writes this page from its record, `benchmarks/results/clients.jsonl`. For frameworks that start
clusters, only the code that calls FSDP2 runs. Programs that FSDP2 does not run are omitted. To run a framework
yourself, see [run a framework unchanged](../how_to/use_a_framework.md).

torch {torch}, commit {commit}, {cpu}.
"""


if __name__ == "__main__":
    main(prog_name="python -m tests.clients")
