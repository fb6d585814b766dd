"""What `--hf` names, read before `transformers` is imported, which takes seconds."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardgrad.extras import require
from shardgrad.train.config import read_text
from shardgrad.train.failure import UsageError

__all__ = ["require_model_type", "settings_in"]


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
