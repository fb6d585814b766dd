"""What would change for a program or a model that comes from another engine."""

from .advice import Advice
from .model import examine
from .script import read_script

__all__ = ["Advice", "examine", "read_script"]
