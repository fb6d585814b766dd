"""Programs of many packages: models, optimizers and loops as they come."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.clients.catalogue import client
from tests.support import tiny_models
from tests.support.parity import Tensors, token_loss, tower
from tests.support.under_patch import shared_folder

# -- models


_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}


@client("Transformers: llama", "transformers", name="llama")
@client("Transformers: qwen", "transformers", name="qwen3", head_dim=4)
@client("Transformers: gpt2", "transformers", name="gpt2", tie_word_embeddings=True)
@client("Transformers: mixtral", "transformers", name="mixtral", **_MIXTRAL)
@client("Transformers: llama in bf16", "transformers", name="llama", bf16=True)
@client("Transformers: mixtral in bf16", "transformers", name="mixtral", bf16=True, **_MIXTRAL)
def language_model(
    name: str, *, kind: str = "CausalLM", bf16: bool = False, **options: Any
) -> tuple[nn.Module, Tensors]:
    """A model of Transformers by the name of its architecture, each block a unit."""
    import transformers as hf

    sizes = {**tiny_models._DECODER, "tie_word_embeddings": False, **options}
    config = hf.AutoConfig.for_model(name, **sizes)
    of_its_kind = getattr(hf, f"AutoModelFor{kind}")
    model = of_its_kind.from_config(config, attn_implementation="eager").train()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded = tiny_models.sharded(model, **({"mp_policy": policy} if bf16 else {}))
    return sharded, tiny_models.train(sharded)


for _name in (
    "mistral", "qwen2", "gemma", "gemma2", "phi", "phi3", "olmo2", "gpt_neox", "stablelm",
    "granite", "cohere", "smollm3", "opt", "qwen2_moe", "falcon", "bloom",
    "gpt_oss", "glm4", "nemotron", "exaone4", "olmoe",
):  # fmt: skip
    client(f"Transformers: {_name}", "transformers", is_tested=False, name=_name)(language_model)
for _name in ("bert", "roberta"):
    client(f"Transformers: {_name}", "transformers", is_tested=False, name=_name, kind="MaskedLM")(
        language_model
    )


@client("Transformers: vit", "transformers")
def vit() -> tuple[nn.Module, Tensors]:
    """Images in, classes out."""
    import transformers as hf

    sizes = {name: tiny_models._DECODER[name] for name in ("hidden_size", "intermediate_size")}
    config = hf.ViTConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=4,
        num_labels=5,
    )  # fmt: skip
    model = tiny_models.sharded(hf.ViTForImageClassification(config))

    def loss_of(generator: torch.Generator) -> Tensor:
        pixels = torch.randn(3, 3, 8, 8, generator=generator)
        return model(pixels, labels=torch.randint(5, (3,), generator=generator)).loss

    return model, tiny_models.train(model, loss_of=loss_of)


@client("Transformers: t5", "transformers")
def t5() -> tuple[nn.Module, Tensors]:
    """An encoder and a decoder that share their embedding, and relative positions in the first
    blocks.
    """
    import transformers as hf

    config = hf.T5Config(
        vocab_size=64, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    model = tiny_models.sharded(hf.T5ForConditionalGeneration(config))
    return model, tiny_models.train(model)


@client("Transformers: sharded while it is loaded", "transformers")
def sharded_while_it_is_loaded() -> tuple[nn.Module, Tensors]:
    """`from_pretrained` builds on meta, shards by the model's own plan, and streams the weights
    in.
    """
    import transformers

    with shared_folder() as folder:
        if dist.get_rank() == 0:
            tiny_models.llama().save_pretrained(folder)
        dist.barrier()
        plan = transformers.distributed.DistributedConfig(fsdp_size=dist.get_world_size())
        model = transformers.LlamaForCausalLM.from_pretrained(folder, distributed_config=plan)
    return model, tiny_models.train(model)


@client("Transformers: checkpointed activations", "transformers")
def checkpointed_activations() -> tuple[nn.Module, Tensors]:
    model = tiny_models.llama()
    model.gradient_checkpointing_enable()
    return tiny_models.sharded(model), tiny_models.train(model)


@client("Transformers: generates between steps", "transformers")
def generates_between_steps() -> tuple[nn.Module, Tensors]:
    """As a loop of reinforcement learning does: `generate` is not forward, and calls it many
    times.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    model = tiny_models.sharded(tiny_models.llama())
    register_fsdp_forward_method(model, "generate")
    notes = tiny_models.train(model, steps=1)
    prompt = tiny_models.batch(model, 7)["input_ids"]
    notes["generated"] = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=4,
        do_sample=False,
        synced_gpus=True,
    )
    model.reshard()  # else the next optimizer would be built over what generate has left whole
    notes.update(tiny_models.train(model))
    return model, notes


