"""Prints the results of run.py as Markdown, for docs/performance.md and
docs/validation.md. run.py calls it, too.

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

from listing import ALL, OFFLOAD
from runner import read_result, status_text

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tables import spread, table

Figures = dict[str, Any]


def number_text(value: float | None, unit: float = 1.0, digits: int = 1) -> str:
    return "-" if value is None else f"{value / unit:,.{digits}f}"


def holds_text(holds: bool | None) -> str:
    return {True: "yes", False: "**no**", None: "needs a GPU"}[holds]


def print_calibration(figures: Figures) -> None:
    print("Rates of the machine, by `ebbtide calibrate`:\n")
    table(
        ["rate", "value"],
        [[key, f"{value:.4g}"] for key, value in figures["rates"].items()],
    )
    rows = []
    for source, result in (figures["counters"] or {}).items():
        for direction in ("h2d", "d2h"):
            comparison = result.get(direction, {})
            cells = [
                number_text(comparison.get(key), digits=3)
                for key in ("scale", "lag_ms", "dropouts", "samples")
            ]
            rows.append([f"`{source}`", direction, *cells, result.get("refused", "")])
    if rows:
        print("Link counters against copies of known size (scale: counted / copied):\n")
        table(
            [
                "source",
                "direction",
                "scale",
                "lag, ms",
                "dropouts",
                "samples",
                "refused",
            ],
            rows,
        )


def print_recording(figures: Figures) -> None:
    print("Recorded phases over phases by the marks of the job:\n")
    rows = [
        [
            phase,
            number_text(entry.get("own_ms")),
            *(
                number_text(entry.get(key), digits=4)
                for key in ("ratio", "least", "most")
            ),
        ]
        for phase, entry in figures["phases"].items()
    ]
    table(["phase", "own, ms", "recorded / own", "minimum", "maximum"], rows)
    if "copies" in figures:
        print("Copies of known size:\n")
        rows = []
        for copy in figures["copies"]:
            counted = copy["bytes_by_counters"]
            share = None if counted is None else counted / copy["bytes"]
            recorded_copies = f"{copy['found']} of {copy['count']}"
            rows.append(
                [
                    copy["way"],
                    recorded_copies,
                    number_text(copy["bytes_per_s"], 1e9),
                    str(copy["source"]),
                    number_text(share, digits=3),
                ]
            )
        table(["direction", "recorded", "GB/s", "counter", "counted / copied"], rows)
        print("Memory, highest count:\n")
        pools = figures["memory"].items()
        rows = [
            [
                pool,
                number_text(peak["recorded"], 1e9, 3),
                number_text(peak["torch"], 1e9, 3),
            ]
            for pool, peak in pools
        ]
        table(["pool", "recorded, GB", "torch's own peak, GB"], rows)


def print_cost(figures: Figures) -> None:
    print(
        "Step time relative to the bare run of the same round: median (minimum to "
        "maximum)\n"
    )
    rounds = figures["step_ms"]
    rows = []
    for name in ("ebbtide", "torch.profiler"):
        ratios = [step_ms[name] / step_ms["bare"] for step_ms in rounds]
        rows.append(
            [name, f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"]
        )
    print(
        f"The bare step takes {median(step_ms['bare'] for step_ms in rounds):.1f} ms, "
        f"{len(rounds)} rounds.\n"
    )
    table(["under", "over bare"], rows)


def print_policies(figures: Figures) -> None:
    print(
        f"{figures['params'] / 1e9:.3g} G parameters on {figures['device']}, measured "
        "(predicted, ratio), ms:\n"
    )
    before = figures["beforehand"]["update_ms"]
    rows = []
    for policy, result in figures.get("results", {}).items():
        cells = []
        for phase in ("forward", "backward", "update", "iteration"):
            pair = result[f"{phase}_ms"]
            predicted, ratio = (
                number_text(pair["predicted"]),
                number_text(pair["ratio"], digits=2),
            )
            cells.append(f"{number_text(pair['measured'])} ({predicted}, {ratio})")
        update = result["update_ms"]["measured"]
        prediction = f"{number_text(before[policy])} ({update / before[policy]:.2f})"
        peak = result["peak_device_bytes"]["measured"]
        rows.append([f"`{policy}`", *cells, prediction, number_text(peak, 1e9, 2)])
    head = [
        "policy",
        "forward",
        "backward",
        "update",
        "iteration",
        "update, predicted before (ratio)",
        "state on device, GB",
    ]
    table(head, rows)
    adaptive, bound = figures.get("results", {}).get("adaptive"), figures.get("bound")
    if adaptive and bound:
        exposed, bound_ms = adaptive["update_ms"]["measured"], bound["exposed_ms"]
        ratio = f"{exposed / bound_ms:.2f} times the bound"
        print(
            f"`adaptive` exposes {number_text(exposed)} ms, the bound is "
            f"{number_text(bound_ms)} ms: {ratio}.\n"
        )
    for policy, reason in figures.get("failed", {}).items():
        print(f"`{policy}` failed: {reason}\n")


def print_smoke(figures: Figures) -> None:
    print("Parts, each in a process of its own:\n")
    parts = figures["parts"].items()
    table(
        ["part", "seconds", "failed"],
        [[name, number_text(p["seconds"]), p.get("why", "")] for name, p in parts],
    )


def print_table(figures: Figures) -> None:
    rounds = [results for results in figures["rounds"] if results]
    first = next(iter(rounds[0].values()))
    print(
        f"{first['params'] / 1e9:.3g} G parameters, {first['tokens']} tokens a step, "
        f"{len(rounds)} rounds in turn: "
        "median (minimum to maximum). Ratios are of the same round, above 1 faster "
        f"than {OFFLOAD}:\n"
    )
    reference = [
        results["ebbtide none"]["losses"]
        for results in rounds
        if "ebbtide none" in results
    ]
    rows = []
    for name, (about, state) in figures["about"].items():
        results = [round_[name] for round_ in rounds if name in round_]
        if not results:
            reason = figures["failed"].get(name) or figures.get("left_out", {}).get(
                name, "not run yet"
            )
            rows.append([name, about, state, f"not measured: {reason}", *[""] * 5])
            continue
        ratios = [
            median(round_[OFFLOAD]["iteration_ms"])
            / median(round_[name]["iteration_ms"])
            for round_ in rounds
            if name in round_ and OFFLOAD in round_
        ]
        times = [ms for result in results for ms in result["iteration_ms"]]
        losses = results[0]["losses"]
        same = (
            "-"
            if not reference
            else "yes"
            if all(r["losses"] == reference[0] for r in results)
            else "no"
        )
        device, host = (
            median(r[key] or 0 for r in results)
            for key in ("peak_device_bytes", "host_bytes")
        )
        rows.append(
            [
                name,
                about,
                state,
                spread(times, 0),
                spread(ratios, 2) if ratios else "-",
                number_text(device, 1e9),
                number_text(host, 1e9),
                f"{losses[-1]:.6f}",
                same,
            ]
        )
    head = [
        "optimizer",
        "what",
        "state",
        "iteration, ms",
        f"iteration of {OFFLOAD} / iteration",
    ]
    head += [
        "peak of the device, GB",
        "host memory, GB",
        "last loss",
        "losses bit-equal to ebbtide none",
    ]
    table(head, rows)


def print_windows(figures: Figures) -> None:
    print("A long sequence whose activations fill the card:\n")
    rows = []
    for name, run in figures["runs"].items():
        card = run["card"]
        memory = (run["state_peak_bytes"], card["most_bytes"], card["capacity_bytes"])
        parked = f"{run['parked']} of {run['subgroups']}"
        times = [number_text(run[key]) for key in ("median_iteration_ms", "update_ms")]
        retries = str(run.get("allocator_retries", "-"))
        rows.append(
            [
                name,
                *times,
                parked,
                *(number_text(size, 1e9, 2) for size in memory),
                retries,
            ]
        )
    head = [
        "run",
        "iteration, ms",
        "update, ms",
        "parked",
        "state on device, GB",
        "NVML maximum, GB",
        "capacity, GB",
    ]
    table([*head, "allocator retries"], rows)
    for name, reason in figures.get("failed", {}).items():
        print(f"{name} failed: {reason}\n")


def print_layers(figures: Figures) -> None:
    print("Choices for weights and activations of layers, measured and predicted:\n")
    rows = []
    for name, one in figures["results"].items():
        times, sizes = one["iteration_ms"], one["device_bytes"]
        times_text = [number_text(times[key]) for key in ("measured", "predicted")]
        rows.append(
            [
                name,
                *times_text,
                *(number_text(sizes[key], 1e9, 2) for key in ("measured", "predicted")),
            ]
        )
    table(
        [
            "activations, weights",
            "iteration, ms",
            "predicted, ms",
            "memory of layers, GB",
            "predicted, GB",
        ],
        rows,
    )


TABLES: dict[str, Callable[[Figures], None]] = {
    "calibrate": print_calibration,
    "profile": print_recording,
    "cost": print_cost,
    "costs": print_cost,
    "smoke": print_smoke,
    "racecheck": print_smoke,
    "table": print_table,
    "others": print_table,
    "larger": print_table,
    "windows": print_windows,
    "always-free": print_windows,
    "predictions": print_policies,
    "layers": print_layers,
}


def print_report(out: Path) -> None:
    about = json.loads((out / "summary.json").read_text())
    if about["rehearsed"]:
        print("**A rehearsal without a GPU: these figures say nothing about a GPU.**\n")
    versions = ", ".join(
        f"{name} {value}" for name, value in about["versions"].items() if value
    )
    print(
        f"{about['date']}, {about['gpu'] or 'no GPU'}, {about['cpu']}, "
        f"{about['cores']} cores, {versions}\n"
    )
    results = [
        result for step in ALL if (result := read_result(out, step.name)) is not None
    ]
    table(
        ["step", "description", "result"],
        [[r["name"], r["about"], status_text(r)] for r in results],
    )
    for kind, title in (("checks", "check"), ("aims", "aim")):
        rows = [
            (r["name"], *check)
            for r in results
            for check in r.get("figures", {}).get(kind, {}).items()
        ]
        if rows:
            table(
                ["step", title, "reached"],
                [[name, what, holds_text(holds)] for name, what, holds in rows],
            )
    for result in results:
        show = TABLES.get(result["name"])
        if show is None or not result.get("figures"):
            continue
        print(f"### {result['name']}\n")
        try:
            show(result["figures"])
        except (KeyError, IndexError, StopIteration) as missing:
            print(f"Stopped before all was measured: {missing!r}.\n")


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("out", type=Path, help="folder of the results")
    print_report(flags.parse_args().out)


if __name__ == "__main__":
    main()
