"""The training jobs of published memory figures, which `memory_published.py` runs in
dry runs.

python memory_published_jobs.py JOB OPTIONS-AS-JSON

Models are made from their configurations, and data is random: neither changes the
memory.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from functools import partial
from typing import Any

import torch
from torch.nn import functional

# Fake forms of torchvision's own operations, which a build for another torch lacks, and
# which these jobs do not use.
sys.modules["torchvision._meta_registrations"] = types.ModuleType(
    "torchvision._meta_registrations"
)


def bert(**arguments: Any) -> None:
    """BERT large for classification in Hugging Face's Trainer, 512 sequences of 512
    tokens."""
    import transformers

    config = transformers.BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        vocab_size=30522,
    )
    config._attn_implementation = "eager"  # the figures are older than others
    model = transformers.BertForSequenceClassification(config).to("cuda")
    rows = [
        {
            "input_ids": torch.randint(100, 30000, (512,)),
            "labels": torch.tensor(row % 2),
        }
        for row in range(512)
    ]
    options = transformers.TrainingArguments(
        output_dir="tmp",
        num_train_epochs=1,
        report_to="none",
        disable_tqdm=True,
        **arguments,
    )
    transformers.Trainer(model=model, args=options, train_dataset=rows).train()


def vit(
    model: str,
    batch: int,
    optimizer: str,
    amp: bool,
    checkpointing: bool,
    offload: str | None = None,
) -> None:
    """A vision transformer of timm, as benchmarks/benchmark_low_bit_adam.py of torchao
    trains it."""
    import timm

    network = timm.create_model(model, pretrained=False, num_classes=45, img_size=224)
    if checkpointing:
        network.set_grad_checkpointing()
    if not amp:
        network.bfloat16()
    network.cuda()
    steps = optimizer_of(network.parameters(), optimizer, offload)
    network.train()
    while True:
        images, labels = (
            torch.randn(batch, 3, 224, 224),
            torch.zeros(batch, dtype=torch.long),
        )
        images = images if amp else images.bfloat16()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
            loss = functional.cross_entropy(network(images.cuda()), labels.cuda())
        loss.backward()
        steps.step()
        steps.zero_grad()


def optimizer_of(parameters: Any, name: str, offload: str | None = None) -> Any:
    """Return an optimizer by its name in torchao's tables."""
    import bitsandbytes
    import torchao.optim

    kinds = {
        "AdamW": partial(torch.optim.AdamW, fused=True),
        "bnb 8-bit": bitsandbytes.optim.AdamW8bit,
        "bnb paged 8-bit": bitsandbytes.optim.PagedAdamW8bit,
        "ao 8-bit": torchao.optim.AdamW8bit,
        "ao FP8": torchao.optim.AdamWFp8,
        "ao 4-bit": torchao.optim.AdamW4bit,
    }
    kind = kinds[name]
    if offload:
        kind = partial(
            torchao.optim.CPUOffloadOptimizer,
            optimizer_class=kind,
            offload_gradients=offload == "gradients",
        )
    return kind(parameters, lr=1e-4)


def torchtune_full(
    model: str, optimizer: str, batch: int, length: int, in_backward: bool
) -> None:
    """Full fine-tuning with torchtune's model and loss in bf16, with checkpointing."""
    from torchtune import training
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    with training.set_default_dtype(torch.bfloat16), torch.device("cuda"):
        network = _torchtune_model(model)()
    loss_of = CEWithChunkedOutputLoss()
    network.set_num_output_chunks(loss_of.num_output_chunks)
    if in_backward:
        steps = {
            parameter: optimizer_of([parameter], optimizer)
            for parameter in network.parameters()
        }
        training.register_optim_in_bwd_hooks(model=network, optim_dict=steps)
        finish = training.create_optim_in_bwd_wrapper(model=network, optim_dict=steps)
    else:
        finish = optimizer_of(network.parameters(), optimizer)
    _train_torchtune(network, loss_of, None if in_backward else finish, batch, length)


def torchtune_lora(model: str, batch: int, length: int, quantized: bool) -> None:
    """LoRA with torchtune's model and loss in bf16, with checkpointing, as its
    single-device configurations have it."""
    from torchtune import training
    from torchtune.modules.loss import CEWithChunkedOutputLoss
    from torchtune.modules.peft import get_adapter_params, set_trainable_params

    build = partial(
        _torchtune_model(("qlora_" if quantized else "lora_") + model),
        lora_attn_modules=["q_proj", "v_proj", "output_proj"],
        apply_lora_to_mlp=True,
        lora_rank=8,
        lora_alpha=16,
    )
    with training.set_default_dtype(torch.bfloat16), torch.device("cuda"):
        network = build()
    adapters = get_adapter_params(network)
    set_trainable_params(network, adapters)
    loss_of = CEWithChunkedOutputLoss()
    network.set_num_output_chunks(loss_of.num_output_chunks)
    optimizer = torch.optim.AdamW(adapters.values(), fused=True, lr=3e-4)
    _train_torchtune(network, loss_of, optimizer, batch, length)


def litgpt(
    model: str,
    batch: int,
    rank: int,
    layers: str,
    dropout: float = 0.05,
    steps: int = 1,
) -> None:
    """LitGPT's model, loss and loop in bf16, 512 tokens, with LoRA of a rank (0: full
    fine-tuning) on `layers`.

    `steps`: micro-batches whose gradients are added.
    """
    import litgpt.lora
    from litgpt.utils import chunked_cross_entropy

    kinds = {
        f"lora_{kind}": kind in layers
        for kind in ("query", "key", "value", "projection", "mlp", "head")
    }
    options = (
        {"lora_r": rank, "lora_alpha": 16, "lora_dropout": dropout, **kinds}
        if rank
        else {}
    )
    package = litgpt.lora if rank else litgpt.model
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        network = package.GPT(
            (litgpt.lora.Config if rank else litgpt.Config).from_name(model, **options)
        )
    if rank:
        litgpt.lora.mark_only_lora_as_trainable(network)
    network.max_seq_length = 512
    optimizer = torch.optim.AdamW(
        [one for one in network.parameters() if one.requires_grad], lr=2e-4
    )
    while True:
        for _ in range(steps):
            tokens = torch.randint(0, 32_000, (batch, 512)).cuda()
            logits = network(tokens, lm_head_chunk_size=128)
            logits[-1] = logits[-1][..., :-1, :]
            chunked_cross_entropy(logits, tokens[..., 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()


def _torchtune_model(name: str) -> Any:
    family = next(
        family for family in ("llama3_1", "llama3_2", "llama2") if family in name
    )
    return getattr(importlib.import_module(f"torchtune.models.{family}"), name)


def _train_torchtune(
    network: Any, loss_of: Any, optimizer: Any, batch: int, length: int
) -> None:
    from torchtune import training
    from torchtune.modules import TransformerSelfAttentionLayer

    training.set_activation_checkpointing(
        network, auto_wrap_policy={TransformerSelfAttentionLayer}
    )
    ignored = torch.full((batch, 1), loss_of.ignore_index, device="cuda")
    while True:
        tokens = torch.randint(0, 32_000, (batch, length)).cuda()
        labels = torch.hstack((tokens[..., 1:], ignored))
        logits = network(tokens)
        loss = loss_of(logits, labels)
        del logits
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
