"""Random training programs, each run by plain torch, by FSDP2 where it can, and by shardgrad, and
compared.

| file | what it is |
|---|---|
| `program.py` | a program as data: a model, how it is sharded, an optimizer, operations |
| `contract.py` | which operation may follow which |
| `generate.py` | draws programs |
| `net.py` | the model |
| `plain.py` | plain torch: a copy on each rank, gradients averaged by hand |
| `sharded.py` | FSDP2 and shardgrad |
| `compare.py` | one program on one rank under all of them, and what differs |
| `explained.py` | what FSDP2 cannot do, and differences that are documented |
| `worlds.py` | ranks that live for many programs: processes, or threads with simulated devices |
| `shrink.py` | makes a program that fails small |
| `defects.py` | defects that the engine once had, to see that they are found |
| `record.py` | thousands of programs, and the record of them |
| `seeds/` | programs that once failed; a test runs them |

    python -m tests.fuzz.programs --seed 7 --count 200
    python -m tests.fuzz.programs --replay tests/fuzz/programs/seeds/NAME.json
"""
