"""Ranges of iterations, from how far predictions of other projects' jobs were off.

Each project counts the same, whatever its number of runs: the residuals of a project
share one weight, as in hierarchical conformal prediction (Lee, Barber and Willett 2023,
"Distribution-free inference with hierarchical data"; the two layers of Dunn, Wasserman
and Ramdas 2022, "Distribution-free prediction sets for two-layer hierarchical models").
Projects with the layers of the job count more (localized conformal prediction, Guan
2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# The probability that a range is to hold with.
LEVEL = 0.8
# Fewer projects that are like a job make its range a guess.
LEAST_NEAR = 3
# A case is near a job from this likeness on: one fact may differ, one be not known.
_NEAR = 0.35
# The likeness of a job and a case that differ in a fact, and where one is not known.
_OTHER, _NOT_KNOWN = 0.5, 0.7
# Jobs of other kinds of layers are further apart than the other facts make them.
_OTHER_LAYERS = 0.15
_CONTEXTS = {1_023: "short", 8_191: "middle"}
_HALF = ("bfloat16", "float16", "bf16", "fp16")


class JobKind(NamedTuple):
    """The facts of a job by which it is like others; an empty one is not known."""

    # `transformer`, `convolutions`, `both`, or `other`, by the most operations.
    layers: str = ""
    # `eager`, `fused` (compiled, too), `deepspeed` or `streamed`.
    runtime: str = ""
    context: str = ""
    precision: str = ""
    ranks: str = ""
    card: str = ""

    def likeness(self, other: JobKind) -> float:
        """Return the likeness to another kind, at most 1."""
        product = 1.0
        for name, own, their in zip(self._fields, self, other, strict=True):
            if not own or not their:
                product *= _NOT_KNOWN
            elif own != their:
                product *= _OTHER_LAYERS if name == "layers" else _OTHER
        return product


def kind_of(
    layers: str,
    runtime: str | None,
    sequence: int | None,
    precision: str | None,
    ranks: int,
    gpu_name: str | None,
) -> JobKind:
    """Return the kind of a job. `sequence`: tokens of a sample; None, also for the
    runtime and the precision: not known."""
    context = ""
    if sequence is not None:
        sizes = (name for most, name in _CONTEXTS.items() if sequence <= most)
        context = next(sizes, "long")
    spread = "1" if ranks == 1 else "host" if ranks <= 8 else "hosts"
    rounded = "half" if precision in _HALF else precision or ""
    return JobKind(layers, runtime or "", context, rounded, spread, card_of(gpu_name))


def card_of(gpu_name: str | None) -> str:
    """Return the model of a GPU: the word with digits, or all words after the maker's.

    Empty where it is not known.
    """
    words = (gpu_name or "").upper().replace("-", " ").split()
    models = [word for word in words if any(letter.isdigit() for letter in word)]
    return models[0] if models else " ".join(words[1:])


class Case(NamedTuple):
    """The runs of a project that are of one kind."""

    kind: JobKind
    share: float  # Their share of the runs of the project.
    coverage: float  # The share that ranges held while the project was left out.
    # Logarithms of measured over predicted times, or quantiles of many.
    residuals: tuple[float, ...]
    # The score of each residual while the project was left out.
    scores: tuple[float, ...] = ()


Projects = Mapping[str, Sequence[Case]]


class Quantiles(NamedTuple):
    """Quantiles of residuals of projects, weighted by their likeness to a job."""

    low: float
    high: float
    weight: float  # The sum of the likenesses of the projects.

    def score(self, residual: float) -> float:
        """Return how far a residual lies outside, in the width that few alike add;
        negative inside (conformalized quantiles: Romano, Patterson and Candes 2019)."""
        outside = max(self.low - residual, residual - self.high)
        return outside / self._scale

    def widened(self, margin: float) -> tuple[float, float]:
        """Return the ends that a margin of scores adds to."""
        added = margin * self._scale
        return min(self.low - added, 0.0), max(self.high + added, 0.0)

    @property
    def _scale(self) -> float:
        return math.sqrt(1 + 1 / self.weight)


def local_quantiles(kind: JobKind, projects: Iterable[Sequence[Case]]) -> Quantiles:
    """Return the quantiles of residuals for jobs of a kind; there is a project."""
    weighted: list[tuple[float, float]] = []
    total = 0.0
    for cases in projects:
        own = [case.share * kind.likeness(case.kind) for case in cases]
        weight = max(kind.likeness(case.kind) for case in cases)
        total += weight
        for case, part in zip(cases, own, strict=True):
            each = weight * part / sum(own) / len(case.residuals)
            weighted += ((residual, each) for residual in case.residuals)
    weighted.sort()
    tail = (1 - LEVEL) / 2
    return Quantiles(
        weighted_quantile(weighted, tail * total),
        -weighted_quantile([(-r, w) for r, w in reversed(weighted)], tail * total),
        total,
    )


def weighted_quantile(ordered: Iterable[tuple[float, float]], weight: float) -> float:
    """Return the first of ordered values up to which the weights exceed a weight, or
    the last one."""
    passed, last = 0.0, 0.0
    for value, own in ordered:
        passed, last = passed + own, value
        if passed > weight:
            break
    return last


@dataclass(frozen=True)
class EvidenceRange:
    """The range of a job's time, as factors of the predicted one, and its evidence."""

    low: float
    high: float
    near: tuple[str, ...]  # Projects that are like the job, the most alike first.
    covered: float  # Of these, how many the ranges held while they were left out.

    @property
    def is_guess(self) -> bool:
        """Whether too few projects are like the job."""
        return len(self.near) < LEAST_NEAR

    def as_json(self) -> dict[str, Any]:
        """Return the trust in the range: projects that are like the job, of how many
        the ranges held, and the names of the most alike first."""
        return {
            "sources": len(self.near),
            "held": round(self.covered),
            "nearest": list(self.near),
        }

    @property
    def text(self) -> str:
        """The trust in the range, in few words."""
        count = len(self.near)
        if self.is_guess:
            what = f"{count or 'no'} project{'' if count == 1 else 's'}"
            return f"a guess: {what} like yours"
        names = ", ".join(self.near[:2])
        return (
            f"like yours: held for {self.covered:.0f} of {count} projects that were "
            f"left out ({names}{', ...' if count > 2 else ''})"
        )


