"""The tests that are marked `gpu`. Without a GPU they are collected, and skip."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as xml
from pathlib import Path

from step import ROOT, arguments, begin, run


def outcomes(file: Path) -> dict[str, list[str]]:
    """Tests by outcome, from JUnit's XML."""
    found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in xml.parse(file).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[outcome].append(f"{case.get('classname')}::{case.get('name')}")
    return found


def main() -> None:
    step = begin(arguments(__doc__).parse_args())
    # By name: other files import what a GPU machine may lack.
    files: list[str | Path] = [
        file for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in file.read_text()
    ]
    results = step.out / "suite.xml"
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "pytest",
        *options,
        "--rootdir",
        ROOT,
        f"--junitxml={results}",
        *files,
    ]
    print(run(command, right=(0, 1)))
    found = outcomes(results)
    step.tell(counts={outcome: len(names) for outcome, names in found.items()}, failed=found["failed"])
    step.check("every gpu test passed", None if not found["passed"] and not found["failed"] else not found["failed"])


if __name__ == "__main__":
    main()
