"""Runs of others with their predictions of today, by source.

A source is who wrote a job: a repository, a paper or a framework. `sources.csv` names
each with its sets, its address and its licence; figures alone are stored here.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from accuracy_jobs import FOLDER, Job, predict, read_rows

from ebbtide.machines.evidence import (
    Case,
    JobKind,
    Projects,
    kind_of,
)

# Of the sources added on a day, the fifth whose names have the lowest hashes is set aside.
SHARES = 5
# A case of more runs keeps this number of quantiles.
MOST_RESIDUALS = 9
DECODERS = "decoders"


@dataclass(frozen=True)
class Source:
    """Who wrote jobs.

    Attributes:
        sets: Sets of decoders, as `SET.jobs.csv`; empty: its rows are in
            `models.jobs.csv` or `decoders.jobs.csv`.
        added: The day; empty: its times had been compared with predictions before
            sources were set aside.
    """

    source: str
    sets: str
    address: str
    licence: str
    added: str
    is_set_aside: bool = False

    @property
    def digest(self) -> str:
        """The hash of its name."""
        return hashlib.sha256(self.source.encode()).hexdigest()


@dataclass(frozen=True)
class Run:
    """A run with the prediction of today, s."""

    source: Source
    name: str
    family: str
    kind: JobKind
    predicted_s: float
    measured_s: float

    @property
    def residual(self) -> float:
        """The logarithm of the measured over the predicted time."""
        return math.log(self.measured_s / self.predicted_s)


@dataclass(frozen=True)
class ModelRun:
    """The kind and the time of a job of `models.jobs.csv`, as a dry run predicts
    them."""

    name: str
    layers: str
    runtime: str
    context: str
    precision: str
    ranks: str
    card: str
    likely_s: float

    @property
    def kind(self) -> JobKind:
        """The kind that the ranges of the dry run are for."""
        facts = (self.layers, self.runtime, self.context, self.precision)
        return JobKind(*facts, self.ranks, self.card)


def all_sources() -> list[Source]:
    """Return the sources of `sources.csv`.

    No range and no prior may be fitted to those that are set aside. The names alone
    decide, before their times are compared with a prediction.
    """
    rows: list[Source] = read_rows(Source, FOLDER / "sources.csv")
    days: dict[str, list[Source]] = defaultdict(list)
    for row in rows:
        days[row.added].append(row)
    aside: set[str] = set()
    for day, added in days.items():
        count = math.ceil(len(added) / SHARES) if day else 0
        lowest = sorted(added, key=lambda one: one.digest)[:count]
        aside |= {one.source for one in lowest}
    return [replace(row, is_set_aside=row.source in aside) for row in rows]


def all_runs() -> list[Run]:
    """Return all runs, with predictions of today of decoders, and the stored ones of
    other models, which `accuracy_models.py` writes."""
    runs: list[Run] = []
    for source in all_sources():
        for name in source.sets.split():
            runs += _decoder_runs(name, functools.partial(_same, source))
    by_name = {source.source: source for source in all_sources()}
    owner = functools.partial(_owner, by_name)
    if (FOLDER / "decoders.jobs.csv").exists():
        runs += _decoder_runs("decoders", owner)
    if not (FOLDER / "models.predicted.csv").exists():
        return runs
    measured = _columns("models.jobs.csv")
    for row in read_rows(ModelRun, FOLDER / "models.predicted.csv"):
        own = measured[row.name]
        runs.append(
            Run(
                owner(row.name),
                row.name,
                own["family"],
                row.kind,
                row.likely_s,
                float(own["step_s"]),
            )
        )
    return runs


def _same(source: Source, name: str) -> Source:
    return source


def _owner(by_name: Mapping[str, Source], name: str) -> Source:
    """Return the source that a job's name begins with."""
    return by_name[name.partition(":")[0]]


def _decoder_runs(name: str, owner: Callable[[str], Source]) -> Iterator[Run]:
    measured = _columns(f"{name}.measured.csv")
    for job in read_rows(Job, FOLDER / f"{name}.jobs.csv"):
        prediction = predict(job)
        if prediction is None or job.name not in measured:
            continue
        kind = kind_of(
            "transformer",
            job.runtime,
            job.sequence,
            "bfloat16",
            job.ranks,
            job.rates.gpu_name,
        )
        step_s = float(measured[job.name]["step_s"])
        yield Run(
            owner(job.name), job.name, DECODERS, kind, prediction.likely_s, step_s
        )


def _columns(file: str) -> dict[str, dict[str, str]]:
    lines = (FOLDER / file).read_text().splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return {row["name"]: row for row in rows}


def by_source(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Return the runs of each source."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.source.source].append(run)
    return dict(groups)


def projects_of_runs(runs: Iterable[Run]) -> dict[str, tuple[Case, ...]]:
    """Return the cases of each source, without what ranges held."""
    projects: dict[str, tuple[Case, ...]] = {}
    for name, own in by_source(runs).items():
        kinds: dict[JobKind, list[float]] = defaultdict(list)
        for run in own:
            kinds[run.kind].append(run.residual)
        projects[name] = tuple(
            Case(kind, len(residuals) / len(own), 0.0, _thinned(residuals))
            for kind, residuals in sorted(kinds.items())
        )
    return projects


def _thinned(residuals: list[float]) -> tuple[float, ...]:
    ordered = sorted(residuals)
    if len(ordered) > MOST_RESIDUALS:
        step = len(ordered) / MOST_RESIDUALS
        ordered = [ordered[int(step * (i + 0.5))] for i in range(MOST_RESIDUALS)]
    return tuple(round(value, 4) for value in ordered)


def without(projects: Projects, name: str) -> dict[str, tuple[Case, ...]]:
    """Return the projects without one."""
    return {key: tuple(cases) for key, cases in projects.items() if key != name}
