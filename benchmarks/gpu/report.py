"""The results of run.py as Markdown, for docs/performance.md and docs/validation.md.

python benchmarks/gpu/report.py OUT
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from listing import ALL
from runner import line, read

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tables import table

Figures = dict[str, Any]
OFFLOAD = "DeepSpeed ZeRO-Offload"


def number(value: float | None, unit: float = 1.0, digits: int = 1) -> str:
    return "-" if value is None else f"{value / unit:,.{digits}f}"


def told(holds: bool | None) -> str:
    return {True: "yes", False: "**no**", None: "needs a GPU"}[holds]


def calibrated(figures: Figures) -> None:
    print("Rates of the machine, by `ebbtide calibrate`:\n")
    table(["rate", "value"], [[key, f"{value:.4g}"] for key, value in figures["rates"].items()])
    rows = []
    for source, found in (figures["counters"] or {}).items():
        for way in ("h2d", "d2h"):
            of = found.get(way, {})
            cells = [number(of.get(key), digits=3) for key in ("scale", "lag_ms", "dropouts", "samples")]
            rows.append([f"`{source}`", way, *cells, found.get("refused", "")])
    if rows:
        print("Its link's counters against known copies (scale: counted over copied):\n")
        table(["source", "way", "scale", "lag, ms", "dropouts", "samples", "refused"], rows)


def recorded(figures: Figures) -> None:
    print("Phases as recorded over phases by the job's own marks:\n")
    rows = [
        [phase, number(of.get("own_ms")), *(number(of.get(key), digits=4) for key in ("ratio", "least", "most"))]
        for phase, of in figures["phases"].items()
    ]
    table(["phase", "own, ms", "recorded / own", "least", "most"], rows)
    if "copies" in figures:
        print("Known copies:\n")
        rows = []
        for copy in figures["copies"]:
            passed = copy["bytes_by_counters"]
            share = None if passed is None else passed / copy["bytes"]
            found = f"{copy['found']} of {copy['count']}"
            rows.append(
                [copy["way"], found, number(copy["bytes_per_s"], 1e9), str(copy["source"]), number(share, digits=3)]
            )
        table(["way", "found", "GB/s", "counter", "counted / copied"], rows)
        print("Memory, the highest count:\n")
        pools = figures["memory"].items()
        rows = [[pool, number(of["recorded"], 1e9, 3), number(of["torch"], 1e9, 3)] for pool, of in pools]
        table(["pool", "recorded, GB", "torch's own peak, GB"], rows)


def cost(figures: Figures) -> None:
    print("Recording, over the bare run of the same round: median (least to most)\n")
    rounds = figures["step_ms"]
    rows = []
    for name in ("ebbtide", "torch.profiler"):
        ratios = [found[name] / found["bare"] for found in rounds]
        rows.append([name, f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"])
    print(f"The bare step takes {median(found['bare'] for found in rounds):.1f} ms, {len(rounds)} rounds.\n")
    table(["under", "over bare"], rows)


def policies(figures: Figures) -> None:
    print(f"{figures['params'] / 1e9:.3g} G parameters on {figures['device']}, measured (predicted, ratio), ms:\n")
    before = figures["beforehand"]["update_ms"]
    rows = []
    for policy, found in figures.get("results", {}).items():
        cells = []
        for phase in ("forward", "backward", "update", "iteration"):
            pair = found[f"{phase}_ms"]
            predicted, ratio = number(pair["predicted"]), number(pair["ratio"], digits=2)
            cells.append(f"{number(pair['measured'])} ({predicted}, {ratio})")
        update = found["update_ms"]["measured"]
        ahead = f"{number(before[policy])} ({update / before[policy]:.2f})"
        peak = found["peak_device_bytes"]["measured"]
        rows.append([f"`{policy}`", *cells, ahead, number(peak, 1e9, 2)])
    head = ["policy", "forward", "backward", "update", "iteration", "update, beforehand (ratio)", "state on device, GB"]
    table(head, rows)
    adaptive, bound = figures.get("results", {}).get("adaptive"), figures.get("bound")
    if adaptive and bound:
        exposed, least = adaptive["update_ms"]["measured"], bound["exposed_ms"]
        ratio = f"{exposed / least:.2f} times it"
        print(f"`adaptive` exposes {number(exposed)} ms, the bound is {number(least)} ms: {ratio}.\n")
    for policy, why in figures.get("failed", {}).items():
        print(f"`{policy}` failed: {why}\n")


def peers(figures: Figures) -> None:
    print("Other optimizers on the same job, ms:\n")
    rows = [
        [peer["name"], peer["about"], *(number(peer[f"{part}_ms"]) for part in ("backward", "update", "iteration"))]
        for peer in figures.get("peers", [])
    ]
    table(["who", "what", "backward", "update", "iteration"], rows)
    for name, why in figures.get("skipped", {}).items():
        print(f"{name}: {why}\n")


def offload(figures: Figures) -> None:
    found = figures.get("ms", {})
    print(f"DeepSpeed's offload and ours in it, {figures['params'] / 1e9:.3g} G parameters, ms:\n")
    rows = []
    for name, ms in found.items():
        over = found[OFFLOAD]["iteration"] / ms["iteration"] if OFFLOAD in found else None
        parts = (number(ms[part]) for part in ("forward", "backward", "step", "iteration"))
        rows.append([name, *parts, number(over, digits=2)])
    table(["who", "forward", "backward", "step", "iteration", "ZeRO-Offload's iteration / its"], rows)
    for name, why in figures.get("left_out", {}).items():
        print(f"{name}: not measured: {why}\n")


def windows(figures: Figures) -> None:
    print("A long sequence whose activations fill the card:\n")
    rows = []
    for name, run in figures["runs"].items():
        card = run["card"]
        memory = (run["state_peak_bytes"], card["most_bytes"], card["capacity_bytes"])
        parked = f"{run['parked']} of {run['subgroups']}"
        times = [number(run[key]) for key in ("median_iteration_ms", "update_ms")]
        retries = str(run.get("allocator_retries", "-"))
        rows.append([name, *times, parked, *(number(size, 1e9, 2) for size in memory), retries])
    head = ["run", "iteration, ms", "update, ms", "parked", "state on device, GB", "NVML's most, GB", "capacity, GB"]
    table([*head, "allocator's retries"], rows)
    for name, why in figures.get("failed", {}).items():
        print(f"{name} failed: {why}\n")


TABLES: dict[str, Callable[[Figures], None]] = {
    "calibrate": calibrated,
    "profile": recorded,
    "cost": cost,
    "policies-1.5b": policies,
    "policies-4b": policies,
    "deepspeed": offload,
    "torchao": peers,
    "windows": windows,
}


def report(out: Path) -> None:
    about = json.loads((out / "summary.json").read_text())
    if about["rehearsed"]:
        print("**A rehearsal without a GPU: no figure here tells anything of one.**\n")
    found = ", ".join(f"{name} {value}" for name, value in about["versions"].items() if value)
    print(f"{about['date']}, {about['gpu'] or 'no GPU'}, {about['cpu']}, {about['cores']} cores, {found}\n")
    results = [result for step in ALL if (result := read(out, step.name)) is not None]
    table(["step", "what", "came out"], [[r["name"], r["about"], line(r)] for r in results])
    checks = [(r["name"], *check) for r in results for check in r.get("figures", {}).get("checks", {}).items()]
    table(["step", "what should hold", "holds"], [[name, what, told(holds)] for name, what, holds in checks])
    for result in results:
        show = TABLES.get(result["name"])
        if show is None or not result.get("figures"):
            continue
        print(f"### {result['name']}\n")
        try:
            show(result["figures"])
        except KeyError as missing:
            print(f"It was stopped before it told {missing}.\n")


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("out", type=Path)
    report(flags.parse_args().out)


if __name__ == "__main__":
    main()
