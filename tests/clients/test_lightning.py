"""Lightning's `ModelParallelStrategy`: its Trainer shards, accumulates, saves and loads."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.parity import ROWS, Tensors, token_loss, tower
from tests.support.ranks import Ranks
from tests.support.under_patch import STARTUP_S, same_bits_under_both, shared_folder, skip_without

skip_without("lightning")

# Whichever test is first, imports the framework on both ranks.
pytestmark = pytest.mark.timeout(300)


def with_lightnings_trainer() -> tuple[nn.Module, Tensors]:
    import lightning as pl
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Tensor] = []

        def configure_model(self) -> None:
            if hasattr(self, "tower"):
                return
            self.tower = tower()
            mesh = self.device_mesh["data_parallel"]
            for layer in self.tower.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.tower, mesh=mesh)

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


@pytest.mark.filterwarnings("ignore")
def test_lightnings_trainer_equals_fsdp2(client_ranks: Ranks) -> None:
    client_ranks.run(same_bits_under_both, with_lightnings_trainer, timeout_s=STARTUP_S)
