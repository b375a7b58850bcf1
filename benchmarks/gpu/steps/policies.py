"""Predicts policies for a model size from the machine file, then runs them with
`ebbtide compare`.

Each policy runs in its own process, so that one that does not fit does not stop the
others. Losses are compared here, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from step import StepContext, argument_parser, ebbtide, removed, start

from ebbtide.interleave.compare.compare import POLICIES
from ebbtide.interleave.compare.runs import find_shape
from ebbtide.interleave.compare.testbed import Testbed, find_testbed
from ebbtide.machines.catalog import find_machine
from ebbtide.state_bytes import STATE_BYTES

PARTS, SLOTS = 10, 3
TINY_PARAMS, TINY_POLICIES, TINY_LINK = 2_000_000, ("pipelined", "adaptive"), 2e8
# The phases of the small job are not known before the run; its update hardly depends on
# them.
ASSUMED_PHASES = {"forward_s": 0.05, "backward_s": 0.1}


def replay(step: StepContext, testbed: Testbed, job: dict[str, Any]) -> dict[str, Any]:
    """Return the result of `ebbtide replay` for a job on this machine."""
    workload, machine = (
        step.file.with_suffix(".workload"),
        step.file.with_suffix(".machine"),
    )
    workload.write_text(json.dumps(job))
    # Without the notes on how rates were measured: those of an emulated device were
    # not.
    replace(testbed.machine, extra={}).save(machine)
    words = [word for policy in POLICIES for word in ("--policy", policy)]
    result: dict[str, Any] = json.loads(
        ebbtide(
            "replay", "--workload", workload, "--machine", machine, "--json", *words
        )
    )
    for file in (workload, machine):
        file.unlink()
    return result


def compare(
    step: StepContext, policies: Sequence[str], words: list[str], save: Path
) -> dict[str, Any]:
    """Run `ebbtide compare` for each policy; return its results by policy. save: a
    folder for traces."""
    results: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for policy in policies:
        trace = str(save / policy.replace(":", "-"))
        try:
            comparison = json.loads(
                ebbtide(
                    "compare", "--policy", policy, "--json", *words, "--save", trace
                )
            )
        except SystemExit as error:
            failed[policy] = str(error)
            step.add(failed=failed)
            continue
        results[policy] = comparison["results"][0]
        step.add(results=results)
    if not results:
        raise SystemExit("no policy ran")
    return results


def check(
    step: StepContext, policies: Sequence[str], results: dict[str, Any], budget: float
) -> None:
    step.check("every policy ran", len(results) == len(policies))
    losses = {json.dumps(result["losses"]) for result in results.values()}
    step.check("the same losses to the bit under every policy", len(losses) == 1)
    peaks = [result["peak_device_bytes"]["measured"] for result in results.values()]
    step.check(
        "state on the device within its budget", all(peak <= budget for peak in peaks)
    )
    if step.rehearse:
        return
    ratios = [result["iteration_ms"]["ratio"] for result in results.values()]
    step.aim(
        "measured within 10 % of predicted",
        all(ratio and abs(ratio - 1) < 0.1 for ratio in ratios),
    )
    exposed, bound_ms = results.get("adaptive"), step.figures["bound"]["exposed_ms"]
    near = exposed is not None and exposed["update_ms"]["measured"] <= 1.1 * bound_ms
    step.aim("exposed within 10 % of the bound", near)


def main() -> None:
    flags = argument_parser(__doc__)
    flags.add_argument("--params", type=float, default=1.5e9)
    flags.add_argument("--iterations", type=int, default=8)
    args = flags.parse_args()
    step = start(args)
    params = TINY_PARAMS if step.rehearse else round(args.params)
    shape = find_shape(params)
    subgroup = -(-shape.params // PARTS)
    budget = STATE_BYTES * (shape.params / 2 + SLOTS * subgroup)
    # Without a GPU the link is slow, to suit so small a model.
    link = None if torch.cuda.is_available() else TINY_LINK
    file = step.out / "machine.json"
    testbed = find_testbed(
        shape.params, subgroup, budget, link, find_machine(str(file))
    )
    step.add(
        params=shape.params,
        subgroup_params=subgroup,
        budget_bytes=budget,
        device=testbed.name,
    )
    words = [
        "--params",
        str(params),
        "--subgroup-params",
        str(subgroup),
        "--memory-budget",
        str(round(budget)),
    ]
    words += ["--steps", str(args.iterations), "--machine", str(file)]
    words += ["--emulate-link", str(round(link))] if link else []
    job = {
        "params": shape.params,
        "subgroup_params": subgroup,
        "gpu_free_bytes": budget,
        "gradients_stay": True,
    }
    before = replay(step, testbed, {**job, **ASSUMED_PHASES})["results"]
    step.add(
        beforehand={
            "update_ms": {result["policy"]: result["update_ms"] for result in before}
        }
    )
    traces = removed(step.out / "predictions")
    traces.mkdir()
    policies = TINY_POLICIES if step.rehearse else POLICIES
    results = compare(step, policies, words, traces)
    phases = {
        f"{phase}_s": median(
            result[f"{phase}_ms"]["measured"] for result in results.values()
        )
        / 1e3
        for phase in ("forward", "backward")
    }
    step.add(bound=replay(step, testbed, {**job, **phases})["bound"])
    check(step, policies, results, budget)


if __name__ == "__main__":
    main()
