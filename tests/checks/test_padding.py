"""Units that send mostly padding are told of, before anything is changed."""

from __future__ import annotations

import warnings

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardgrad import fully_shard
from shardgrad.checks.padding import PaddingWarning
from shardgrad.programs.plan.world import fake_world


def layer(rows: int) -> nn.Linear:
    return nn.Linear(1024, rows, bias=False, device="meta")


@pytest.mark.parametrize(
    ("replicas", "ranks", "rows", "told"),
    [
        (1, 128, 1, None),  # too little to be worth a word
        (1, 4096, 4096, None),
        (1, 16384, 4096, "4.0 times"),
        (2, 1024, 384, "2.7 times"),
    ],
)
def test_a_unit_that_sends_mostly_padding_is_told_of_with_the_mesh_that_cures_it(
    replicas: int, ranks: int, rows: int, told: str | None
) -> None:
    with fake_world((replicas, ranks)) as mesh, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fully_shard(layer(rows), mesh=mesh)
        found = [str(one.message) for one in said if one.category is PaddingWarning]
        assert len(found) == (told is not None)
        if told is None:
            return
        assert f"a Linear moves {told} its bytes" in found[0]
        shards = 4096 if ranks == 16384 else 128
        assert {one.filename for one in said} == {__file__}
        shape = (replicas * ranks // shards, shards)
        assert f"device, {shape}" in found[0]
        said.clear()
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        fully_shard(layer(rows), mesh=mesh)
        assert not [one for one in said if one.category is PaddingWarning]


def test_a_warning_that_is_an_error_leaves_the_module_as_it_was() -> None:
    module = layer(384)
    before = dict(module.named_parameters())
    with fake_world((1024,)), warnings.catch_warnings():
        warnings.simplefilter("error", PaddingWarning)
        with pytest.raises(PaddingWarning):
            fully_shard(module)
    assert type(module) is nn.Linear
    assert all(module.get_parameter(name) is param for name, param in before.items())
