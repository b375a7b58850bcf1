"""The settings of each framework for each change of a job, as they are documented there."""

from typing import Any

TITLES = {
    "transformers": "HF Trainer",
    "trl": "TRL",
    "llamafactory": "LLaMA-Factory",
    "axolotl": "Axolotl",
    "torchtune": "torchtune",
    "lightning": "Lightning",
    "deepspeed": "DeepSpeed",
    "fsdp2": "FSDP2",
    "torch": "plain torch",
}
# Stand for the samples of a micro-step, the micro-steps of an update, the ranks on a host, and the hosts: a key for
# these is left out where there is one.
MICRO_BATCH, MICRO_STEPS, RANKS, HOSTS = "{micro_batch}", "{micro_steps}", "{ranks}", "{hosts}"

_ZERO_3 = {"zero_optimization": {"stage": 3}}
_ZERO_OFFLOAD = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}
_TRAINER: dict[str, dict[str, Any]] = {
    "micro-batch": {"per_device_train_batch_size": MICRO_BATCH, "gradient_accumulation_steps": MICRO_STEPS},
    "8-bit optimizer": {"optim": "adamw_8bit"},
    "checkpointing": {"gradient_checkpointing": True},
    "paged optimizer": {"optim": "paged_adamw_8bit"},
    "offload": {"deepspeed": _ZERO_OFFLOAD},
    "ranks": {"deepspeed": _ZERO_3, "torchrun": {"nproc_per_node": RANKS, "nnodes": HOSTS}},
}
_TORCH: dict[str, dict[str, Any]] = {
    "micro-batch": {"torch.utils.data.DataLoader": {"batch_size": MICRO_BATCH}, "micro-steps": MICRO_STEPS},
    "streamed gradients": {"torch.Tensor.register_post_accumulate_grad_hook": "step and free each gradient"},
    "8-bit optimizer": {"optimizer": "bitsandbytes.optim.AdamW8bit"},
    "checkpointing": {"torch.utils.checkpoint.checkpoint": "around each layer"},
    "paged optimizer": {"optimizer": "bitsandbytes.optim.PagedAdamW8bit"},
    "offload": {"optimizer": "ebbtide.interleave.InterleavedAdamW"},
    "LoRA": {"peft.get_peft_model": "peft.LoraConfig"},
    "ranks": {
        "torch.distributed.fsdp.fully_shard": "each layer",
        "torchrun": {"nproc_per_node": RANKS, "nnodes": HOSTS},
    },
}
KEYS: dict[str, dict[str, dict[str, Any]]] = {
    "transformers": {
        **_TRAINER,
        "LoRA": {"peft.get_peft_model": "peft.LoraConfig"},
        "QLoRA": {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}},
    },
    "trl": {**_TRAINER, "LoRA": {"use_peft": True}, "QLoRA": {"use_peft": True, "load_in_4bit": True}},
    "llamafactory": {
        **_TRAINER,
        # It checkpoints by default.
        "checkpointing": {"disable_gradient_checkpointing": False},
        "LoRA": {"finetuning_type": "lora"},
        "QLoRA": {"finetuning_type": "lora", "quantization_bit": 4},
    },
    "axolotl": {
        "micro-batch": {"micro_batch_size": MICRO_BATCH, "gradient_accumulation_steps": MICRO_STEPS},
        "8-bit optimizer": {"optimizer": "adamw_bnb_8bit"},
        "checkpointing": {"gradient_checkpointing": True},
        "paged optimizer": {"optimizer": "paged_adamw_8bit"},
        "offload": {"deepspeed": _ZERO_OFFLOAD},
        "LoRA": {"adapter": "lora"},
        "QLoRA": {"adapter": "qlora", "load_in_4bit": True},
        "ranks": {"deepspeed": _ZERO_3},
    },
    "torchtune": {
        "micro-batch": {"batch_size": MICRO_BATCH, "gradient_accumulation_steps": MICRO_STEPS},
        "streamed gradients": {"optimizer_in_bwd": True},
        "8-bit optimizer": {"optimizer": {"_component_": "bitsandbytes.optim.AdamW8bit"}},
        "checkpointing": {"enable_activation_checkpointing": True},
        "paged optimizer": {"optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW8bit"}},
        "LoRA": {"tune run": "lora_finetune_single_device"},
        "ranks": {"tune run": "full_finetune_distributed", "nproc_per_node": RANKS, "nnodes": HOSTS},
    },
    "lightning": {
        "micro-batch": {
            "torch.utils.data.DataLoader": {"batch_size": MICRO_BATCH},
            "Trainer": {"accumulate_grad_batches": MICRO_STEPS},
        },
        "8-bit optimizer": _TORCH["8-bit optimizer"],
        "checkpointing": _TORCH["checkpointing"],
        "paged optimizer": _TORCH["paged optimizer"],
        "offload": {"Trainer": {"strategy": "deepspeed_stage_3_offload"}},
        "LoRA": _TORCH["LoRA"],
        "ranks": {"Trainer": {"devices": RANKS, "num_nodes": HOSTS, "strategy": "fsdp"}},
    },
    "deepspeed": {
        "micro-batch": {"train_micro_batch_size_per_gpu": MICRO_BATCH, "gradient_accumulation_steps": MICRO_STEPS},
        "checkpointing": {"deepspeed.checkpointing.checkpoint": "around each layer"},
        "offload": _ZERO_OFFLOAD,
        "LoRA": _TORCH["LoRA"],
        "ranks": {**_ZERO_3, "deepspeed": {"num_gpus": RANKS, "num_nodes": HOSTS}},
    },
    # bitsandbytes has no state for sharded parameters.
    "fsdp2": {
        "micro-batch": _TORCH["micro-batch"],
        "8-bit optimizer": {"optimizer": "torchao.optim.AdamW8bit"},
        "checkpointing": _TORCH["checkpointing"],
        "offload": {"torch.distributed.fsdp.fully_shard": {"offload_policy": "CPUOffloadPolicy()"}},
        "LoRA": _TORCH["LoRA"],
        "ranks": {"torchrun": {"nproc_per_node": RANKS, "nnodes": HOSTS}},
    },
    "torch": _TORCH,
}


def settings_for(framework: str, levers: list[str], values: dict[str, int]) -> dict[str, Any]:
    """Return the settings of a framework for some changes; `values` fill in the placeholders, by their name."""
    settings: dict[str, Any] = {}
    for lever in levers:
        settings |= _filled(KEYS[framework][lever], values)
    return settings


def settings_text(settings: dict[str, Any]) -> str:
    """Return settings as text, the names of nested ones joined by a point."""
    return ", ".join(f"{name}: {_value(value)}" for name, value in _flat("", settings))


def _filled(value: Any, values: dict[str, int]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(part, values) for key, part in value.items() if part != HOSTS or values["hosts"] > 1}
    return values.get(value[1:-1], value) if isinstance(value, str) else value


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix.removesuffix("."), value)]
    return [pair for key, part in value.items() for pair in _flat(f"{prefix}{key}.", part)]


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
