"""The engine on the stand-in: random jobs, races, and calls of the runtime that fail."""

import pytest

from tests.cuda_runtime.conftest import OnStandIn

FAILING_RUNS = 12


@pytest.mark.parametrize("seed", [0, 4])
def test_random_jobs__have_the_bits_of_the_plain_job_without_races(on_stand_in: OnStandIn, seed: int) -> None:
    arguments = ["-m", "tests.cuda_runtime.random_jobs", str(seed), "4"]
    on_stand_in(arguments, jitter_us=300, seed=seed, order=1)


@pytest.mark.parametrize("mode", ["none", "forward", "both", "layers"])
def test_failing_calls__leave_the_bits_of_the_plain_job_or_an_error(on_stand_in: OnStandIn, mode: str) -> None:
    on_stand_in(["-m", "tests.cuda_runtime.failing_calls", mode, "30", str(FAILING_RUNS)])
