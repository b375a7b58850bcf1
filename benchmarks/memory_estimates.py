"""Compare the memory that dry runs predict with 65 measured training jobs, and with
three other estimators.

    python benchmarks/memory_estimates.py FOLDER [--family CNN] [--jobs 10] [--python PYTHON]

FOLDER has `jobs.csv`, whose rows are jobs of the public repository
Stone-ResearchLife/xMem (arXiv 2510.21048): the growth of the GPU's used memory as NVML
counts it, on an RTX 3060 and an RTX 4060 with torch 2.6, whether the job ran out of
memory, and the bytes that xMem, DNNMem and SchedTune estimated. `train_cnn.py` and
`train_lm.py` beside it rebuild the jobs; they need torchvision and transformers 4.51 in
the environment of PYTHON. cuBLAS has no workspace in them, as `exp/run.py` of xMem sets
it. The rule for workspaces of cuDNN was chosen on every second CNN job that did not run
out, `adjusted` in the table, and tried on the others, `judged`. Prints Markdown.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tables import machine_line, table

from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.tables.prediction import MISFIT, verdict
from ebbtide.profiler.trace import open_trace

RIVALS = {
    "xMem": "xmem_bytes",
    "DNNMem": "dnnmem_bytes",
    "SchedTune": "schedtune_bytes",
}
SCRIPTS = {"CNN": "train_cnn.py", "Transformer": "train_lm.py"}
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}
PRESETS = {"RTX 3060": "rtx3060", "RTX 4060": "rtx4060"}
# xMem's files state beside its bytes whether a job runs out of memory. It says so of
# these jobs, by model and batch, though its bytes are below the capacity.
XMEM_OUT = {
    ("EleutherAI-gpt-neo-125M", 48), ("EleutherAI-gpt-neo-125M", 53), ("EleutherAI-gpt-neo-125M", 55),
    ("facebook-opt-350m", 30), ("facebook-opt-350m", 48), ("openai-community-gpt2", 54), ("t5-base", 29),
    ("t5-base", 46), ("facebook-opt-125m", 55), ("cerebras-Cerebras-GPT-111M", 53),
}  # fmt: skip
# Fake forms of torchvision's own operations, which a build for another torch lacks, and
# which these models do not use.
RUN_SCRIPT = """
import runpy, sys, types
sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Comparison:
    """A job, and what was predicted of it.

    Attributes:
        job: Its row of jobs.csv.
        bytes: Predicted peak of reserved memory.
        ran_out: Whether it was predicted to run out of memory.
        held_out: Whether no rule was adjusted on it.
    """

    job: dict[str, str]
    bytes: int
    ran_out: bool
    held_out: bool

    @property
    def error_percent(self) -> float:
        return 100 * (self.bytes / int(self.job["measured_bytes"]) - 1)

    @property
    def measured_to_end(self) -> bool:
        return self.job["ran_out"] == "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=SCRIPTS)
    parser.add_argument("--jobs", type=int, help="only the first so many jobs")
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="interpreter whose environment has ebbtide, too",
    )
    args = parser.parse_args()
    listing = args.folder / "jobs.csv"
    if not listing.is_file():
        print(f"skipped: {listing} is missing")
        return
    with listing.open(encoding="utf-8", newline="") as file:
        jobs = list(csv.DictReader(file))
    adjusted = [
        job for job in jobs if job["family"] == "CNN" and job["ran_out"] == "0"
    ][::2]
    chosen = [job for job in jobs if args.family in (None, job["family"])][: args.jobs]
    rows = [
        compare(args.folder, args.python, job, job not in adjusted) for job in chosen
    ]
    print(machine_line())
    print_jobs(rows)
    print_estimators(rows)


