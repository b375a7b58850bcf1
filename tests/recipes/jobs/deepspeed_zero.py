"""Train GPT-2 XL with DeepSpeed's engine under ZeRO stage 1 or 2 (the argument), as its
tutorial of ZeRO does."""

import argparse

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
deepspeed.add_config_arguments(parser)
arguments = parser.parse_args()
deepspeed.init_distributed()
model = AutoModelForCausalLM.from_config(
    AutoConfig.from_pretrained("openai-community/gpt2-xl")
)
model.gradient_checkpointing_enable()
engine, optimizer, _, _ = deepspeed.initialize(
    args=arguments, model=model, model_parameters=model.parameters()
)
while True:
    tokens = torch.randint(
        50_257, (engine.train_micro_batch_size_per_gpu(), 1_024), device=engine.device
    )
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
