"""The training loops that people have, as a graph: captured by one line, or refused in a sentence.

Each loop has the shape in which its framework's users write it; the table in
`docs/how_to/migrate_to_graphed_step.md` has one row for each, with the line. A graph is compared
bit for bit with the same loop without the decorator, over as many steps as hold warm-up, capture,
comparison and replays.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardgrad
from shardgrad.errors import CaptureError
from shardgrad.graphs import GraphedStep
from shardgrad.graphs.capturable import capturable
from tests.support.gpu import ON_A_GPU
from tests.support.graphed import Values, require_same, step_of, values_of

pytestmark = ON_A_GPU

VOCABULARY, WIDTH, LENGTH, ROWS = 32, 16, 8, 4
STEPS = 9
Loop = Callable[[Any, torch.device], Values]


@pytest.fixture
def device(one_rank: None) -> torch.device:
    return torch.device("cuda")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class LanguageModel(nn.Module):
    """Returns logits and a loss if targets are given, as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Any]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def sharded(model: nn.Module, device: torch.device, blocks: Any = ()) -> Any:
    model.to(device)
    for block in blocks:
        shardgrad.fully_shard(block)
    return shardgrad.fully_shard(model)


def language_model(device: torch.device) -> Any:
    model = LanguageModel()
    return sharded(model, device, model.blocks)


def get_batch(device: torch.device | str) -> tuple[Tensor, Tensor]:
    """A batch of a file of tokens, which is on the host."""
    rows = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=DATA)
    return rows[:, :-1].to(device), rows[:, 1:].to(device)


DATA = torch.Generator()


# -- loops: each with the line that is added; they yield the step, numbers, and what was trained


def nanogpt(graphed: Any, device: torch.device, *, fp16: bool = False) -> Values:
    """A learning rate that is set by hand, accumulation, a scaler that is off in bfloat16."""
    model = language_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), capturable=True)
    scaler = torch.amp.GradScaler(device.type, enabled=fp16)

    @graphed(model, optimizer)
    def update(micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        for x, y in micro_batches:
            with torch.autocast(device.type, torch.bfloat16):
                _, loss = model(x, y)
                loss = loss / len(micro_batches)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss

    yield update
    for number in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * number / STEPS))
        loss = update([get_batch(device) for _ in range(2)])
        if number % 3 == 0:
            yield loss.item() * 2
    yield model


def fsdp2_tutorial(graphed: Any, device: torch.device, *, capturable: bool = True) -> Values:
    """The first gathers by hand, and tokens that are drawn in the step."""
    model = language_model(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, capturable=capturable)

    @graphed(model, optimizer)
    def train_step() -> Tensor:
        model.unshard()
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), device=device)
        loss = model(tokens)[0].square().sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    yield train_step
    for _ in range(STEPS):
        yield train_step()
    yield model


