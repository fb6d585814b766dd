"""Fine-tune a causal language model from Hugging Face: all weights, or LoRA adapters.

    torchrun --nproc-per-node 8 examples/finetune.py --model MODEL --text book.txt --save tuned
    torchrun --nproc-per-node 8 examples/finetune.py --model MODEL --text book.txt --lora 16

It needs `pip install transformers safetensors`, and `peft` for LoRA. It is an FSDP2 program with
three changed lines, which are numbered.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, AutoTokenizer

import shardgrad  # 1: for the two lines below
from shardgrad import fully_shard  # 2: was from torch.distributed.fsdp import fully_shard


def build(options: argparse.Namespace, device: torch.device) -> nn.Module:
    """Returns the model, with adapters if `--lora` is set, with one unit per decoder layer."""
    # Weights and AdamW's state are float32; `MixedPrecisionPolicy` sets the compute dtype.
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device)
    model.config.use_cache = False
    layers = model.model.layers
    if options.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(options.seed)  # adapters are the same on every rank
        adapters = LoraConfig(r=options.lora, lora_alpha=2 * options.lora, lora_dropout=0.05)
        adapters.target_modules = "all-linear"
        model = get_peft_model(model, adapters)
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = MixedPrecisionPolicy() if device.type == "cpu" else low
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def batches(options: argparse.Namespace, device: torch.device) -> list[Tensor]:
    """Returns this rank's batches of token ids, one per step."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = torch.tensor(tokenizer(options.text.read_text(), add_special_tokens=False).input_ids)
    numel = options.batch_size * options.seq_len
    needed = options.steps * dist.get_world_size() * numel
    if len(ids) < needed:
        raise SystemExit(
            f"{options.text} has {len(ids)} tokens, and {options.steps} steps take {needed}: give "
            "more text, or fewer --steps"
        )
    cut = ids[:needed].view(options.steps, dist.get_world_size(), options.batch_size, -1)
    return list(cut[:, dist.get_rank()].to(device))


def save(model: nn.Module, options: argparse.Namespace) -> None:
    """Writes weights, or adapters, as `from_pretrained` reads them."""
    whole = get_model_state_dict(
        model,
        options=StateDictOptions(
            full_state_dict=True, cpu_offload=True, ignore_frozen_params=bool(options.lora)
        ),
    )
    if dist.get_rank() == 0:
        model.save_pretrained(options.save, state_dict=whole)
        AutoTokenizer.from_pretrained(options.model).save_pretrained(options.save)
    dist.barrier()


def main() -> None:
    """Trains for `--steps` steps and prints the mean loss over ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder, or a name on the hub")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0 tunes all weights")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    model = build(options, device)
    trained = [param for param in model.parameters() if param.requires_grad]
    # With `capturable`, a graph reads the learning rate on the device, so schedules can change it.
    optimizer = torch.optim.AdamW(
        trained, lr=options.lr, weight_decay=0.0, capturable=device.type == "cuda"
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=options.steps)
    model.train()
    torch.manual_seed(options.seed + dist.get_rank())  # for dropout

    # In a capture, Transformers builds an attention mask that an eager step does not need. For long
    # texts, see "Transformers" in docs/how_to/migrate_to_graphed_step.md.
    @shardgrad.graphed_step(model, optimizer)  # 3: on a GPU, the step is one CUDA graph
    def step(ids: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for number, ids in enumerate(batches(options, device)):
        loss = step(ids).detach().clone()
        schedule.step()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {number}: loss {loss.item() / dist.get_world_size():.9f}", flush=True)
    if options.save:
        save(model, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
