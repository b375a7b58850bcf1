"""Compare the memory that dry runs predict with recordings of the same jobs on GPUs,
which others have published.

    python benchmarks/dry_run_accuracy.py [--published FOLDER] [--picture docs/pictures/dry-run-accuracy.png] [JOB ...]

The jobs are rebuilt in tests/features/dryrun/published_jobs.py, which names the
repositories with the recordings. Those that FOLDER does not have are left out. Prints
Markdown.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from tables import machine_line, table

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.features.dryrun.forked import run_forked
from tests.features.dryrun.memory_lines import (
    MemoryLine,
    PhaseDifference,
    compare_lines,
    predicted_line,
)
from tests.features.dryrun.published_jobs import JOBS, PublishedJob

# Jobs in the picture -> their titles.
DRAWN = {
    "cs336-ctx512-fullstep": "3.4e9 parameters, fp32, context 512, H100",
    "cs336-medium-ctx1024-training": "0.42e9 parameters, bf16 autocast, context 1024",
}
MEASURED_COLOR, PREDICTED_COLOR = "#b0b0b0", "#1b4f72"


def compare(
    job: PublishedJob, path: Path
) -> tuple[MemoryLine, MemoryLine, list[PhaseDifference]]:
    """Return the measured line of a job, the predicted one, and their differences."""
    measured = job.measured(path)
    predicted = run_forked(
        lambda: predicted_line(job.run, job.device_name, job.relative)
    )
    return measured, predicted, compare_lines(measured, predicted)


def error(share: float) -> str:
    return f"{100 * share:+.4f} %"


def phase_rows(name: str, differences: list[PhaseDifference]) -> list[list[str]]:
    return [
        [
            f"`{name}`",
            phase.phase,
            f"{phase.measured:,}",
            f"{phase.predicted:,}",
            error(phase.peak_error),
            error(phase.end_error),
            f"{100 * phase.line_error:.2f} %",
            f"{100 * phase.matched:.0f} %",
        ]
        for phase in differences
        if phase.measured
    ]


def reserved_row(name: str, measured: MemoryLine, predicted: MemoryLine) -> list[str]:
    assert measured.reserved is not None
    assert predicted.reserved is not None
    share = predicted.reserved / measured.reserved - 1
    return [
        f"`{name}`",
        f"{measured.reserved:,}",
        f"{predicted.reserved:,}",
        f"{100 * share:+.2f} %",
    ]


def draw(lines: dict[str, tuple[MemoryLine, MemoryLine]], path: Path) -> None:
    """Draw measured beside predicted memory of the jobs in DRAWN, a panel for each."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1,
        len(lines),
        figsize=(5.2 * len(lines), 3.6),
        layout="constrained",
        squeeze=False,
    )
    for panel, (name, (measured, predicted)) in zip(
        panels[0], lines.items(), strict=True
    ):
        for line, options in (
            (
                measured,
                {"color": MEASURED_COLOR, "linewidth": 4.0, "label": "measured"},
            ),
            (
                predicted,
                {"color": PREDICTED_COLOR, "linewidth": 1.0, "label": "dry run"},
            ),
        ):
            panel.plot(*points(line), **options)
        starts = np.cumsum([0, *(phase.sizes.sum() for phase in measured.phases)]) / 1e9
        for start, phase in zip(starts, measured.phases, strict=False):
            panel.axvline(start, color="#d0d0d0", linewidth=0.8, zorder=0)
            panel.annotate(
                phase.name,
                (start, 1.01),
                xycoords=("data", "axes fraction"),
                fontsize=8,
            )
        panel.set_title(DRAWN[name], fontsize=10, pad=16)
        panel.set_xlabel("allocated since the start, GB")
        panel.set_ylabel("requested memory, GB")
        panel.set_ylim(bottom=0)
        panel.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=110)


def points(line: MemoryLine) -> tuple[Any, Any]:
    """Return the bytes allocated so far, and those requested, in GB."""
    sizes = np.concatenate(
        [np.concatenate([[0], phase.sizes]) for phase in line.phases]
    )
    return sizes.cumsum() / 1e9, np.concatenate(
        [phase.requested for phase in line.phases]
    ) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "jobs", nargs="*", metavar="JOB", help="names of jobs; default all"
    )
    parser.add_argument(
        "--published",
        type=Path,
        help="folder with the recordings; default ../shared/published/snapshots",
    )
    parser.add_argument("--picture", type=Path, help="PNG or SVG to draw")
    args = parser.parse_args()
    if args.published is not None:
        os.environ["EBBTIDE_PUBLISHED"] = str(args.published)
    unknown = sorted(set(args.jobs) - set(JOBS))
    if unknown:
        parser.error(
            f"no job is named {', '.join(unknown)}; there are {', '.join(JOBS)}"
        )
    phases: list[list[str]] = []
    reserved: list[list[str]] = []
    missing: list[str] = []
    drawn: dict[str, tuple[MemoryLine, MemoryLine]] = {}
    for name in args.jobs or JOBS:
        job = JOBS[name]
        path = job.path()
        if path is None:
            missing.append(
                f"`{name}`: {job.name} is not in the folder; it is published in "
                f"{job.source}"
            )
            continue
        measured, predicted, differences = compare(job, path)
        phases += phase_rows(name, differences)
        if measured.reserved is not None:
            reserved.append(reserved_row(name, measured, predicted))
        if name in DRAWN:
            drawn[name] = measured, predicted
    print(f"{time.strftime('%Y-%m-%d')}, computed on {machine_line()}.\n")
    head = (
        "job | phase | peak, measured | predicted | error | error at the end | along "
        "the line | matched"
    )
    table(head.split(" | "), phases)
    table(["job", "reserved, measured", "predicted", "error"], reserved)
    for line in missing:
        print(f"- {line}")
    if args.picture is not None and drawn:
        draw(drawn, args.picture)


if __name__ == "__main__":
    main()
