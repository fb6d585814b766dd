"""The programs in `examples/` that people copy, as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import programs
from tests.support.ranks import free_port
from tests.support.under_patch import skip_without

EXAMPLES = programs.ROOT / "examples"
TEXT = "the quick brown fox jumps over the lazy dog. " * 400
TIMEOUT_S = 200.0
pytestmark = pytest.mark.timeout(300)


def on_two_ranks(program: Path, *options: str | Path, ends_well: bool = True) -> list[str]:
    """Runs a program on ranks as torchrun starts them; returns the lines about its steps."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        programs.Program(str(program), *options, RANK=rank, LOCAL_RANK=rank, **meeting)
        for rank in ("0", "1")
    ]
    ended = [(*each.communicate(TIMEOUT_S), each.poll()) for each in ranks]
    for _, errors, status in ended:
        assert status == 0 or not ends_well, errors[-4000:]
    return [line for line in ended[0][0].splitlines() if "loss" in line]


def loss_of(line: str) -> float:
    found = re.search(r"loss ([\d.]+)", line)
    assert found, line
    return float(found[1])


def test_pretraining_learns_and_an_interrupted_run_goes_on_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    sizes = ["--width=32", "--depth=2", "--heads=2", "--context=32", "--batch-size=4"]
    sizes += ["--accumulate=2", "--steps=20", "--warmup=4", "--save-every=10", "--lr=1e-2"]

    def trained(folder: str, *more: str) -> list[str]:
        options = ("--text", text, "--folder", tmp_path / folder, *sizes, *more)
        return on_two_ranks(EXAMPLES / "pretrain.py", *options)

    whole = trained("whole")
    assert loss_of(whole[-1]) < 2.0 < loss_of(whole[0])
    trained("parts", "--stop-after", "10")
    rest = trained("parts")
    assert rest == whole[-len(rest) :]
    assert rest[0].startswith("step 10")


def with_fsdp2(folder: Path) -> Path:
    """Undoes the three marked changes of the fine-tuning program."""
    text = (EXAMPLES / "finetune.py").read_text()
    ours = re.compile(r"^ *(import shardgrad|@shardgrad\.graphed_step\(.*\)) +# [13]:.*\n", re.M)
    text, undone = ours.subn("", text)
    text, imported = re.subn(
        r"^from shardgrad import fully_shard +# 2: was (.*)$", r"\1", text, flags=re.M
    )
    assert (undone, imported) == (2, 1)
    assert not re.search(r"^(import|from) shardgrad|shardgrad\.", text, flags=re.M)
    program = folder / "finetune.py"
    program.write_text(text)
    return program


@pytest.mark.parametrize(
    "lora",
    [pytest.param("0", marks=pytest.mark.long, id="all weights"), pytest.param("4", id="LoRA")],
)
def test_fine_tuning_gives_the_losses_of_fsdp2_and_loads_again(
    lora: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without("peft")
    import transformers

    from tests.support.tiny_models import llama

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text, saved = tmp_path / "text.txt", tmp_path / "saved"
    text.write_text(TEXT)
    tokens = 384  # of ByT5, whose tokenizer needs no file
    llama(vocab_size=tokens).save_pretrained(tmp_path / "model")
    transformers.ByT5Tokenizer().save_pretrained(tmp_path / "model")
    options: list[str | Path] = ["--model", tmp_path / "model", "--text", text, "--lora", lora]
    options += ["--steps", "4", "--batch-size", "2", "--seq-len", "32", "--lr", "1e-3"]
    ours = on_two_ranks(EXAMPLES / "finetune.py", *options, "--save", saved)
    assert len(ours) == 4
    # Its losses count: a rank of FSDP2's was once aborted by torch while it ended.
    assert ours == on_two_ranks(with_fsdp2(tmp_path), *options, ends_well=False)
    name = "adapter_model" if lora != "0" else "model"
    assert (saved / f"{name}.safetensors").stat().st_size > 0
