"""What every benchmark is given: where records go, and whether the numbers have to mean
anything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from benchmarks.launched import Launched
from benchmarks.records import Record, append, environment
from benchmarks.report import show, write


def option(*names: str, **settings: Any) -> Any:
    """`click.option` that shows its default, if there is one."""
    return click.option(*names, show_default="default" in settings, **settings)


class Run:
    """One call of `python -m benchmarks`.

    Args:
        smoke: a few seconds, to see that it runs; the numbers mean nothing.
        out: folder for records; None to write nothing.
        on: what starts ranks, if somebody else started several of these processes.

    Attributes:
        records: what has been measured so far.
        has_failed: a benchmark found something wrong, so the exit status is 1.
    """

    def __init__(self, *, smoke: bool, out: Path | None, on: Launched | None = None) -> None:
        self.smoke, self.out, self.on = smoke, out, on
        self.records: list[Record] = []
        self.has_failed = False
        # Before anything was measured: later it is the load that this run makes.
        self._load_before = os.getloadavg()[0]
        self.environment = self._environment()

    def finish(
        self, benchmark: str, *, config: Mapping[str, Any], samples: Any, summary: Any
    ) -> None:
        """Makes the record of a measurement, prints it, and writes it.

        Its environment is that of the moment when the measurement before it was finished.
        """
        config = {**config, "smoke": self.smoke}
        self.add(
            {
                "benchmark": benchmark,
                "environment": self.environment,
                "config": config,
                "samples": samples,
                "summary": summary,
            }
        )

    def add(self, record: Record) -> None:
        """Prints a record and writes it, and looks at the environment again for the next."""
        self.records.append(record)
        show(record)
        if self.out is not None:
            append(self.out, record)
        self.environment = self._environment()

    def _environment(self) -> dict[str, Any]:
        return environment() | {"load_before": self._load_before}

    def close(self) -> Path | None:
        """Writes the page of what was measured; returns its path."""
        if not self.records or self.out is None:
            return None
        return write(self.records, self.out)
