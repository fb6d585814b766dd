"""Four bugs of other engines in the order between streams, each as small as it can be, and its
correction.

Nothing here knows a device: streams are `torch.Stream`, so the same lines run on the simulated
accelerator, which names the missing wait, and on a GPU, where a late stream makes the numbers
wrong. On a GPU `late` keeps the current stream busy; memory is allocated and kernels are loaded by
a first step that is not late, because both would make the host wait and hide what is missing.

`docs/explanation/order_between_streams.md` tells where each was found.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardgrad import fully_shard
from shardgrad.engine.unit import unit_of

# 4 MiB: a block of its own in CUDA's allocator, so that the next request of this size gets it
# again.
NUMEL = 1 << 20
HALF = NUMEL // 2


def on_time() -> None:
    """A stream that is not late."""


class Bug:
    """A step of a program that has one of the bugs, or has not.

    Args:
        device: the accelerator.
        fixed: with the wait that was missing.

    Attributes:
        late: what delays the stream that the bug forgets; called in each step where that stream is
            current.
        made: told of every tensor and stream that a report might name.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        fixed: bool,
        made: Callable[[torch.Tensor | torch.Stream, str], None] = lambda thing, name: None,
    ) -> None:
        self.device = device
        self.fixed = fixed
        self.made = made
        self.late: Callable[[], None] = on_time
        self.home, self.reducer, self.rounds = self.current(), self.stream("reducer"), 0
        self.prepare()
        torch.accelerator.synchronize()

    def prepare(self) -> None:
        """Allocates what lives longer than a step."""
        raise NotImplementedError

    def step(self) -> bool:
        """Runs once and lets everything finish; returns whether all halves are right."""
        raise NotImplementedError

    def stream(self, name: str) -> torch.Stream:
        stream = torch.Stream(self.device)
        self.made(stream, name)
        return stream

    def zeros(self, name: str) -> torch.Tensor:
        tensor = torch.zeros(NUMEL, device=self.device)
        self.made(tensor, name)
        return tensor

    def current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def sent_is_right(self) -> bool:
        self.home.wait_stream(self.reducer)
        return halves(self.sent) == [float(self.rounds)] * 2

    def leaf_of(self, stream: torch.Stream, numel: int) -> tuple[torch.Tensor, object]:
        """Returns a parameter and its AccumulateGrad node, born on `stream` and alive while it is
        kept.
        """
        weight = torch.ones(numel, device=self.device, requires_grad=True)
        stream.wait_stream(self.current())
        with stream:
            return weight, weight.expand_as(weight).grad_fn.next_functions[0][0]


def halves(*results: torch.Tensor) -> list[float]:
    """Returns the first number of each half, once the device has finished."""
    torch.accelerator.synchronize()
    return [result[place].item() for result in results for place in (0, HALF)]


class HookBornOnASideStream(Bug):
    """A gradient's hook runs where its node was born, and the reduction waits for the default
    stream.
    """

    def prepare(self) -> None:
        self.side = self.stream("side")
        self.bucket, self.sent = self.zeros("bucket"), self.zeros("sent")
        self.weight, self.node = self.leaf_of(self.side, NUMEL)
        self.weight.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, weight: torch.Tensor) -> None:
        self.late()
        self.bucket.copy_(weight.grad)
        weight.grad.zero_()
        self.reducer.wait_stream(self.current() if self.fixed else self.home)
        with self.reducer:
            torch.mul(self.bucket, 0.5, out=self.sent)

    def step(self) -> bool:
        self.rounds += 1
        (self.weight * (2.0 * self.rounds)).sum().backward()
        return self.sent_is_right()


