"""Train Llama 3.1 8B with kernels of Liger, AdamW in bf16, and checkpointing: its
benchmark, on one card."""

import torch
from liger_kernel.transformers import AutoLigerKernelForCausalLM

model = AutoLigerKernelForCausalLM.from_pretrained(
    "meta-llama/Llama-3.1-8B", dtype=torch.bfloat16
).to("cuda")
model.gradient_checkpointing_enable()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-6)
while True:
    tokens = torch.randint(128_000, (8, 2_048), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