def torchtitan(graphed: Any, device: torch.device, *, counts_on_host: bool = False) -> Values:
    """Zeroes gradients first, divides by the tokens of all ranks, and steps the schedule after."""
    model = language_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))

    @graphed(model, optimizer)
    def forward_backward_update(
        micro_batches: list[tuple[Tensor, Tensor]], valid_tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        dist.all_reduce(valid_tokens)
        total: Any = valid_tokens.item() if counts_on_host else valid_tokens
        losses = []
        for tokens, labels in micro_batches:
            tokens, labels = tokens.to(device), labels.to(device)
            logits = model(tokens)[0].flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / total
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        return torch.stack(losses).sum(), norm.full_tensor()

    yield forward_backward_update
    for _ in range(STEPS):
        micro_batches = [get_batch("cpu") for _ in range(2)]
        count = sum(labels.numel() for _, labels in micro_batches)
        yield forward_backward_update(micro_batches, torch.tensor(count, device=device))
        schedule.step()
    yield model


def transformers(graphed: Any, device: torch.device, *, schedule_inside: bool = False) -> Values:
    """Batches are dictionaries, and the model returns an object that has the loss."""
    model = language_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, capturable=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)

    def called(input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        logits, loss = model(input_ids, labels)
        return SimpleNamespace(loss=loss, logits=logits)

    @graphed(model, optimizer)
    def train_step(batch: dict[str, Tensor]) -> Tensor:
        batch = {k: v.to(device) for k, v in batch.items()}
        outputs = called(**batch)
        outputs.loss.backward()
        optimizer.step()
        if schedule_inside:
            schedule.step()
        optimizer.zero_grad()
        return outputs.loss

    yield train_step
    for _ in range(STEPS):
        yield train_step(dict(zip(("input_ids", "labels"), get_batch("cpu"), strict=True)))
        if not schedule_inside:
            schedule.step()
    yield model


class Accumulating:
    """What Accelerate decides on the host: which micro-batch ends a step."""

    def __init__(self, model: Any, every: int) -> None:
        self.model, self.every, self.number = model, every, 0
        self.sync_gradients = True

    def __enter__(self) -> None:
        self.number += 1
        self.sync_gradients = self.number % self.every == 0
        self.model.set_requires_gradient_sync(self.sync_gradients)

    def __exit__(self, *exception: object) -> None:
        pass


def accelerate(graphed: Any, device: torch.device, *, counts_inside: bool = False) -> Values:
    """The context counts micro-batches, and optimizers step in the last one of each few."""
    model = language_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
    accumulate = Accumulating(model, every=3)

    def inner(tokens: Tensor, targets: Tensor, sync_gradients: bool) -> Tensor:
        _, loss = model(tokens, targets)
        (loss / 3).backward()
        if sync_gradients:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    micro_step = graphed(model, optimizer)(inner)

    @graphed(model, optimizer)
    def counting(tokens: Tensor, targets: Tensor) -> Tensor:
        with accumulate:
            return inner(tokens, targets, accumulate.sync_gradients)

    yield micro_step
    for _ in range(3 * STEPS):
        if counts_inside:
            yield counting(*get_batch(device))
            continue
        with accumulate:
            yield micro_step(*get_batch(device), accumulate.sync_gradients)
    yield model


def lightning(graphed: Any, device: torch.device, *, logs_inside: bool = False) -> Values:
    """A method of the module that holds the model, and zeroes gradients first."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.logged = language_model(device), list[Tensor]()
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, capturable=True)
            self.update = graphed(self.model, self.optimizer)(self.update_of)

        def update_of(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            self.optimizer.zero_grad()
            loss = self.model(*batch)[1]
            if logs_inside:
                self.logged.append(loss)
            loss.backward()
            self.optimizer.step()
            return loss

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return self.update(batch)

    module = Module()
    yield module.update
    for number in range(STEPS):
        yield module.training_step(get_batch(device), number)
    yield module.model


class LoRA(nn.Module):
    """A frozen layer and an adapter, with dropout in front of the adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x)))


def lora(graphed: Any, device: torch.device) -> Values:
    """Adapters in recomputed blocks, with dropout in front of each."""
    model = LanguageModel().requires_grad_(False)
    for block in model.blocks:
        block.first = LoRA(block.first)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    sharded(model, device, model.blocks)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, capturable=True)

    @graphed(model, optimizer)
    def train_step(tokens: Tensor, targets: Tensor) -> Tensor:
        _, loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    yield train_step
    for _ in range(STEPS):
        yield train_step(*get_batch(device))
    yield model


def gan(graphed: Any, device: torch.device) -> Values:
    """The discriminator is trained on real and made rows, then the generator against it."""
    generator = sharded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), device)
    critic = sharded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)), device)
    g_optimizer, d_optimizer = (
        torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.999), capturable=True)
        for m in (generator, critic)
    )
    criterion = nn.BCEWithLogitsLoss()

    @graphed(generator, critic, g_optimizer, d_optimizer)
    def train_step(real: Tensor) -> tuple[Tensor, Tensor]:
        ones, zeros = (torch.full((len(real), 1), x, device=device) for x in (1.0, 0.0))
        critic.zero_grad()
        noise = torch.randn(len(real), WIDTH, device=device)
        fake = generator(noise)
        d_loss = criterion(critic(real), ones) + criterion(critic(fake.detach()), zeros)
        d_loss.backward()
        d_optimizer.step()
        generator.zero_grad()
        g_loss = criterion(critic(fake), ones)
        g_loss.backward()
        g_optimizer.step()
        return d_loss, g_loss

    yield train_step
    for _ in range(STEPS):
        yield train_step(torch.randn(ROWS, WIDTH, generator=DATA).to(device))
    yield from (generator, critic)