class ReductionAwaitsTheCurrentStream(Bug):
    """Two streams fill one bucket; the reduction waits for the one on which the last gradient
    came.
    """

    def prepare(self) -> None:
        self.producers = [self.stream("producer 0"), self.stream("producer 1")]
        self.bucket, self.sent = self.zeros("bucket"), self.zeros("sent")
        leaves = [self.leaf_of(stream, HALF) for stream in self.producers]
        self.weights, self.nodes = [weight for weight, _ in leaves], [node for _, node in leaves]
        for weight in self.weights:
            weight.register_post_accumulate_grad_hook(self.arrived)
        self.written: list[torch.Event] = []

    def arrived(self, weight: torch.Tensor) -> None:
        half = self.bucket[:HALF] if weight is self.weights[0] else self.bucket[HALF:]
        if not self.written:
            self.late()
        half.copy_(weight.grad)
        weight.grad.zero_()
        event = torch.Event(self.device)
        event.record(self.current())
        self.written.append(event)
        if len(self.written) == len(self.weights):
            self.reduce()

    def reduce(self) -> None:
        for event in self.written if self.fixed else self.written[-1:]:
            event.wait(self.reducer)
        with self.reducer:
            torch.mul(self.bucket, 0.5, out=self.sent)

    def step(self) -> bool:
        self.rounds += 1
        self.written.clear()
        scaled = [weight * (2.0 * self.rounds) for weight in self.weights]
        (scaled[0].sum() + scaled[1].sum()).backward()
        return self.sent_is_right()


class RefillAwaitsTheFlusher(Bug):
    """Two streams fill two buckets in turn. Reading waits for both; only the flushing one waits to
    refill.
    """

    def prepare(self) -> None:
        self.other, self.flusher = self.stream("other producer"), self.stream("flusher")
        self.buckets = [self.zeros("bucket 0"), self.zeros("bucket 1")]
        self.sent = [self.zeros(f"sent {turn}") for turn in range(3)]
        self.free: list[torch.Event | None] = [None, None]

    def fill(self, stream: torch.Stream, turn: int, value: float) -> None:
        half = slice(0, HALF) if stream is self.other else slice(HALF, NUMEL)
        free = self.free[turn % 2]
        if self.fixed and free is not None:
            free.wait(stream)
        with stream:
            self.buckets[turn % 2][half].fill_(value)

    def flush(self, turn: int) -> None:
        # The reduction before this one, and so this bucket's last.
        self.flusher.wait_stream(self.reducer)
        self.reducer.wait_stream(self.other)
        self.reducer.wait_stream(self.flusher)
        with self.reducer:
            if turn == 0:
                self.late()
            torch.mul(self.buckets[turn % 2], 0.5, out=self.sent[turn])
        free = torch.Event(self.device)
        free.record(self.reducer)
        self.free[turn % 2] = free

    def step(self) -> bool:
        self.rounds += 1
        values = [2.0 * (10 * self.rounds + turn) for turn in range(3)]
        for turn, value in enumerate(values):
            self.fill(self.other, turn, value)
            self.fill(self.flusher, turn, value)
            self.flush(turn)
        return halves(*self.sent) == [value / 2 for value in values for _ in range(2)]


class CommunicationBufferFreedEarly(Bug):
    """A buffer is dropped while the communication stream still reads it; the next tensor gets its
    memory.
    """

    def prepare(self) -> None:
        self.sent, self.reused = self.zeros("sent"), False

    def step(self) -> bool:
        self.rounds += 1
        buffer = torch.empty(NUMEL, device=self.device)
        self.made(buffer, "buffer")
        address = buffer.data_ptr()
        buffer.fill_(2.0 * self.rounds)
        self.reducer.wait_stream(self.home)
        with self.reducer:
            self.late()
            torch.mul(buffer, 0.5, out=self.sent)
        if self.fixed:
            self.home.wait_stream(self.reducer)
        del buffer
        following = torch.empty(NUMEL, device=self.device)
        following.fill_(-1.0)
        self.reused = following.data_ptr() == address
        return self.sent_is_right()


BUGS: list[type[Bug]] = [
    HookBornOnASideStream,
    ReductionAwaitsTheCurrentStream,
    RefillAwaitsTheFlusher,
    CommunicationBufferFreedEarly,
]


# -- the engine, doing the same work


class Branches(nn.Module):
    """As many linear layers as there are producers, added up."""

    def __init__(self, branches: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(branches))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([branch(x) for branch in self.branches]).sum(0).tanh()


