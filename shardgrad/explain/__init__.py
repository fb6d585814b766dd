"""Says where the time of a training step goes, and what changes would save, from a trace of one
step.

A step is a list of operations on lanes (streams), with what each waits for (`step.py`). It is read
from a Chrome trace of `torch.profiler`, or of `shardgrad plan --trace` (`traces.py`), replayed
(`replay.py`), and replayed again with changes (`changes.py`).
"""
