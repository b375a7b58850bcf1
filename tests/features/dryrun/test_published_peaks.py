"""Memory of jobs that others have recorded on GPUs, predicted from rebuilt jobs."""

from __future__ import annotations

import pytest

from tests.conftest import slow
from tests.features.dryrun.forked import run_forked
from tests.features.dryrun.memory_lines import compare_lines, predicted_line
from tests.features.dryrun.published_jobs import JOBS

# cuDNN's workspaces are not predicted: allocations of the recording beside them are not
# found among the predicted ones.
WITH_CUDNN = {"resnet50-v100"}
QUICK = {"linear-grad", "resnet50-v100"}


@pytest.mark.parametrize("name", slow(JOBS, but=QUICK))
def test_dry_run__predicts_the_memory_that_was_measured_on_a_gpu(name: str) -> None:
    job = JOBS[name]
    path = job.path()
    if path is None:
        pytest.skip(f"{job.name} is not here: it is published in {job.source}")
    measured = job.measured(path)
    predicted = run_forked(
        lambda: predicted_line(job.run, job.device_name, job.relative)
    )
    for phase in compare_lines(measured, predicted):
        assert abs(phase.peak_error) < 0.01, phase
        assert abs(phase.end_error) < 0.01, phase
        if name not in WITH_CUDNN:
            assert phase.line_error < 0.03, phase
            assert phase.matched > 0.8, phase
    if measured.reserved is not None:
        assert predicted.reserved == pytest.approx(measured.reserved, rel=0.05)
