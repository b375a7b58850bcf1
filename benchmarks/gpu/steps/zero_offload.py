"""DeepSpeed ZeRO-Offload, Twin-Flow at several ratios, and ebbtide in DeepSpeed (benchmarks/deepspeed_step.py).

Each is a process of its own, the most telling first, and what is measured stands as soon as it is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import Any

import torch
from step import ROOT, arguments, begin, load

BENCHMARK = load(ROOT / "benchmarks" / "deepspeed_step.py")
BENCHMARK.CONTESTANTS["DeepSpeed Twin-Flow 0.2"] = ({"ratio": 0.2}, None)
ORDER = (
    BENCHMARK.OFFLOAD,
    "ebbtide adaptive",
    "DeepSpeed Twin-Flow 0.5",
    "ebbtide interleaved:2",
    "DeepSpeed Twin-Flow 0.2",
    "ebbtide zero-offload",
    "DeepSpeed SuperOffload",
)
PARAMS, STEPS = 1_500_000_000, 4
TINY_PARAMS, TINY_STEPS = 13_000_000, 3
# A parameter: fp32 master, moments and gradient in pinned memory, which torch rounds up to powers of two (40 MB to
# 64 MiB); the model in fp32 until DeepSpeed has taken it over, and in bf16.
HOST_BYTES = 16 * 1.68 + 4 + 2
# How long one may take: import 10 s, model and engine 35 s, steps 2 s each.
LIMIT_S = 110
BUILD = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"


def measured(name: str, params: int, steps: int) -> dict[str, Any]:
    """In a process of its own: median ms of each part, or why there is none."""
    command = [sys.executable, __file__, "-", "--contestant", name, "--params", str(params), "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"why": f"it took more than {LIMIT_S} s"}
    if done.returncode:
        print(done.stderr[-4000:], flush=True)
        return {"why": (done.stderr.strip().splitlines() or ["it failed"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def build(step: Any) -> None:
    """DeepSpeed compiles its CPU Adam at its first use: once, here, out of all that is timed."""
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", BUILD], capture_output=True, text=True, check=False)
    step.tell(build_s=time.perf_counter() - begun)
    if done.returncode:
        print(done.stderr[-4000:])
        raise SystemExit(f"DeepSpeed's CPU Adam does not build: {done.stderr.strip().splitlines()[-1]}")


def main() -> None:
    flags = arguments(__doc__)
    flags.add_argument("--params", type=int, default=PARAMS)
    flags.add_argument("--steps", type=int, default=STEPS)
    flags.add_argument("--contestant", choices=list(BENCHMARK.CONTESTANTS))
    args = flags.parse_args()
    if args.contestant:
        print(json.dumps(BENCHMARK.measure(args.contestant, args.params, max(1, args.params // 15), args.steps)))
        return
    step = begin(args)
    params, steps = (TINY_PARAMS, TINY_STEPS) if step.rehearse else (args.params, args.steps)
    if find_spec("deepspeed") is None:
        raise SystemExit("DeepSpeed is not installed: see README.md, wheels.py")
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    step.tell(params=params, host_bytes=HOST_BYTES * params, left_out={})
    if HOST_BYTES * params > 0.9 * there:
        why = f"it takes {HOST_BYTES * params / 1e9:.0f} GB of host memory, of {there / 1e9:.0f} GB"
        step.tell(left_out=dict.fromkeys(ORDER, why))
        return
    build(step)
    on_gpu = torch.cuda.is_available()
    found: dict[str, Any] = {}
    for name in ORDER:
        if not on_gpu and name not in BENCHMARK.ON_CPU:
            step.tell(left_out={**step.figures["left_out"], name: "needs a GPU"})
            continue
        result = measured(name, params, steps)
        if "why" in result:
            step.tell(left_out={**step.figures["left_out"], name: result["why"]})
        else:
            found[name] = result
            step.tell(ms=found)
    baseline, ours = found.get(BENCHMARK.OFFLOAD), found.get("ebbtide adaptive")
    holds = None
    if baseline is not None and ours is not None:
        holds = baseline["iteration"] >= 1.5 * ours["iteration"]
    step.check("iteration 1.5 times as fast as ZeRO-Offload's", holds)
    if BENCHMARK.OFFLOAD not in found:
        raise SystemExit(f"{BENCHMARK.OFFLOAD} does not run here: {step.figures['left_out'][BENCHMARK.OFFLOAD]}")


if __name__ == "__main__":
    main()
