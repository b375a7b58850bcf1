"""Compare predictions of today with runs of others, by source; write docs/accuracy.md,
its picture, and the residuals from which ebbtide makes ranges of iterations.

    python benchmarks/accuracy.py

Decoders are predicted here, other models by `accuracy_models.py` (`--set-aside` with
the sources that are set aside). Prints coverage by source left out, and the median
width by kind of job.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import matplotlib.pyplot as plt
from accuracy_evidence import (
    DECODERS,
    FOLDER,
    Run,
    all_runs,
    by_source,
    projects_of_runs,
    without,
)
from published import jobs as published_jobs
from published import simulated_sample

from ebbtide.machines.evidence import (
    Case,
    EvidenceRange,
    Projects,
    evidence_range,
    scored,
)

ROOT = Path(__file__).parents[1]
DATE = "2026-11-30"
# Ends of the picture's axis; what lies outside is drawn there.
LIMITS = 0.25, 4
HEAD = ["sources", "runs", "held", "width", "median error", "median size of errors"]


@dataclass(frozen=True)
class Judged:
    """The runs of a source, and the ranges that other sources give them."""

    name: str
    runs: Sequence[Run]
    ranges: Sequence[EvidenceRange]

    @cached_property
    def holds(self) -> list[bool]:
        """Whether the range of each run holds it."""
        pairs = zip(self.runs, self.ranges, strict=True)
        return [one.low <= math.exp(run.residual) <= one.high for run, one in pairs]

    @property
    def coverage(self) -> float:
        """The share of runs that the ranges hold."""
        return statistics.mean(self.holds)

    @property
    def width(self) -> float:
        """The high end of a range over the low one (median)."""
        return statistics.median(one.high / one.low for one in self.ranges)

    @property
    def errors(self) -> list[float]:
        """Relative errors of the likely times."""
        return [math.exp(-run.residual) - 1 for run in self.runs]

    @property
    def size(self) -> float:
        """The median size of an error."""
        return statistics.median(map(abs, self.errors))

    @property
    def family(self) -> str:
        """The kind of most of its jobs."""
        return Counter(run.family for run in self.runs).most_common(1)[0][0]

    @property
    def cards(self) -> str:
        """The GPUs, by the words of their names that have digits."""
        return ", ".join(sorted({run.kind.card for run in self.runs}))

    @property
    def is_guess(self) -> bool:
        """Whether most ranges are guesses."""
        return statistics.mean(one.is_guess for one in self.ranges) > 0.5

    def of(self, family: str) -> Judged | None:
        """Return the runs of one kind of job; None: it has none."""
        chosen = [i for i, run in enumerate(self.runs) if run.family == family]
        if not chosen:
            return None
        runs, ranges = ([rows[i] for i in chosen] for rows in (self.runs, self.ranges))
        return Judged(self.name, runs, ranges)


def judge(
    fitted: Sequence[Run], aside: Sequence[Run]
) -> tuple[list[Judged], list[Judged]]:
    """Return the sources with ranges of the others, and those that are set aside with
    ranges of all that are not."""
    projects = projects_of_runs(fitted)
    left_out = [
        _judged(name, runs, scored(without(projects, name)))
        for name, runs in by_source(fitted).items()
    ]
    with_scores = scored(projects)
    judged = [
        _judged(name, runs, with_scores) for name, runs in by_source(aside).items()
    ]
    return left_out, judged


def _judged(name: str, runs: Sequence[Run], projects: Projects) -> Judged:
    ranges = {
        kind: evidence_range(kind, projects) for kind in {run.kind for run in runs}
    }
    return Judged(name, runs, [ranges[run.kind] for run in runs])


def record(left_out: Sequence[Judged], errors: Sequence[float]) -> dict[str, object]:
    """Return what ebbtide makes ranges from: residuals by source, their scores, and
    errors of held-out updates."""
    projects = scored(projects_of_runs(run for one in left_out for run in one.runs))
    rows = {
        one.name: [_row(case, one) for case in projects[one.name]] for one in left_out
    }
    sizes = [abs(error) for error in errors]
    return {
        "date": DATE,
        "page": "docs/accuracy.md",
        "projects": rows,
        "updates": {
            "runs": len(errors),
            "mean_error": round(statistics.mean(sizes), 4),
            "largest_error": round(max(sizes), 4),
        },
    }


def _row(case: Case, judged: Judged) -> list[object]:
    pairs = zip(judged.runs, judged.holds, strict=True)
    own = [holds for run, holds in pairs if run.kind == case.kind]
    coverage = round(statistics.mean(own), 3)
    numbers = round(case.share, 4), coverage
    return [*case.kind, *numbers, list(case.residuals), list(case.scores)]


def updates() -> list[float]:
    """Return the errors of updates of published runs, each by a fit to the other runs
    of its job."""
    errors = []
    for job in published_jobs():
        for name, run in job.runs.items():
            machine = job.fit(other for other in job.runs if other != name).machine
            errors.append(
                simulated_sample(run.sample, machine).update_s / run.sample.update_s - 1
            )
    return errors


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "".join(
        f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows)
    )


def percent(value: float, form: str = ".0f") -> str:
    """Return a share in percent."""
    return f"{100 * value:{form}} %"


def cells(judged: Sequence[Judged]) -> list[str]:
    """Return the figures of some sources, which weigh the same."""
    medians = [statistics.median(one.errors) for one in judged]
    return [
        str(len(judged)),
        f"{sum(len(one.runs) for one in judged):,}",
        percent(statistics.mean(one.coverage for one in judged)),
        f"{statistics.median(one.width for one in judged):.2f}",
        percent(statistics.median(medians), "+.0f"),
        percent(statistics.median(one.size for one in judged)),
    ]


def families(judged: Sequence[Judged]) -> dict[str, list[Judged]]:
    """Return the sources of each kind of job, with their runs of that kind."""
    groups: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        for family in sorted({run.family for run in one.runs}):
            part = one.of(family)
            if part is not None:
                groups[family].append(part)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def source_row(one: Judged) -> list[str]:
    """Return the cells of a source."""
    return [
        one.name,
        one.family,
        one.cards,
        f"{len(one.runs):,}",
        percent(one.coverage),
        f"{one.width:.2f}{'?' * one.is_guess}",
        percent(statistics.median(one.errors), "+.0f"),
        percent(one.size),
    ]


SOURCE_HEAD = [
    "source",
    "jobs",
    "GPU",
    "runs",
    "held",
    "width",
    "median error",
    "median size",
]


def aside_text(aside: Sequence[Judged]) -> str:
    """Return the sentence on the sources that are set aside."""
    if not aside:
        return ""
    return (
        f"Of {len(aside)} sources that were set aside and predicted at the end, "
        f"they held {cells(aside)[2]} (median size of an error {cells(aside)[5]}). "
    )


def page(
    left_out: Sequence[Judged], aside: Sequence[Judged], errors: Sequence[float]
) -> str:
    """Return docs/accuracy.md: `page.md` beside the sets, with figures and tables."""
    decoders, others = (
        [one for one in left_out if (one.family == DECODERS) is wanted]
        for wanted in (True, False)
    )
    everything = [*left_out, *aside]
    cards = {run.kind.card for one in everything for run in one.runs}
    sizes = [abs(error) for error in errors]
    by_kind = [[name, *cells(group)] for name, group in families(left_out).items()]
    totals = [["**all, left out**", *cells(left_out)]]
    if aside:
        totals.append(["**all, set aside**", *cells(aside)])
    rows = sorted(left_out, key=lambda one: one.coverage)
    return (
        (FOLDER / "page.md")
        .read_text()
        .format(
            sources=len(everything),
            others=sum(one.family != DECODERS for one in everything),
            cards=len(cards),
            runs=f"{sum(len(one.runs) for one in everything):,}",
            coverage=cells(left_out)[2],
            width=cells(left_out)[3],
            aside=aside_text(aside),
            decoder_size=cells(decoders)[5],
            other_size=cells(others)[5],
            kinds=table(["jobs", *HEAD], [*by_kind, *totals]),
            left_out=table(SOURCE_HEAD, map(source_row, rows)),
            set_aside=table(SOURCE_HEAD, map(source_row, aside)),
            updates=len(errors),
            mean=percent(statistics.mean(sizes), ".1f"),
            largest=percent(max(sizes), ".1f"),
        )
    )


def draw(left_out: Sequence[Judged], aside: Sequence[Judged], path: Path) -> None:
    """Draw predicted over measured times of each source, with its median range."""
    order = list(families(left_out))
    rows = sorted(left_out, key=lambda one: (order.index(one.family), one.name))
    rows = [*aside, *reversed(rows)]
    figure, axes = plt.subplots(
        figsize=(8, 1.2 + 0.19 * len(rows)), layout="constrained"
    )
    for place, one in enumerate(rows):
        is_aside = one in aside
        color = "#d55e00" if is_aside else "#0072b2"
        # The range of the measured time, seen from it: predicted over measured.
        low = statistics.median(1 / span.high for span in one.ranges)
        high = statistics.median(1 / span.low for span in one.ranges)
        style = (0, (2, 1)) if one.is_guess else "solid"
        axes.plot(
            [low, high],
            [place, place],
            color="0.8",
            lw=6,
            linestyle=style,
            solid_capstyle="butt",
        )
        ratios = [min(max(1 + error, LIMITS[0]), LIMITS[1]) for error in one.errors]
        marker = "D" if is_aside else "o"
        axes.plot(
            ratios, [place] * len(ratios), marker, ms=3, color=color, alpha=0.5, mew=0
        )
        axes.plot([statistics.median(ratios)], [place], "|", ms=9, color="black")
    axes.axvline(1, color="0.4", lw=0.8)
    axes.set_yticks(
        range(len(rows)),
        [f"{one.name} ({one.family}{', set aside' * (one in aside)})" for one in rows],
        fontsize=7,
    )
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xscale("log")
    axes.set_xlim(*LIMITS)
    axes.set_xticks(
        [0.25, 0.5, 0.7, 1, 1.4, 2, 4], ["0.25", "0.5", "0.7", "1", "1.4", "2", "4"]
    )
    axes.minorticks_off()
    axes.set_xlabel(
        "predicted / measured; grey: 80 % range by the other sources (broken: a guess); diamonds: set aside",
        fontsize=8,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    runs = all_runs()
    fitted = [run for run in runs if not run.source.is_set_aside]
    aside = [run for run in runs if run.source.is_set_aside]
    left_out, judged_aside = judge(fitted, aside)
    for one in sorted(left_out, key=lambda one: one.coverage):
        print(" | ".join(source_row(one)))
    groups = {
        **families(left_out),
        "all, left out": left_out,
        "set aside": judged_aside,
    }
    print(
        "\n"
        + table(
            ["jobs", *HEAD],
            [[name, *cells(group)] for name, group in groups.items() if group],
        )
    )
    errors = updates()
    (ROOT / "docs" / "accuracy.md").write_text(page(left_out, judged_aside, errors))
    draw(left_out, judged_aside, ROOT / "docs" / "pictures" / "accuracy.png")
    values = json.dumps(record(left_out, errors))
    (ROOT / "ebbtide" / "machines" / "track_record.json").write_text(values + "\n")


if __name__ == "__main__":
    main()
