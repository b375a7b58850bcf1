"""The engine on the stand-in: random jobs, races, and calls of the runtime that
fail."""

import pytest

from tests.cuda_runtime.conftest import OnStandIn

FAILING_RUNS = 12


@pytest.mark.parametrize("seed", [0, 4])
def test_random_jobs__have_the_bits_of_the_plain_job_without_races(
    on_stand_in: OnStandIn, seed: int
) -> None:
    arguments = ["-m", "tests.cuda_runtime.random_jobs", str(seed), "4"]
    on_stand_in(arguments, jitter_us=300, seed=seed, order=1)


@pytest.mark.parametrize("mode", ["none", "forward", "both", "copied", "layers"])
def test_failing_calls__leave_the_bits_of_the_plain_job_or_an_error(
    on_stand_in: OnStandIn, mode: str
) -> None:
    on_stand_in(
        ["-m", "tests.cuda_runtime.failing_calls", mode, "30", str(FAILING_RUNS)]
    )


def test_failing_calls__with_jitter_leave_the_bits_of_the_plain_job_or_an_error(
    on_stand_in: OnStandIn,
) -> None:
    on_stand_in(
        ["-m", "tests.cuda_runtime.failing_calls", "both", "600", "5"],
        jitter_us=300,
        seed=1,
    )


@pytest.mark.parametrize("mode", ["both", "layers"])
def test_sticky_errors__end_the_job_in_an_error_with_a_state_of_the_plain_job_or_none(
    on_stand_in: OnStandIn, mode: str
) -> None:
    on_stand_in(["-m", "tests.cuda_runtime.failing_calls", mode, "301", "2", "sticky"])


# The job's stream waits for no other but where layers move; in all other modes the host
# does.
@pytest.mark.parametrize(
    ("kind", "mode"),
    [("streams", "both"), ("for-job", "both"), ("host", "both"), ("by-job", "layers")],
)
def test_races__are_reported_where_a_wait_is_left_out(
    on_stand_in: OnStandIn, kind: str, mode: str
) -> None:
    command = ["-m", "tests.cuda_runtime.mutations", kind, mode]
    done = on_stand_in(command, succeeds=False, jitter_us=1000, seed=1, order=1)
    # What is written after it was freed may crash the process.
    assert done.returncode or " 0 races" not in done.stdout
    assert "cuda_runtime: race" in done.stderr


@pytest.mark.parametrize("mode", ["both", "copied"])
def test_races__are_none_where_nothing_is_left_out(
    on_stand_in: OnStandIn, mode: str
) -> None:
    done = on_stand_in(
        ["-m", "tests.cuda_runtime.mutations", "nothing", mode],
        jitter_us=1000,
        seed=1,
        order=1,
    )
    assert done.stdout.strip() == "right 0 races, 0 errors"
