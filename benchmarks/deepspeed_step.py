"""ebbtide's step in DeepSpeed beside DeepSpeed's own, on the same model and data.

    python benchmarks/deepspeed_step.py [--params 100] [--rounds 5] [--steps 8] [--contestant NAME]...

Each is DeepSpeed's ZeRO stage 3 with the optimizer offloaded, bf16, clipping, the small GPT of examples/ made so large;
only who does the step differs. Each is a process of its own, they take turns in changing order, and the ratios are
within a round. On a machine without a GPU this is the host's part of the work alone, and what needs a GPU is left out.
Prints Markdown. With --losses it prints the losses of so many steps side by side instead.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tables import machine_line, spread, table

HERE = Path(__file__).resolve().parent

OFFLOAD = "DeepSpeed ZeRO-Offload"
# What each is: changes to offload_optimizer, and the policy that drives it.
CONTESTANTS: dict[str, tuple[dict[str, Any], str | None]] = {
    OFFLOAD: ({}, None),
    "DeepSpeed Twin-Flow 0.5": ({"ratio": 0.5}, None),
    "DeepSpeed SuperOffload": ({"super_offload": True}, None),
    "ebbtide zero-offload": ({}, "zero-offload"),
    "ebbtide pipelined": ({}, "pipelined"),
    "ebbtide interleaved:2": ({}, "interleaved:2"),
    "ebbtide adaptive": ({}, "adaptive"),
}
# On the CPU accelerator the GPU is emulated: what would run on it says nothing.
ON_CPU = (OFFLOAD, "ebbtide zero-offload", "ebbtide pipelined")
WIDTH, CONTEXT = 1024, 64
PARTS = ("forward", "backward", "step", "iteration")


def config(pinned: bool, subgroup: int, more: dict[str, Any]) -> dict[str, Any]:
    offload = {"device": "cpu", "pin_memory": pinned, **more}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": offload, "sub_group_size": subgroup},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "steps_per_print": 1_000_000,
    }


def measure(name: str, params: int, subgroup: int, steps: int) -> dict[str, Any]:
    """Median milliseconds of each part of an iteration, after two that are not counted, and all losses."""
    import deepspeed
    import torch

    sys.path.append(str(HERE.parent / "examples"))
    from train_gpt import GPT

    for key, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(key, value)
    os.environ.setdefault("MASTER_PORT", str(20_000 + os.getpid() % 20_000))
    more, policy = CONTESTANTS[name]
    torch.manual_seed(0)
    layers = max(1, round(params / (12 * WIDTH**2)))
    model = GPT(64, CONTEXT, layers, WIDTH, 16)
    if policy is not None:
        from ebbtide.interleave.deepspeed import enable

        enable(policy, subgroup_params=subgroup)
    on_gpu = torch.cuda.is_available()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(on_gpu, subgroup, more)
    )
    tokens = torch.randint(0, 64, (1, CONTEXT + 1), device=engine.device)

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    taken: dict[str, list[float]] = {part: [] for part in PARTS}
    losses = []
    for _ in range(steps + 2):
        times = [now()]
        logits = engine(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        times.append(now())
        engine.backward(loss)
        times.append(now())
        engine.step()
        times.append(now())
        for part, begin, end in zip(PARTS, (*times[:3], times[0]), (*times[1:], times[3]), strict=True):
            taken[part].append((end - begin) * 1e3)
        losses.append(loss.item())
    return {**{part: statistics.median(values[2:]) for part, values in taken.items()}, "losses": losses}


def run(name: str, args: argparse.Namespace) -> dict[str, Any] | str:
    """What a process of its own measures, or why it could not."""
    sizes = ["--params", str(args.params), "--subgroup", str(args.subgroup)]
    options = [*sizes, "--steps", str(args.steps), "--measure", name]
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    done = subprocess.run(
        [sys.executable, __file__, *options], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it failed"])[-1]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    taken = {part: round(found[part], 1) for part in PARTS}
    print(f"  load {os.getloadavg()[0]:.1f}: {name} {taken}", file=sys.stderr)
    return found


def machine() -> str:
    from importlib.metadata import version

    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{machine_line()}, {gpu}, torch {torch.__version__}, DeepSpeed {version('deepspeed')}"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--params", type=int, default=100, help="millions")
    flags.add_argument("--subgroup", type=int, default=10, help="millions of parameters")
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--steps", type=int, default=8, help="counted, of each process")
    flags.add_argument("--losses", action="store_true", help="of one round, side by side")
    flags.add_argument("--contestant", action="append", choices=list(CONTESTANTS))
    flags.add_argument("--measure", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.params * 1_000_000, args.subgroup * 1_000_000, args.steps)))
        return
    import torch

    names = args.contestant or list(CONTESTANTS if torch.cuda.is_available() else ON_CPU)
    names = [OFFLOAD, *(name for name in names if name != OFFLOAD)]
    if args.losses:
        side_by_side(args, {name: run(name, args) for name in names})
        return
    missing: dict[str, str] = {}
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(args.rounds):
        found = {}
        for name in names if number % 2 else reversed(names):
            result = run(name, args) if name not in missing else missing[name]
            if isinstance(result, str):
                missing[name] = result
            else:
                found[name] = result
        rounds.append(found)
    report(args, names, rounds, missing)


def side_by_side(args: argparse.Namespace, found: dict[str, dict[str, Any] | str]) -> None:
    ran = {name: result["losses"] for name, result in found.items() if not isinstance(result, str)}
    print(f"{time.strftime('%Y-%m-%d')}, {machine()}, {args.params} M parameters\n")
    table(["step", *ran], ([f"{step}", *(f"{losses[step]:.6f}" for losses in ran.values())]
                           for step in range(args.steps + 2)))  # fmt: skip
    print("\n".join(f"{name}: not run: {why}" for name, why in found.items() if isinstance(why, str)))


def report(
    args: argparse.Namespace, names: list[str], rounds: list[dict[str, dict[str, Any]]], missing: dict[str, str]
) -> None:
    if OFFLOAD in missing:
        sys.exit(f"{OFFLOAD} does not run here: {missing[OFFLOAD]}")
    about = f"{args.params} M parameters, {args.rounds} rounds of {args.steps} steps: median (least to most)"
    print(f"{time.strftime('%Y-%m-%d')}, {machine()}, {about}\n")
    rows = []
    for name in names:
        if name in missing:
            rows.append([name, f"not measured: {missing[name]}", "", "", ""])
            continue
        ratios = [
            spread([found[OFFLOAD][part] / found[name][part] for found in rounds], 2)
            for part in ("step", "backward", "iteration")
        ]
        rows.append([name, spread([found[name]["step"] for found in rounds], 0), *ratios])
    table(["who", "step, ms", "ZeRO-Offload's step / its", "backward / its", "iteration / its"], rows)


if __name__ == "__main__":
    main()