@client("Transformers: whisper", "transformers", is_tested=False)
def whisper() -> tuple[nn.Module, Tensors]:
    import transformers as hf

    config = hf.WhisperConfig(
        vocab_size=64, d_model=16, encoder_layers=2, decoder_layers=2, num_mel_bins=8,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=24,
        decoder_ffn_dim=24, max_source_positions=10, max_target_positions=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    model = hf.WhisperForConditionalGeneration(config)
    tiny_models.sharded(model, [*model.model.encoder.layers, *model.model.decoder.layers])

    def loss_of(generator: torch.Generator) -> Tensor:
        sound = torch.randn(3, 8, 20, generator=generator)
        return model(sound, labels=torch.randint(3, 64, (3, 7), generator=generator)).loss

    return model, tiny_models.train(model, loss_of=loss_of)


@client("Transformers: clip", "transformers", is_tested=False)
def clip() -> tuple[nn.Module, Tensors]:
    import transformers as hf

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "projection_dim": 8}
    text = {**sizes, "vocab_size": 64, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    model = hf.CLIPModel(
        hf.CLIPConfig(
            text_config=text,
            vision_config={**sizes, "image_size": 8, "patch_size": 4},
            projection_dim=8,
        )
    )
    # CLIP has a scalar parameter, which no engine with FSDP2's interface shards.
    model.logit_scale = nn.Parameter(model.logit_scale.detach().reshape(1))
    tiny_models.sharded(
        model, [*model.text_model.encoder.layers, *model.vision_model.encoder.layers]
    )

    def loss_of(generator: torch.Generator) -> Tensor:
        images = torch.randn(3, 3, 8, 8, generator=generator)
        texts = torch.randint(3, 64, (3, 7), generator=generator)
        return model(texts, images, return_loss=True).loss.mean()

    return model, tiny_models.train(model, loss_of=loss_of)


@client("diffusers: UNet2DModel", "diffusers", is_tested=False)
def diffusion() -> tuple[nn.Module, Tensors]:
    """A denoiser of diffusers, with its noise schedule."""
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16),
        layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    tiny_models.sharded(model, [*model.down_blocks, model.mid_block, *model.up_blocks])
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=10)

    def loss_of(generator: torch.Generator) -> Tensor:
        clean, noise = (torch.randn(2, 4, 8, 8, generator=generator) for _ in range(2))
        time = torch.randint(10, (2,), generator=generator)
        noisy = scheduler.add_noise(clean, noise, time)
        return (model(noisy, time).sample - noise).square().mean()

    return model, tiny_models.train(model, loss_of=loss_of)


@client("x-transformers: decoder", "x-transformers", is_tested=False)
def x_transformer() -> tuple[nn.Module, Tensors]:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    inner = TransformerWrapper(
        num_tokens=64,
        max_seq_len=16,
        attn_layers=Decoder(dim=16, depth=2, heads=2, rotary_pos_emb=True, ff_swish=True),
    )
    model = AutoregressiveWrapper(inner)
    tiny_models.sharded(model, [each[1] for each in inner.attn_layers.layers])

    def loss_of(generator: torch.Generator) -> Tensor:
        return model(torch.randint(64, (3, 9), generator=generator))

    return model, tiny_models.train(model, loss_of=loss_of)


