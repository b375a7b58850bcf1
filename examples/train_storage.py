"""Train the small GPT of train_gpt.py with optimizer state in files, and go on after a
crash.

    python examples/train_storage.py --storage /scratch/job --host-memory 40e6 --steps 20
    python examples/train_storage.py --storage /scratch/job --host-memory 40e6 --steps 40    # goes on from step 20

Every tenth step it commits the state in storage and saves the parameters with what
`commit` returns. A run that was killed goes on from there when it is started again.
FOLDER/checkpoint.pt has the parameters, a fraction of the state.
"""

import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from train_gpt import GPT, Sentences, make_parser

from ebbtide.interleave import InterleavedAdamW

SAVE_EVERY = 10


def save(
    path: Path, step: int, model: torch.nn.Module, optimizer: InterleavedAdamW
) -> None:
    """Commit the state in storage, and save the parameters with it. Whenever this is
    interrupted, one can be loaded."""
    checkpoint = {
        "step": step,
        "optimizer": optimizer.commit(),
        "model": model.state_dict(),
    }
    new = path.with_suffix(".new")
    torch.save(checkpoint, new)
    new.replace(path)


def main() -> None:
    flags = make_parser(__doc__.splitlines()[0])
    flags.add_argument(
        "--storage", type=Path, required=True, help="a folder on a drive"
    )
    flags.add_argument(
        "--host-memory",
        type=float,
        help="bytes for state and buffers; by default most of what is free",
    )
    flags.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    args = flags.parse_args()

    torch.manual_seed(args.seed)
    data = Sentences(20_000, args.context, args.seed)
    model = GPT(data.vocabulary, args.context, args.layers, args.width, args.heads).to(
        args.device, torch.bfloat16
    )
    args.storage.mkdir(parents=True, exist_ok=True)
    optimizer = InterleavedAdamW(
        model.parameters(),
        lr=3e-4,
        policy="pipelined",
        subgroup_params=500_000,
        gradients="streamed",
        max_grad_norm=1.0,
        storage=args.storage,
        host_memory_budget=args.host_memory,
    )
    first, path = 0, args.storage / "checkpoint.pt"
    if path.exists():
        checkpoint = torch.load(path, map_location=args.device)
        first = checkpoint["step"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])

    loader = DataLoader(data, batch_size=args.batch, shuffle=True, drop_last=True)
    batches = iter(loader)
    for _ in range(first * args.accumulate):
        next(batches)
    for step in range(first, args.steps):
        start = time.perf_counter()
        for _ in range(args.accumulate):
            tokens, targets = (part.to(args.device) for part in next(batches))
            loss = F.cross_entropy(
                model(tokens).flatten(0, 1).float(), targets.flatten()
            )
            (loss / args.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(
            f"step {step:3d}  loss {loss.item():.4f}  "
            f"{1e3 * (time.perf_counter() - start):7.1f} ms",
            flush=True,
        )
        if (step + 1) % SAVE_EVERY == 0:
            save(path, step + 1, model, optimizer)
    stored = len(optimizer.plan.stored)
    print(
        f"{stored} subgroups in storage, {optimizer.storage_written_bytes / 1e9:.2f} "
        "GB written"
    )
    optimizer.close()


if __name__ == "__main__":
    main()
