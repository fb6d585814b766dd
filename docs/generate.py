"""Writes the pages of docs/reference/ from the code, so that they cannot say anything else.

    python docs/generate.py            write them
    python docs/generate.py --check    exit with status 1 if one of them is out of date

What each page is made from:

| page               | made from                                                                     |
|--------------------|-------------------------------------------------------------------------------|
| `fsdp2_surface.md` | the installed torch, by inspection; the docstrings of `shardgrad`              |
| `errors.md`        | the docstrings in `shardgrad/errors.py`; every place that builds such an error |
| `cli.md`           | the options of the `shardgrad` command                                         |
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
REFERENCE = DOCS / "reference"
sys.path.insert(0, str(ROOT))

import click  # noqa: E402
import torch  # noqa: E402
import torch.distributed.fsdp as torch_fsdp  # noqa: E402

import shardgrad  # noqa: E402
import shardgrad.errors  # noqa: E402
from shardgrad.cli import main as command_line  # noqa: E402

NOTICE = "<!-- Written by docs/generate.py; edit the docstrings it reads, then run it again. -->\n"


def main(arguments: list[str]) -> int:
    """Writes or checks every page; returns the exit status."""
    outdated = []
    for name, make in PAGES.items():
        path = REFERENCE / name
        text = make()
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            if name == "fsdp2_surface.md" and made_for_another_torch(path):
                print(f"{path.relative_to(ROOT)} was made with another release of torch: not checked")
            else:
                outdated.append(str(path.relative_to(ROOT)))
    if outdated:
        print(f"out of date: {', '.join(outdated)}; run: python docs/generate.py")
    return 1 if outdated else 0


def torch_release() -> str:
    return ".".join(torch.__version__.split(".")[:2])


def made_for_another_torch(path: Path) -> bool:
    return path.exists() and f"torch {torch_release()}" not in path.read_text(encoding="utf-8")


# -- FSDP2's surface ------------------------------------------------------------------------------------


def surface_page() -> str:
    missing = [name for name in torch_methods() if name not in vars(shardgrad.FSDPModule)]
    if missing:
        raise SystemExit(f"shardgrad.FSDPModule lets torch's own methods through: {', '.join(missing)}")
    rows = [
        *table("argument", "status", "what it does here", argument_rows()),
        "## Methods of a sharded module\n",
        "Every public method of torch's `FSDPModule`, in its order. *Accepted* means that the call does "
        "nothing, because the engine already behaves that way. *Refused* means that the call raises "
        "[`UnsupportedError`](errors.md#unsupportederror) and changes nothing.\n",
        *table("method", "status", "what it does here", map(method_row, torch_methods())),
        "## Names to import\n",
        "*The same object* means that a policy made with torch's class can be passed to either engine.\n",
        *table("`torch.distributed.fsdp`", "`shardgrad`", "", map(export_row, torch_exports())),
        "## What FSDP2 does not have\n",
        *table("name", "what it is", "", own_rows()),
    ]
    head = (
        f"# FSDP2's surface\n\n{NOTICE}\n"
        f"Every argument, method and name of torch's `fully_shard`, as of torch {torch_release()}, and what "
        "`shardgrad` does with each. Nothing is ignored in silence: what is not offered raises.\n\n"
        "Behaviour that differs on purpose is in [differences](../explanation/differences.md).\n\n"
        "## Arguments of `fully_shard`\n\n"
    )
    return head + "\n".join(rows) + "\n"


def argument_rows() -> Iterator[tuple[str, str, str]]:
    theirs = inspect.signature(torch_fsdp.fully_shard).parameters
    ours = inspect.signature(shardgrad.fully_shard).parameters
    words = documented_arguments(shardgrad.fully_shard)
    for name in dict.fromkeys([*theirs, *ours]):
        text = words.get(name, "")
        if name not in ours:
            yield f"`{name}`", "**missing**", "not an argument here"
        elif name not in theirs:
            yield f"`{name}`", "ours", sentence(text)
        else:
            yield f"`{name}`", argument_status(text), sentence(text)


def argument_status(text: str) -> str:
    """Reads the status off the docstring's words."""
    if text.startswith("refused"):
        return "refused"
    return "in part" if "are refused" in text or text.startswith("only") else "works"


