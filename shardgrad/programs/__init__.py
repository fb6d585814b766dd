"""What stands around the engine: the command line, and what its commands run.

The engine imports none of it.
"""
