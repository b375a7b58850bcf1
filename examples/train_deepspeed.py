"""Train the small GPT of train_gpt.py with DeepSpeed: ZeRO stage 3, the optimizer
offloaded to the CPU.

    deepspeed examples/train_deepspeed.py                     # on all GPUs, or on the CPU if there is none
    python examples/train_deepspeed.py --layers 12 --width 768
    ebbtide profile -o run.ebb -- deepspeed examples/train_deepspeed.py
    deepspeed examples/train_deepspeed.py --policy adaptive   # the same job, driven by ebbtide

This is plain DeepSpeed, like most scripts for it; one call is ebbtide's.
"""

import argparse
import os
import socket
import time

import deepspeed
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from train_gpt import GPT, Sentences, make_parser


def config(args: argparse.Namespace) -> dict:
    """Return the configuration of DeepSpeed."""
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": args.stage,
            "offload_optimizer": {
                "device": "cpu",
                "pin_memory": torch.cuda.is_available(),
                "ratio": args.ratio,
            },
            "sub_group_size": args.sub_group_size,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.01}},
        "steps_per_print": 1_000_000,
    }


def set_single_rank() -> None:
    """Set the environment of one rank, if no launcher has set it."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        os.environ[name] = value
    os.environ["MASTER_PORT"] = port


def main() -> None:
    flags = make_parser(__doc__.splitlines()[0])
    flags.add_argument("--stage", type=int, default=3, choices=[1, 2, 3])
    flags.add_argument(
        "--ratio",
        type=float,
        default=1.0,
        help="Twin-Flow: the share that the CPU updates; default 1",
    )
    flags.add_argument("--sub-group-size", type=int, default=1_000_000)
    flags.add_argument(
        "--policy",
        help=(
            "policy of ebbtide for the update, e.g. adaptive; default: plain DeepSpeed"
        ),
    )
    flags.add_argument("--local_rank", type=int, help="local rank, set by the launcher")
    args = flags.parse_args()

    set_single_rank()
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(args.seed)
    data = Sentences(20_000, args.context, args.seed)
    loader = DataLoader(
        data,
        batch_size=args.batch,
        sampler=DistributedSampler(data, seed=args.seed),
        drop_last=True,
    )
    model = GPT(data.vocabulary, args.context, args.layers, args.width, args.heads)
    parameters = sum(p.numel() for p in model.parameters())

    if args.policy:
        from ebbtide.interleave.deepspeed import enable

        enable(policy=args.policy)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(args)
    )

    first = engine.global_rank == 0
    if first:
        print(
            f"{parameters / 1e6:.1f} million parameters on {engine.world_size} of "
            f"{engine.device.type}",
            flush=True,
        )
    batches = iter(loader)
    for step in range(args.steps):
        start = time.perf_counter()
        for _ in range(args.accumulate):
            tokens, targets = (part.to(engine.device) for part in next(batches))
            loss = F.cross_entropy(
                engine(tokens).flatten(0, 1).float(), targets.flatten()
            )
            engine.backward(loss)
            engine.step()
        if first:
            print(
                f"step {step:3d}  loss {loss.item():.4f}  "
                f"{1e3 * (time.perf_counter() - start):7.1f} ms",
                flush=True,
            )
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
