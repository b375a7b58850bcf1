"""Everything that only a GPU can show, in steps that are bounded, resumable and told as JSON.

    python benchmarks/gpu/run.py OUT [--minutes 9.5] [--step NAME]... [--rehearse] [--pack FILE.tar.gz]

Each step is a process of its own with a limit; what is known of it stands in OUT/NAME.json. A step that is done is not
run again, one is not begun with too little time left, and one that fails stops no other. --rehearse runs the same steps
with tiny sizes on the CPU and the emulated device. README.md says what each step tells.
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
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from listing import ALL
from runner import DONE, Run, line, pack

PACKAGES = ("torch", "triton", "nvidia-ml-py", "numba", "numpy", "pandas", "pyarrow", "deepspeed", "torchao")
ASK_CARD = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max", "--format=csv,noheader"]


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def card() -> str | None:
    try:
        return subprocess.run(ASK_CARD, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def machine() -> dict[str, Any]:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return {
        "gpu": card(),
        "cpu": cpu.group(1) if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "host_memory_bytes": int(memory.group(1)) * 1024 if memory else None,
        "kernel": platform.release(),
        "versions": versions(),
    }


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("out", type=Path)
    flags.add_argument("--minutes", type=float, default=9.5, help="all in all")
    flags.add_argument(
        "--step", action="append", choices=[step.name for step in ALL], help="only this; may be repeated"
    )
    flags.add_argument("--rehearse", action="store_true")
    flags.add_argument("--pack", type=Path, help="an archive of the results, kept up to date")
    args = flags.parse_args()
    end = time.monotonic() + 60 * args.minutes
    # Whoever ends this ends the step that runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # In the order asked for.
    steps = [next(step for step in ALL if step.name == name) for name in args.step] if args.step else ALL
    args.out.mkdir(parents=True, exist_ok=True)
    # First, so that it stands whatever happens.
    about = {"date": time.strftime("%Y-%m-%d"), "rehearsed": args.rehearse, **machine()}
    (args.out / "summary.json").write_text(json.dumps(about, indent=1))
    results = Run(args.out, end, args.rehearse, args.pack).all(steps)
    about["steps"] = {result["name"]: line(result) for result in results}
    (args.out / "summary.json").write_text(json.dumps(about, indent=1))
    if args.pack:
        pack(args.out, args.pack)
    for name, told in about["steps"].items():
        print(f"{name:14} {told}")
    sys.exit(0 if all(result["status"] == DONE for result in results) else 1)


if __name__ == "__main__":
    main()
