"""Compare DeepSpeed's SuperOffload and ZenFlow with its plain offload and with ebbtide: time, losses and weights.

    PYTHONPATH=. python benchmarks/deepspeed_rivals.py [--forward-ms 100] [--backward-ms 300] [--overlap none]

All train one bf16 model on the same batches, with the optimizer's state in host memory. Each runs in its own process,
they take turns in changing order, and ratios are within a round. The reference of DeepSpeed's is its plain offload,
that of ebbtide's is ebbtide's own with everything on the CPU: the two round differently. Without a GPU, the forward and the backward of a GPU
are timed waits that take no core, so that updates can hide behind them; the checks by which DeepSpeed refuses
SuperOffload and ZenFlow's stage 3 on its CPU accelerator are lifted. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tables import machine_line, spread, table

REFERENCE = "DeepSpeed ZeRO-Offload"
EBBTIDE = "ebbtide: "
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 8, "update_interval": 2}
# Name -> changes to zero_optimization.
DEEPSPEED: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    "DeepSpeed SuperOffload": {"offload_optimizer": {"device": "cpu", "super_offload": True}},
    "DeepSpeed ZenFlow": {"zenflow": ZENFLOW},
    "DeepSpeed ZenFlow, overlap_step": {"zenflow": {**ZENFLOW, "overlap_step": True}},
}
ENGINE, OPTIMIZER = EBBTIDE + "enable()", EBBTIDE + "InterleavedAdamW"
# Each of ebbtide's must have the bits of the same one with everything on the CPU.
ON_CPU = ", zero-offload"
NAMES = (*DEEPSPEED, ENGINE + ON_CPU, ENGINE, OPTIMIZER + ON_CPU, OPTIMIZER)
PARTS = ("forward", "backward", "step", "iteration")
# ZenFlow starts its process in the first interval, and SuperOffload's worker is ready after the first step.
WARM_UP = 4
LEARNING_RATE = 1e-4


def build_model(args: argparse.Namespace) -> Any:
    """Return the model: blocks of two matrices, each with its share of the emulated forward and backward."""
    import torch
    from torch import nn

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            time.sleep(args.forward_ms / args.blocks / 1e3)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            time.sleep(args.backward_ms / args.blocks / 1e3)
            return gradient

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(args.width, 4 * args.width), nn.Linear(4 * args.width, args.width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = x + self.down(torch.relu(self.up(x)))
            return out if torch.cuda.is_available() else Wait.apply(out)  # type: ignore[no-any-return, no-untyped-call]

    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(args.blocks)))


def deepspeed_engine(name: str, model: Any, args: argparse.Namespace) -> Any:
    import deepspeed

    if name.startswith(EBBTIDE):
        from ebbtide.interleave.deepspeed import enable

        enable(subgroup_params=args.subgroup * 1_000_000, **policy_options(name, args))
    else:
        from tests.profiler.agent.deepspeed.cpu_accelerator import lift_device_checks

        if args.lift_checks:
            lift_device_checks()
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "sub_group_size": args.subgroup * 1_000_000}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": args.clip,
        "bf16": {"enabled": True},
        "zero_optimization": {**offload, **DEEPSPEED.get(name, {})},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "steps_per_print": 1_000_000,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def policy_options(name: str, args: argparse.Namespace) -> dict[str, Any]:
    if name.endswith(ON_CPU):
        return {"policy": "zero-offload"}
    return {"policy": args.policy} | ({} if args.overlap == "none" else {"overlap": args.overlap})


def reference_of(name: str) -> str:
    return name.removesuffix(ON_CPU) + ON_CPU if name.startswith(EBBTIDE) else REFERENCE


def contestant(name: str, args: argparse.Namespace) -> tuple[Any, Callable[[Any], None], Callable[[], None], Any]:
    """Return (callable model, backward of a loss, step, function that yields all weights)."""
    import torch

    model = build_model(args)
    if name.startswith(OPTIMIZER):
        from ebbtide.interleave import InterleavedAdamW

        model = model.to(torch.bfloat16)
        optimizer = InterleavedAdamW(
            model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, model=model,
            subgroup_params=args.subgroup * 1_000_000, max_grad_norm=args.clip or None, **policy_options(name, args),
        )  # fmt: skip

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        def own_weights() -> Iterator[Any]:
            optimizer.synchronize()
            yield from model.parameters()

        return model, lambda loss: loss.backward(), step, own_weights
    engine = deepspeed_engine(name, model, args)

    def gathered_weights() -> Iterator[Any]:
        import deepspeed

        for parameter in engine.module.parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                # ZenFlow's stage 3 has the matrices transposed, except within a forward and a backward.
                yield parameter.t() if engine.zenflow and parameter.dim() > 1 else parameter

    return engine, engine.backward, engine.step, gathered_weights


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the mean milliseconds of each part of an iteration, after some for warm-up, and all losses."""
    import torch

    model, backward, step, weights = contestant(name, args)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1)

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    part_ms: dict[str, list[float]] = {part: [] for part in PARTS}
    losses = []
    for _ in range(args.steps + WARM_UP):
        batch = torch.randn(1, args.width, generator=generator).to(device, torch.bfloat16)
        times = [now()]
        loss = model(batch).float().square().mean()
        times.append(now())
        backward(loss)
        times.append(now())
        step()
        times.append(now())
        for part, begin, end in zip(PARTS, (*times[:3], times[0]), (*times[1:], times[3]), strict=True):
            part_ms[part].append((end - begin) * 1e3)
        losses.append(loss.item())
    torch.save(torch.cat([weight.detach().float().cpu().flatten() for weight in weights()]), args.weights)
    return {**{part: statistics.mean(values[WARM_UP:]) for part, values in part_ms.items()}, "losses": losses}


