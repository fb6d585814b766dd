"""The package needs torch alone; what needs more names the extra to install, before any work is
done.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from click.testing import CliRunner

from shardgrad.errors import PartnerUnavailableError
from shardgrad.programs.cli import main
from shardgrad.programs.extras import EXTRAS, require
from tests.support.processes import communicate

ROOT = Path(__file__).parents[1]
SITE = Path(torch.__file__).parents[1]
OPTIONAL = (*EXTRAS, "jinja2", "accelerate", "peft")

TWO_RANKS = """
import sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from shardgrad import clip_grad_norm_, optim

assert "numpy" not in sys.modules
store = f"file://{sys.argv[2]}"
dist.init_process_group("gloo", init_method=store, rank=int(sys.argv[1]), world_size=2)
torch.manual_seed(0)
model = fully_shard(torch.nn.Linear(4, 4))
assert fully_shard.__wrapped__.__module__ == "shardgrad.fully_shard"
optimizer = optim.AdamW(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
clip_grad_norm_(model, 1.0)
optimizer.step()
dist.destroy_process_group()
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def run_with_torch_alone(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts Python where nothing but torch and its dependencies is installed."""
    site = tmp_path / "site"
    site.mkdir()
    for entry in SITE.iterdir():
        if not entry.name.startswith((*OPTIONAL, "_")) or entry.name.startswith("jinja2"):
            (site / entry.name).symlink_to(entry)

    def start(*words: str) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": f"{site}:{ROOT}"}
        return subprocess.Popen(
            [sys.executable, "-S", *words],  # no site-packages
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def test_an_import_of_shardgrad_imports_no_optional_package() -> None:
    program = (
        "import torch.distributed.fsdp, sys; before = set(sys.modules); from shardgrad import *; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    done = run("-c", program)
    assert done.returncode == 0, done.stderr
    assert {"shardgrad"} <= set(done.stdout.split())
    assert not set(done.stdout.split()) & set(OPTIONAL)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["plan", "--help"],
        ["checkpoint", "--help"],
        ["train", "--x"],
    ],
)
def test_help_and_usage_errors_import_no_pytorch(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom shardgrad.programs.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    print('torch' in sys.modules)"
    )
    assert run("-c", program).stdout.endswith("False\n")


@pytest.mark.slow
def test_two_ranks_train_with_nothing_but_torch_installed(
    run_with_torch_alone: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(TWO_RANKS)
    words = ("-m", "shardgrad.patch", str(program))
    ranks = [run_with_torch_alone(*words, str(rank), str(tmp_path / "store")) for rank in range(2)]
    for rank in ranks:
        _, errors = communicate(rank, 100)
        assert rank.returncode == 0, errors


def test_the_command_line_names_its_extra_in_one_sentence(
    run_with_torch_alone: Callable[..., subprocess.Popen[str]],
) -> None:
    process = run_with_torch_alone("-m", "shardgrad", "train")
    _, errors = communicate(process, 100)
    assert process.returncode == 2
    assert errors == (
        "shardgrad: the command line needs click, rich and numpy, which are not installed: pip "
        "install 'shardgrad[cli,checkpoint]'\n"
    )


@pytest.mark.parametrize(
    ("package", "arguments", "work", "sentence"),
    [
        (
            "tensorboard",
            ["train", "--tensorboard"],
            "shardgrad.programs.train.launch.launch_ranks",
            "--tensorboard needs tensorboard, which is not installed: pip install "
            "'shardgrad[tensorboard]'",
        ),
        (
            "safetensors",
            ["checkpoint", "export", ".", "there"],
            "shardgrad.programs.checkpoint.safetensors.verify",
            "a safetensors file needs safetensors, which is not installed: pip install "
            "'shardgrad[safetensors]'",
        ),
        (
            "torch",
            ["train"],
            "shardgrad.programs.train.launch.logging.disable",
            "torch is not installed: pip install torch",
        ),
    ],
    ids=[
        "tensorboard",
        "safetensors",
        "torch",
    ],
)
def test_a_missing_package_is_named_before_any_work(
    package: str,
    arguments: list[str],
    work: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").touch()  # as in a checkpoint
    with mock.patch(work, side_effect=AssertionError("work was begun")):
        done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_all_missing_packages_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("rich", "numpy"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        PartnerUnavailableError, match="it needs rich and numpy, which are not"
    ) as raised:
        require("click", "rich", "numpy", feature="it")
    assert raised.value.fix == "pip install 'shardgrad[cli,checkpoint]'"
    require("click", feature="it")


def test_the_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [line.partition(">")[0] for line in project["dependencies"]] == ["torch"]
    for package, extra in EXTRAS.items():
        assert any(
            line.startswith(f"{package}>=") for line in project["optional-dependencies"][extra]
        )


def test_importing_a_file_does_not_hide_the_function_of_its_name() -> None:
    program = "import shardgrad.fully_shard, shardgrad.patch, shardgrad; "
    program += (
        "print(callable(shardgrad.fully_shard), callable(shardgrad.patch)); shardgrad.nothing"
    )
    done = run("-c", program)
    assert done.stdout == "True True\n"
    assert "AttributeError: module 'shardgrad' has no attribute 'nothing'" in done.stderr
