"""Models of Hugging Face Transformers, sharded by hand and by Transformers itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.parity import Tensors
from tests.support.ranks import Ranks
from tests.support.under_patch import STARTUP_S, same_bits_under_both, shared_folder, skip_without

skip_without("transformers")

# Whichever test is first, imports the framework on both ranks.
pytestmark = pytest.mark.timeout(300)

NAMES = ("llama", "qwen", "gpt2", "mixtral", "vit", "t5")


def sharded_by_hand(name: str, *, bf16: bool = False) -> tuple[nn.Module, Tensors]:
    """Each block a unit, and the rest."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from tests.support.tiny_models import MODELS, sharded, train

    options: dict[str, Any] = {}
    if bf16:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    model = sharded(MODELS[name](), **options)
    return model, train(model)


def sharded_while_it_is_loaded() -> tuple[nn.Module, Tensors]:
    """`from_pretrained` builds on meta, shards by the model's own plan, and streams the weights
    in.
    """
    import transformers

    from tests.support.tiny_models import llama, train

    with shared_folder() as folder:
        if dist.get_rank() == 0:
            llama().save_pretrained(folder)
        dist.barrier()
        plan = transformers.distributed.DistributedConfig(fsdp_size=dist.get_world_size())
        model = transformers.LlamaForCausalLM.from_pretrained(folder, distributed_config=plan)
    return model, train(model)


def checkpointed_activations() -> tuple[nn.Module, Tensors]:
    from tests.support.tiny_models import llama, sharded, train

    model = llama()
    model.gradient_checkpointing_enable()
    return sharded(model), train(model)


def generates_between_steps() -> tuple[nn.Module, Tensors]:
    """As a loop of reinforcement learning does: `generate` is not forward, and calls it many
    times.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    from tests.support.tiny_models import batch, llama, sharded, train

    model = sharded(llama())
    register_fsdp_forward_method(model, "generate")
    notes = train(model, steps=1)
    prompt = batch(model, 7)["input_ids"]
    notes["generated"] = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=4,
        do_sample=False,
        synced_gpus=True,
    )
    model.reshard()  # else the next optimizer would be built over what generate has left whole
    notes.update(train(model))
    return model, notes


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_model_sharded_by_hand_equals_fsdp2(client_ranks: Ranks, name: str) -> None:
    client_ranks.run(same_bits_under_both, sharded_by_hand, name, timeout_s=STARTUP_S)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_model_in_mixed_precision_equals_fsdp2(client_ranks: Ranks, name: str) -> None:
    client_ranks.run(same_bits_under_both, sharded_by_hand, name, bf16=True, timeout_s=STARTUP_S)


@pytest.mark.parametrize(
    "program", [sharded_while_it_is_loaded, checkpointed_activations, generates_between_steps]
)
def test_what_transformers_does_itself_equals_fsdp2(client_ranks: Ranks, program: Any) -> None:
    client_ranks.run(same_bits_under_both, program, timeout_s=STARTUP_S)


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
