"""Measure the step of ebbtide in DeepSpeed and DeepSpeed's own, on the same model and
data.

    python benchmarks/deepspeed_step.py [--params 100] [--rounds 5] [--steps 8] [--contestant NAME]...

Each contestant is DeepSpeed's ZeRO stage 3 with an offloaded optimizer in bf16 with
clipping, on a large version of the GPT of examples/; only the step differs. Each runs
in its own process, they take turns in changing order, and ratios are within a round.
Without a GPU only the work of the host is measured, and contestants that need a GPU are
left out. Prints Markdown; with --losses the losses of each step instead.
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

from extensions import use_own_extensions
from tables import machine_line, spread, table

FOLDER = Path(__file__).resolve().parent

OFFLOAD = "DeepSpeed ZeRO-Offload"
# Name -> (changes to offload_optimizer, policy of ebbtide or None).
CONTESTANTS: dict[str, tuple[dict[str, Any], str | None]] = {
    OFFLOAD: ({}, None),
    "DeepSpeed Twin-Flow 0.5": ({"ratio": 0.5}, None),
    "DeepSpeed SuperOffload": ({"super_offload": True}, None),
    "ebbtide zero-offload": ({}, "zero-offload"),
    "ebbtide pipelined": ({}, "pipelined"),
    "ebbtide interleaved:2": ({}, "interleaved:2"),
    "ebbtide adaptive": ({}, "adaptive"),
}
# DeepSpeed's CPU accelerator emulates the GPU: contestants that use it would show
# nothing.
ON_CPU = (OFFLOAD, "ebbtide zero-offload", "ebbtide pipelined")
WIDTH, CONTEXT = 1024, 64
PARTS = ("forward", "backward", "step", "iteration")


def config(pinned: bool, subgroup: int, changes: dict[str, Any]) -> dict[str, Any]:
    offload = {"device": "cpu", "pin_memory": pinned, **changes}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": offload,
            "sub_group_size": subgroup,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "steps_per_print": 1_000_000,
    }


def measure(name: str, params: int, subgroup: int, steps: int) -> dict[str, Any]:
    """Return the median milliseconds of each part of an iteration, after two for
    warm-up, and all losses."""
    import deepspeed
    import torch

    sys.path.append(str(FOLDER.parent / "examples"))
    from train_gpt import GPT

    for key, value in (
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
    ):
        os.environ.setdefault(key, value)
    os.environ.setdefault("MASTER_PORT", str(20_000 + os.getpid() % 20_000))
    changes, policy = CONTESTANTS[name]
    torch.manual_seed(0)
    layers = max(1, round(params / (12 * WIDTH**2)))
    model = GPT(64, CONTEXT, layers, WIDTH, 16)
    if policy is not None:
        from ebbtide.interleave.deepspeed import enable

        enable(policy, subgroup_params=subgroup)
    on_gpu = torch.cuda.is_available()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config(on_gpu, subgroup, changes),
    )
    tokens = torch.randint(0, 64, (1, CONTEXT + 1), device=engine.device)

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    part_ms: dict[str, list[float]] = {part: [] for part in PARTS}
    losses = []
    for _ in range(steps + 2):
        times = [now()]
        logits = engine(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
        )
        times.append(now())
        engine.backward(loss)
        times.append(now())
        engine.step()
        times.append(now())
        for part, begin, end in zip(
            PARTS, (*times[:3], times[0]), (*times[1:], times[3]), strict=True
        ):
            part_ms[part].append((end - begin) * 1e3)
        losses.append(loss.item())
    return {
        **{part: statistics.median(values[2:]) for part, values in part_ms.items()},
        "losses": losses,
    }


def run(name: str, args: argparse.Namespace) -> dict[str, Any] | str:
    """Measure in another process; return its results, or an error message."""
    sizes = ["--params", str(args.params), "--subgroup", str(args.subgroup)]
    options = [*sizes, "--steps", str(args.steps), "--measure", name]
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    done = subprocess.run(
        [sys.executable, __file__, *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it failed"])[-1]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    part_ms = {part: round(result[part], 1) for part in PARTS}
    print(f"  load {os.getloadavg()[0]:.1f}: {name} {part_ms}", file=sys.stderr)
    return result


def machine() -> str:
    from importlib.metadata import version

    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{machine_line()}, {gpu}, torch {torch.__version__}, DeepSpeed "
        f"{version('deepspeed')}"
    )


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--params", type=int, default=100, help="parameters in millions")
    flags.add_argument(
        "--subgroup", type=int, default=10, help="parameters of a subgroup in millions"
    )
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument(
        "--steps",
        type=int,
        default=8,
        help="steps of each process, without two for warm-up",
    )
    flags.add_argument(
        "--losses", action="store_true", help="print the losses of one round instead"
    )
    flags.add_argument("--contestant", action="append", choices=list(CONTESTANTS))
    flags.add_argument("--measure", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    args = flags.parse_args()
    use_own_extensions()
    if args.measure:
        print(
            json.dumps(
                measure(
                    args.measure,
                    args.params * 1_000_000,
                    args.subgroup * 1_000_000,
                    args.steps,
                )
            )
        )
        return
    import torch

    names = args.contestant or list(
        CONTESTANTS if torch.cuda.is_available() else ON_CPU
    )
    names = [OFFLOAD, *(name for name in names if name != OFFLOAD)]
    if args.losses:
        side_by_side(args, {name: run(name, args) for name in names})
        return
    errors: dict[str, str] = {}
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(args.rounds):
        results = {}
        for name in names if number % 2 else reversed(names):
            result = run(name, args) if name not in errors else errors[name]
            if isinstance(result, str):
                errors[name] = result
            else:
                results[name] = result
        rounds.append(results)
    report(args, names, rounds, errors)


def side_by_side(
    args: argparse.Namespace, results: dict[str, dict[str, Any] | str]
) -> None:
    ran = {
        name: result["losses"]
        for name, result in results.items()
        if not isinstance(result, str)
    }
    print(f"{time.strftime('%Y-%m-%d')}, {machine()}, {args.params} M parameters\n")
    table(["step", *ran], ([f"{step}", *(f"{losses[step]:.6f}" for losses in ran.values())]
                           for step in range(args.steps + 2)))  # fmt: skip
    print(
        "\n".join(
            f"{name}: not run: {error}"
            for name, error in results.items()
            if isinstance(error, str)
        )
    )


def report(
    args: argparse.Namespace,
    names: list[str],
    rounds: list[dict[str, dict[str, Any]]],
    errors: dict[str, str],
) -> None:
    if OFFLOAD in errors:
        sys.exit(f"{OFFLOAD} does not run here: {errors[OFFLOAD]}")
    setup = (
        f"{args.params} M parameters, {args.rounds} rounds of {args.steps} steps: "
        "median (minimum to maximum)"
    )
    print(f"{time.strftime('%Y-%m-%d')}, {machine()}, {setup}\n")
    rows = []
    for name in names:
        if name in errors:
            rows.append([name, f"not measured: {errors[name]}", "", "", ""])
            continue
        ratios = [
            spread(
                [results[OFFLOAD][part] / results[name][part] for results in rounds], 2
            )
            for part in ("step", "backward", "iteration")
        ]
        rows.append(
            [name, spread([results[name]["step"] for results in rounds], 0), *ratios]
        )
    table(
        [
            "contestant",
            "step, ms",
            "step of ZeRO-Offload / step",
            "same for backward",
            "same for iteration",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