class SideBySide(nn.Module):
    """Units that all read the batch, added up.

    Nothing says when the backward of such a unit is over, so it is reduced when its last gradient
    is there, after nothing but its own waits. One whose inputs require grad has waited for all
    producers by then.
    """

    def __init__(self, units: list[Branches]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([unit(x) for unit in self.units]).sum(0)


@dataclass(frozen=True)
class Work:
    """What the engine is asked to do, in the terms of one of the bugs.

    Attributes:
        units: reductions in one backward; the engine has two slots for them, the third refills the
            first. The last one is launched when backward is over, where autograd has made streams
            wait for all others.
        producers: streams on which the gradients of one unit arrive; with 0 all come on the current
            one.
        late_reduction: the reduce stream is late, instead of the producers.
        resharded: parameters are gathered again in backward. NCCL runs the collectives of a group
            in turn, so each gather holds up what follows until the reduction before it is over.
    """

    units: int
    producers: int
    late_reduction: bool = False
    resharded: bool = True


WORK: dict[type[Bug], Work] = {
    HookBornOnASideStream: Work(units=2, producers=1),
    ReductionAwaitsTheCurrentStream: Work(units=2, producers=2),
    RefillAwaitsTheFlusher: Work(units=5, producers=2, late_reduction=True, resharded=False),
    CommunicationBufferFreedEarly: Work(units=5, producers=0, late_reduction=True),
}


class Training:
    """Trains a model whose gradients are doubled on producers' streams, sharded or not.

    Late streams are late from the second step on: in the first the host has to wait anyway.

    Args:
        device: the accelerator.
        mesh: of `fully_shard`; None for the model alone, without any stream.
        late: what delays the current stream.
    """

    def __init__(
        self,
        work: Work,
        device: torch.device,
        mesh: DeviceMesh | None = None,
        late: Callable[[], None] = on_time,
    ) -> None:
        self.work, self.device, self.mesh, self.late = work, device, mesh, late
        torch.manual_seed(0)
        units = [Branches(max(1, work.producers)) for _ in range(work.units)]
        self.model = SideBySide(units).to(device)
        if mesh is not None:
            for unit in (*units, self.model):
                fully_shard(unit, mesh=mesh, reshard_after_forward=work.resharded)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.nodes: list[object] = []  # of parameters: autograd makes others when they are gone
        self.rounds = 0

    def spread(self) -> None:
        """Gives every branch's parameters a stream of their own, on which their gradients are
        written.
        """
        spreads = self.mesh is not None
        streams = [torch.Stream(self.device) for _ in range(self.work.producers if spreads else 0)]
        for unit in self.model.units:
            if self.mesh is not None:
                unit.unshard()
            for number, branch in enumerate(unit.branches):
                for weight in branch.parameters():
                    with streams[number] if streams else nullcontext():
                        self.nodes.append(weight.expand_as(weight).grad_fn.next_functions[0][0])
                    weight.register_hook(self.doubled)

    def doubled(self, grad: torch.Tensor) -> torch.Tensor:
        if not self.work.late_reduction and self.rounds > 1:
            self.late()
        return grad * 2

    def delay_reduction(self) -> None:
        if self.work.late_reduction and self.mesh is not None:
            context = unit_of(self.model).context
            assert context is not None
            with context.comm_ctx.streams.reduce or nullcontext():
                self.late()

    def step(self) -> None:
        self.rounds += 1
        if self.rounds == 1:
            self.spread()
        x = torch.linspace(-1, self.rounds, 8 * 16).reshape(8, 16)
        loss = self.model(x.to(self.device, non_blocking=True)).square().mean()
        if self.rounds > 1:
            self.delay_reduction()
        loss.backward()
        # Of sizes the engine was using: an allocator that was told too early lends them again.
        for parameter in self.model.parameters():
            torch.empty(parameter.shape, device=self.device).fill_(-1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        """Returns the whole parameters on the CPU."""
        torch.accelerator.synchronize()
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.model.parameters()]
        return [tensor.detach().cpu() for tensor in whole]
