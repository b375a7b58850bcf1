"""Runs the tests that are marked `gpu`. Without a GPU they are collected and
skipped."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as xml
from pathlib import Path

from step import ROOT, argument_parser, run_command, start


def outcomes(file: Path) -> dict[str, list[str]]:
    """Return tests by outcome, from a JUnit XML file."""
    tests: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in xml.parse(file).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = (
            "failed"
            if kinds & {"failure", "error"}
            else "skipped"
            if "skipped" in kinds
            else "passed"
        )
        tests[outcome].append(f"{case.get('classname')}::{case.get('name')}")
    return tests


def main() -> None:
    flags = argument_parser(__doc__)
    flags.add_argument(
        "--file",
        default="test_*.py",
        help="pattern of the names of their files (default: test_*.py)",
    )
    args = flags.parse_args()
    step = start(args)
    # Only these files: others import packages that a GPU machine may lack.
    files: list[str | Path] = [
        file
        for file in sorted((ROOT / "tests").rglob(args.file))
        if "mark.gpu" in file.read_text()
    ]
    results = step.out / "suite.xml"
    options = [
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
    ]
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
    print(run_command(command, expected=(0, 1)))
    tests = outcomes(results)
    step.add(
        counts={outcome: len(names) for outcome, names in tests.items()},
        failed=tests["failed"],
    )
    if tests["failed"]:
        print(f"failed: {', '.join(tests['failed'])}")
    step.check(
        "every gpu test passed",
        None if not tests["passed"] and not tests["failed"] else not tests["failed"],
    )


if __name__ == "__main__":
    main()