def run(name: str, args: argparse.Namespace, weights: Path) -> dict[str, Any] | str:
    """Measure in another process; return its results, or an error message."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), **os.environ, **ranks}
    environment["MASTER_PORT"] = str(20_000 + time.monotonic_ns() % 20_000)
    options = [*sys.argv[1:], "--measure", name, "--weights", str(weights)]
    done = subprocess.run(
        [sys.executable, __file__, *options], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it failed"])[-1]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    shown = {part: round(result[part], 1) for part in PARTS}
    print(f"  load {os.getloadavg()[0]:.1f}: {name} {shown}", file=sys.stderr)
    return result


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--blocks", type=int, default=4)
    flags.add_argument("--width", type=int, default=1024, help="a block has 8 width**2 parameters")
    flags.add_argument("--subgroup", type=int, default=8, help="parameters of a subgroup in millions")
    flags.add_argument("--forward-ms", type=float, default=100.0, help="emulated forward of a GPU (only without a GPU)")
    flags.add_argument("--backward-ms", type=float, default=300.0, help="the same for the backward")
    flags.add_argument("--clip", type=float, default=0.0, help="largest gradient norm; 0: no clipping")
    flags.add_argument("--policy", default="pipelined", help="policy of ebbtide")
    flags.add_argument("--overlap", default="none", choices=["none", "forward", "backward", "both", "auto"])
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--steps", type=int, default=8, help="steps of each process, without those for warm-up")
    flags.add_argument("--contestant", action="append", choices=NAMES)
    flags.add_argument("--as-shipped", dest="lift_checks", action="store_false", help="do not lift DeepSpeed's checks")
    flags.add_argument("--measure", choices=NAMES, help=argparse.SUPPRESS)
    flags.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    args = flags.parse_args()
    import torch

    args.lift_checks = args.lift_checks and not torch.cuda.is_available()
    if args.measure:
        print(json.dumps(measure(args.measure, args)))
        return
    names = [REFERENCE, *(name for name in args.contestant or NAMES if name != REFERENCE)]
    errors: dict[str, str] = {}
    rounds: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder, f"{number}.pt") for number, name in enumerate(names)}
        for number in range(args.rounds):
            rounds.append({})
            for name in names if number % 2 else reversed(names):
                result = errors.get(name) or run(name, args, files[name])
                if isinstance(result, str):
                    errors[name] = result
                else:
                    rounds[-1][name] = result
        if REFERENCE in errors:
            sys.exit(f"{REFERENCE} does not run here: {errors[REFERENCE]}")
        report(args, names, rounds, errors, {name: torch.load(files[name]) for name in names if name not in errors})


def report(
    args: argparse.Namespace, names: list[str], rounds: list[dict[str, dict[str, Any]]], errors: dict[str, str],
    weights: dict[str, Any],
) -> None:  # fmt: skip
    import torch
    from importlib.metadata import version

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else (
        f"no GPU (emulated forward {args.forward_ms:g} ms, backward {args.backward_ms:g} ms)")  # fmt: skip
    print(f"{time.strftime('%Y-%m-%d')}, {machine_line()}, {gpu}, torch {torch.__version__}, "
          f"DeepSpeed {version('deepspeed')}, {weights[REFERENCE].numel() / 1e6:.1f} M parameters, clipping {args.clip:g}, "
          f"policy {args.policy}, overlap {args.overlap}, {args.rounds} rounds of {args.steps} steps: "
          "median of the rounds' means (minimum to maximum)\n")  # fmt: skip
    rows = []
    for name in names:
        if name in errors:
            rows.append([name, f"not measured: {errors[name]}", *[""] * 4])
            continue
        own = [results[name] for results in rounds]
        ratios = [
            spread([results[REFERENCE][part] / results[name][part] for results in rounds], 2)
            for part in ("step", "iteration")
        ]
        reference = rounds[-1].get(reference_of(name))
        same = "?" if reference is None else "yes" if own[-1]["losses"] == reference["losses"] else "no"
        difference = float((weights[name] - weights[REFERENCE]).abs().max())
        rows.append([name, spread([result["step"] for result in own], 1), *ratios, same,
                     f"{difference / LEARNING_RATE:.2g}"])  # fmt: skip
    heads = ["contestant", "step, ms", "step of ZeRO-Offload / step", "same for iteration", "losses bit-equal to its reference",
             "largest difference of weights to ZeRO-Offload, in learning rates"]  # fmt: skip
    table(heads, rows)


if __name__ == "__main__":
    main()
