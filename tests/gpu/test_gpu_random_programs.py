"""Random programs on torch.cuda agree with plain torch, and whatever shares memory has an order.

`python -m tests.fuzz.programs --world cuda1` runs more of them, `--world cuda2` on two ranks that
share a GPU. Without a GPU every order that streams allow may occur (tests/cuda_runtime).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda_runtime import inspection
from tests.fuzz import programs
from tests.fuzz.programs.compare import run
from tests.fuzz.programs.generate import program_of
from tests.fuzz.programs.program import Program
from tests.fuzz.programs.worlds import prepared
from tests.support.gpu import ON_ONE_RANK

pytestmark = ON_ONE_RANK

SEEDS = Path(programs.__file__).parent / "seeds"
DRAWN = 40


def require_agreement(program: Program) -> None:
    with prepared(program), inspection.late_and_ordered():
        outcome = run(program, 0, lambda value: value)
    assert not outcome.differences, f"{outcome.differences[0]}\n{program}"


@pytest.mark.parametrize(
    "path", [path for path in sorted(SEEDS.glob("*.json")) if '"cuda1"' in path.read_text()]
)
def test_a_kept_program_of_torch_cuda_agrees_with_plain_torch(path: Path) -> None:
    require_agreement(Program.from_json(path.read_text()))


def test_programs_nobody_thought_of_agree_with_plain_torch_on_torch_cuda() -> None:
    for seed in range(DRAWN):
        require_agreement(program_of(40_000 + seed, "cuda1"))
