"""Fault drills: the training program with injected faults, judged by its reports and what it leaves
behind.

`python -m tests.drills` (or `make drills`) runs them; `test_drills.py` runs a short set.

| file | job |
|---|---|
| `faults.py` | the catalogue: what is injected, where, and the expected outcome |
| `injector.py` | injects a fault inside a rank |
| `processes.py` | runs the program: ranks forked from a process that has imported PyTorch |
| `hosts.py` | two hosts on one machine: network namespaces and a link that can be cut |
| `reports.py` | checks that a report names the right rank, step and location |
| `judge.py` | runs a drill and judges it |
| `record.py` | records of drills, one line of JSON each |
"""
