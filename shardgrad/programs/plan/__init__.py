"""Predicts memory, traffic and time of a training step without the machine that runs it.

The engine's real code shards and trains the model on fake tensors in a fake process group
(`world.py`, `rehearsal.py`). A recorder collects what it allocates and launches (`recording.py`),
and a cost model computes the time (`cost.py`, `timeline.py`). The engine's arithmetic is not
repeated here, so it cannot differ.
"""
