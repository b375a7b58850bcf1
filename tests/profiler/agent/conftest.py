"""Jobs that are recorded with `Tracer`, all in one process, since each process would
import torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.profiler.trace import Trace
from tests.conftest import shared_folder
from tests.profiler.agent.jobs import CASES


@pytest.fixture(scope="session")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """Record loops that need no compiler, closures, and updates by hand; return the
    traces by name."""
    from tests.profiler.agent.test_closures import CLOSURES
    from tests.profiler.agent.test_manual_updates import MANUAL_UPDATES
    from tests.profiler.agent.test_phases import COMPILED, read_all, trace_all
    from tests.profiler.agent.test_without_gradients import WITHOUT_GRADIENTS

    loops = {name: job for name, (job, _) in CASES.items() if name not in COMPILED}
    groups = (loops, CLOSURES, MANUAL_UPDATES, WITHOUT_GRADIENTS)
    jobs = {name: job for group in groups for name, job in group.items()}
    assert len(jobs) == sum(map(len, groups))

    def fill(folder: Path) -> None:
        trace_all(folder, jobs)

    return read_all(shared_folder(tmp_path_factory, "traced", fill), jobs)
