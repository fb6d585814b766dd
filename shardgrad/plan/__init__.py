"""What a training step will need, before there is a cluster to run it on: memory, traffic, time.

The engine itself answers. Its real code lays out, shards and trains the model on tensors that have shapes
and no memory, among ranks that do not exist (`world.py`, `rehearsal.py`); what it allocates and launches is
written down (`recording.py`), and a cost model turns that into time (`cost.py`, `timeline.py`). Nothing here
repeats the engine's arithmetic, so nothing here can disagree with it.
"""
