"""Prints the lines that tests have run, by package, from coverage's JSON; in CI also in
the summary of the job."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path


def package_of(file: str) -> str:
    """Return the top-level folder of a file; of a feature with its name."""
    parts = file.rpartition("ebbtide/")[2].split("/")
    return "/".join(parts[:2] if parts[0] == "features" else parts[:1])


def table(report: dict[str, dict[str, dict[str, dict[str, int]]]]) -> str:
    """Return a Markdown table of the packages, the least covered first."""
    lines: Counter[str] = Counter()
    run: Counter[str] = Counter()
    for file, entry in report["files"].items():
        lines[package_of(file)] += entry["summary"]["num_statements"]
        run[package_of(file)] += entry["summary"]["covered_lines"]
    lines["all"], run["all"] = lines.total(), run.total()
    shares = {name: 100 * run[name] / count for name, count in lines.items() if count}
    rows = [
        f"| {name} | {lines[name]:,} | {share:.0f} |"
        for name, share in sorted(shares.items(), key=lambda item: item[1])
    ]
    return "\n".join(["| package | statements | run % |", "| --- | --- | --- |", *rows])


def main(path: Path) -> None:
    """Print the table of a report."""
    text = table(json.loads(path.read_text()))
    print(text)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