def policy_update(
    graphed: Any,
    device: torch.device,
    *,
    evaluates_at_its_end: bool = False,
    uses_distributions: bool = False,
) -> Values:
    """Several epochs over a rollout, with the log-probabilities of the policy that made it."""
    policy = language_model(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, capturable=True)

    def log_probabilities(tokens: Tensor) -> Tensor:
        logits = policy(tokens[:, :-1])[0]
        if uses_distributions:
            # Explicitly: torch.compile, which another test may have used, turns it off by default.
            chances = torch.distributions.Categorical(logits=logits, validate_args=True)
            return chances.log_prob(tokens[:, 1:])
        return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)

    @graphed(policy, optimizer)
    def update(tokens: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        new = log_probabilities(tokens)
        ratio = (new - old).exp()
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        torch.set_grad_enabled(not evaluates_at_its_end)
        return loss, (old - new).mean()

    yield update
    for _ in range(STEPS // 2):
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=DATA).to(device)
        advantages = torch.randn(ROWS, 1, generator=DATA).to(device)
        with torch.no_grad():
            old = log_probabilities(tokens)
        for _ in range(2):
            loss, kl = update(tokens, old, advantages)
            yield loss, kl
            if kl > 0.5:
                break
    yield policy


def mixed_up(graphed: Any, device: torch.device, *, given: bool = True) -> Values:
    """Rows are mixed by a generator of the program's, and moved along their own gradient; weights
    are averaged by hand.
    """
    model = sharded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), device)
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator(device).manual_seed(1)
    average = [p.to_local().detach().clone() for p in model.parameters()]

    @graphed(model, optimizer, *[generator] * given)
    def train_step(x: Tensor) -> tuple[dict[str, Tensor], tuple[None, list[Tensor]]]:
        share = torch.rand((), device=device, generator=generator)
        x.requires_grad_(True)
        (ascent,) = torch.autograd.grad(model(x).square().mean(), x)
        x = x.detach() + 0.1 * ascent.sign()
        loss = model(share * x + (1 - share) * x.flip(0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, param in zip(average, model.parameters(), strict=True):
                mean.lerp_(param.to_local(), 0.1)
        return {"loss": loss}, (None, [share])

    yield train_step
    for _ in range(STEPS):
        yield train_step(torch.randn(ROWS, WIDTH, generator=DATA).to(device))
    yield from (model, average)


def called(step: Any, *shape: int) -> Values:
    for _ in range(STEPS):
        yield step(torch.ones(shape, device="cuda"))


def in_two_threads(graphed: Any, device: torch.device) -> Values:
    """A second thread has come to its own capture while the first captures."""
    squares: dict[int, Any] = {}

    def other() -> None:
        squares.update(enumerate(called(graphed(warmup=1)(torch.square), ROWS)))

    thread = threading.Thread(target=other)

    @graphed(warmup=1)
    def step(x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing() and thread.ident is None:
            thread.start()
            thread.join(timeout=0.2)
        return x.square()

    yield step
    yield from called(step, ROWS)
    if thread.ident is None:  # without captures
        thread.start()
    thread.join()
    yield from squares.values()


LOOPS = [
    nanogpt,
    fsdp2_tutorial,
    torchtitan,
    transformers,
    accelerate,
    lightning,
    lora,
    gan,
    policy_update,
    mixed_up,
    in_two_threads,
]


# -- as some write them


def class_weights(graphed: Any, device: torch.device) -> Values:
    @graphed(warmup=1)
    def train_step(logits: Tensor) -> Tensor:
        made = torch.tensor([0.5, 1.0], device=device)
        return F.cross_entropy(logits, logits.argmax(-1), weight=made, label_smoothing=0.1)

    return called(train_step, ROWS, 2)


def result_of_before(graphed: Any, device: torch.device) -> Values:
    held = SimpleNamespace(last=torch.zeros((), device=device), before=None)

    @graphed(warmup=1)
    def train_step(batch: Tensor) -> None:
        held.before, held.last = held.last, batch.sum()

    return called(train_step, ROWS)


def batch_of_before(graphed: Any, device: torch.device) -> Values:
    held = SimpleNamespace(last=torch.zeros(ROWS, device=device))

    @graphed(warmup=1)
    def train_step(batch: Tensor) -> Tensor:
        difference = (batch - held.last).square().sum()
        held.last = batch
        return difference

    return called(train_step, ROWS)


def cumulative_average(graphed: Any, device: torch.device) -> Values:
    """torch divides by a count that it reads on the host."""
    norms = (nn.BatchNorm1d(WIDTH, momentum=None) for _ in range(3))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm) for norm in norms))
    model = sharded(model, device, model)  # the next unit is gathered already
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)
    return called(graphed(model, optimizer)(step_of(model, optimizer)), ROWS, WIDTH)


def count_on_the_host(graphed: Any, device: torch.device) -> Values:
    seen = torch.zeros(())

    @graphed(warmup=1)
    def train_step(batch: Tensor) -> Tensor:
        seen.add_(1)
        return batch.square().sum()

    return called(train_step, ROWS)


