"""Policies on a model of a size: predicted from the machine file beforehand, then run for real by `ebbtide compare`.

Each policy is a process of its own, so that one that does not fit loses itself alone. Equal losses across them are
compared here, to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from step import Step, arguments, begin, ebbtide, fresh

from ebbtide.interleave.experiments.compare.compare import POLICIES
from ebbtide.interleave.experiments.compare.job import shape_of
from ebbtide.interleave.experiments.compare.testbed import Box, find_box
from ebbtide.interleave.replay.resolve import find_machine

PARTS, SLOTS, STATE_BYTES = 10, 3, 12
TINY_PARAMS, TINY_POLICIES, TINY_LINK = 2_000_000, ("pipelined", "adaptive"), 2e8
# Of the small job's phases nothing is known beforehand; its update hardly depends on them.
GUESS = {"forward_s": 0.05, "backward_s": 0.1}


def replayed(step: Step, box: Box, job: dict[str, Any]) -> dict[str, Any]:
    """What `ebbtide replay` says of a job on this machine."""
    workload, machine = step.file.with_suffix(".workload"), step.file.with_suffix(".machine")
    workload.write_text(json.dumps(job))
    # Without the record of how its rates were measured: those of an emulated device were not.
    replace(box.machine, more={}).save(machine)
    words = [word for policy in POLICIES for word in ("--policy", policy)]
    found: dict[str, Any] = json.loads(
        ebbtide("replay", "--workload", workload, "--machine", machine, "--json", *words)
    )
    for file in (workload, machine):
        file.unlink()
    return found


def compared(step: Step, policies: Sequence[str], words: list[str], save: Path | None) -> dict[str, Any]:
    """The results of `ebbtide compare` by policy, each by a process of its own. save: a folder for its schedules."""
    results: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for policy in policies:
        more = [] if save is None else ["--save", str(save / policy.replace(":", "-"))]
        try:
            found = json.loads(ebbtide("compare", "--policy", policy, "--json", *words, *more))
        except SystemExit as error:
            failed[policy] = str(error)
            step.tell(failed=failed)
            continue
        results[policy] = found["results"][0]
        step.tell(results=results, peers=found["peers"], skipped=found["skipped"])
    if not results:
        raise SystemExit("no policy ran")
    return results


def judge(step: Step, policies: Sequence[str], results: dict[str, Any], budget: float) -> None:
    step.check("every policy ran", len(results) == len(policies))
    losses = {json.dumps(result["losses"]) for result in results.values()}
    step.check("the same losses to the bit under every policy", len(losses) == 1)
    peaks = [result["peak_device_bytes"]["measured"] for result in results.values()]
    step.check("state on the device within its budget", all(peak <= budget for peak in peaks))
    if step.rehearse:
        step.check("measured within 10 % of predicted", None)
        step.check("exposed within 10 % of the bound", None)
        return
    ratios = [result["iteration_ms"]["ratio"] for result in results.values()]
    step.check("measured within 10 % of predicted", all(ratio and abs(ratio - 1) < 0.1 for ratio in ratios))
    exposed, least = results.get("adaptive"), step.figures["bound"]["exposed_ms"]
    near = exposed is not None and exposed["update_ms"]["measured"] <= 1.1 * least
    step.check("exposed within 10 % of the bound", near)


def main() -> None:
    flags = arguments(__doc__)
    flags.add_argument("--name", default="policies")
    flags.add_argument("--params", type=float, default=1.5e9)
    flags.add_argument("--iterations", type=int, default=8)
    flags.add_argument("--against", help="other optimizers, beside the policy `pipelined` alone")
    args = flags.parse_args()
    step = begin(args)
    asked = TINY_PARAMS if step.rehearse else round(args.params)
    shape = shape_of(asked)
    subgroup = -(-shape.params // PARTS)
    budget = STATE_BYTES * (shape.params / 2 + SLOTS * subgroup)
    # Without a GPU as slow a link as suits so small a model.
    link = None if torch.cuda.is_available() else TINY_LINK
    file = step.out / "machine.json"
    box = find_box(shape.params, budget, link, find_machine(str(file), None))
    step.tell(params=shape.params, subgroup_params=subgroup, budget_bytes=budget, device=box.name)
    words = ["--params", str(asked), "--subgroup-params", str(subgroup), "--memory-budget", str(round(budget))]
    words += ["--iterations", str(args.iterations), "--machine", str(file)]
    words += ["--emulate-link", str(round(link))] if link else []
    if args.against:
        compared(step, ["pipelined"], [*words, "--against", args.against], None)
        return
    job = {"params": shape.params, "subgroup_params": subgroup, "gpu_free_bytes": budget, "gradients_stay": True}
    before = replayed(step, box, {**job, **GUESS})["results"]
    step.tell(beforehand={"update_ms": {result["policy"]: result["update_ms"] for result in before}})
    traces = fresh(step.out / args.name)
    traces.mkdir()
    policies = TINY_POLICIES if step.rehearse else POLICIES
    results = compared(step, policies, words, traces)
    phases = {
        f"{phase}_s": median(result[f"{phase}_ms"]["measured"] for result in results.values()) / 1e3
        for phase in ("forward", "backward")
    }
    step.tell(bound=replayed(step, box, {**job, **phases})["bound"])
    judge(step, policies, results, budget)


if __name__ == "__main__":
    main()
