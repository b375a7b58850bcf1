"""Ranges from the residuals of other projects."""

from __future__ import annotations

import math
from statistics import mean

import numpy as np
import pytest

from ebbtide.machines.evidence import (
    LEAST_NEAR,
    LEVEL,
    Case,
    JobKind,
    Projects,
    calibrated_margin,
    card_of,
    evidence_range,
    kind_of,
    local_quantiles,
    scored,
    weighted_quantile,
)

KIND = JobKind("transformer", "fused", "middle", "half", "host", "A100")


def random_projects(
    random: np.random.Generator, count: int, kind: JobKind = KIND
) -> dict[str, tuple[Case, ...]]:
    """Return projects with an error of their own, and 1 to 40 runs around it."""
    projects = {}
    for number in range(count):
        center = random.normal(0.05, 0.2)
        runs = random.normal(center, 0.08, random.integers(1, 12))
        projects[str(number)] = (Case(kind, 1.0, 0.0, tuple(runs.tolist())),)
    return projects


def coverage_of(project: tuple[Case, ...], others: Projects) -> float:
    """Return the share of a project's runs that the ranges of others hold."""
    with_scores = scored(others)
    return mean(
        span.low <= math.exp(own) <= span.high
        for case in project
        for span in [evidence_range(case.kind, with_scores)]
        for own in case.residuals
    )


def test_evidence_range__holds_for_new_projects_as_often_as_stated() -> None:
    """The last of exchangeable projects is held with the level, though runs of a
    project are alike."""
    random = np.random.default_rng(0)
    shares = []
    for _ in range(80):
        projects = random_projects(random, 18)
        shares.append(coverage_of(projects.pop("17"), projects))
    # A standard error of 0.03; a range that counted runs would hold for fewer.
    assert LEVEL - 0.06 <= mean(shares) <= 0.92


def test_local_quantiles__each_project_weighs_the_same() -> None:
    """Runs that are repeated in one project change nothing."""
    projects = random_projects(np.random.default_rng(1), 12)
    before = local_quantiles(KIND, projects.values())
    case = projects["3"][0]
    many = case._replace(residuals=case.residuals * 500)
    again = local_quantiles(KIND, {**projects, "3": (many,)}.values())
    assert again == pytest.approx(before)
    margins = [
        calibrated_margin(KIND, scored(own))
        for own in (projects, {**projects, "3": (many,)})
    ]
    assert margins[0] == pytest.approx(margins[1])


def test_evidence_range__is_wider_where_few_are_like_the_job() -> None:
    projects = scored(random_projects(np.random.default_rng(2), 12))
    other = KIND._replace(layers="convolutions", card="H100", runtime="eager")
    near, far = (evidence_range(kind, projects) for kind in (KIND, other))
    assert far.high / far.low > near.high / near.low
    assert len(near.near) == 12
    assert not far.near


def test_evidence_range__follows_the_projects_that_are_alike() -> None:
    """A project of convolutions that is 40 % slower says little of a transformer."""
    random = np.random.default_rng(3)
    slow = {
        f"slow {name}": tuple(
            case._replace(residuals=tuple(0.5 + own for own in case.residuals))
            for case in cases
        )
        for name, cases in random_projects(
            random, 10, KIND._replace(layers="convolutions")
        ).items()
    }
    projects = {**random_projects(random, 10), **slow}
    quantiles = [
        local_quantiles(kind, projects.values())
        for kind in (KIND, KIND._replace(layers="convolutions"))
    ]
    assert quantiles[0].low < quantiles[1].low
    assert quantiles[0].high < quantiles[1].high


@pytest.mark.parametrize("count", [0, 1, 2, 3, 9])
def test_evidence_range__of_fewer_than_three_near_projects_is_a_guess(
    count: int,
) -> None:
    far = random_projects(
        np.random.default_rng(4), 8, JobKind("both", "eager", "", "", "1", "T4")
    )
    near = {
        f"near {name}": (Case(KIND, 1.0, 0.5, (-0.1, 0.1)),) for name in range(count)
    }
    span = evidence_range(KIND, scored({**far, **near}))
    assert span.is_guess is (count < LEAST_NEAR)
    assert len(span.near) == count
    assert span.covered == count / 2
    words = "a guess: " if count < LEAST_NEAR else f"of {count} projects"
    assert words in span.text
    assert span.low < 1 < span.high


def test_calibrated_margin__counts_the_unknown_project() -> None:
    """With fewer than four projects no score is large enough: it is the largest."""
    projects = random_projects(np.random.default_rng(5), 3)
    scores = []
    for name, cases in projects.items():
        others = [own for key, own in projects.items() if key != name]
        quantiles = local_quantiles(KIND, others)
        scores += [quantiles.score(own) for own in cases[0].residuals]
    margin = calibrated_margin(KIND, scored(projects))
    assert margin == pytest.approx(max(scores), abs=1e-4)


def test_calibrated_margin__is_that_of_the_projects_that_are_alike() -> None:
    """Few projects that are predicted poorly are held as often as stated, though many
    of another kind are predicted well."""
    random = np.random.default_rng(6)
    other = KIND._replace(layers="convolutions")
    shares = []
    for _ in range(200):
        projects = {
            f"{kind.layers} {name}": (Case(kind, 1.0, 0.0, (float(center),)),)
            for kind, count, spread in ((KIND, 30, 0.05), (other, 10, 0.5))
            for name, center in enumerate(random.normal(0, spread, count))
        }
        shares.append(coverage_of(projects.pop("convolutions 9"), projects))
    # A standard error of 0.03.
    assert mean(shares) >= LEVEL - 0.06


def test_weighted_quantile__is_the_first_value_past_a_weight() -> None:
    ordered = [(-1.0, 0.2), (0.0, 0.5), (2.0, 0.3)]
    values = [weighted_quantile(ordered, weight) for weight in (0.1, 0.2, 0.69, 2.0)]
    assert values == [-1.0, 0.0, 0.0, 2.0]


def test_kind_of__rounds_what_jobs_differ_in_slightly() -> None:
    name = "NVIDIA A100-SXM4-80GB"
    facts = ("transformer", "eager", 2048, "bfloat16")
    assert kind_of(*facts, 8, name) == kind_of(
        "transformer", "eager", 4096, "float16", 4, "NVIDIA A100-PCIE-40GB"
    )
    assert kind_of(*facts, 9, name).ranks == "hosts"
    assert kind_of("other", None, None, None, 1, None) == JobKind("other", ranks="1")
    assert kind_of(*facts, 1, name).likeness(kind_of(*facts, 1, "NVIDIA H200")) == 0.5
    assert card_of("NVIDIA GeForce RTX 4090") == "4090"
    assert card_of("NVIDIA H100 80GB HBM3") == "H100"
    assert card_of("NVIDIA TITAN RTX") == "TITAN RTX"
    assert card_of("") == card_of(None) == ""
