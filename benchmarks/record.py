"""What records look like here: as those of `shardgrad bench`."""

from shardgrad.bench.record import append, environment, make_record

__all__ = ["append", "environment", "make_record"]
