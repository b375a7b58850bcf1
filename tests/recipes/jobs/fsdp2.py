"""Train Llama 3.1 8B on 8 ranks with fully_shard, mixed precision and checkpointing, as
the tutorial of FSDP2 does."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
mesh = init_device_mesh("cuda", (dist.get_world_size(),))
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained("meta-llama/Llama-3.1-8B"), dtype=torch.float32
    )
model.gradient_checkpointing_enable()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
model.to_empty(device="cuda")
model.init_weights()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
while True:
    tokens = torch.randint(0, 128_000, (1, 8_192), device=device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
