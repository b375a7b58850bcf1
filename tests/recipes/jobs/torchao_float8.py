"""Train Llama 3.2 1B in float8 with 8-bit AdamW, both of torchao, as its README
does."""

import torch
from torchao.float8 import convert_to_float8_training
from torchao.optim import AdamW8bit
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(
    "meta-llama/Llama-3.2-1B-Instruct", dtype=torch.bfloat16
).to("cuda")
convert_to_float8_training(
    model, module_filter_fn=lambda module, name: name != "lm_head"
)
model.train()
optimizer = AdamW8bit(model.parameters(), lr=1e-5)
while True:
    tokens = torch.randint(128_000, (4, 2_048), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
