"""Measures what only a GPU can show, in steps with time limits that can be resumed;
results are JSON and Markdown.

    python benchmarks/gpu/run.py OUT CALL [--minutes M] [--step NAME]... [--rehearse] [--pack FILE] [--resume FILE]

CALL is one of those of listing.py: first, second, ...; --step alone runs single steps.
Each step is a process with a time limit; its result is OUT/NAME.json, and OUT/report.md
has all, also of a step that still runs. A step that has ended is not run again, unless
--step names it; one is not started with too little time left, and one that fails stops
no other. --rehearse runs the same steps with tiny sizes on the CPU and the emulated
device. README.md describes them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from listing import ALL, CALLS
from report import print_report
from runner import DONE, StepRunner, status_text

PACKAGES = (
    "torch",
    "triton",
    "nvidia-ml-py",
    "numba",
    "numpy",
    "highspy",
    "deepspeed",
    "torchao",
)
GPU_QUERY = [
    "nvidia-smi",
    "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max",
    "--format=csv,noheader",
]


def versions() -> dict[str, str | None]:
    package_versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            package_versions[name] = version(name)
        except PackageNotFoundError:
            package_versions[name] = None
    return package_versions


def gpu_description() -> str | None:
    try:
        return subprocess.run(
            GPU_QUERY, capture_output=True, text=True, timeout=30, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def runtime_text(machine: dict[str, Any]) -> str:
    """Return in one line where this runs."""
    return (
        f"kernel {machine['kernel']}, {machine['gpu'] or 'no GPU'}, torch "
        f"{machine['versions']['torch']}"
    )


def machine() -> dict[str, Any]:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return {
        "gpu": gpu_description(),
        "cpu": cpu.group(1) if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "host_memory_bytes": int(memory.group(1)) * 1024 if memory else None,
        "kernel": platform.release(),
        "versions": versions(),
    }


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("out", type=Path, help="folder of the results")
    flags.add_argument("call", choices=list(CALLS), nargs="?", help="the steps to run")
    flags.add_argument(
        "--minutes",
        type=float,
        help="time limit of all steps together (default: that of the call)",
    )
    flags.add_argument(
        "--step",
        action="append",
        choices=[step.name for step in ALL],
        help=(
            "run this step instead of those of a call, also if it has failed before; "
            "repeatable"
        ),
    )
    flags.add_argument(
        "--rehearse", action="store_true", help="tiny sizes, without a GPU"
    )
    flags.add_argument(
        "--pack",
        type=Path,
        help="archive of the results, updated after each step and during it",
    )
    flags.add_argument(
        "--resume",
        type=Path,
        help="archive of an earlier call, unpacked into OUT before",
    )
    args = flags.parse_args()
    if (args.call is None) == (args.step is None):
        flags.error(f"name a call ({', '.join(CALLS)}) or a --step")
    call = CALLS.get(args.call)
    end = time.monotonic() + 60 * (args.minutes or (call.minutes if call else 9.5))
    # Ending this process also ends the running step.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # In the order of the options.
    steps = (
        call.steps
        if call
        else [next(step for step in ALL if step.name == name) for name in args.step]
    )
    args.out.mkdir(parents=True, exist_ok=True)
    if args.resume:
        with tarfile.open(args.resume) as tar:
            tar.extractall(args.out, filter="data")
    # Written first, so that it exists even if this process is killed.
    summary = {
        "date": time.strftime("%Y-%m-%d"),
        "rehearsed": args.rehearse,
        **machine(),
    }
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1))
    print(runtime_text(summary), flush=True)
    runner = StepRunner(args.out, end, args.rehearse, args.pack, print_report)
    results = runner.run_all(steps, again=bool(args.step))
    for result in results:
        print(f"{result['name']:14} {status_text(result)}")
    sys.exit(0 if all(result["status"] == DONE for result in results) else 1)


if __name__ == "__main__":
    main()
