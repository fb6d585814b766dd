"""Pre-train a small language model on the bytes of a text, in one file.

    torchrun --nproc-per-node 8 examples/pretrain.py --text book.txt --folder runs/mine

It has what a real run needs: mixed precision, micro-batches, a schedule with warm-up, clipping, a
validation loss, the whole step as one CUDA graph, and checkpoints that any number of ranks can
load. Run again with the same folder, it continues. It needs `pip install 'shardgrad[checkpoint]'`.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional

import shardgrad
from shardgrad import MixedPrecisionPolicy, checkpoint, fully_shard

VOCAB = 256  # bytes


class Block(nn.Module):
    """Attention and a gated MLP, each with a norm before it and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate_up = nn.Linear(width, 8 * width // 3 // 8 * 16, bias=False)
        self.down = nn.Linear(8 * width // 3 // 8 * 8, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns activations of the shape of `x`: batch x context x width."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary position embedding (https://arxiv.org/abs/2104.09864)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class Model(nn.Module):
    """A decoder that predicts the next byte."""

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        rates = 10_000.0 ** (-torch.arange(0, width // heads, 2) / (width // heads))
        angles = torch.outer(torch.arange(context), rates)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss in nats per byte; both arguments are batch x context."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(data: Tensor, generator: torch.Generator, options: Any, device: torch.device) -> Tensor:
    """Returns random windows of the text: micro-batches x sequences x (context + 1)."""
    shape = options.accumulate, options.batch_size
    starts = torch.randint(len(data) - options.context, shape, generator=generator)
    windows = starts[..., None] + torch.arange(options.context + 1)
    return data[windows].to(device=device, dtype=torch.long)


def learning_rates(options: Any) -> Any:
    """Returns the factor of each step: linear warm-up, then a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < options.warmup:
            return (step + 1) / options.warmup
        done = (step - options.warmup) / max(1, options.steps - options.warmup)
        return 0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, done))) / 2

    return factor


def mean_over_ranks(value: Tensor) -> float:
    """Returns the mean of a scalar over ranks. Syncs the host."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def parsed() -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, usage="%(prog)s --text FILE --folder FOLDER [options]"
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences, rank, micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--stop-after", type=int, help="steps, to be continued by another call")
    return parser.parse_args()


def main() -> None:
    """Trains until `--steps` are done."""
    options = parsed()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Checkpoints use gloo, tensors NCCL.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()

    data = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8)
    held_back = max(len(data) // 10, options.context + 1)
    training, validation = data[:-held_back], data[-held_back:]

    torch.manual_seed(0)  # every rank builds the same model and keeps its shard
    model = Model(options.width, options.depth, options.heads, options.context).to(device)
    policy = MixedPrecisionPolicy()
    if device.type == "cuda":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (model.embedding, *model.blocks, model.head):
        fully_shard(part, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rates(options))

    @shardgrad.graphed_step(model, optimizer)
    def train(ids: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), device=device)
        for number, part in enumerate(ids):
            # Gradients are reduced once, after the last micro-batch.
            model.set_requires_gradient_sync(number == len(ids) - 1)
            loss = model(part[:, :-1], part[:, 1:]) / len(ids)
            loss.backward()
            total += loss.detach()
        norm = shardgrad.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total, norm

    @torch.no_grad()
    def validated() -> float:
        model.eval()
        same = torch.Generator().manual_seed(rank)
        ids = batch(validation, same, options, device)
        losses = torch.stack([model(part[:, :-1], part[:, 1:]) for part in ids])
        model.train()
        return mean_over_ranks(losses.mean())

    def state(step: int) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {
            "model": weights,
            "optimizer": moments,
            "schedule": schedule.state_dict(),
            "step": step,
        }

    series = checkpoint.Series(options.folder, keep=2)
    if rank == 0:
        series.recover()  # removes leftovers of interrupted saves
    dist.barrier()
    first, newest = 0, series.latest()
    if newest is not None:
        loaded = checkpoint.load(state(0), newest, optional=("schedule.*",))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        schedule.load_state_dict(loaded["schedule"])
        first = loaded["step"]

    last = min(options.steps, first + (options.stop_after or options.steps))
    for step in range(first, last):
        # The step number seeds the batch, so a resumed run sees the same data.
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        loss, norm = train(batch(training, generator, options, device))
        schedule.step()
        if step % 10 == 0 or step == last - 1:
            mean = mean_over_ranks(loss)
            if rank == 0:
                print(f"step {step}: loss {mean:.6f}, norm {norm.item():.3f}", flush=True)
        if (step + 1) % options.save_every == 0 or step == last - 1:
            path = series.path_of(step + 1)
            checkpoint.save(state(step + 1), path, then=lambda path=path: series.publish(path))
            nats = validated()
            if rank == 0:
                print(f"after step {step}: validation loss {nats:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
