"""Measure how long commands take on a real trace, beside the time that Python takes to load pandas and pyarrow.

    python benchmarks/commands.py [--rounds 5] [--trace traces/h100-20b-blocking.ebb]

Every command is measured as a whole process, from its start to its end, in turn with a process that only imports pandas
and pyarrow.parquet, the least that a script takes to read a Parquet file. The ratio is taken within each round.
Prints Markdown, see docs/performance.md.
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
    """The commands to measure, by how they are written."""
    return {
        "ebbtide --version": ["--version"],
        "ebbtide --help": ["--help"],
        "ebbtide summary": ["summary", str(trace)],
        "ebbtide windows": ["windows", str(trace)],
        "ebbtide findings": ["findings", str(trace)],
        "ebbtide replay": ["replay", str(trace), "--machine", MACHINE],
        "ebbtide plot": ["plot", str(trace), "--force", "-o", str(folder / "memory.png")],
        "ebbtide report": ["report", str(trace), "--force", "-o", str(folder / "report.html")],
    }


def seconds(command: list[str]) -> float:
    """Wall time of one process."""
    begun = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trace", type=Path, default=ROOT / "traces" / "h100-20b-blocking.ebb")
    arguments = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, {machine_line()}, {arguments.rounds} rounds: median (least to most)\n")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, words in commands(arguments.trace, Path(folder)).items():
            command = [sys.executable, "-m", "ebbtide", *words]
            seconds(command)  # Fills the caches of compiled Python files.
            pairs = [(seconds(command), seconds(BASELINE)) for _ in range(arguments.rounds)]
            times = [command_s for command_s, _ in pairs]
            ratios = [command_s / baseline_s for command_s, baseline_s in pairs]
            rows.append([f"`{name}`", spread(times, 2), spread(ratios, 1)])
    table(["command", "s", "times the import of pandas and pyarrow"], rows)


if __name__ == "__main__":
    main()
