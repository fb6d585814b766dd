"""Fault drills: the training program, broken on purpose, and judged by what it says and what it leaves.

| file | job |
|---|---|
| `faults.py` | the catalogue: what is broken, where, and what has to follow |
| `saboteur.py` | breaks it, inside the ranks |
| `stage.py` | where it happens: ranks, forked from a warm process, and what they wrote |
| `hosts.py` | two hosts on one machine: network namespaces, and a cable that can be pulled |
| `tampering.py` | breaks checkpoints that lie on the disk |
| `truth.py` | whether a report names the rank, the step and the place where it struck |
| `referee.py` | runs a drill, and judges it |
| `record.py` | what is kept of drills |
"""
