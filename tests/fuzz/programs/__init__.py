"""Random training programs, each run by plain torch and by shardgrad, and compared.

| file | what it is |
|---|---|
| `program.py` | a program as data: a model, how it is sharded, an optimizer, operations |
| `contract.py` | which operation may follow which |
| `generate.py` | draws programs |
| `net.py` | the model |
| `plain.py` | plain torch: a copy on each rank, gradients averaged by hand |
| `sharded.py` | shardgrad |
| `compare.py` | one program on one rank under both, and what differs |
| `worlds.py` | ranks that live for many programs: processes, or threads with simulated devices |
| `shrink.py` | makes a program that fails small |
| `streams.py` | the streams of a device, as a careful program uses them |
| `seeds/` | kept programs, which tests/engine, tests/graphs and tests/gpu run |

    python -m tests.fuzz.programs --seed 7 --count 200
    python -m tests.fuzz.programs --world cuda1    # on torch.cuda, with or without a GPU
    python -m tests.fuzz.programs --replay tests/fuzz/programs/seeds/NAME.json
"""
