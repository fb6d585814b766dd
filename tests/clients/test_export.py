"""What `export_checkpoint` writes, Transformers reads."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import Ranks
from tests.support.under_patch import STARTUP_S, shared_folder, skip_without

skip_without("transformers")

# Whichever test is first, imports the framework on both ranks.
pytestmark = pytest.mark.timeout(300)


def exported_weights_are_read() -> None:
    """Sharded, exported in several files, and read by `from_pretrained`."""
    import transformers

    from shardgrad import checkpoint, fully_shard
    from tests.support.tiny_models import blocks, llama

    torch.manual_seed(0)
    plain = llama()
    right = {name: param.detach().clone() for name, param in plain.named_parameters()}
    with shared_folder() as shared:
        folder = f"{shared}/weights"
        for unit in (*blocks(plain), plain):
            fully_shard(unit)
        checkpoint.save(plain.state_dict(), f"{shared}/saved")
        if dist.get_rank() == 0:
            checkpoint.export_checkpoint(f"{shared}/saved", folder, file_nbytes=20_000)
            plain.config.save_pretrained(folder)
        dist.barrier()
        read = transformers.LlamaForCausalLM.from_pretrained(folder)
        dist.barrier()
    for name, param in read.named_parameters():
        assert torch.equal(param, right[name]), name


def test_from_pretrained_reads_what_was_exported(client_ranks: Ranks) -> None:
    pytest.importorskip("safetensors")
    client_ranks.run(exported_weights_are_read, timeout_s=STARTUP_S)
