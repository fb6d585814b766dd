"""Memory that is given back and taken again at the same addresses."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import shardgrad
from shardgrad.errors import AsleepError, CheckpointError, OptionError, RootError
from shardgrad.ops.virtual_memory import bring_back, give_back, virtual_zeros
from tests.support.muon import cut_like
from tests.support.parity import SHARDGRAD, assert_same_bits, stack, token_loss, tower
from tests.support.ranks import on_ranks
from tests.support.two_engines import take_steps

CYCLES = 20
LEVELS = [1, 2]


def resident_nbytes() -> int:
    """Bytes of this process's own pages: those of files, which Linux may drop, are left out."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


# -- the memory itself


def test_pages_come_back_at_their_address_with_what_was_in_them() -> None:
    gc.collect()
    size = 1 << 26
    memory, empty = (
        virtual_zeros(numel, torch.float32, torch.device("cpu")) for numel in (size, 0)
    )
    assert not memory.any()
    view, address = memory[1000:].view(-1, 4), memory.data_ptr()
    right = torch.randn(size)
    memory.copy_(right)
    before = resident_nbytes()
    for cycle in range(3):
        away = [memory, empty]
        give_back(away)
        assert before - resident_nbytes() > 0.99 * memory.nbytes
        other = virtual_zeros(size, torch.float32, torch.device("cpu"))
        other.fill_(7.0)
        assert other.data_ptr() != address
        del other
        bring_back(away)
        assert not away
        assert memory.data_ptr() == address
        assert torch.equal(memory, right)
        assert torch.equal(view.flatten(), right[1000:])
        right[cycle] = memory[cycle] = 3.0
    give_back([memory], keep=False)
    bring_back([memory])
    assert not memory.any()


def test_addresses_are_free_once_no_tensor_is_left() -> None:
    before = resident_nbytes()
    for _ in range(10):
        memory = virtual_zeros(1 << 24, torch.float32, torch.device("cpu"))
        memory.fill_(1.0)
        view = memory[5:]
        del memory
        assert view[0] == 1.0
    assert resident_nbytes() - before < 2 * (1 << 26)


# -- a model and its optimizer


