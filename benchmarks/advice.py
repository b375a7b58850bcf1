"""Check that no advice of findings, replay --recommend, plan and report is slower than the job, or does not fit.

    python benchmarks/advice.py [--workloads 300] [--without-rule]

All replayable traces in traces/ on 12 machines, and random workloads, with short searches; see
tests/interleave/advise/advice_checks.py. The report prints the findings. `--without-rule` takes the comparison with
the job out, so that the checks have to fail. Prints counts, and each failure in a line.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ebbtide.errors import MachineError, PolicyError, WorkloadError  # noqa: E402
from ebbtide.interleave.advise.present import Present  # noqa: E402
from ebbtide.machines.catalog import preset  # noqa: E402
from ebbtide.profiler.trace import open_trace  # noqa: E402
from tests.interleave.advise import advice_checks as checks  # noqa: E402
from tests.interleave.quick_plans import plan_quickly  # noqa: E402

# Counts go to stderr after so many cases.
_PROGRESS = 10


class Count:
    """Counts of cases, settings and failures of one kind of source."""

    def __init__(self, name: str) -> None:
        self.name, self.cases, self.settings, self.failures, self.impossible = name, 0, 0, 0, 0

    def add(self, label: str, run: Callable[[], int]) -> None:
        """Run the checks of one case."""
        self.cases += 1
        try:
            self.settings += run()
        except AssertionError as error:
            self.failures += 1
            print(f"{label}: {str(error).splitlines()[0] if str(error) else 'failed'}", flush=True)
        except (MachineError, PolicyError, WorkloadError) as error:
            self.impossible += 1
            print(f"{label}: no advice: {error}", flush=True)
        if self.cases % _PROGRESS == 0:
            print(self, file=sys.stderr, flush=True)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.cases} cases, {self.settings} settings advised, {self.failures} failures, "
            f"{self.impossible} without advice by an error"
        )


def main() -> None:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", type=int, default=300)
    parser.add_argument("--without-rule", action="store_true")
    options = parser.parse_args()
    patch = pytest.MonkeyPatch()
    plan_quickly(patch)
    if options.without_rule:
        patch.setattr(Present, "is_slower_than", lambda self, iteration_s: True)
    counts = [Count("findings"), Count("traces"), Count("workloads")]
    for number in range(options.workloads):
        counts[2].add(f"workload {number}", lambda seed=number: checks.check_workload(random.Random(seed)))  # type: ignore[misc]
    print(counts[2], flush=True)
    for path in checks.traces(ROOT / "traces"):
        trace = open_trace(path)
        counts[0].add(path.stem, lambda trace=trace: checks.check_findings(trace))  # type: ignore[misc]
        for name in checks.MACHINES:
            machine = preset(name)
            run = lambda trace=trace, machine=machine: checks.check_trace(trace, machine)  # noqa: E731
            counts[1].add(f"{path.stem} on {name}", run)
    print(*counts, sep="\n")


if __name__ == "__main__":
    main()
