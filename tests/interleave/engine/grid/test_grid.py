"""Random jobs over the grid of options: the bits of the plain job, or an error that
says what is wrong."""

import pytest
import torch

from tests.conftest import FUZZ, examples
from tests.interleave.engine.grid import draw, judge
from tests.interleave.engine.grid.draw import draw_job
from tests.interleave.engine.grid.edits import EDITS
from tests.interleave.engine.grid.faults import FAULTS
from tests.interleave.engine.grid.job import Event, Job
from tests.interleave.engine.grid.judge import first_difference, judge_all, shrink
from tests.interleave.engine.grid.models import LAYERS
from tests.interleave.engine.grid.training import Results

# Seeds of one test; the others are those of the other parts.
PARTS = 12
JOBS = 750
JOBS_BY_DEFAULT = 12
# Share of jobs that may end in an error of ebbtide.
REFUSED_SHARE = 0.15


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_random_jobs__have_the_bits_of_the_plain_job_or_end_in_an_error(
    part: int,
) -> None:
    """Errors are few: not everything is refused."""
    count = examples(JOBS, by_default=JOBS_BY_DEFAULT) // PARTS
    tally = judge_all(map(draw_job, range(part * count, (part + 1) * count)))
    assert tally.failures == []
    assert tally.refused_share <= max(REFUSED_SHARE, 2.5 / count)
    if FUZZ > 1:
        missing = {value for value in every_value() if not tally.equal[value]}
        assert missing == set()


def every_value() -> set[tuple[str, object]]:
    """Return each value of the options that some jobs must take with equal bits."""
    # Few options take an LSTM or torch.func.grad, and not each part has such a job.
    kinds = [kind for kind in LAYERS if kind != "lstm" and "func.grad" not in kind]
    values = {("layer", kind) for kind in kinds} | {("edit", kind) for kind in EDITS}
    values |= {("fault", kind) for kind in FAULTS}
    values |= {("policy", policy) for policy in draw.POLICIES}
    values |= {("overlap", overlap) for overlap in draw.OVERLAPS}
    values |= {("rule", rule) for rule in draw.HYPERPARAMETERS}
    values |= {("weights", choice) for choice in draw.WEIGHTS}
    return values | {("activations", choice) for choice in draw.ACTIVATIONS}


def test_draw_job__is_the_same_for_a_seed_and_covers_the_grid() -> None:
    jobs = [draw_job(seed) for seed in range(400)]
    assert jobs[7] == draw_job(7)
    assert set(EDITS) == {event.kind for job in jobs for event in job.edits}
    assert set(FAULTS) == {event.kind for job in jobs for event in job.faults}
    assert set(LAYERS) <= {kind for job in jobs for kind in job.kinds}
    assert {job.overlap for job in jobs} == set(draw.OVERLAPS)


def test_str__of_a_job_makes_it_again() -> None:
    names = {"Job": Job, "Event": Event, "torch": torch}
    for seed in range(20):
        assert eval(str(draw_job(seed)), names) == draw_job(seed)


def test_judge__finds_one_wrong_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(seed=3, steps=2)
    assert judge.judge(job).kind == "equal"
    train = judge.train

    def train_wrongly(job: Job, is_plain: bool, decided: list[int]) -> Results:
        results = train(job, is_plain, decided)
        name, value = results.pop()
        return [
            *results,
            (name, value if is_plain else torch.nextafter(value, value + 1)),
        ]

    monkeypatch.setattr(judge, "train", train_wrongly)
    assert judge.judge(job).detail == f"result {len(train(job, True)) - 1}, last loss"


def test_shrink__leaves_the_options_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    event = Event(2, "swap")
    monkeypatch.setitem(
        EDITS, "swap", lambda training, _: training.record("plain", training.is_plain)
    )
    job = Job(seed=1, skips=True, accumulation=(1, 2), edits=(Event(1, "norm"), event))
    assert judge.judge(job).kind == "differs"
    assert shrink(job, "differs") == Job(seed=1, edits=(event,))


def test_first_difference__sees_missing_results_names_and_signs_of_zero() -> None:
    zero = torch.zeros(1)
    assert first_difference([("a", zero)], [("a", zero)]) is None
    assert first_difference([("a", zero)], [("a", -zero)]) == "result 0, a"
    assert first_difference([("a", zero)], []) == "0 results, and 1 in the plain job"
    assert (
        first_difference([("a", zero)], [("b", zero)])
        == "result 0 is b, and a in the plain job"
    )
