"""Measured claims about shardgrad, runnable: `python -m benchmarks --help`."""

from importlib.util import find_spec

_missing = [name for name in ("click", "rich", "jinja2") if find_spec(name) is None]
if _missing:
    raise ImportError(f"benchmarks need {', '.join(_missing)}: pip install --group bench")