@client("PyTorch: nn.Transformer", "torch")
def torchs_transformer() -> tuple[nn.Module, Tensors]:
    model = nn.Transformer(16, 2, 2, 2, 24, batch_first=True)
    tiny_models.sharded(model, [*model.encoder.layers, *model.decoder.layers])

    def loss_of(generator: torch.Generator) -> Tensor:
        source, target = (torch.randn(3, 5, 16, generator=generator) for _ in range(2))
        return model(source, target).square().mean()

    return model, tiny_models.train(model, loss_of=loss_of)


# -- optimizers


def optimizer_of(package: str, name: str, **options: Any) -> tuple[nn.Module, Tensors]:
    """A Llama of Transformers with a package's optimizer."""
    model = tiny_models.sharded(tiny_models.llama())
    kind = getattr(importlib.import_module(package), name)
    optimizer = kind(model.parameters(), **{"lr": 1e-2, **options})
    if hasattr(optimizer, "train"):
        optimizer.train()
    return model, tiny_models.train(model, optimizer, steps=3)


for _package, _names in {
    "lion-pytorch": ("Lion",),
    "schedulefree": ("AdamWScheduleFree", "SGDScheduleFree"),
    "prodigyopt": ("Prodigy",),
    "pytorch_optimizer": (
        "AdaBelief", "AdEMAMix", "Tiger", "Grams", "Ranger", "Lion", "ScheduleFreeAdamW",
        "AdaPNM", "QHAdam", "Yogi",
    ),
}.items():  # fmt: skip
    for _name in _names:
        client(
            f"{_package}: {_name}",
            *(_package, "transformers"),
            is_tested=False,
            package=_package.replace("-", "_"),
            name=_name,
        )(optimizer_of)


# -- loops


@client("Ignite: Engine", "pytorch-ignite", "transformers", is_tested=False)
def ignite_engine() -> tuple[nn.Module, Tensors]:
    from ignite.engine import Engine

    model = tiny_models.sharded(tiny_models.llama())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(engine: Any, batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    trainer = Engine(step)
    trainer.run([tiny_models.batch(model, index) for index in range(3)], max_epochs=1)
    return model, {"the last loss": trainer.state.output}


@client("PyTorch: DCP in between", "torch")
def dcp_in_between() -> tuple[nn.Module, Tensors]:
    """Torch's distributed checkpoint of model and optimizer, into a model that begins anew."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = tiny_models.sharded(tiny_models.llama())
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = built()
    tiny_models.train(model, steps=1)
    again, other = built()
    with shared_folder() as folder:
        state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
        state, optimizer_state = get_state_dict(again, other)
        read = {"model": state, "optimizer": optimizer_state}
        dcp.load(read, checkpoint_id=folder)
        set_state_dict(
            again, other, model_state_dict=read["model"], optim_state_dict=read["optimizer"]
        )
    return again, tiny_models.train(again)


@client("PyTorch: hooks on activations", "torch")
def hooks_on_activations() -> tuple[nn.Module, Tensors]:
    """Full backward hooks on blocks, and a tensor hook that scales a gradient on its way."""
    model, seen = tower(), []

    def note(module: nn.Module, grad_input: Any, grad_output: tuple[Tensor, ...]) -> None:
        seen.append(grad_output[0].norm())

    def halve(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: 0.5 * grad)

    tiny_models.sharded(model, model.layers)
    model.layers[1].register_full_backward_hook(note)
    model.layers[0].register_forward_hook(halve)

    def loss_of(generator: torch.Generator) -> Tensor:
        return token_loss(model, torch.randint(13, (2, 3, 5), generator=generator).unbind())

    notes = tiny_models.train(model, loss_of=loss_of)
    return model, {**notes, "norms": torch.stack(seen)}
