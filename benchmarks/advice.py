"""Check that no advice of findings, replay --recommend, plan and report is slower than
the job, or does not fit.

    python benchmarks/advice.py [--workloads 300] [--part I/N] [--without-rule]

All replayable traces in traces/ on 12 machines, and random workloads, with short
searches; see tests/features/advise/advice_checks.py. The report prints the findings.
`--without-rule` takes the comparison with the job out, so that the checks have to fail.
`--part 2/8` runs every eighth case from the second one on. Prints counts, and each
failure in a line.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ebbtide.analysis.metrics.advice import IterationGain  # noqa: E402
from ebbtide.errors import MachineError, PolicyError, WorkloadError  # noqa: E402
from ebbtide.machines.catalog import preset  # noqa: E402
from ebbtide.profiler.trace import open_trace  # noqa: E402
from tests.features.advise import advice_checks as checks  # noqa: E402
from tests.interleave.quick_plans import plan_quickly  # noqa: E402

# Counts go to stderr after so many cases.
_PROGRESS = 10


class Count:
    """Counts of cases, settings and failures of one kind of source."""

    def __init__(self, name: str) -> None:
        self.name, self.cases, self.settings, self.failures, self.impossible = (
            name,
            0,
            0,
            0,
            0,
        )

    def add(self, label: str, run: Callable[[], int]) -> None:
        """Run the checks of one case."""
        self.cases += 1
        try:
            self.settings += run()
        except AssertionError as error:
            self.failures += 1
            print(
                f"{label}: {str(error).splitlines()[0] if str(error) else 'failed'}",
                flush=True,
            )
        except (MachineError, PolicyError, WorkloadError) as error:
            self.impossible += 1
            print(f"{label}: no advice: {error}", flush=True)
        if self.cases % _PROGRESS == 0:
            print(self, file=sys.stderr, flush=True)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.cases} cases, {self.settings} settings advised, "
            f"{self.failures} failures, "
            f"{self.impossible} without advice by an error"
        )


class CheckedCase(NamedTuple):
    """A job for which advice is checked."""

    kind: str
    label: str
    run: Callable[[], int]


def cases(workloads: int) -> Iterator[CheckedCase]:
    """Yield all cases, with so many random workloads."""
    for seed in range(workloads):
        yield CheckedCase("workloads", f"workload {seed}", partial(check_seed, seed))
    for path in checks.traces(ROOT / "traces"):
        trace = open_trace(path)
        yield CheckedCase("findings", path.stem, partial(checks.check_findings, trace))
        for name in checks.MACHINES:
            yield CheckedCase(
                "traces",
                f"{path.stem} on {name}",
                partial(checks.check_trace, trace, preset(name)),
            )


def check_seed(seed: int) -> int:
    """Check the advice for a random workload."""
    return checks.check_workload(random.Random(seed))


def main() -> None:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", type=int, default=300)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--without-rule", action="store_true")
    options = parser.parse_args()
    patch = pytest.MonkeyPatch()
    plan_quickly(patch)
    if options.without_rule:
        patch.setattr(IterationGain, "is_enough", True)
    part, parts = map(int, options.part.split("/"))
    counts = {kind: Count(kind) for kind in ("workloads", "findings", "traces")}
    for case in islice(cases(options.workloads), part - 1, None, parts):
        counts[case.kind].add(case.label, case.run)
    print(*counts.values(), sep="\n")


if __name__ == "__main__":
    main()