def documented_arguments(function: Callable[..., Any]) -> dict[str, str]:
    """Returns the entries of a Google-style `Args:` section."""
    found: dict[str, str] = {}
    current = None
    section = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")[2]
    for line in section.splitlines():
        entry = re.match(r"    (\w+): (.*)", line)
        if entry:
            current, found[entry[1]] = entry[1], entry[2]
        elif current and line.startswith("        "):
            found[current] += " " + line.strip()
        elif line.strip():
            break
    return found


def torch_methods() -> list[str]:
    members = vars(torch_fsdp.FSDPModule)
    return [name for name, member in members.items() if callable(member) and is_surface(name)]


def is_surface(name: str) -> bool:
    # Private, but called by programs.
    return not name.startswith("_") or name == "_set_unshard_async_op"


def method_row(name: str) -> tuple[str, str, str]:
    doc = summary(vars(shardgrad.FSDPModule)[name])
    if doc.startswith("Refused"):
        return f"`{name}`", "refused", f"Use instead: {refusal_advice(name)}."
    if doc.startswith("Accepted"):
        return f"`{name}`", "accepted", sentence(doc.partition(":")[2].strip() or doc)
    return f"`{name}`", "works", doc


def refusal_advice(name: str) -> str:
    """Returns the `instead` of the `unsupported(...)` call inside a method."""
    source = inspect.cleandoc("\n" + inspect.getsource(vars(shardgrad.FSDPModule)[name]))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and called_name(node) == "unsupported":
            return next(template(word.value) for word in node.keywords if word.arg == "instead")
    return ""


def torch_exports() -> list[str]:
    # The package of FSDP2; `torch.distributed.fsdp` also exports FSDP1's names.
    return [name for name in torch_fsdp.__all__ if hasattr(torch_fsdp._fully_shard, name)]


def export_row(name: str) -> tuple[str, str, str]:
    ours = getattr(shardgrad, name, None)
    if ours is None:
        return f"`{name}`", "not offered", ""
    if ours is getattr(torch_fsdp, name):
        return f"`{name}`", "the same object", ""
    return f"`{name}`", "replaced", summary(ours)


def own_rows() -> Iterator[tuple[str, str, str]]:
    for name in shardgrad.__all__:
        thing = getattr(shardgrad, name)
        if not hasattr(torch_fsdp, name) and not name.startswith("__"):
            yield f"`shardgrad.{name}`", summary(thing), ""


# -- the catalogue of errors ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """A place that builds an error: which class, where, and the text with its blanks."""

    error: str
    module: str
    function: str
    rows: tuple[tuple[str, str], ...]


def errors_page() -> str:
    sites = list(find_sites())
    classes = [getattr(shardgrad.errors, name) for name in declared_errors()]
    lines = [
        "# Errors\n",
        NOTICE,
        "Every error that the engine raises on purpose is a `shardgrad.ShardgradError`, and also the builtin "
        "type that FSDP2 raises in the same situation, so `except` clauses written for FSDP2 keep working. "
        "[How to read one](../how_to/read_an_error.md).\n",
        "In the messages below, ⟨…⟩ stands for what is filled in.\n",
        *table("error", "also a", "raised when", map(error_row, classes)),
    ]
    for cls in classes:
        own = [site for site in sites if site.error == cls.__name__]
        if cls is shardgrad.errors.ShardgradError:
            continue
        lines.append(f"## {cls.__name__}\n")
        lines.append(f"{summary(cls)} Also a {builtin_bases(cls)}.\n")
        for site in own:
            lines.append(f"`{site.function}` in `{site.module}`:\n")
            lines.append("```text")
            lines.extend(line_of(label, text) for label, text in site.rows)
            lines.append("```\n")
    return "\n".join(lines).rstrip() + "\n"


def line_of(label: str, text: str) -> str:
    return text if label == "what" else f"  {label + ':':<10}{text}"


