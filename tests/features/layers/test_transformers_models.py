"""Models of transformers whose weights and activations move and whose updates are late:
bits of the plain job."""

from collections import Counter

import pytest

from ebbtide.errors import UserError
from tests.features.layers.random_transformers import random_model_job
from tests.interleave.engine.grid.judge import first_difference

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(5, 6), id="quick"),
        pytest.param(
            range(40), marks=[pytest.mark.slow, pytest.mark.timeout(1800)], id="all"
        ),
    ],
)
def test_random_models__have_the_bits_of_the_plain_job_or_end_in_an_error(
    seeds: range,
) -> None:
    verdicts: Counter[str] = Counter()
    wrong = []
    for seed in seeds:
        job = random_model_job(seed)
        expected = job.train(is_plain=True)
        try:
            difference = first_difference(expected, job.train(is_plain=False))
        except UserError as error:
            verdicts["refused"] += 1
            print(job, error)
            continue
        verdicts["equal"] += difference is None
        if difference is not None:
            wrong.append(f"{job}: {difference}")
    print(dict(verdicts))
    assert wrong == []
    assert verdicts["refused"] <= 0.2 * len(seeds)
