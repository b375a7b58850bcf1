"""Train the decoder of train_gpt.py with its layers' weights on the host and their activations in a small budget.

    python examples/train_layers.py --share 0.25 --steps 10
    python examples/train_layers.py --plain --steps 10

Both print the same losses. `--share` is the memory for weights and activations of layers, as a share of the layers'
weights: by default a quarter, so that the model is four times as large as the memory. On the CPU the device is an
emulated one, whose memory is a hard limit.
"""

import statistics
import time
from contextlib import ExitStack

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from train_gpt import GPT, Sentences, make_parser

from ebbtide.interleave import offload_activations, stream_weights
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.units import bytes_text


def main() -> None:
    flags = make_parser(__doc__.splitlines()[0])
    flags.set_defaults(layers=16, width=128, context=32, batch=2)
    flags.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    flags.add_argument("--share", type=float, default=0.25, help="memory as a share of the layers' weights")
    flags.add_argument("--plain", action="store_true", help="keep everything on the device")
    args = flags.parse_args()

    torch.manual_seed(args.seed)
    data = Sentences(2_000, args.context, args.seed)
    loader = DataLoader(data, batch_size=args.batch, shuffle=True, drop_last=True)
    model = GPT(data.vocabulary, args.context, args.layers, args.width, args.heads).to(args.device)
    optimizer_params = [*model.parameters()]
    weight_bytes = sum(param.nbytes for param in model.blocks.parameters())
    memory_bytes = args.share * weight_bytes
    device = EmulatedDevice(memory_bytes) if args.device == "cpu" else None
    with ExitStack() as stack:
        activations = weights = None
        times = []
        if not args.plain:
            # One budget, and one plan, for both.
            weights = stack.enter_context(stream_weights(model, memory_budget=memory_bytes, device=device))
            activations = stack.enter_context(offload_activations(model))
        optimizer = torch.optim.AdamW(optimizer_params, lr=3e-4)
        batches = iter(loader)
        for step in range(args.steps):
            begin = time.perf_counter()
            for _ in range(args.accumulate):
                tokens, targets = (part.to(args.device) for part in next(batches))
                loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                (loss / args.accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - begin)
            print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)
        print(
            f"weights of layers {bytes_text(weight_bytes)}, memory for them and activations {bytes_text(memory_bytes)}"
        )
        if activations is not None and weights is not None:
            kinds = [*weights.choices.values(), *activations.choices.values()]
            print("layers: " + ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)))
            # The first steps are measured for the plan, and one makes it.
            if activations.predicted is not None and len(times) > 4 and args.accumulate == 1:
                simulated_ms = 1e3 * activations.predicted.iteration_s
                print(f"iteration: {1e3 * statistics.median(times[4:]):.1f} ms, simulated {simulated_ms:.1f} ms")
        if not args.plain and device is not None:
            print(f"peak of the device: {bytes_text(device.peak_bytes)}")


if __name__ == "__main__":
    main()