def declared_errors() -> list[str]:
    tree = ast.parse(Path(shardgrad.errors.__file__).read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def error_row(cls: type) -> tuple[str, str, str]:
    if cls is shardgrad.errors.ShardgradError:
        parts = "`what`, `expected`, `got`, `where`, `fix`"
        return f"`{cls.__name__}`", "", f"Base of all others, with the attributes {parts}."
    link = f"[`{cls.__name__}`](#{cls.__name__.lower()})"
    return link, builtin_bases(cls), summary(cls)


def builtin_bases(cls: type) -> str:
    return ", ".join(f"`{base.__name__}`" for base in cls.__bases__ if base.__name__ in vars(builtins))


def find_sites() -> Iterator[Site]:
    package = Path(shardgrad.__file__).parent
    wanted = {*declared_errors(), "unsupported"}
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function, node in calls(tree, "module"):
            name = called_name(node)
            is_the_builder = path.name == "errors.py" and function == "unsupported"
            if name in wanted and not is_the_builder:
                module = path.relative_to(package.parent).as_posix()
                error = "UnsupportedError" if name == "unsupported" else name
                yield Site(error, module, function, rows_of(node))


def calls(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    """Yields every call below `node` with the name of the function it is in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield function, child
        is_function = isinstance(child, ast.FunctionDef)
        yield from calls(child, child.name if is_function else function)


def called_name(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def rows_of(node: ast.Call) -> tuple[tuple[str, str], ...]:
    first = template(node.args[0]) if node.args else "⟨…⟩"
    if called_name(node) == "unsupported":
        what = f"shardgrad does not support {first} yet"
        rows = [("what", what)]
    else:
        rows = [("what", first)]
    labels = {"expected": "expected", "got": "got", "where": "where", "fix": "try", "instead": "try"}
    rows += [(labels[word.arg], template(word.value)) for word in node.keywords if word.arg in labels]
    return tuple(rows)


def template(node: ast.expr) -> str:
    """Returns the text that an expression builds, with what is only known at run time as ⟨…⟩."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    if isinstance(node, ast.FormattedValue):
        node = node.value
    if isinstance(node, ast.Name) and len(node.id) > 1:
        return f"⟨{node.id.replace('_', ' ')}⟩"
    return "⟨…⟩"


# -- the command line -----------------------------------------------------------------------------------


def cli_page() -> str:
    lines = [
        "# Command line\n",
        NOTICE,
        "`shardgrad` is installed with the package; `python -m shardgrad` is the same program, and what "
        "`torchrun` starts.\n",
    ]
    for name, command in commands(command_line, "shardgrad"):
        lines += [f"## {name}\n", inspect.cleandoc(command.help or "") + "\n"]
        options = [one for one in command.params if isinstance(one, click.Option)]
        if options:
            lines += table("option", "value", "meaning", map(option_row, options))
    lines += [
        "A setting in a file (`--config run.toml`) has the option's name without the dashes in front: "
        "`batch_size = 4`. A file may hold any of the settings above except `--resume`, `--config` and "
        "`--debug`; an option given on the command line wins.\n",
        "## Exit status\n",
        *table("status", "means", "", status_rows()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def commands(group: click.Group, prefix: str) -> Iterator[tuple[str, click.Command]]:
    """Yields every command with what to type for it, those of groups after their group."""
    for name, command in group.commands.items():
        arguments = [one.human_readable_name for one in command.params if isinstance(one, click.Argument)]
        yield " ".join([prefix, name, *arguments]), command
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix} {name}")


def option_row(option: click.Option) -> tuple[str, str, str]:
    value = "" if option.is_flag else option.metavar or option.type.name.upper()
    names = ", ".join(f"`{name}`" for name in option.opts)
    return names, f"`{value}`".replace("|", r"\|") if value else "", option.help or ""


def status_rows() -> Iterator[tuple[str, str, str]]:
    from shardgrad.train import failure

    yield "0", "the run is done", ""
    for cls in (failure.TrainingError, failure.UsageError, failure.Interrupted):
        yield str(cls.exit_status), summary(cls), ""


# -- text -----------------------------------------------------------------------------------------------


def table(first: str, second: str, third: str, rows: Any) -> list[str]:
    """Returns the lines of a Markdown table and an empty one; a column nobody fills is left out."""
    rows = [(first, second, third), *rows]
    width = 3 if any(row[2] for row in rows) else 2
    lines = [f"| {' | '.join(row[:width])} |" for row in rows]
    return [lines[0], f"|{' --- |' * width}", *lines[1:], ""]


def summary(thing: Any) -> str:
    """Returns the first paragraph of a docstring on one line."""
    return inspect.cleandoc(thing.__doc__ or "").partition("\n\n")[0].replace("\n", " ")


def sentence(text: str) -> str:
    """Returns a phrase that starts with a capital and ends with a full stop."""
    text = text.strip().rstrip(".")
    return f"{text[:1].upper()}{text[1:]}." if text else ""


PAGES: dict[str, Callable[[], str]] = {
    "fsdp2_surface.md": surface_page,
    "errors.md": errors_page,
    "cli.md": cli_page,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
