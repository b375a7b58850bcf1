"""Train a GPT with Megatron-core's own parallel layers, optimizer and schedules, as its
quick start does.

The sizes are those of the published scripts for Megatron-LM: GPT-3 with 175e9
parameters. Options: tensor and pipeline parallel sizes, chunks of the model per
pipeline rank, and its optimizer that updates on the CPU.
"""

import argparse
import os
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

parser = argparse.ArgumentParser()
parser.add_argument("--tensor-model-parallel-size", type=int, default=8)
parser.add_argument("--pipeline-model-parallel-size", type=int, default=16)
parser.add_argument("--virtual-stages", type=int)
parser.add_argument("--num-layers", type=int, default=96)
parser.add_argument("--hidden-size", type=int, default=12_288)
parser.add_argument("--num-attention-heads", type=int, default=96)
parser.add_argument("--seq-length", type=int, default=2_048)
parser.add_argument("--micro-batch-size", type=int, default=1)
parser.add_argument("--micro-batches", type=int, default=16)
parser.add_argument("--optimizer-cpu-offload", action="store_true")
options = parser.parse_args()
device = "cuda"
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
parallel_state.initialize_model_parallel(
    options.tensor_model_parallel_size,
    options.pipeline_model_parallel_size,
    virtual_pipeline_model_parallel_size=options.virtual_stages,
)
model_parallel_cuda_manual_seed(123)
config = TransformerConfig(
    num_layers=options.num_layers,
    hidden_size=options.hidden_size,
    num_attention_heads=options.num_attention_heads,
    tensor_model_parallel_size=options.tensor_model_parallel_size,
    pipeline_model_parallel_size=options.pipeline_model_parallel_size,
    virtual_pipeline_model_parallel_size=options.virtual_stages,
    bf16=True,
    params_dtype=torch.bfloat16,
    pipeline_dtype=torch.bfloat16,
    gradient_accumulation_fusion=False,
    deallocate_pipeline_outputs=True,
    finalize_model_grads_func=finalize_model_grads,
)
data_parallel = DistributedDataParallelConfig(
    use_distributed_optimizer=True, overlap_grad_reduce=False
)
chunks = []
for stage in range(options.virtual_stages or 1):
    ends = {"ignore_virtual": False, "vp_stage": stage}
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=51_200,
        max_sequence_length=options.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        vp_stage=stage if options.virtual_stages else None,
    ).to(device, config.params_dtype)
    chunks.append(DistributedDataParallel(config, data_parallel, model))
settings = OptimizerConfig(
    optimizer="adam",
    lr=6e-5,
    bf16=config.bf16,
    params_dtype=config.params_dtype,
    use_distributed_optimizer=True,
    optimizer_cpu_offload=options.optimizer_cpu_offload,
    optimizer_offload_fraction=1.0,
    overlap_cpu_optimizer_d2h_h2d=options.optimizer_cpu_offload,
)
optimizer = get_megatron_optimizer(settings, chunks)
config.grad_scale_func = optimizer.scale_loss


def forward_step(batches, model):
    tokens = next(batches)
    positions = torch.arange(options.seq_length, device=device).expand_as(tokens)
    losses = model(tokens, positions, None, labels=tokens)
    return losses, partial(
        lambda output: (output.float().mean(), {"loss": output.float().mean().detach()})
    )


def batches():
    while True:
        yield torch.randint(
            50_257, (options.micro_batch_size, options.seq_length), device=device
        )


schedule = get_forward_backward_func()
loaders = [batches() for _ in chunks]
for step in range(4):
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = schedule(
        forward_step_func=forward_step,
        data_iterator=loaders if options.virtual_stages else loaders[0],
        model=chunks if options.virtual_stages else chunks[0],
        num_microbatches=options.micro_batches,
        seq_length=options.seq_length,
        micro_batch_size=options.micro_batch_size,
        decoder_seq_length=options.seq_length,
        forward_only=False,
    )
    optimizer.step()
    print(f"step {step}: {losses}")