def built(sleepy: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    policy = {"offload_policy": shardgrad.SleepPolicy()} if sleepy else {}
    model = SHARDGRAD.shard_tower(tower().bfloat16(), **policy)
    return model, shardgrad.optim.AdamW(model.parameters(), lr=1e-2, master="float32")


def addresses(model: nn.Module, optimizer: Any) -> dict[str, int]:
    found = {name: row.data_ptr for name, row in shardgrad.export_table(model).items()}
    return found | {name: buffer.data_ptr() for name, buffer in optimizer.buffers()}


def contents(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    found = {name: row.local.clone() for name, row in shardgrad.export_table(model).items()}
    return found | {name: buffer.clone() for name, buffer in optimizer.buffers()}


def train(sleepy: bool, between: Callable[[nn.Module, Any], None]) -> dict[str, Tensor]:
    model, optimizer = built(sleepy)
    losses = {}
    where: dict[str, int] = {}
    for step in range(CYCLES):
        loss = token_loss(model, SHARDGRAD.tokens(step))
        loss.backward()
        shardgrad.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses[f"loss {step}"] = loss.detach()
        where = where or addresses(model, optimizer)
        between(model, optimizer)
        assert addresses(model, optimizer) == where
    return losses | contents(model, optimizer)


@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_twenty_cycles_change_no_bit_and_no_address(level: int) -> None:
    def nap(model: nn.Module, optimizer: Any) -> None:
        shardgrad.sleep(model, optimizer, level=level)
        shardgrad.wake(model, optimizer)

    assert_same_bits(train(True, nap), train(False, lambda *_: None))


@on_ranks(2)
def test_states_may_be_away_in_forward_and_backward() -> None:
    def trained(away: bool) -> dict[str, Tensor]:
        model, optimizer = built()
        for step in range(4):
            if away:
                optimizer.offload()
                optimizer.offload()  # does nothing
            optimizer.zero_grad()
            token_loss(model, SHARDGRAD.tokens(step)).backward()
            if away:
                optimizer.reload()
                optimizer.reload()
            optimizer.step()
        return contents(model, optimizer)

    assert_same_bits(trained(True), trained(False))


@on_ranks(2)
def test_memory_that_is_given_back_is_that_of_states_shards_and_gradients() -> None:
    model = stack(1024, 1024, 1024, 1024)
    numel = sum(param.numel() for param in model.parameters())
    SHARDGRAD.fully_shard(model, offload_policy=shardgrad.SleepPolicy())
    optimizer = shardgrad.optim.AdamW(model.parameters())
    x = torch.randn(2, 1024)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    own = numel * 4 / dist.get_world_size()  # bytes of this rank's shard, float32
    model(x)
    # Two moments; then the shard and its gradient as well.
    for level, copies in ((1, 2), (2, 4)):
        awake = resident_nbytes()
        shardgrad.sleep(model, optimizer, level=level)
        freed = awake - resident_nbytes()
        assert freed > 0.95 * copies * own, (level, freed / own)
        # A forward leaves the root unsharded.
        assert (level == 2) == all(isinstance(param, DTensor) for param in model.parameters())
        shardgrad.wake(model, optimizer)
        model(x)


@on_ranks(2)
def test_weights_may_be_forgotten_and_are_zeros_then() -> None:
    model, optimizer = built()
    take_steps(SHARDGRAD, model, optimizer, range(1))
    right = contents(model, optimizer)
    saved = {name: value.full_tensor() for name, value in model.state_dict().items()}
    shardgrad.sleep(model, optimizer, level=3)
    shardgrad.wake(model, optimizer)
    assert all(not row.local.any() for row in shardgrad.export_table(model).values())
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(cut_like(param, saved[name]))
    assert_same_bits(contents(model, optimizer), right)


@on_ranks(2)
def test_a_use_while_asleep_is_refused_and_changes_nothing() -> None:
    model, optimizer = built()
    batch = SHARDGRAD.tokens(0)
    token_loss(model, batch).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    for name, param in model.named_parameters():
        if not name.startswith("layers.1."):  # one unit's are left
            param.grad = None
    with pytest.raises(OptionError, match=r"(?s)discard gradients.*zero_grad"):
        shardgrad.sleep(model, optimizer, level=2)
    optimizer.zero_grad()
    right = contents(model, optimizer)
    weights = model.state_dict()

    shardgrad.sleep(model, optimizer, level=1)
    token_loss(model, batch).backward()
    for use in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(AsleepError, match=r"(?s)optimizer AdamW is asleep.*reload\(\)"):
            use()
    optimizer.zero_grad()
    group = optimizer.param_groups.pop()
    with pytest.raises(AsleepError):
        optimizer.zero_grad()
    optimizer.param_groups.append(group)
    shardgrad.export_table(model)  # weights are there
    shardgrad.wake(model, optimizer)

    earlier = token_loss(model, batch)
    shardgrad.sleep(model, optimizer, level=2)
    uses = (
        lambda: model(batch[0]),
        lambda: model.layers[0](torch.ones(1, 7, dtype=torch.bfloat16)),
        model.unshard,
        model.state_dict,
        model.layers[0].state_dict,
        model.double,
        model.layers[0].cpu,
        lambda: model.load_state_dict(weights),
        lambda: shardgrad.export_table(model),
        lambda: next(model.parameters()).full_tensor(),
        lambda: next(model.parameters()).to_local(),
        lambda: next(model.parameters()).redistribute(placements=[Replicate()]),
        lambda: shardgrad.sleep(model, optimizer, level=2),
    )
    for use in (*uses, earlier.backward):
        with pytest.raises(AsleepError, match=r"(?s)Tower is asleep.*wake"):
            use()
    with pytest.raises(CheckpointError, match="AsleepError: gain is asleep"):
        shardgrad.checkpoint.save(weights, "unused")
    late = patch(
        "shardgrad.ops.virtual_memory._HostPages.bring_back", side_effect=OSError("no room")
    )
    with late, pytest.raises(OSError, match="no room"):
        shardgrad.wake(model, optimizer)
    other = torch.optim.SGD(model.parameters())
    for use in (optimizer.step, other.step, *uses):
        with pytest.raises(AsleepError):
            use()
    shardgrad.wake(model, optimizer)
    assert_same_bits(contents(model, optimizer), right)
    token_loss(model, batch).backward()
    optimizer.step()
    model.cpu().load_state_dict(model.state_dict())


@on_ranks(2)
def test_gradients_in_flight_are_not_lost_in_sleep() -> None:
    model = shardgrad.fully_shard(torch.nn.Linear(2, 2), offload_policy=shardgrad.SleepPolicy())
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    model.set_requires_gradient_sync(True)
    model.finalize_backward(async_op=True)
    with pytest.raises(OptionError, match="discard gradients"):
        shardgrad.sleep(model, level=2)


@on_ranks(1)
def test_all_modules_of_a_list_sleep() -> None:
    parts = [*stack(4, 4, 4)]
    shardgrad.fully_shard(parts, offload_policy=shardgrad.SleepPolicy())
    shardgrad.sleep(parts[0], level=2)
    with pytest.raises(AsleepError):
        parts[-1].state_dict()


@on_ranks(2)
def test_a_gradient_that_the_program_holds_is_there_again() -> None:
    model, optimizer = built()
    take_steps(SHARDGRAD, model, optimizer, range(1))
    token_loss(model, SHARDGRAD.tokens(1)).backward()
    held = {name: param.grad for name, param in model.named_parameters()}
    right = {name: grad.full_tensor().clone() for name, grad in held.items()}
    optimizer.zero_grad()
    shardgrad.sleep(model, optimizer, level=3)
    shardgrad.wake(model, optimizer)
    assert_same_bits({name: grad.full_tensor() for name, grad in held.items()}, right)


@on_ranks(1)
def test_a_part_of_two_models_sleeps_for_both_and_is_woken_by_one() -> None:
    part, policy = stack(4, 4), shardgrad.SleepPolicy()
    first, second = nn.Sequential(part), nn.Sequential(part, nn.Linear(4, 1))
    for module in (part, first, second):
        shardgrad.fully_shard(module, offload_policy=policy)
    x = torch.ones(1, 4)
    right = first(x).clone()
    for _ in range(2):  # before and after a forward of the second, which takes the part over
        shardgrad.sleep(first, level=2)
        with suppress(AsleepError):
            shardgrad.wake(second)
        for use in (lambda: second(x), lambda: shardgrad.sleep(second, level=2)):
            with pytest.raises(AsleepError):
                use()
        shardgrad.wake(first)
        second(x)
    assert torch.equal(first(x), right)


@on_ranks(2)
def test_what_cannot_sleep_is_refused() -> None:
    model, optimizer = built(sleepy=False)
    take_steps(SHARDGRAD, model, optimizer, range(1))
    for use in (optimizer.offload, lambda: shardgrad.sleep(model, level=2)):
        with pytest.raises(OptionError, match=r"(?s)cannot be released.*SleepPolicy\(\)"):
            use()
    with pytest.raises(OptionError, match="level=1, 2 or 3"):
        shardgrad.sleep(model, level=4)
    for use in (shardgrad.sleep, shardgrad.wake):
        with pytest.raises(OptionError, match=r"(?s)optimizer from shardgrad\.optim.*SGD"):
            use(model, None, torch.optim.SGD(model.parameters()))
    hook = model.layers[0].register_forward_hook(lambda *_: shardgrad.sleep(model, level=2))
    with hook, pytest.raises(OptionError, match="weights that a forward is using"):
        model(SHARDGRAD.tokens(0)[0])
    for use in (shardgrad.sleep, shardgrad.wake):
        with pytest.raises(RootError, match=r"(?s)must be called with the root.*Block"):
            use(model.layers[0])
    optimizer.step()


@on_ranks(2)
def test_a_sleep_that_is_refused_or_fails_leaves_everything_as_it_was() -> None:
    model, optimizer = built()
    take_steps(SHARDGRAD, model, optimizer, range(1))
    optimizer.zero_grad()
    right, states = contents(model, optimizer), sum("step" not in n for n, _ in optimizer.buffers())
    files = map(TemporaryFile, ["w+b"] * (states + 1))  # for all states, and not all weights
    full_disk = patch(
        "tempfile.TemporaryFile", side_effect=[*files, *map(open, ["/dev/full"], ["wb"])]
    )
    with full_disk, pytest.raises(OSError, match="No space"):
        shardgrad.sleep(model, optimizer, level=2)
    assert_same_bits(contents(model, optimizer), right)
    take_steps(SHARDGRAD, model, optimizer, range(1))
    shardgrad.sleep(model, optimizer, shardgrad.GraphPool())  # level 1 leaves graphs alone
    with pytest.raises(OptionError, match=r"(?s)pool's memory cannot.*GraphPool.*SleepPolicy\(\)"):
        shardgrad.sleep(model, optimizer, shardgrad.GraphPool(), level=2)
    with pytest.raises(AsleepError):
        optimizer.state_dict()