# -- what a capture finds far from its cause


def model_and_optimizer(device: torch.device) -> tuple[Any, Any]:
    model = sharded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), device)
    return model, shardgrad.optim.AdamW(model.parameters(), lr=1e-2)


def side_stream(
    graphed: Any,
    device: torch.device,
    *,
    waits_before: bool,
    works: bool = True,
    waits_after: bool,
    waits_on_host: bool = False,
) -> Values:
    side, count = torch.cuda.Stream(), torch.zeros((), device=device)

    @graphed(warmup=1)
    def step(x: Tensor) -> Tensor:
        if waits_before:
            side.wait_stream(torch.cuda.current_stream())
        if works:
            with torch.cuda.stream(side):
                count.add_(1)  # allocates nothing, which would be an error of its own
        if waits_after:
            torch.cuda.current_stream().wait_stream(side)
        if waits_on_host:
            torch.cuda.current_stream().record_event().synchronize()
        return x.sum()

    return called(step, ROWS)


def first_update(graphed: Any, device: torch.device) -> Values:
    model, optimizer = model_and_optimizer(device)
    calls: list[int] = []

    @graphed(model, optimizer)
    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        calls.append(1)
        if len(calls) > 3:
            optimizer.step()
        optimizer.zero_grad()

    return called(step, ROWS, WIDTH)


def an_average_that_is_not_given(graphed: Any, device: torch.device) -> Values:
    average, _ = model_and_optimizer(device)

    @graphed(warmup=1)
    @torch.no_grad()
    def step(x: Tensor) -> None:
        for mean in average.parameters():
            mean.mul_(0.9)

    return called(step, 1)


def a_temperature_of_no_module(graphed: Any, device: torch.device) -> Values:
    temperature = torch.zeros((), device=device, requires_grad=True)
    return called(graphed(warmup=1)(lambda x: (x * temperature).sum().backward()), ROWS)


def beside_a_loss_that_is_kept(graphed: Any, device: torch.device) -> Values:
    model, _ = model_and_optimizer(device)
    loss = model(torch.ones(ROWS, WIDTH, device=device)).sum()
    yield from called(graphed(model)(lambda x: model(x).sum().backward()), ROWS, WIDTH)
    loss.item()


