"""Helpers for tests of programs and of the engine itself."""

from .recorded_streams import Hazard, RecordedStreams

__all__ = ["Hazard", "RecordedStreams"]
