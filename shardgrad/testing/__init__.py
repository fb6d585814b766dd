"""Tools for tests of programs and of the engine."""

from shardgrad.testing.check_streams import (
    Order,
    StreamCheckError,
    StreamHazard,
    StreamReport,
    StreamUse,
    check_streams,
)
from shardgrad.testing.recorded_streams import Hazard, RecordedStreams

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
