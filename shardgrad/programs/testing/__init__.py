"""Tools for tests of programs and of the engine."""

from shardgrad.programs.testing.check_streams import (
    Order,
    StreamCheckError,
    StreamHazard,
    StreamReport,
    StreamUse,
    check_streams,
)
from shardgrad.programs.testing.recorded_streams import Hazard, RecordedStreams

__all__ = [
    "Hazard",
    "Order",
    "RecordedStreams",
    "StreamCheckError",
    "StreamHazard",
    "StreamReport",
    "StreamUse",
    "check_streams",
]
