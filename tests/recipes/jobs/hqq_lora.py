"""Train adapters on Llama 3.1 8B, whose weights HQQ holds in 4 bits, as its README
does."""

import torch
from hqq.core.peft import PeftUtils
from hqq.core.quantize import BaseQuantizeConfig, HQQBackend, HQQLinear
from hqq.models.hf.base import AutoHQQHFModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(
    "meta-llama/Llama-3.1-8B", dtype=torch.bfloat16
)
quantization = BaseQuantizeConfig(nbits=4, group_size=64)
AutoHQQHFModel.quantize_model(
    model, quant_config=quantization, compute_dtype=torch.bfloat16, device="cuda"
)
adapter = {
    "lora_type": "default",
    "r": 32,
    "lora_alpha": 64,
    "dropout": 0.05,
    "train_dtype": torch.float32,
}
PeftUtils.add_lora(
    model,
    {f"self_attn.{name}_proj": adapter for name in "qkvo"}
    | {f"mlp.{name}_proj": None for name in ("gate", "up", "down")},
)
HQQLinear.set_backend(HQQBackend.PYTORCH)
model.train()
optimizer = torch.optim.AdamW(
    [weight for weight in model.parameters() if weight.requires_grad], lr=1e-4
)
while True:
    tokens = torch.randint(128_000, (1, 2_048), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
