"""Accelerate, told that the CPUs of this machine are accelerators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tests.support import tiny_models
from tests.support.parity import Tensors
from tests.support.under_patch import whole


@contextmanager
def cpus_as_accelerators() -> Iterator[None]:
    import os

    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    def forget() -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()

    def found(*_: Any, **__: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    discovery = PartialState._prepare_backend
    os.environ.update(ACCELERATE_TORCH_DEVICE="cpu", LOCAL_RANK=os.environ["RANK"])
    PartialState._prepare_backend = found
    forget()
    try:
        yield
    finally:
        PartialState._prepare_backend = discovery
        forget()


def accelerated(
    model: nn.Module, mixed_precision: str = "no", **plugin_options: Any
) -> tuple[Any, nn.Module, Any, Any]:
    """Prepares a model, its optimizer and data as Accelerate's documentation does."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        **plugin_options,
    )
    accelerator = Accelerator(
        fsdp_plugin=plugin, gradient_accumulation_steps=2, mixed_precision=mixed_precision
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    batches = torch.utils.data.DataLoader(tiny_models.Sentences(), batch_size=2)
    return accelerator, *accelerator.prepare(model, optimizer, batches)


def train(accelerator: Any, model: nn.Module, optimizer: Any, batches: Any) -> Tensors:
    """One epoch, two micro-batches a step, with clipping."""
    notes: Tensors = {}
    for i, inputs in enumerate(batches):
        with accelerator.accumulate(model):
            loss = model(**inputs).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                notes[f"norm of batch {i}"] = whole(
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                )
            optimizer.step()
            optimizer.zero_grad()
            notes[f"loss of batch {i}"] = loss.detach()
    return notes
