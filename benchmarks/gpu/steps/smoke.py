"""Trains 20 M parameters in every mode with real backwards, and looks at what else
breaks first on a GPU.

Parts run in processes of their own, four at a time, and each result is kept at once.
Digests of all parameters, masters and moments must be those of the CPU.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch
from smoke_job import MODES, REFERENCE, REMAINDER, budget_bytes
from step import ROOT, STEPS, StepContext, argument_parser, run_part, start

PARAMS, TINY_PARAMS = 20_000_000, 200_000
LIMIT_S, REHEARSAL_LIMIT_S, PROBE_LIMIT_S, AT_ONCE = 60.0, 300.0, 20.0, 4
TOOLS = ("memcheck", "racecheck")
# Whether a tool works with a device at all.
PROBE = "import torch; torch.ones(1, device='cuda').add_(1).item(); print('{}')"
# An epoch with late updates may take so much longer than one without.
EPOCH_RATIO, EPOCH_SLACK_S = 1.2, 0.3
# For rounding to blocks of torch's allocator, in addition to the budget.
SLACK_BYTES = 32 << 20


def run(name: str, step: StepContext) -> dict[str, Any]:
    """Run a part and return its result."""
    params = TINY_PARAMS if step.rehearse else PARAMS
    limit = min(REHEARSAL_LIMIT_S if step.rehearse else LIMIT_S, step.left_s() - 2)
    tool = name.removeprefix("kernels-")
    if tool == name:
        return run_part([STEPS / "smoke_job.py", name, "--params", str(params)], limit)
    # So that each tensor is an allocation of its own, whose end the tool knows.
    environment = (
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        if torch.cuda.is_available()
        else {"TRITON_INTERPRET": "1"}
    )
    return run_kernels(step, tool, limit, environment)


def run_kernels(
    step: StepContext, tool: str, limit: float, environment: dict[str, str]
) -> dict[str, Any]:
    """Compare the kernels under a tool of compute-sanitizer, without it where it is not
    there or refuses the device."""
    job = [STEPS / "smoke_job.py", "kernels"]
    refusal = "it is not installed or there is no GPU"
    if shutil.which("compute-sanitizer") and torch.cuda.is_available():
        log = step.out / f"smoke-{tool}.log"
        under = [
            "compute-sanitizer",
            "--tool",
            tool,
            "--error-exitcode",
            "9",
            "--log-file",
        ]
        result = run_part(job, limit, [*under, str(log)], **environment)
        if "why" not in result:
            return {**result, "under": under[0]}
        # A tool that fails with a program that is right refuses the device.
        probe = run_part(
            ["-c", PROBE],
            min(PROBE_LIMIT_S, step.left_s() - 2),
            [*under, f"{log}.probe"],
            **environment,
        )
        if "why" not in probe:
            return {**result, "under": under[0]}
        refusal = probe["why"]
    limit = min(limit, step.left_s() - 2)
    return {**run_part(job, limit, **environment), "under": None, "refused": refusal}


def check(step: StepContext, parts: dict[str, Any]) -> None:
    """Check the results: what failed, digests, memory, times."""
    references = {name: _digests(parts[name]) for name in (REFERENCE, REMAINDER)}
    for name, part in parts.items():
        step.check(f"{name}: ended", "why" not in part)
        if name in MODES and name not in references and "why" not in part:
            expected = references[REMAINDER if name == "remainder" else REFERENCE]
            step.check(
                f"{name}: the digest of the CPU",
                len(expected) == 1 and _digests(part) == expected,
            )
    graph, fork, direct = (
        parts["graph"],
        parts["fork"],
        parts["direct-read"].get("direct"),
    )
    if "why" not in graph:
        same = {graph["beside"], graph["replayed"]} == references[REFERENCE]
        step.check(
            "graph: the digest of the CPU beside late updates and by replays",
            same and graph["right"],
        )
    if "why" not in fork:
        none, forward = (fork[mode] for mode in ("none", "forward"))
        step.check(
            "fork: the same digest with late updates",
            none["digest"] == forward["digest"],
        )
        in_time = (
            min(forward["epoch_s"])
            <= EPOCH_RATIO * min(none["epoch_s"]) + EPOCH_SLACK_S
        )
        step.check(
            "fork: epochs are not longer with late updates",
            None if step.rehearse else in_time,
        )
    if direct:
        exact = all(run.get("same", True) for run in direct.values())
        step.check("direct-read: the digest of the CPU, or an error", exact)
    if "why" not in parts["deterministic"]:
        step.check(
            "deterministic: the same gradients in every run",
            parts["deterministic"]["same"],
        )
    if "why" not in parts["storage"]:
        stored = all(run["in_storage"] for run in parts["storage"]["runs"].values())
        step.check("storage: state was in storage", stored)
    runs = [
        run
        for name in MODES
        for policy, run in parts[name].get("runs", {}).items()
        if policy != "gpu-only"
    ]
    peaks = [
        run["state_peak_bytes"] for run in runs if run["state_peak_bytes"] is not None
    ]
    within = all(peak <= budget_bytes(PARAMS) + SLACK_BYTES for peak in peaks)
    step.check("state on the device within its budget", within if peaks else None)
    kernels = [part for name, part in parts.items() if name.startswith("kernels-")]
    step.check(
        "kernels ran under compute-sanitizer",
        all(part.get("under") for part in kernels) or None,
    )


def _digests(part: dict[str, Any]) -> set[str]:
    return {run["digest"] for run in part.get("runs", {}).values()}


def main() -> None:
    flags = argument_parser(__doc__)
    flags.add_argument(
        "--tool",
        action="append",
        choices=TOOLS,
        help="only this one of compute-sanitizer; repeatable",
    )
    args = flags.parse_args()
    step = start(args)
    # So that `tests` can be imported.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )
    # The longest first.
    tools = (args.tool or TOOLS)[: None if torch.cuda.is_available() else 1]
    names = [f"kernels-{tool}" for tool in tools]
    names += ["graph", "fork", *MODES, "direct-read", "deterministic"]
    parts: dict[str, Any] = {}
    at_once = AT_ONCE if (os.cpu_count() or 1) >= 2 * AT_ONCE else 1
    with ThreadPoolExecutor(at_once) as pool:
        running = {pool.submit(run, name, step): name for name in names}
        for part in as_completed(running):
            parts[running[part]] = part.result()
            step.add(parts=parts)
    check(step, parts)


if __name__ == "__main__":
    main()
