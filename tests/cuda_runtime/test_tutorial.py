"""The tutorial of graphed steps, followed word for word on two devices."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tests.support.processes import run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorials/first_graphed_step.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
LAST_LINE = "torch.distributed.destroy_process_group()\n"


def block_with(words: str) -> str:
    """Returns the one short block of the page that has these words."""
    (block,) = (block for block in PYTHON if words in block and "import os" not in block)
    return block


def printed(program: str, folder: Path) -> list[str]:
    """Runs a program under torchrun on two ranks; returns what it printed."""
    path = folder / "program.py"
    path.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOSTCUDA_DEVICES": "2"}
    done = run(command, env=environment | {"OMP_NUM_THREADS": "1"}, timeout_s=100)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.splitlines()


def test_the_graphs_of_the_tutorial_have_the_numbers_and_counts_that_it_says(
    tmp_path: Path,
) -> None:
    eager = PYTHON[0]
    step = re.search(r"def step\(x\):.*?return loss, norm\n", eager, flags=re.DOTALL)
    assert step
    decorated = block_with("@shardgrad.graphed_step(model, optimizer)\ndef step(x):\n    loss")
    graphed = eager.replace(step[0], decorated).removesuffix(LAST_LINE)
    graphed += block_with("step.eager_steps") + LAST_LINE
    *numbers, counted = printed(graphed, tmp_path)
    assert numbers == printed(eager, tmp_path)
    said = re.search(r"^\d+ eager, \d+ captured, \d+ replayed$", PAGE, flags=re.MULTILINE)
    assert said
    assert counted == said[0]
