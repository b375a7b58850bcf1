"""Measure how long commands take on a real trace, relative to the time that importing
pandas and pyarrow takes.

    python benchmarks/commands.py [--rounds 5] [--trace traces/h100-20b-blocking.ebb]

Every command is measured as a whole process, in turn with a process that only imports
pandas and pyarrow.parquet: the minimum for a script that reads a Parquet file. Ratios
are within a round. Prints Markdown, see docs/performance.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tables import machine_line, spread, table

ROOT = Path(__file__).parents[1]
BASELINE = [sys.executable, "-c", "import pandas, pyarrow.parquet"]
MACHINE = "h100-80gb-sxm-published"


def commands(trace: Path, folder: Path) -> dict[str, list[str]]:
    """Return the arguments of each command to measure, by its name in the table."""
    return {
        "ebbtide --version": ["--version"],
        "ebbtide --help": ["--help"],
        "ebbtide summary": ["summary", str(trace)],
        "ebbtide windows": ["windows", str(trace)],
        "ebbtide findings": ["findings", str(trace)],
        "ebbtide replay": ["replay", str(trace), "--machine", MACHINE],
        "ebbtide plot": [
            "plot",
            str(trace),
            "--force",
            "-o",
            str(folder / "memory.png"),
        ],
        "ebbtide report": [
            "report",
            str(trace),
            "--force",
            "-o",
            str(folder / "report.html"),
        ],
    }


def seconds(command: list[str]) -> float:
    """Return the wall time of one process."""
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--trace", type=Path, default=ROOT / "traces" / "h100-20b-blocking.ebb"
    )
    arguments = parser.parse_args()
    print(
        f"{time.strftime('%Y-%m-%d')}, {machine_line()}, {arguments.rounds} rounds: "
        "median (minimum to maximum)\n"
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, words in commands(arguments.trace, Path(folder)).items():
            command = [sys.executable, "-m", "ebbtide", *words]
            seconds(command)  # Fills the caches of compiled Python files.
            pairs = [
                (seconds(command), seconds(BASELINE)) for _ in range(arguments.rounds)
            ]
            times = [command_s for command_s, _ in pairs]
            ratios = [command_s / baseline_s for command_s, baseline_s in pairs]
            rows.append([f"`{name}`", spread(times, 2), spread(ratios, 1)])
    table(["command", "s", "times the import of pandas and pyarrow"], rows)


if __name__ == "__main__":
    main()
