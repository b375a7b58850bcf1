"""Training loops of frameworks and of unusual optimizers: phases agree with timers
inside the job."""

from __future__ import annotations

import pytest

from tests.profiler.agent.timed_jobs import (
    STEPS,
    TIMED_JOBS,
    Record,
    record_in_agreement,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMED_JOBS)
def test_profile__agrees_with_timers_inside_the_job(name: str, record: Record) -> None:
    job, expected = TIMED_JOBS[name]
    assert record_in_agreement(record, job).phases() == [expected.split()] * STEPS
