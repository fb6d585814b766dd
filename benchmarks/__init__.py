"""Measured claims about shardgrad, runnable: `python -m benchmarks.<name> --help`."""
