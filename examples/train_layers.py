"""Train the decoder of train_gpt.py with its layers' weights on the host and their
activations in a small budget.

    python examples/train_layers.py --share 0.25 --steps 24
    python examples/train_layers.py --weights streamed:2 --share 0.5 --steps 24
    python examples/train_layers.py --plain --steps 24

All print the same losses. `--share` is the memory for weights and activations of
layers, as a share of the layers' weights: by default a quarter, so that the model is
four times as large as the memory. On the CPU the device is an emulated one, whose
memory is a hard limit.

A plan is from the first iterations, and a machine is not always as fast as it was then.
So the job makes a new one every `--steps-per-plan`, and compares the iterations of each
with what it says of them.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from train_gpt import GPT, Sentences, make_parser

from ebbtide.interleave import move_layers
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.units import bytes_text

# The first iterations of a plan are measured for it, and one makes it.
WARMUP = 4


def main() -> None:
    flags = make_parser(__doc__.splitlines()[0])
    flags.set_defaults(layers=16, width=128, context=32, batch=2)
    flags.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    flags.add_argument(
        "--share",
        type=float,
        default=0.25,
        help="memory as a share of the layers' weights",
    )
    flags.add_argument(
        "--weights",
        default="auto",
        help="resident, streamed, streamed:K or auto (default)",
    )
    flags.add_argument(
        "--activations",
        default="auto",
        help="keep, recompute, offload or auto (default)",
    )
    flags.add_argument("--steps-per-plan", type=int, default=12)
    flags.add_argument(
        "--plain", action="store_true", help="keep everything on the device"
    )
    args = flags.parse_args()
    if args.device == "cpu":
        # The copies of the emulated device take a core: threads of a layer would wait
        # for each other behind them.
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))

    torch.manual_seed(args.seed)
    data = Sentences(2_000, args.context, args.seed)
    loader = DataLoader(data, batch_size=args.batch, shuffle=True, drop_last=True)
    model = GPT(data.vocabulary, args.context, args.layers, args.width, args.heads).to(
        args.device
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    batches = iter(loader)

    def step() -> float:
        """Train a step and return its loss."""
        for _ in range(args.accumulate):
            tokens, targets = (part.to(args.device) for part in next(batches))
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            (loss / args.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    if args.plain:
        timed_steps(step, range(args.steps))
    else:
        train_with_plans(args, model, step)


def timed_steps(step: Callable[[], float], numbers: range) -> list[float]:
    """Train steps, and return the seconds of each."""
    times = []
    for number in numbers:
        begin = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - begin)
        print(f"step {number:3d}  loss {loss:.4f}", flush=True)
    return times


def train_with_plans(
    args: argparse.Namespace, model: GPT, step: Callable[[], float]
) -> None:
    """Train with the layers in their memory, and print the iterations beside the
    simulated ones of each plan."""
    weight_bytes = sum(param.nbytes for param in model.blocks.parameters())
    memory_bytes = args.share * weight_bytes
    pairs = []
    for first in range(0, args.steps, args.steps_per_plan):
        device = EmulatedDevice(memory_bytes) if args.device == "cpu" else None
        with move_layers(
            model,
            weights=args.weights,
            activations=args.activations,
            memory_budget=memory_bytes,
            device=device,
        ) as moved:
            times = timed_steps(
                step, range(first, min(first + args.steps_per_plan, args.steps))
            )
            kinds = [*moved.weights.values(), *moved.activations.values()]
            if (
                moved.predicted is not None
                and len(times) > WARMUP
                and args.accumulate == 1
            ):
                pairs.append(
                    (statistics.median(times[WARMUP:]), moved.predicted.iteration_s)
                )
    print(
        f"weights of layers {bytes_text(weight_bytes)}, memory for them and "
        f"activations {bytes_text(memory_bytes)}"
    )
    print(
        "layers: "
        + ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    )
    if pairs:
        measured, simulated = (
            1e3 * statistics.median(one) for one in zip(*pairs, strict=True)
        )
        ratios = sorted(one / other for one, other in pairs)
        print(
            f"iteration: {measured:.1f} ms, simulated {simulated:.1f} ms; of each plan "
            f"{ratios[0]:.2f} to "
            f"{ratios[-1]:.2f} of the simulated one, median "
            f"{statistics.median(ratios):.2f}"
        )
    if device is not None:
        print(f"peak of the device: {bytes_text(device.peak_bytes)}")


if __name__ == "__main__":
    main()