def evidence_range(kind: JobKind, projects: Projects) -> EvidenceRange:
    """Return the range of jobs of a kind, by projects that are scored."""
    margin = calibrated_margin(kind, projects)
    low, high = local_quantiles(kind, projects.values()).widened(margin)
    near: dict[str, tuple[float, float]] = {}
    for name, cases in projects.items():
        alike = [(kind.likeness(case.kind), case) for case in cases]
        alike = [(like, case) for like, case in alike if like >= _NEAR]
        if alike:
            covered = mean_coverage([case for _, case in alike])
            near[name] = max(like for like, _ in alike), covered
    names = sorted(near, key=lambda name: -near[name][0])
    covered = sum(own for _, own in near.values())
    return EvidenceRange(math.exp(low), math.exp(high), tuple(names), covered)


def mean_coverage(cases: Sequence[Case]) -> float:
    """Return the share of the runs of some cases that ranges held."""
    share = sum(case.share for case in cases)
    return sum(case.share * case.coverage for case in cases) / share


def calibrated_margin(kind: JobKind, projects: Projects) -> float:
    """Return the score that ranges of a kind need to hold with `LEVEL`: the quantile of
    scores of runs whose project is left out. Projects with other layers weigh less, and
    the next one, whose score is not known, as much as one with the same."""
    weighted: list[tuple[float, float]] = []
    for case in (case for cases in projects.values() for case in cases):
        alike = 1.0 if case.kind.layers == kind.layers else _OTHER_LAYERS
        each = alike * case.share / len(case.scores)
        weighted += ((score, each) for score in case.scores)
    weighted.sort()
    total = sum(weight for _, weight in weighted) + 1
    return weighted_quantile(weighted, LEVEL * total)


def scored(projects: Projects) -> dict[str, tuple[Case, ...]]:
    """Return the projects with the scores of their runs, each by the other projects."""
    with_scores = {}
    for name, cases in projects.items():
        others = [other for key, other in projects.items() if key != name]
        with_scores[name] = tuple(_scored(case, others) for case in cases)
    return with_scores


def _scored(case: Case, others: Sequence[Sequence[Case]]) -> Case:
    quantiles = local_quantiles(case.kind, others)
    scores = (round(quantiles.score(own), 4) for own in case.residuals)
    return case._replace(scores=tuple(scores))


def projects_of(record: Mapping[str, Any]) -> Projects:
    """Return the projects of a record of predictions."""
    return {
        name: tuple(
            Case(JobKind(*row[:6]), row[6], row[7], tuple(row[8]), tuple(row[9]))
            for row in rows
        )
        for name, rows in record["projects"].items()
    }
