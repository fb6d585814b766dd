"""What would change for a program or a model that comes from another engine."""

from shardgrad.migration.advice import Advice
from shardgrad.migration.model import examine
from shardgrad.migration.script import read_script

__all__ = ["Advice", "examine", "read_script"]
