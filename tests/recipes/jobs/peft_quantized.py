"""Train adapters of PEFT on the quantized Llama 3.1 8B of a folder, whose weights GPTQ
or AWQ holds in 4 bits."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AwqConfig, GPTQConfig

method = AutoConfig.from_pretrained(sys.argv[1]).quantization_config["quant_method"]
# Without it, GPTQModel takes kernels that have no backward.
kernels = (GPTQConfig if method == "gptq" else AwqConfig)(
    bits=4, backend="auto_trainable"
)
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype=torch.float16, device_map="auto", quantization_config=kernels
)
model.gradient_checkpointing_enable()
model = get_peft_model(
    model, LoraConfig(task_type="CAUSAL_LM", r=16, target_modules=["q_proj", "v_proj"])
)
model.train()
optimizer = torch.optim.AdamW(
    [weight for weight in model.parameters() if weight.requires_grad], lr=1e-4
)
while True:
    tokens = torch.randint(128_000, (1, 2_048), device="cuda")
    with torch.autocast("cuda", torch.float16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
