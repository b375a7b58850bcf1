"""Train adapters of PEFT on Llama 3.1 8B, whose weights torchao holds in 8 bits."""

import torch
from peft import LoraConfig, get_peft_model
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, TorchAoConfig

model = AutoModelForCausalLM.from_pretrained(
    "meta-llama/Llama-3.1-8B",
    dtype=torch.bfloat16,
    quantization_config=TorchAoConfig(Int8WeightOnlyConfig()),
    device_map="auto",
)
model = get_peft_model(
    model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
)
model.train()
optimizer = torch.optim.AdamW(
    [weight for weight in model.parameters() if weight.requires_grad], lr=1e-4
)
while True:
    tokens = torch.randint(128_000, (1, 2_048), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