def compare(
    folder: Path, python: str, job: dict[str, str], held_out: bool
) -> Comparison:
    """Run a job in a dry run."""
    script = folder / SCRIPTS[job["family"]]
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary, "run.ebb")
        options = [
            "--gpu",
            PRESETS[job["gpu"]],
            "--capacity",
            job["capacity_bytes"],
            "--steps",
            "4",
            "-o",
            str(output),
        ]
        words = [
            "python",
            "-c",
            RUN_SCRIPT,
            str(script),
            job["model"],
            job["batch"],
            job["optimizer"],
        ]
        command = [python, "-m", "ebbtide", "dry-run", *options, "--", *words]
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | ENVIRONMENT,
        )
        if run.returncode:
            raise SystemExit(
                f"{job['model']}: the dry run ended with status "
                f"{run.returncode}:\n{run.stderr[-2000:]}"
            )
        metrics = JobMetrics(open_trace(output))
        result = Comparison(
            job,
            metrics.pool_peak("reserved") or 0,
            verdict(metrics) == MISFIT,
            held_out,
        )
    print(
        job["model"],
        job["optimizer"],
        job["batch"],
        f"{result.error_percent:+.1f} %",
        file=sys.stderr,
        flush=True,
    )
    return result


def print_jobs(rows: Sequence[Comparison]) -> None:
    """Print each job, in GB."""

    def cells(row: Comparison) -> list[str]:
        job = row.job
        name = f"{job['model']} {job['optimizer']} {job['batch']}"
        sizes = [
            f"{int(size) / 1e9:.2f}"
            for size in (
                job["measured_bytes"],
                row.bytes,
                *map(job.get, RIVALS.values()),
            )
        ]
        ran_out = (
            f"{'yes' if job['ran_out'] == '1' else 'no'}, "
            f"{'yes' if row.ran_out else 'no'}"
        )
        error = f"{row.error_percent:+.1f} %" if row.measured_to_end else "-"
        return [
            name,
            job["gpu"],
            *sizes,
            error,
            ran_out,
            "judged" if row.held_out else "adjusted",
        ]

    head = [
        "job",
        "GPU",
        "measured GB",
        "ebbtide",
        *RIVALS,
        "error",
        "ran out: measured, predicted",
        "part",
    ]
    table(head, [cells(row) for row in rows])


def print_estimators(rows: Sequence[Comparison]) -> None:
    """Print the relative errors of the peaks of jobs that did not run out, and the
    right answers about running out."""
    print()
    groups = {
        "all": rows,
        "Transformers": [row for row in rows if row.job["family"] == "Transformer"],
        "CNNs": [row for row in rows if row.job["family"] == "CNN"],
        "CNNs, judged": [
            row for row in rows if row.job["family"] == "CNN" and row.held_out
        ],
        "CNNs, adjusted": [row for row in rows if not row.held_out],
    }
    lines = []
    for group, members in groups.items():
        if not any(row.measured_to_end for row in members):
            continue
        errors = [abs(row.error_percent) for row in members if row.measured_to_end]
        right = sum(row.ran_out != row.measured_to_end for row in members)
        lines.append([group, "ebbtide", *_errors(errors), f"{right} of {len(members)}"])
        for rival, column in RIVALS.items():
            pairs = [
                (int(row.job[column]), int(row.job["measured_bytes"]))
                for row in members
                if row.measured_to_end
            ]
            errors = [
                abs(100 * (estimate / measured - 1)) for estimate, measured in pairs
            ]
            right = sum(
                says_out(row.job, column) != row.measured_to_end for row in members
            )
            lines.append([group, rival, *_errors(errors), f"{right} of {len(members)}"])
    table(
        [
            "jobs",
            "estimator",
            "median %",
            "mean %",
            "90th percentile %",
            "worst %",
            "right about running out",
        ],
        lines,
    )


def says_out(job: dict[str, str], column: str) -> bool:
    """Return whether another estimator says that a job runs out of memory."""
    own = column == "xmem_bytes" and (job["model"], int(job["batch"])) in XMEM_OUT
    return own or int(job[column]) > int(job["capacity_bytes"])


def _errors(errors: Sequence[float]) -> list[str]:
    ordered = sorted(errors)
    ninetieth = ordered[min(len(ordered) - 1, round(0.9 * (len(ordered) - 1)))]
    return [
        f"{value:.1f}"
        for value in (
            statistics.median(ordered),
            statistics.fmean(ordered),
            ninetieth,
            ordered[-1],
        )
    ]


if __name__ == "__main__":
    main()
