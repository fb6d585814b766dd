"""The documentation keeps its word: links lead somewhere, examples run, generated pages are up to date."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
WITH_CODE = [
    ROOT / "README.md",
    *sorted((ROOT / "docs/tutorials").glob("*.md")),
    *sorted((ROOT / "docs/how_to").glob("*.md")),
]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(page: Path) -> str:
    """Returns a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{target} leads nowhere"
        assert not anchor or anchor in anchors(path), f"{target}: no such heading"


def test_every_page_can_be_reached_from_the_index() -> None:
    index = prose(ROOT / "docs/README.md")
    for page in (ROOT / "docs").glob("*/*.md"):
        assert page.relative_to(ROOT / "docs").as_posix() in index, f"{named(page)} is not in docs/README.md"


@pytest.mark.parametrize("page", WITH_CODE, ids=named)
def test_python_examples_compile(page: Path) -> None:
    for number, code in enumerate(blocks(page, "python")):
        compile(textwrap.dedent(code), f"{named(page)}, block {number}", "exec")


def test_the_readme_example_trains_on_one_rank(tmp_path: Path) -> None:
    (example,) = blocks(ROOT / "README.md", "python")
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    environment = os.environ | where | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    code = example + "\nprint('gradients:', all(p.grad is None for p in model.parameters()))\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "gradients: True" in done.stdout


def test_generated_pages_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs/generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    sys.modules["docs_generate"] = generate  # its dataclass looks itself up there
    try:
        spec.loader.exec_module(generate)
        status = generate.main(["--check"])
    finally:
        del sys.modules["docs_generate"]
    assert status == 0, capsys.readouterr().out


def house() -> set[str]:
    """Returns the files that CONTRIBUTING's tables of the house name."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("\n## The house\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return {name for row in rows for name in re.findall(r"`([\w./]+\.\w+|[\w./]+/)`", row)}


def test_every_file_of_the_house_exists() -> None:
    names = house()
    assert names
    for name in names:
        assert any((ROOT / folder / name).exists() for folder in ("", "shardgrad")), f"{name} is gone"


def test_every_module_of_the_engine_is_in_the_house() -> None:
    missing = {path.name for path in (ROOT / "shardgrad").glob("*.py")} - house() - {"__init__.py"}
    assert not missing, f"CONTRIBUTING.md does not say what {sorted(missing)} are for"


def test_every_test_that_a_page_names_exists() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    for page in PAGES:
        for name in re.findall(r"`(test_\w+)`", prose(page)):
            assert f"def {name}(" in tests, f"{named(page)} names {name}"
        for file in re.findall(r"`((?:tests|shardgrad|csrc)/[\w./]+)`", prose(page)):
            assert (ROOT / file).exists(), f"{named(page)} names {file}"
