"""What `export_checkpoint` writes, Transformers reads, and torch.distributed.checkpoint."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.ranks import Ranks
from tests.support.under_patch import STARTUP_S, shared_folder, skip_without

skip_without("transformers")

# Whichever test is first, imports the framework on both ranks.
pytestmark = pytest.mark.timeout(300)


def weights_there_and_back() -> None:
    """Sharded, exported in several files, read by `from_pretrained`, and loaded onto shards
    again.
    """
    import torch.distributed.checkpoint as dcp
    import transformers

    from shardgrad import checkpoint, fully_shard
    from tests.support.tiny_models import blocks, llama

    def sharded(model: nn.Module) -> nn.Module:
        for block in blocks(model):
            fully_shard(block)
        return fully_shard(model)

    torch.manual_seed(0)
    plain = llama()
    right = {name: param.detach().clone() for name, param in plain.named_parameters()}
    with shared_folder() as shared:
        folder = f"{shared}/weights"
        checkpoint.save(sharded(plain).state_dict(), f"{shared}/saved")
        if dist.get_rank() == 0:
            checkpoint.export_checkpoint(f"{shared}/saved", folder, file_nbytes=20_000)
            plain.config.save_pretrained(folder)
        dist.barrier()
        read = transformers.LlamaForCausalLM.from_pretrained(folder)
        again = llama()
        with torch.no_grad():
            for param in again.parameters():
                param.zero_()
        again = sharded(again)
        dcp.load(again.state_dict(), storage_reader=dcp.HuggingFaceStorageReader(folder))
        dist.barrier()
    for name, param in read.named_parameters():
        assert torch.equal(param, right[name]), name
    for name, param in again.named_parameters():
        assert torch.equal(param.full_tensor(), right[name]), name


def test_from_pretrained_reads_what_was_exported(client_ranks: Ranks) -> None:
    pytest.importorskip("safetensors")
    client_ranks.run(weights_there_and_back, timeout_s=STARTUP_S)
