"""Fault drills: the training program with injected faults, judged by its reports and what it leaves
behind. `python -m tests.drills` (or `make drills`) runs them; `test_drills.py` runs a short set.
"""
