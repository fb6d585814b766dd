"""What `--hf` names, read before `transformers` is imported, which takes seconds."""

from __future__ import annotations

import ast
import functools
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardgrad.extras import require
from shardgrad.train.config import read_text
from shardgrad.train.failure import UsageError
from shardgrad.train.presets import BYTE_VALUES, Scalar, suggestion

__all__ = ["require_fitting_sizes", "require_known_fields", "require_model_type", "settings_in"]

# What transformers' configurations call sizes, of which none can be less than one.
_SIZES = (
    *(
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ),
    *(
        "head_dim",
        "max_position_embeddings",
        "vocab_size",
        "n_embd",
        "n_layer",
        "n_head",
        "n_positions",
    ),
)
_MOST = 2**24
_MULTIPLES = (("num_attention_heads", "num_key_value_heads"), ("n_embd", "n_head"))
_DOES_NOT_DIVIDE = "--hf {}: {} is {}, which {}, {}, does not divide: correct one of them."


def require_model_type(source: str) -> None:
    """Refuses a model type that the installed `transformers` does not know.

    Args:
        source: path of a `config.json`, or a model type such as `gpt2`.

    Raises:
        UsageError: the file cannot be read, or the type is not known.
        PartnerUnavailableError: `transformers` is not installed.
    """
    require("transformers", feature="--hf")
    kind = settings_in(source)["model_type"]
    # Where its tables of types are, each is a word in quotes.
    tables = _tables_of_types()
    if tables and not any(f'"{kind}"' in table for table in tables):
        raise UsageError(
            f"--hf {source}: the installed transformers has no model of type {kind!r}. Correct it, "
            f"or name a "
            "config.json."
        )


def require_fitting_sizes(source: str, overrides: Mapping[str, Scalar]) -> None:
    """Refuses sizes of which `transformers` could build no model for bytes; it has the last word.

    Args:
        source: path of a `config.json`, or a model type such as `gpt2`.
        overrides: fields of the configuration to replace.

    Raises:
        UsageError: a size is none, or two do not fit each other.
    """
    settings = settings_in(source) | dict(overrides)
    sizes = {name: settings[name] for name in _SIZES if settings.get(name) is not None}
    for name, value in sizes.items():
        if type(value) is not int or not 1 <= value <= _MOST:
            raise UsageError(
                f"--hf {source}: {name} is {value!r:.50}: give a whole number from 1 to {_MOST}."
            )
    if sizes.get("vocab_size", BYTE_VALUES) < BYTE_VALUES:
        raise UsageError(
            f"{source} has {sizes['vocab_size']} tokens: bytes need at least {BYTE_VALUES}."
        )
    for larger, smaller in _MULTIPLES:
        if larger in sizes and smaller in sizes and sizes[larger] % sizes[smaller]:
            raise UsageError(
                _DOES_NOT_DIVIDE.format(source, larger, sizes[larger], smaller, sizes[smaller])
            )


def require_known_fields(source: str, overrides: Mapping[str, Scalar]) -> None:
    """Refuses fields that the configuration does not have, and values of another type or size than
    it takes.

    The class of the configuration is read from its file, not imported. It refuses no more than
    `transformers` does, which has the last word: on other rules of its own, and on a class that is
    written in another way.

    Args:
        source: path of a `config.json`, or a model type such as `gpt2`.
        overrides: fields of the configuration to replace.

    Raises:
        UsageError: there is no such field, a value is of another type, or one size does not divide
            another.
    """
    settings = settings_in(source) | dict(overrides)
    kind = settings["model_type"]
    classes = _classes_of(str(kind))
    if not classes:
        return
    # A field is declared, or a property, or assigned in a method, or a name that a table maps to
    # another.
    words = {word for node in classes for word in _words(node)}
    declared = {
        statement.target.id: statement
        for node in reversed(classes)  # what a class declares replaces its base's
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and not ast.unparse(statement.annotation).startswith("ClassVar")
    }
    for name in overrides:
        if name not in words:
            fields = textwrap.shorten(suggestion(name, list(declared)), 200)
            raise UsageError(f"The configuration of {kind!r} has no field {name!r}: {fields}")
    for name in declared.keys() & settings.keys() if _is_strict(classes[0]) else ():
        taken = _simple_types(declared[name].annotation)
        if taken and _kind_of(settings[name]) not in taken:
            types = " or ".join(sorted(taken))
            raise UsageError(
                f"--hf {source}: {name} is {settings[name]!r:.50}, and transformers takes {types}."
            )
    sizes = {
        name: statement.value.value
        for name, statement in declared.items()
        if isinstance(statement.value, ast.Constant)
    }
    sizes |= settings
    for larger, smaller in _divisions(classes[0]):
        whole, part = sizes.get(larger), sizes.get(smaller)
        if isinstance(whole, int) and isinstance(part, int) and part and whole % part:
            raise UsageError(_DOES_NOT_DIVIDE.format(source, larger, whole, smaller, part))


