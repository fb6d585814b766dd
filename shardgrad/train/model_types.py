"""What `--hf` names, read before `transformers` is imported, which takes seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardgrad.extras import require
from shardgrad.train.config import read_text
from shardgrad.train.failure import UsageError
from shardgrad.train.presets import BYTE_VALUES, Scalar

__all__ = ["require_fitting_sizes", "require_model_type", "settings_in"]

# What transformers' configurations call sizes, of which none can be less than one.
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "max_position_embeddings", "vocab_size", "n_embd", "n_layer", "n_head", "n_positions"),
)
_MOST = 2**24
_MULTIPLES = (("num_attention_heads", "num_key_value_heads"), ("n_embd", "n_head"))


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
    found = find_spec("transformers")
    places = [] if found is None else found.submodule_search_locations or []
    # Where its tables of types are, each is a word in quotes.
    tables = [path.read_text("utf-8") for place in places for path in Path(place, "models/auto").glob("*.py")]
    if tables and not any(f'"{kind}"' in table for table in tables):
        raise UsageError(
            f"--hf {source}: the installed transformers has no model of type {kind!r}. Correct it, or name a "
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
        raise UsageError(f"{source} has {sizes['vocab_size']} tokens: bytes need at least {BYTE_VALUES}.")
    for larger, smaller in _MULTIPLES:
        if larger in sizes and smaller in sizes and sizes[larger] % sizes[smaller]:
            raise UsageError(
                f"--hf {source}: {larger} is {sizes[larger]}, which {smaller}, {sizes[smaller]}, does not "
                "divide: correct one of them."
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
        raise UsageError(f"--hf {source} names no model_type: use the config.json of a transformers model.")
    return settings
