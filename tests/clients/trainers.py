"""Programs of Accelerate, Transformers' Trainer, PEFT, Lightning and torchao.

Accelerate shards only where it finds several accelerators. So it is told that this machine has them
and that they are called "cpu"; everything behind that discovery is its own code.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.clients.catalogue import client
from tests.support import tiny_models
from tests.support.accelerated import accelerated, cpus_as_accelerators, train
from tests.support.parity import ROWS, Tensors, float64, stack, token_loss, tower
from tests.support.under_patch import shared_folder

# -- Accelerate's FSDP2 plugin, and Transformers' Trainer


@client("Accelerate: FSDP2 plugin", "accelerate", "transformers")
@client("Accelerate: efficient loading", "accelerate", "transformers", efficient_loading=True)
def with_the_plugin(
    *, tied: bool = False, efficient_loading: bool = False
) -> tuple[nn.Module, Tensors]:
    """Also asks for the full state dict, and loads what it saved over parameters that were set to
    zero.
    """
    with cpus_as_accelerators(), shared_folder() as folder:
        accelerator, model, optimizer, batches = accelerated(
            tiny_models.llama(tied=tied),
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


# Its own policy is tested elsewhere: it rounds sums to bfloat16 with FSDP2.
@client("Accelerate: bf16", "accelerate", "transformers", is_tested=False, reduce_dtype=None)
@client("Accelerate: bf16, sums in fp32", "accelerate", "transformers", reduce_dtype=torch.float32)
def in_mixed_precision(reduce_dtype: torch.dtype | None) -> tuple[nn.Module, Tensors]:
    """Accelerate's own policy, all in bfloat16, or one that reduces in another dtype."""
    policy = {
        "param_dtype": torch.bfloat16,
        "reduce_dtype": reduce_dtype,
        "output_dtype": torch.bfloat16,
    }
    options = {} if reduce_dtype is None else {"mixed_precision_policy": policy}
    with cpus_as_accelerators():
        accelerator, *prepared = accelerated(tiny_models.llama(), mixed_precision="bf16", **options)
        notes = train(accelerator, *prepared)
        model = prepared[0]
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    return model, notes


@client("Transformers: Trainer", "accelerate", "transformers")
def with_the_trainer() -> tuple[nn.Module, Tensors]:
    import transformers

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
        trainer = transformers.Trainer(
            model=tiny_models.llama(), args=arguments, train_dataset=tiny_models.Sentences()
        )
        trainer.train()
        log = [row for row in trainer.state.log_history if "loss" in row]
        notes = {
            f"{what} of step {i}": torch.tensor(row[what])
            for i, row in enumerate(log)
            for what in ("loss", "grad_norm")
        }
        return trainer.model_wrapped, notes


# -- LoRA through PEFT: a frozen base in one dtype, adapters in another


def adapted(dtype: torch.dtype) -> nn.Module:
    """A Llama in `dtype` with adapters, which PEFT makes float32 where the base is narrower."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(tiny_models.llama().to(dtype), config)


@client("PEFT: LoRA, float32", "peft", "transformers", dtype=torch.float32)
@client("PEFT: LoRA, bfloat16", "peft", "transformers", dtype=torch.bfloat16)
def with_adapters(dtype: torch.dtype) -> tuple[nn.Module, Tensors]:
    """Frozen and trainable parameters of both dtypes in each unit."""
    model = adapted(dtype)
    tiny_models.sharded(model, tiny_models.blocks(model.get_base_model()))
    return model, tiny_models.train(model)


@client("PEFT: LoRA through Accelerate", "peft", "accelerate", "transformers")
def through_accelerate() -> tuple[nn.Module, Tensors]:
    with cpus_as_accelerators():
        prepared = accelerated(adapted(torch.float32))
        return prepared[1], train(*prepared)


# -- Lightning's `ModelParallelStrategy`: its Trainer shards, accumulates, saves and loads


@client("Lightning: ModelParallelStrategy", "lightning")
def with_lightnings_trainer() -> tuple[nn.Module, Tensors]:
    import lightning as pl
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Tensor] = []

        def configure_model(self) -> None:
            if hasattr(self, "tower"):
                return
            self.tower = tower()
            mesh = self.device_mesh["data_parallel"]
            tiny_models.sharded(self.tower, self.tower.layers, mesh=mesh)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            loss = token_loss(self.tower, batch)
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def fit(
        module: pl.LightningModule, folder: str, epochs: int, resumed: str | None = None
    ) -> pl.Trainer:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
            max_epochs=epochs,
            accumulate_grad_batches=2,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            use_distributed_sampler=True,
        )
        trainer.fit(module, loader(), ckpt_path=resumed)
        return trainer

    with shared_folder() as folder:
        # As torchrun does; Lightning then launches nothing.
        os.environ["LOCAL_RANK"] = os.environ["RANK"]
        first, checkpoint = Module(), f"{folder}/half"
        fit(first, folder, 1).save_checkpoint(checkpoint)
        second = Module()
        fit(second, folder, 2, checkpoint)
    losses = [*first.losses, *second.losses]
    return second, {f"loss of batch {i}": loss for i, loss in enumerate(losses)}


def loader() -> Any:
    tokens, targets = torch.randint(
        13, (2, 8 * ROWS, 5), generator=torch.Generator().manual_seed(3)
    )
    rows = torch.utils.data.TensorDataset(tokens, targets)
    return torch.utils.data.DataLoader(rows, batch_size=ROWS)


# -- torchao's float8, which is emulated, as CPUs have no product of it


@client("torchao: float8 layers", "torchao", gathers_float8=False)
@client("torchao: gathered in float8", "torchao", gathers_float8=True)
def float8_layers(*, gathers_float8: bool) -> tuple[nn.Module, Tensors]:
    """`gathers_float8` makes weights a tensor subclass with FSDP2's hooks around the all-gather."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    width = 32  # float8 layers want multiples of 16
    model = stack(width, 2 * width, width).bfloat16()
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gathers_float8)
    convert_to_float8_training(model, config=config)
    tiny_models.sharded(model, [model[0], model[2]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    notes: Tensors = {}
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(16, width, generator=generator).bfloat16()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        notes[f"loss of step {step}"] = loss.detach()
    return model, notes
