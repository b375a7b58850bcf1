"""Record ZeRO-Infinity (optimizer state in files) with its defaults and with better
settings, and what recording costs.

    PYTHONPATH=. python benchmarks/infinity.py [--folder FOLDER] [--blocks 8] [--width 1024] [--rounds 3]

Needs DeepSpeed, libaio-dev and five minutes to compile async_io. Each job runs in its
own process; all take turns, each without and with `ebbtide profile`. Ratios are within
a round, since a disk drifts. Prints Markdown; the recordings of the last round stay in
FOLDER.
"""

from __future__ import annotations

import argparse
import itertools
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

from ebbtide.analysis.metrics.storage_use import storage_use
from ebbtide.profiler import open_trace
from ebbtide.units import bytes_text, ms_text

MIB = 2**20
WARMUP = 3
PIPELINED = {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
# Name -> settings of offload_optimizer, and whether gradients stay in host memory.
SETTINGS: dict[str, tuple[dict[str, Any], bool]] = {
    "default": ({}, False),
    "gradients-in-memory": ({}, True),
    "pipelined": (PIPELINED, True),
}


def config(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return DeepSpeed's configuration: a subgroup has the two weight matrices of a
    block."""
    swapping, in_memory = SETTINGS[name]
    nvme = {
        "device": "nvme",
        "nvme_path": str(args.folder / "state"),
        "pin_memory": False,
        **swapping,
    }
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        # Above the gradient of a matrix (8 B x width**2), below the fp32 parameters of
        # a subgroup (16 B x width**2).
        "aio": {"block_size": 12 * args.width**2 if in_memory else MIB},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 4 * args.width**2,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": nvme,
        },
    }


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train in this process; return the milliseconds of the iterations after the
    warm-up, and the last loss."""
    import deepspeed
    import torch
    from torch import nn

    torch.manual_seed(0)
    widths = [args.width, 2 * args.width] * args.blocks + [args.width]
    layers = [
        nn.Linear(wide, high, bias=False) for wide, high in itertools.pairwise(widths)
    ]
    model = nn.Sequential(*layers)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config(name, args),
        dist_init_required=True,
    )
    batch, times_ms = torch.randn(args.batch, args.width).bfloat16(), []
    for step in range(WARMUP + args.steps):
        start_s = time.perf_counter()
        loss = engine(batch).float().square().mean()
        engine.backward(loss)
        engine.step()
        if step >= WARMUP:
            times_ms.append((time.perf_counter() - start_s) * 1e3)
    return {"times_ms": times_ms, "loss": loss.item().hex()}


def run(name: str, args: argparse.Namespace, trace: Path | None) -> dict[str, Any]:
    """Measure in another process, recorded into a trace or not."""
    ranks = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "DS_ACCELERATOR": "cpu",
    }
    environment = {
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        **os.environ,
        **ranks,
    }
    environment["MASTER_PORT"] = str(20_000 + time.monotonic_ns() % 20_000)
    recorder = (
        ["-m", "ebbtide", "profile", "--force", "-o", str(trace), "--", sys.executable]
        if trace
        else []
    )
    command = [sys.executable, *recorder, __file__, *sys.argv[1:], "--measure", name]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    line = next(
        line for line in done.stdout.splitlines() if line.startswith('{"times_ms"')
    )
    result: dict[str, Any] = json.loads(line)
    return result


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument(
        "--folder",
        type=Path,
        default=Path("infinity"),
        help="folder of state and recordings",
    )
    flags.add_argument("--blocks", type=int, default=8)
    flags.add_argument(
        "--width", type=int, default=1024, help="a block has 4 width**2 parameters"
    )
    flags.add_argument("--batch", type=int, default=4)
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument(
        "--steps", type=int, default=8, help="steps of each process after the warm-up"
    )
    flags.add_argument("--measure", choices=SETTINGS, help=argparse.SUPPRESS)
    args = flags.parse_args()
    use_own_extensions()
    args.folder = args.folder.resolve()
    if args.measure:
        print(json.dumps(measure(args.measure, args)), flush=True)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    rounds = []
    for _ in range(args.rounds):
        traces = {name: args.folder / f"{name}.ebb" for name in SETTINGS}
        rounds.append(
            {
                name: (run(name, args, None), run(name, args, trace))
                for name, trace in traces.items()
            }
        )
    print(
        f"{machine_line()}; {4 * args.blocks * args.width**2 / 1e6:.1f} M parameters, "
        f"{args.rounds} rounds\n"
    )
    rows = []
    for name in SETTINGS:
        pairs = [results[name] for results in rounds]
        bare, recorded = (
            [statistics.median(pair[n]["times_ms"]) for pair in pairs] for n in (0, 1)
        )
        read, write = storage_use(open_trace(args.folder / f"{name}.ebb"))
        rows.append(
            [
                name,
                spread(bare, 0),
                spread(
                    [
                        with_it / without
                        for with_it, without in zip(recorded, bare, strict=True)
                    ],
                    3,
                ),
                str(all(first["loss"] == second["loss"] for first, second in pairs)),
                bytes_text(read.bytes),
                bytes_text(write.bytes),
                ms_text(read.wait_ms),
                ms_text(write.wait_ms),
            ]
        )
    head = [
        "settings",
        "iteration, ms",
        "recorded / not",
        "same loss",
        "read",
        "written",
        "waits for reads",
        "for writes",
    ]
    table(head, rows)


if __name__ == "__main__":
    main()
