"""Measures optimizers on one model, in turn, in rounds whose order changes. It
continues where an earlier call stopped.

Each run is a process of its own. One that fails is kept with its reason, and left out
of later rounds.
"""

from __future__ import annotations

import json
import sys
from statistics import median
from typing import Any

import torch
from contestant import BASELINE, CONTESTANTS, EXACT, ON_CPU
from step import (
    ROOT,
    STEPS,
    StepContext,
    argument_parser,
    build_extensions,
    run_part,
    start,
)

sys.path.append(str(ROOT / "benchmarks" / "gpu"))
from runner import CONTINUES

# Time of a run before the first of its kind has ended, its limit, and the limit for
# compiling DeepSpeed's CPU Adam.
EXPECTED_S, LIMIT_S, BUILD_S, REHEARSAL_LIMIT_S = 75.0, 150.0, 150.0, 600.0
# With less time left a run was cut off by the end of the call.
ENOUGH_S = 5.0
REHEARSED_ROUNDS = 2
NEEDS_BUILD = (BASELINE, "SuperOffload")
AIM = 1.5


def run(step: StepContext, name: str, params: int) -> dict[str, Any]:
    """Run a contestant; return its result, or `why` it has failed."""
    limit = REHEARSAL_LIMIT_S if step.rehearse else LIMIT_S
    if name in NEEDS_BUILD:
        build = build_extensions(
            min(REHEARSAL_LIMIT_S if step.rehearse else BUILD_S, step.left_s() - 2)
        )
        if "why" in build:
            return {**build, "why": f"DeepSpeed does not compile: {build['why']}"}
    words = [
        STEPS / "contestant.py",
        name,
        "--params",
        params,
        "--machine",
        step.out / "machine.json",
    ]
    return run_part([str(word) for word in words], min(limit, step.left_s() - 2))


def expected_s(step: StepContext, name: str) -> float:
    """Return the time that a run takes: that of its earlier ones, or an assumption."""
    seconds = [
        results[name]["seconds"]
        for results in step.figures["rounds"]
        if name in results
    ]
    return 1.3 * max(seconds) if seconds else EXPECTED_S


def check(step: StepContext) -> None:
    rounds, failed = step.figures["rounds"], step.figures["failed"]
    step.check("every contestant ran", not failed)
    exact = {
        json.dumps(results[name]["losses"])
        for results in rounds
        for name in EXACT
        if name in results
    }
    step.check(
        "the same losses to the bit with every overlap of ebbtide and in every round",
        len(exact) == 1,
    )
    ratios = [
        median(results[BASELINE]["iteration_ms"])
        / median(results["ebbtide both"]["iteration_ms"])
        for results in rounds
        if BASELINE in results and "ebbtide both" in results
    ]
    is_measured = bool(ratios) and not step.rehearse
    step.aim(
        f"an iteration {AIM} times as fast as that of {BASELINE}",
        median(ratios) >= AIM if is_measured else None,
    )


def main() -> None:
    flags = argument_parser(__doc__)
    flags.add_argument("--params", type=float, default=1.5e9)
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument(
        "--contestant",
        action="append",
        choices=list(CONTESTANTS),
        help="only this one; repeatable",
    )
    args = flags.parse_args()
    step = start(args)
    params = 0 if step.rehearse else round(args.params)
    names = args.contestant or list(CONTESTANTS)
    about = {name: CONTESTANTS[name][:2] for name in names}
    step.add(
        about=about,
        failed=step.figures.get("failed", {}),
        rounds=step.figures.get("rounds", []),
    )
    if not torch.cuda.is_available():
        step.add(
            left_out={name: "it needs a GPU" for name in names if name not in ON_CPU}
        )
        names = [name for name in names if name in ON_CPU]
    for number in range(
        min(args.rounds, REHEARSED_ROUNDS) if step.rehearse else args.rounds
    ):
        rounds: list[dict[str, Any]] = step.figures["rounds"]
        if number == len(rounds):
            rounds.append({})
        turn = (number * 2) % len(names)
        for name in names[turn:] + names[:turn]:
            if name in rounds[number] or name in step.figures["failed"]:
                continue
            if not step.rehearse and step.left_s() < expected_s(step, name):
                print(f"{name}: too little time left", flush=True)
                sys.exit(CONTINUES)
            result = run(step, name, params)
            if "why" in result and step.left_s() < ENOUGH_S:
                sys.exit(CONTINUES)
            if "why" in result:
                step.add(failed={**step.figures["failed"], name: result["why"]})
            else:
                rounds[number][name] = result
                step.add(rounds=rounds)
    check(step)


if __name__ == "__main__":
    main()
