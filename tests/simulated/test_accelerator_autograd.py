"""Autograd on the simulated device is the real one: its threads, and the streams it chooses."""

from __future__ import annotations

import threading

import torch

from tests.simulated.accelerator.device import checked


def _current() -> torch.Stream:
    return torch.accelerator.current_stream()


def _leaf() -> torch.Tensor:
    return torch.ones(8, device="sim", requires_grad=True)


def test_a_hook_runs_on_the_stream_its_accumulation_node_was_born_on() -> None:
    weight, side = _leaf(), torch.Stream("sim")
    side.wait_stream(_current())
    with side:
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    seen: list[torch.Stream] = []
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(_current()))
    (weight * 2).sum().backward()
    assert seen == [side]
    assert node is not None


def test_a_hook_registered_on_a_side_stream_runs_where_the_node_was_born() -> None:
    weight, side = _leaf(), torch.Stream("sim")
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    home = _current()
    seen: list[torch.Stream] = []
    with side:
        weight.register_post_accumulate_grad_hook(lambda _: seen.append(_current()))
    (weight * 2).sum().backward()
    assert seen == [home]
    assert node is not None


def test_a_gradient_read_on_the_wrong_stream_is_a_hazard() -> None:
    """A reduction that waits for the default stream, while the gradient comes on the side
    stream.
    """
    for waits_for_side in (True, False):
        weight, side, reducer = _leaf(), torch.Stream("sim"), torch.Stream("sim")
        side.wait_stream(_current())
        reducer.wait_stream(_current())
        default = _current()
        with side:
            node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        assert node is not None
        flat = torch.zeros(8, device="sim")
        side.wait_stream(default)
        reducer.wait_stream(default)

        def reduce(
            param: torch.Tensor,
            flat: torch.Tensor = flat,
            source: torch.Stream = side if waits_for_side else default,
            reducer: torch.Stream = reducer,
        ) -> None:
            flat.copy_(param.grad)
            reducer.wait_stream(source)
            with reducer:
                flat.mul_(0.5)

        weight.register_post_accumulate_grad_hook(reduce)
        with checked(raises=False) as found:
            (weight * 2).sum().backward()
            _current().wait_stream(reducer)
        assert [(h.kind, h.later.op) for h in found] == (
            [] if waits_for_side else [("read-after-write", "aten::mul.out")]
        )
        torch.accelerator.synchronize()


def test_every_device_has_its_own_backward_thread() -> None:
    threads: dict[int, int] = {}
    losses = []
    for index in range(2):
        weight = torch.ones(8, device=f"sim:{index}", requires_grad=True)
        weight.register_post_accumulate_grad_hook(
            lambda p: threads.__setitem__(p.device.index, threading.get_ident())
        )
        losses.append((weight * 2).sum())
    torch.autograd.backward(losses)
    assert sorted(threads) == [0, 1]
    assert len({*threads.values(), threading.get_ident()}) == 3


def test_a_backward_without_python_is_named_by_its_node() -> None:
    x = _leaf()
    y = torch.ones(8, device="sim", requires_grad=True)
    side = torch.Stream("sim")
    loss = (x * y).sum()
    with checked(raises=False) as found:
        with side:
            y.data.fill_(3)  # not ordered before backward, which reads it
        loss.backward()
        side.synchronize()
    backward = [h for h in found if h.later.place == "backward of MulBackward0"]
    assert backward, [str(hazard) for hazard in found]


def test_training_ops_work_and_agree_with_the_cpu() -> None:
    def train(device: str) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).to(
            device
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        batch = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).to(device)
        losses = []
        for _ in range(3):
            loss = model(batch).square().mean() + model.linear1.weight.abs().max()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    with checked():
        ours = train("sim")
    # Attention is fused on the CPU and not here, so sums differ in their last bits: some hundred of
    # 6e-8.
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(train("cpu")), rtol=1e-5, atol=0)


def test_random_numbers_belong_to_the_device() -> None:
    torch.manual_seed(3)
    first = torch.rand(4, device="sim:0"), torch.rand(4, device="sim:1")
    torch.manual_seed(3)
    torch.rand(7)
    assert torch.equal(torch.rand(4, device="sim:0").cpu(), first[0].cpu())
    assert torch.equal(torch.rand(4, device="sim:1").cpu(), first[1].cpu())
    state = torch.get_device_module("sim").get_rng_state(0)
    again = torch.rand(4, device="sim:0")
    torch.get_device_module("sim").set_rng_state(state, 0)
    assert torch.equal(torch.rand(4, device="sim:0").cpu(), again.cpu())
