"""Measures DeepSpeed ZeRO-Offload, Twin-Flow at several ratios, and ebbtide in DeepSpeed (see deepspeed_step.py).

Each runs in its own process, the most important first, and each result is written at once.
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
from step import ROOT, argument_parser, load, start

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
# Per parameter: fp32 master, moments and gradient in pinned memory, which torch rounds up to powers of two (40 MB to
# 64 MiB); the model in fp32 until DeepSpeed has converted it, and in bf16.
HOST_BYTES = 16 * 1.68 + 4 + 2
# Time limit of one contestant: import 10 s, model and engine 35 s, steps 2 s each.
LIMIT_S = 110
BUILD = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"


def measure(name: str, params: int, steps: int) -> dict[str, Any]:
    """Measure in another process; return the median ms of each part, or the reason of a failure as `why`."""
    command = [sys.executable, __file__, "-", "--contestant", name, "--params", str(params), "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"why": f"it took more than {LIMIT_S} s"}
    if done.returncode:
        print(done.stderr[-4000:], flush=True)
        return {"why": (done.stderr.strip().splitlines() or ["it failed"])[-1]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def build(step: Any) -> None:
    """Compile DeepSpeed's CPU Adam, which otherwise happens at its first use, within the timed runs."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", BUILD], capture_output=True, text=True, check=False)
    step.add(build_s=time.perf_counter() - begin)
    if done.returncode:
        print(done.stderr[-4000:])
        raise SystemExit(f"DeepSpeed's CPU Adam does not build: {done.stderr.strip().splitlines()[-1]}")


def main() -> None:
    flags = argument_parser(__doc__)
    flags.add_argument("--params", type=int, default=PARAMS)
    flags.add_argument("--steps", type=int, default=STEPS)
    flags.add_argument("--contestant", choices=list(BENCHMARK.CONTESTANTS))
    args = flags.parse_args()
    if args.contestant:
        print(json.dumps(BENCHMARK.measure(args.contestant, args.params, max(1, args.params // 15), args.steps)))
        return
    step = start(args)
    params, steps = (TINY_PARAMS, TINY_STEPS) if step.rehearse else (args.params, args.steps)
    if find_spec("deepspeed") is None:
        raise SystemExit("DeepSpeed is not installed: see README.md, wheels.py")
    host_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    step.add(params=params, host_bytes=HOST_BYTES * params, left_out={})
    if HOST_BYTES * params > 0.9 * host_memory:
        reason = f"needs {HOST_BYTES * params / 1e9:.0f} GB of host memory, of {host_memory / 1e9:.0f} GB"
        step.add(left_out=dict.fromkeys(ORDER, reason))
        return
    build(step)
    on_gpu = torch.cuda.is_available()
    results: dict[str, Any] = {}
    for name in ORDER:
        if not on_gpu and name not in BENCHMARK.ON_CPU:
            step.add(left_out={**step.figures["left_out"], name: "needs a GPU"})
            continue
        result = measure(name, params, steps)
        if "why" in result:
            step.add(left_out={**step.figures["left_out"], name: result["why"]})
        else:
            results[name] = result
            step.add(ms=results)
    baseline, ours = results.get(BENCHMARK.OFFLOAD), results.get("ebbtide adaptive")
    holds = None
    if baseline is not None and ours is not None:
        holds = baseline["iteration"] >= 1.5 * ours["iteration"]
    step.check("iteration 1.5 times as fast as ZeRO-Offload's", holds)
    if BENCHMARK.OFFLOAD not in results:
        raise SystemExit(f"{BENCHMARK.OFFLOAD} does not run here: {step.figures['left_out'][BENCHMARK.OFFLOAD]}")


if __name__ == "__main__":
    main()
