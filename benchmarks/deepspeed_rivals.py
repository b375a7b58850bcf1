"""Compare DeepSpeed's SuperOffload and ZenFlow with its plain offload and with ebbtide:
time, losses and weights.

    PYTHONPATH=. python benchmarks/deepspeed_rivals.py [--forward-ms 100] [--backward-ms 300] [--overlap none]

All train one bf16 model on the same batches, with the optimizer's state in host memory.
Each runs in its own process, they take turns in changing order, and ratios are within a
round. The reference of DeepSpeed's is its plain offload, that of ebbtide's is ebbtide's
own with everything on the CPU: the two round differently. Without a GPU, the forward
and the backward of a GPU are timed waits that take no core, so that updates can hide
behind them; the checks by which DeepSpeed refuses SuperOffload and ZenFlow's stage 3 on
its CPU accelerator are lifted. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from extensions import use_own_extensions
from rival_jobs import LEARNING_RATE, NAMES, PARTS, REFERENCE, measure, reference_of
from tables import machine_line, spread, table


def run(name: str, args: argparse.Namespace, weights: Path) -> dict[str, Any] | str:
    """Measure in another process; return its results, or an error message."""
    ranks = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    environment = {
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        **os.environ,
        **ranks,
    }
    environment["MASTER_PORT"] = str(20_000 + time.monotonic_ns() % 20_000)
    options = [*sys.argv[1:], "--measure", name, "--weights", str(weights)]
    done = subprocess.run(
        [sys.executable, __file__, *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
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
    flags.add_argument(
        "--width", type=int, default=1024, help="a block has 8 width**2 parameters"
    )
    flags.add_argument(
        "--subgroup", type=int, default=8, help="parameters of a subgroup in millions"
    )
    flags.add_argument(
        "--forward-ms",
        type=float,
        default=100.0,
        help="emulated forward of a GPU (only without a GPU)",
    )
    flags.add_argument(
        "--backward-ms", type=float, default=300.0, help="the same for the backward"
    )
    flags.add_argument(
        "--clip", type=float, default=0.0, help="largest gradient norm; 0: no clipping"
    )
    flags.add_argument("--policy", default="pipelined", help="policy of ebbtide")
    flags.add_argument(
        "--overlap",
        default="none",
        choices=["none", "forward", "backward", "both", "auto"],
    )
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument(
        "--steps",
        type=int,
        default=8,
        help="steps of each process, without those for warm-up",
    )
    flags.add_argument("--contestant", action="append", choices=NAMES)
    flags.add_argument(
        "--as-shipped",
        dest="lift_checks",
        action="store_false",
        help="do not lift DeepSpeed's checks",
    )
    flags.add_argument("--measure", choices=NAMES, help=argparse.SUPPRESS)
    flags.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    args = flags.parse_args()
    use_own_extensions()
    import torch

    args.lift_checks = args.lift_checks and not torch.cuda.is_available()
    if args.measure:
        print(json.dumps(measure(args.measure, args)))
        return
    names = [
        REFERENCE,
        *(name for name in args.contestant or NAMES if name != REFERENCE),
    ]
    errors: dict[str, str] = {}
    rounds: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as folder:
        files = {
            name: Path(folder, f"{number}.pt") for number, name in enumerate(names)
        }
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
        report(
            args,
            names,
            rounds,
            errors,
            {name: torch.load(files[name]) for name in names if name not in errors},
        )


def setup_line(args: argparse.Namespace, params: int) -> str:
    """Return the machine and everything that the figures depend on."""
    from importlib.metadata import version

    import torch

    waits = (
        f"no GPU (emulated forward {args.forward_ms:g} ms, backward "
        f"{args.backward_ms:g} ms)"
    )
    parts = [
        time.strftime("%Y-%m-%d"),
        machine_line(),
        torch.cuda.get_device_name() if torch.cuda.is_available() else waits,
        f"torch {torch.__version__}",
        f"DeepSpeed {version('deepspeed')}",
        f"{params / 1e6:.1f} M parameters",
        f"clipping {args.clip:g}",
        f"policy {args.policy}",
        f"overlap {args.overlap}",
        f"{args.rounds} rounds of {args.steps} steps: median of the rounds' means "
        "(minimum to maximum)",
    ]
    return ", ".join(parts)


def report(
    args: argparse.Namespace,
    names: list[str],
    rounds: list[dict[str, dict[str, Any]]],
    errors: dict[str, str],
    weights: dict[str, Any],
) -> None:
    print(f"{setup_line(args, weights[REFERENCE].numel())}\n")
    rows = []
    for name in names:
        if name in errors:
            rows.append([name, f"not measured: {errors[name]}", *[""] * 4])
            continue
        own = [results[name] for results in rounds]
        ratios = [
            spread(
                [results[REFERENCE][part] / results[name][part] for results in rounds],
                2,
            )
            for part in ("step", "iteration")
        ]
        reference = rounds[-1].get(reference_of(name))
        same = (
            "?"
            if reference is None
            else "yes"
            if own[-1]["losses"] == reference["losses"]
            else "no"
        )
        difference = (
            float((weights[name] - weights[REFERENCE]).abs().max()) / LEARNING_RATE
        )
        rows.append(
            [
                name,
                spread([result["step"] for result in own], 1),
                *ratios,
                same,
                f"{difference:.2g}",
            ]
        )
    heads = [
        "contestant",
        "step, ms",
        "step of ZeRO-Offload / step",
        "same for iteration",
    ]
    heads += [
        "losses bit-equal to its reference",
        "largest difference of weights to ZeRO-Offload, in learning rates",
    ]
    table(heads, rows)


if __name__ == "__main__":
    main()
