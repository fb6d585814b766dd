"""Accelerate's FSDP2 plugin and Transformers' Trainer, unchanged but for what they think is a GPU.

Accelerate shards only where it finds several accelerators. So it is told that this machine has them
and that they are called "cpu"; everything behind that discovery is its own code.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.accelerated import accelerated, cpus_as_accelerators, train
from tests.support.parity import Tensors, float64
from tests.support.ranks import Ranks
from tests.support.under_patch import (
    STARTUP_S,
    close_under_both,
    same_bits_under_both,
    shared_folder,
    skip_without,
)

skip_without("accelerate")
skip_without("transformers")

# Whichever test is first, imports the framework on both ranks.
pytestmark = pytest.mark.timeout(300)


def with_the_plugin(
    *, tied: bool = False, efficient_loading: bool = False
) -> tuple[nn.Module, Tensors]:
    """Also asks for the full state dict, and loads what it saved over parameters that were set to
    zero.
    """
    from tests.support.tiny_models import llama

    with cpus_as_accelerators(), shared_folder() as folder:
        accelerator, model, optimizer, batches = accelerated(
            llama(tied=tied),
            cpu_ram_efficient_loading=efficient_loading,
            state_dict_type="FULL_STATE_DICT",
        )
        notes = train(accelerator, model, optimizer, batches)
        full: dict[str, Tensor] = accelerator.get_state_dict(model)
        notes.update({f"in the state dict: {name}": tensor for name, tensor in full.items()})
        accelerator.save_state(folder)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        accelerator.load_state(folder)
    return model, notes


def with_the_plugin_in_float64(**options: Any) -> tuple[nn.Module, Tensors]:
    with float64():
        return with_the_plugin(**options)


def in_mixed_precision(reduce_dtype: torch.dtype | None) -> tuple[nn.Module, Tensors]:
    """Accelerate's own policy, all in bfloat16, or one that reduces in another dtype."""
    from tests.support.tiny_models import llama

    policy = {
        "param_dtype": torch.bfloat16,
        "reduce_dtype": reduce_dtype,
        "output_dtype": torch.bfloat16,
    }
    options = {} if reduce_dtype is None else {"mixed_precision_policy": policy}
    with cpus_as_accelerators():
        accelerator, *prepared = accelerated(llama(), mixed_precision="bf16", **options)
        notes = train(accelerator, *prepared)
        model = prepared[0]
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    return model, notes


def with_the_trainer() -> tuple[nn.Module, Tensors]:
    import transformers

    from tests.support.tiny_models import Sentences, llama

    with cpus_as_accelerators(), shared_folder() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            fsdp=True,
            fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
            ddp_backend="gloo",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = transformers.Trainer(model=llama(), args=arguments, train_dataset=Sentences())
        trainer.train()
        log = [row for row in trainer.state.log_history if "loss" in row]
        notes = {
            f"{what} of step {i}": torch.tensor(row[what])
            for i, row in enumerate(log)
            for what in ("loss", "grad_norm")
        }
        return trainer.model_wrapped, notes


@pytest.mark.parametrize("efficient_loading", [False, True])
def test_accelerates_plugin_equals_fsdp2(client_ranks: Ranks, *, efficient_loading: bool) -> None:
    client_ranks.run(
        same_bits_under_both,
        with_the_plugin,
        efficient_loading=efficient_loading,
        timeout_s=STARTUP_S,
    )


def test_accelerates_plugin_with_tied_weights_equals_fsdp2(client_ranks: Ranks) -> None:
    """Embedding and head are one unit of two modules, which FSDP2 reduces twice and this engine
    once: another order of the same sum. Twelve digits of float64 are left after some thousand
    roundings.
    """
    client_ranks.run(
        close_under_both,
        with_the_plugin_in_float64,
        tied=True,
        tolerance=1e-12,
        timeout_s=STARTUP_S,
    )


def test_accelerates_mixed_precision_with_sums_in_float32_equals_fsdp2(client_ranks: Ranks) -> None:
    client_ranks.run(same_bits_under_both, in_mixed_precision, torch.float32, timeout_s=STARTUP_S)


def test_accelerates_mixed_precision_differs_by_the_rounding_of_sums(client_ranks: Ranks) -> None:
    """Its own policy reduces in bfloat16, where FSDP2 rounds a sum once more: 2^-9 of each
    gradient.

    Two steps move a weight by 2e-2, and 2^-9 of that is 4e-5; the tolerance is five times as much.
    """
    client_ranks.run(
        close_under_both, in_mixed_precision, None, tolerance=2e-4, timeout_s=STARTUP_S
    )


def test_the_trainer_equals_fsdp2(client_ranks: Ranks) -> None:
    client_ranks.run(same_bits_under_both, with_the_trainer, timeout_s=STARTUP_S)
