"""Whether a machine was quiet while it was measured, said before any number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Quartiles of a time further than this from its median, relative, are too far.
ALLOWED = 0.10
# Of each core, before anything is measured: what else is running would be measured too.
ALLOWED_LOAD = 0.5


def widest(summary: Mapping[str, Any]) -> tuple[str, float]:
    """Returns the row whose time has the quartile furthest from its median, and how far, relative;
    an empty name where a summary has no times.

    Of times that are below a hundredth of the longest one nothing is expected: a graph's call
    beside eager steps.
    """
    times = list(_times(summary))
    least = max((time["median"] for _, time in times), default=0.0) / 100
    distances = [
        (
            name,
            max(abs(quartile - time["median"]) for quartile in time["quartiles"]) / time["median"],
        )
        for name, time in times
        if time["median"] > least
    ]
    return max(distances, key=lambda found: found[1], default=("", 0.0))


def _times(of: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, value in of.items():
        # Beside the time of a step, what is worked out of it is not looked at.
        is_time = name == "wall_s" or ("wall_s" not in of and "_s_" in f"{name}_")
        if isinstance(value, Mapping) and "quartiles" not in value:
            yield from _times(value, (*path, str(name)))
        elif isinstance(value, Mapping) and is_time:
            yield ", ".join(path), value


def verdict(record: Mapping[str, Any]) -> tuple[bool, str]:
    """Returns whether the machine was quiet, and a sentence that says so or why not."""
    environment = record["environment"]
    # Older records have the load of the moment when each of them began.
    load = environment.get("load_before", environment["load_average_1min"])
    cores = environment["cores"]
    name, distance = widest(record["summary"])
    if distance > ALLOWED:
        cause = f"a quartile of {name} is {distance:.0%} from its median; {ALLOWED:.0%} are allowed"
    elif load > cores * ALLOWED_LOAD:
        cause = f"the load was {load:.1f} on {cores} cores before anything was measured"
    else:
        times = f", and no quartile is further than {distance:.0%} from its median" if name else ""
        return True, f"The machine was quiet: load {load:.1f} on {cores} cores{times}."
    return False, f"The machine was not quiet: {cause}. Let nothing else run, and measure again."
