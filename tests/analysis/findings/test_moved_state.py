"""The rule `copies-around-step`, and that `between-phases` leaves copies to it."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.analysis.findings import Finding
from ebbtide.analysis.findings.rules.iterations import between_phases
from ebbtide.analysis.findings.rules.moved_state import copies_around_step
from tests.analysis.findings.jobs import (
    GIB,
    PARAMS,
    Job,
    async_copies,
    offloaded,
    on_gpu,
)

STATE = 8 * PARAMS


def _job(used: float = 60, **optimizer: Any) -> Job:
    """Return a job whose time outside phases is half of its iteration."""
    job = on_gpu(used=used, other=400)
    entry = {"class": "AdamW", "params": PARAMS, "state_bytes": STATE, **optimizer}
    return job.meta(optimizers=[{**entry, "state_devices": ["cuda"]}])


def _moved(job: Job, phase: str = "other", size: int = STATE, ms: float = 180) -> Job:
    """Add copies of `size` bytes up, and then down."""
    job.copy("h2d", phase, 5, ms, size, "pageable")
    return job.copy("d2h", phase, 10 + ms, ms, size, "pageable")


def test_copies_around_step__names_state_that_would_fit() -> None:
    job = _moved(_job())
    finding = job.finding(copies_around_step)
    assert finding.title.startswith("State of the optimizer moves")
    assert finding.potential_gain_ms == pytest.approx(361, rel=0.01)
    assert "keep the state on the device: its 7.45 GiB fit" in finding.advice
    # Nothing else fills that time.
    assert job.result(between_phases) is None
    assert not any("data loading" in one.advice for one in job.results.findings)


def test_copies_around_step__names_state_that_would_not_fit() -> None:
    job = _moved(_job(used=79))
    assert "update on the CPU, or copy the state" in (
        job.finding(copies_around_step).advice
    )


def test_copies_around_step__sees_state_that_moves_in_the_update() -> None:
    job = on_gpu(used=60, update=400)
    entry = {"class": "AdamW", "params": PARAMS, "state_bytes": STATE}
    job.meta(optimizers=[{**entry, "state_devices": ["cuda"]}])
    finding = _moved(job, "update").finding(copies_around_step)
    assert finding.title.startswith("State of the optimizer moves")


def test_copies_around_step__counts_counters_that_are_read_one_by_one() -> None:
    job = _moved(_job())
    for number in range(40):
        job.copy("d2h", "update", number, 0.01, 4, "pageable")
    evidence = job.finding(copies_around_step).evidence
    assert any("41 copies an iteration have at most 64 B" in line for line in evidence)


def test_copies_around_step__of_gradients_advises_to_begin_earlier() -> None:
    job = _job()
    job.copy("d2h", "other", 5, 360, 2 * PARAMS, "pageable")
    finding = job.finding(copies_around_step)
    assert finding.title.startswith("Copies fill the time outside")
    assert "while the GPU computes" in finding.advice


def test_copies_around_step__leaves_time_without_copies_to_between_phases() -> None:
    job = _job()
    assert job.result(copies_around_step) is None
    finding = job.result(between_phases)
    assert isinstance(finding, Finding)
    assert "data loading" in finding.advice


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_copies_around_step__is_silent_on_copies_within_passes(phase: str) -> None:
    job = on_gpu(used=60, **{phase: 800})
    entry = {"class": "AdamW", "params": PARAMS, "state_bytes": STATE}
    job.meta(optimizers=[{**entry, "state_devices": ["cuda"]}])
    assert _moved(job, phase, ms=300).result(copies_around_step) is None


def test_copies_around_step__is_silent_on_engines_that_plan_their_copies() -> None:
    assert async_copies(offloaded(update=400)).result(copies_around_step) is None
    engine = _moved(_job(ebbtide=True))
    assert engine.result(copies_around_step) is None


def test_copies_around_step__is_silent_on_short_copies() -> None:
    job = _job().copy("h2d", "other", 5, 100, GIB // 8, "pageable")
    assert job.result(copies_around_step) is None