# As some write them: the loop, and what the error says.
REFUSED = {
    "a scaler of torch's": (
        partial(nanogpt, fp16=True),
        r"torch\.amp\.GradScaler reads on the host[\s\S]*"
        r"in update: scaler\.step\(optimizer\)\n  try:      use shardgrad\.GradScaler",
    ),
    "an optimizer with its defaults": (
        partial(fsdp2_tutorial, capturable=False),
        r"a step of Adam cannot be part of a CUDA graph: one of its groups has "
        r"capturable=False[\s\S]*"
        r"in train_step: optimizer\.step\(\)\n  try:      shardgrad\.optim\.Adam",
    ),
    "tokens counted on the host": (
        partial(torchtitan, counts_on_host=True),
        r"total: Any = valid_tokens\.item\(\)[\s\S]*return the value from the step",
    ),
    "a generator that is not given": (
        partial(mixed_up, given=False),
        r"a torch\.Generator that was not passed to graphed_step[\s\S]*in train_step: share = torch"
        r"[\s\S]*\n  try:      graphed_step\(\.\.\., generator\)",
    ),
    "class weights that are made in the step": (
        class_weights,
        r"copies a tensor or a number from the host[\s\S]*in train_step: made = torch\.tensor"
        r"[\s\S]*\n  try:      create it before the step",
    ),
    "the result of before": (
        result_of_before,
        r"uses memory that was replaced or freed before the next call, 3 times in a row[\s\S]*"
        r"held\.last\n  try:      pass the tensor as an argument, or keep one tensor and write",
    ),
    "the batch of before": (
        batch_of_before,
        r"stores an argument in held\.last, and reads it in the next call[\s\S]*"
        r"\n  try:      held\.last\.copy_\(\.\.\.\), or pass it",
    ),
    "a module that counts on the host": (
        cumulative_average,
        r"a call reads a device value on the host[\s\S]*module 0\.1, [\s\S]*in step: loss = model",
    ),
    "a count on the host": (
        count_on_the_host,
        r"it writes seen on the host, so a replay would not write it[\s\S]*"
        r"in train_step: seen\.add_\(1\)\n  try:      keep it on the device",
    ),
    "a schedule in the step": (
        partial(transformers, schedule_inside=True),
        r"it changes schedule\.last_epoch from 3, which a replay would not do\n[\s\S]*"
        r"schedule\.step\(\) after the call",
    ),
    "Accelerate's context in the step": (
        partial(accelerate, counts_inside=True),
        r"accumulate\.number changed from 5 to 7[\s\S]*pass values that change between calls",
    ),
    "a log in the step": (
        partial(lightning, logs_inside=True),
        r"it changes .*logged\.__len__\(\) from 3[\s\S]*return a tensor, and append it there",
    ),
    "a distribution that looks at its arguments": (
        partial(policy_update, uses_distributions=True),
        r"torch\.distributions validates its arguments on the host[\s\S]*"
        r"in log_probabilities: [\s\S]*\n  try:      validate_args=False",
    ),
    "a mode that the step leaves changed": (
        torch.enable_grad()(partial(policy_update, evaluates_at_its_end=True)),
        r"it leaves a mode of torch changed, such as torch\.set_grad_enabled",
    ),
    "work that is not joined": (
        partial(side_stream, waits_before=True, waits_after=False),
        r"does not wait for it[\s\S]*current_stream\(\)\.wait_stream\(side\) after that work",
    ),
    "a wait for work of before": (
        partial(side_stream, waits_before=False, works=False, waits_after=True),
        r"before it[\s\S]*in step: torch.*wait_stream\(side\)[\s\S]*side\.wait_stream\(torch",
    ),
    "a wait for an event on the host": (
        partial(side_stream, waits_before=True, waits_after=True, waits_on_host=True),
        r"waits for the device[\s\S]*in step: [\s\S]*synchronize\(\)",
    ),
    "work that did not wait": (
        partial(side_stream, waits_before=False, waits_after=True),
        r"writes on a stream that is not captured[\s\S]*in step: count\.add_\(1\)",
    ),
    "the first update": (
        first_update,
        r"the first step of an optimizer runs in a capture[\s\S]*0\.weight, 0\.bias; [\s\S]*"
        r"in step: optimizer\.step\(\)\n  try:      pass the step a boolean",
    ),
    "a sharded module that is not given": (
        an_average_that_is_not_given,
        r"it uses 0\.weight, which is no parameter of a module that was passed[\s\S]*"
        r"in step: mean\.mul_\(0\.9\)\n  try:      graphed_step\(\.\.\., module\)",
    ),
    "a parameter of no module": (
        a_temperature_of_no_module,
        r"it uses a tensor that requires a gradient, which is no parameter[\s\S]*"
        r"\(x \* temperature\)[\s\S]*make an nn\.Parameter of a module",
    ),
    "a loss of an eager forward that is kept": (
        beside_a_loss_that_is_kept,
        r"it is captured on another one[\s\S]*detach\(\) or del what is left of",
    ),
}


def plain(*capturables: Any, **settings: Any) -> Callable[[Any], Any]:
    """Stands where `graphed_step` does: the function itself, with learning rates in tensors, with
    which torch rounds otherwise.
    """
    optimizers = [capturable(x) for x in capturables if isinstance(x, torch.optim.Optimizer)]

    def decorate(function: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            for optimizer in optimizers:
                optimizer.begin_call()
            found = function(*args, **kwargs)
            for optimizer in optimizers:
                optimizer.replayed()
            return found

        return step

    return decorate


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_as_people_write_it_is_captured_by_adding_a_line(
    loop: Loop, device: torch.device
) -> None:
    runs = []
    for graphed in (plain, shardgrad.graphed_step):
        DATA.manual_seed(0)
        torch.manual_seed(0)
        runs.append(values_of(loop(graphed, device)))
    (_, *expected), (step, *got) = runs
    assert isinstance(step, GraphedStep)
    assert step.replays > STEPS // 3, step.status()
    require_same(expected, got)


@pytest.mark.parametrize("name", REFUSED)
def test_what_keeps_such_a_loop_from_being_a_graph_is_named_with_its_cure(
    name: str, device: torch.device
) -> None:
    loop, sentence = REFUSED[name]
    with pytest.raises(CaptureError, match=sentence):
        list(loop(shardgrad.graphed_step, device))
    # The allocator knows that the capture is over: memory that another stream has used comes back.
    side, addresses = torch.cuda.Stream(), set()
    for _ in range(3):
        x = torch.empty(2**22, device=device)
        x.record_stream(side)
        addresses.add(x.data_ptr())
        del x
        torch.cuda.synchronize()
    assert len(addresses) == 1
