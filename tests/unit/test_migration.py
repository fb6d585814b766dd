"""What `shardgrad doctor SCRIPT` and `shardgrad.migration.examine` say of programs for other engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from shardgrad.cli import main
from shardgrad.migration import examine, read_script
from shardgrad.migration.rules import ATTRIBUTES

FSDP1 = """
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType

model = FSDP(build())
with model.no_sync():
    model(x).backward()
with FSDP.summon_full_params(model):
    pass
"""
DEEPSPEED = """
import deepspeed
engine, *_ = deepspeed.initialize(model=model, config="ds.json")
with deepspeed.zero.GatheredParameters([p]):
    pass
"""
DDP = """
from torch.nn import parallel
model = parallel.DistributedDataParallel(model)
"""
FSDP2 = """
import torch
import torch.distributed.fsdp as fsdp

def main():
    optimizer = torch.optim.AdamW(model.parameters())
    for block in model:
        fsdp.fully_shard(block)
    later = torch.optim.SGD(model.parameters())
    model.set_reduce_scatter_unused_params(True)
"""
OURS = """
from shardgrad import fully_shard
model = fully_shard(model)
fine = DistributedDataParallel  # a name of its own
"""


def lines_of(tmp_path: Path, text: str) -> list[tuple[int, str]]:
    script = tmp_path / "script.py"
    script.write_text(text)
    return [(int(each.where.rpartition(":")[2]), each.weight) for each in read_script(script)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FSDP1, [(5, "change"), (6, "change"), (8, "change"), (8, "change")]),
        (DEEPSPEED, [(3, "change"), (4, "change")]),
        (DDP, [(3, "change")]),
        (FSDP2, [(6, "check"), (8, "change"), (10, "drop")]),
        (OURS, []),
    ],
    ids=["fsdp1", "deepspeed", "ddp", "fsdp2", "ours"],
)
def test_a_script_is_told_which_lines_to_change(
    tmp_path: Path, text: str, expected: list[tuple[int, str]]
) -> None:
    assert lines_of(tmp_path, text) == expected


def test_every_page_that_advice_names_exists() -> None:
    from shardgrad.migration.rules import NAMES

    root = Path(__file__).parents[2]
    for rule in (*NAMES.values(), *ATTRIBUTES.values()):
        for word in rule.do.split():
            if word.startswith("docs/"):
                assert (root / word).exists(), word


def test_the_command_prints_lines_and_says_by_its_status_whether_something_has_to_change(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(DDP)
    ran = CliRunner().invoke(main, ["doctor", str(script)])
    assert ran.exit_code == 1
    assert f"{script}:3: DDP wraps the model" in ran.output
    script.write_text(OURS)
    ran = CliRunner().invoke(main, ["doctor", str(script)])
    assert (ran.exit_code, ran.output) == (0, "0 things to change, 0 to look at.\n")


def test_a_script_that_is_not_python_is_refused_by_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def:")
    ran = CliRunner().invoke(main, ["doctor", str(script)])
    assert ran.exit_code == 1
    assert f"{script} is not Python" in ran.output


def test_a_live_model_is_told_what_cannot_be_sharded_as_it_is() -> None:
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
    model["second"].weight = model["first"].weight
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    model.register_parameter("table", nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False))
    said = {each.where: each.weight for each in examine(model)}
    assert said == {"first.weight": "check", "scale": "change", "table": "change"}
