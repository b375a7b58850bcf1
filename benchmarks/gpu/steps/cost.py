"""Measures the cost of recording a job of 1.5 G parameters: bare, under `ebbtide
profile`, under torch.profiler.

They run in turn, and ratios are within a round, as in benchmarks/overhead.py.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from step import ROOT, STEPS, argument_parser, load, start

OVERHEAD = load(ROOT / "benchmarks" / "overhead.py")
TINY = [
    "--layers",
    "2",
    "--width",
    "64",
    "--heads",
    "2",
    "--context",
    "64",
    "--batch",
    "2",
]
# The first steps of a run are left out, so there are more than those.
ROUNDS, STEPS_OF_A_RUN = 3, OVERHEAD.SKIP + 24
TINY_ROUNDS, TINY_STEPS = 1, OVERHEAD.SKIP + 12


def variants(job: list[str], trace: Path) -> dict[str, list[str]]:
    python = [sys.executable]
    script = [str(STEPS / "gpt_job.py"), *job]
    return {
        "bare": [*python, *script],
        "ebbtide": [
            *python,
            "-m",
            "ebbtide",
            "profile",
            "--force",
            "-o",
            str(trace),
            "--",
            *python,
            *script,
        ],
        "torch.profiler": [*python, "-c", OVERHEAD.TORCH_PROFILER, *script],
    }


def main() -> None:
    flags = argument_parser(__doc__)
    flags.add_argument("--rounds", type=int, default=ROUNDS)
    args = flags.parse_args()
    step = start(args)
    # The script that runs torch.profiler does not put the folder of the job on
    # sys.path.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [os.environ.get("PYTHONPATH"), str(STEPS)])
    )
    steps = TINY_STEPS if step.rehearse else STEPS_OF_A_RUN
    trace = step.out / "cost.ebb"
    all_variants = list(
        variants(
            [*(TINY if step.rehearse else []), "--steps", str(steps)], trace
        ).items()
    )
    rounds: list[dict[str, float]] = []
    for number in range(TINY_ROUNDS if step.rehearse else args.rounds):
        order = all_variants[number % 3 :] + all_variants[: number % 3]
        rounds.append({name: OVERHEAD.step_ms(command) for name, command in order})
        print(rounds[-1], flush=True)
        step.add(step_ms=rounds)
    shutil.rmtree(trace)
    ratios = sorted(step_ms["ebbtide"] / step_ms["bare"] for step_ms in rounds)
    step.aim(
        "recording costs under 1 %",
        None if step.rehearse else ratios[len(ratios) // 2] < 1.01,
    )


if __name__ == "__main__":
    main()