def _package() -> list[Path]:
    found = find_spec("transformers")
    return (
        [] if found is None else [Path(place) for place in found.submodule_search_locations or ()]
    )


def _tables_of_types() -> list[str]:
    return [
        path.read_text("utf-8") for root in _package() for path in root.glob("models/auto/*.py")
    ]


@functools.cache
def _classes_of(kind: str) -> list[ast.ClassDef]:
    """Returns the configuration's class and those that it inherits from, or nothing if one is not
    found.
    """
    entry = re.compile(rf'"{re.escape(kind)}",\s*"(\w+Config)"')
    named = [match[1] for table in _tables_of_types() if (match := entry.search(table))]
    for root in _package() if named else ():
        folder = root / "models" / kind.replace("-", "_")
        likely = folder.glob("configuration_*.py")
        for path in (*likely, *root.glob("models/**/configuration_*.py")):
            if f"class {named[0]}(" in path.read_text("utf-8"):
                try:
                    return list(_with_bases(path, named[0]))
                except (LookupError, OSError, SyntaxError, RecursionError):
                    return []
    return []


def _with_bases(path: Path, name: str) -> Iterator[ast.ClassDef]:
    """Yields a class, then those that it inherits from, in files of the same package.

    Raises:
        LookupError: a base is from elsewhere.
    """
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield node
            for base in node.bases:
                if not isinstance(base, ast.Name):
                    raise LookupError(ast.unparse(base))
                if base.id != "object":
                    yield from _with_bases(path, base.id)
            return
        if (
            isinstance(node, ast.ImportFrom)
            and node.level
            and name in [alias.name for alias in node.names]
        ):
            target = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            yield from _with_bases(
                target / "__init__.py" if target.is_dir() else target.with_suffix(".py"), name
            )
            return
    raise LookupError(name)


def _words(node: ast.ClassDef) -> Iterator[str]:
    """Yields each name in the code of a class, and each string that is one."""
    for part in ast.walk(node):
        for label in ("id", "attr", "arg", "name", "value"):
            word = getattr(part, label, None)
            if isinstance(word, str) and word.isidentifier():
                yield word


def _is_strict(node: ast.ClassDef) -> bool:
    """Returns whether the types of values are checked, as `huggingface_hub` does for one under
    `@strict`.
    """
    return any(isinstance(each, ast.Name) and each.id == "strict" for each in node.decorator_list)


def _simple_types(annotation: ast.expr) -> set[str]:
    """Returns the types of `int | None`, or nothing if one of them is more than a word or a
    number.
    """
    if isinstance(annotation, ast.BinOp):
        left, right = _simple_types(annotation.left), _simple_types(annotation.right)
        return left | right if left and right else set()
    found = annotation.id if isinstance(annotation, ast.Name) else ast.unparse(annotation)
    return {found} & {"bool", "int", "float", "str", "None"}


def _kind_of(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _divisions(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yields the fields of each `if self.a % self.b != 0` in the method that refuses a
    configuration.
    """
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "validate_architecture":
            tests = [ast.unparse(each.test) for each in method.body if isinstance(each, ast.If)]
            yield from re.findall(
                r"^self\.(\w+) % self\.(\w+) != 0$", "\n".join(tests), re.MULTILINE
            )


def settings_in(source: str) -> dict[str, Any]:
    """Returns the settings in a `config.json`, or those of a model type: its name.

    Raises:
        UsageError: the file cannot be read, or names no model type.
    """
    path = Path(source)
    if not path.suffix:
        return {"model_type": source}
    try:
        settings = json.loads(read_text(path))
    except UsageError as error:
        raise UsageError(f"--hf {error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--hf {source} is not valid JSON ({error}): correct it there.") from error
    if not isinstance(settings, dict) or not isinstance(settings.get("model_type"), str):
        raise UsageError(
            f"--hf {source} names no model_type: use the config.json of a transformers model."
        )
    return settings
