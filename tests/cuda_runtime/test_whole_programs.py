"""`shardgrad train`, programs of `examples/` and of a tutorial from start to end, on torch.cuda and
NCCL.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import run
from tests.support.under_patch import skip_without

ROOT = Path(__file__).parents[2]
STEPS = 6
MICRO = [
    *("--steps", str(STEPS), "--checkpoint-every", "3", "--seq-len", "32", "--log-every", "1"),
    *("--batch-size", "4"),
    *("--data", argparse.__file__, "--sample-bytes", "0"),
]


def ran(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments, on devices of the runtime."""
    environment = {**os.environ, "HOSTCUDA_DEVICES": "2", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = run([sys.executable, *map(str, command)], env=environment, timeout_s=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def trained(folder: Path, *options: str) -> list[tuple[str, float]]:
    """Trains; returns every loss that was written."""
    command = ["-W", "ignore", "-m", "shardgrad", "train", *MICRO, *options]
    ran(*command, "--run-dir", folder)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(event["event"], event["loss"]) for event in lines if "loss" in event]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_one_and_two_ranks_train_alike_and_graphed_steps_as_eager_ones(tmp_path: Path) -> None:
    options = {1: ("--ranks", "1", "--accumulate", "2"), 2: ("--ranks", "2")}
    curves = {}
    for ranks, of in options.items():
        folder = tmp_path / str(ranks)
        curves[ranks] = trained(folder / "eager", *of, "--no-graph")
        assert trained(folder / "graphed", *of) == curves[ranks]  # to the bit
        began = json.loads((folder / "graphed/metrics.jsonl").read_text().splitlines()[0])
        assert began["world_size"] == ranks
        assert began["device"] != "cpu"
    assert [name for name, _ in curves[1]] == [name for name, _ in curves[2]]
    assert [loss for _, loss in curves[1]] == pytest.approx(
        [loss for _, loss in curves[2]], rel=1e-5
    )
    assert curves[1][-1][1] < curves[1][0][1]


def printed(program: Path, *options: str | Path) -> str:
    """Runs a program under torchrun on two ranks; returns what it printed."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    done = ran(*command, "--rdzv-endpoint=127.0.0.1:0", program, *options)
    # A step that could not be captured would have said so.
    assert "UncapturableStepWarning" not in done.stderr
    return done.stdout


def losses_of(example: str, *options: str | Path) -> list[float]:
    """Runs a program of `examples/`; returns the losses that it prints."""
    text = printed(ROOT / "examples" / example, *options)
    return [float(each) for each in re.findall(r"loss ([\d.]+)", text)]


def test_the_example_of_pretraining_is_captured_and_learns(tmp_path: Path) -> None:
    options = (
        "--width 32 --depth 2 --heads 2 --context 32 --batch-size 4 --accumulate 2 --lr 1e-2 "
        "--steps 20 --warmup 4 --save-every 20"
    )
    text = Path(argparse.__file__)
    found = losses_of("pretrain.py", *options.split(), "--text", text, "--folder", tmp_path)
    assert found[-1] < 0.8 * found[0]


@pytest.mark.long
@pytest.mark.parametrize("lora", ["0", "4"], ids=["all weights", "LoRA"])
def test_the_example_of_fine_tuning_is_captured_and_learns(lora: str, tmp_path: Path) -> None:
    skip_without("peft")
    import transformers

    from tests.support.tiny_models import llama

    llama(vocab_size=384).save_pretrained(tmp_path)
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)
    text = Path(argparse.__file__)
    options = f"--lora {lora} --steps 8 --batch-size 2 --seq-len 32 --lr 1e-2"
    found = losses_of("finetune.py", *options.split(), "--model", tmp_path, "--text", text)
    assert len(found) == 8
    assert found[-1] < found[0]


# -- the tutorial of graphed steps, word for word


PAGE = (ROOT / "docs/tutorials/first_graphed_step.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
LAST_LINE = "torch.distributed.destroy_process_group()\n"


def block_with(words: str) -> str:
    """Returns the one short block of the page that has these words."""
    (block,) = (block for block in PYTHON if words in block and "import os" not in block)
    return block


def test_the_graphs_of_the_tutorial_have_the_numbers_and_counts_that_it_says(
    tmp_path: Path,
) -> None:
    eager = PYTHON[0]
    step = re.search(r"def step\(x\):.*?return loss, norm\n", eager, flags=re.DOTALL)
    assert step
    decorated = block_with("@shardgrad.graphed_step(model, optimizer)\ndef step(x):\n    loss")
    graphed = eager.replace(step[0], decorated).removesuffix(LAST_LINE)
    graphed += block_with("step.eager_steps") + LAST_LINE
    runs = []
    for text in (graphed, eager):
        program = tmp_path / "program.py"
        program.write_text(text)
        runs.append(printed(program).splitlines())
    *numbers, counted = runs[0]
    assert numbers == runs[1]
    said = re.search(r"^\d+ eager, \d+ captured, \d+ replayed$", PAGE, flags=re.MULTILINE)
    assert said
    assert counted == said[0]
