"""Times of a step, and the measured schedule that follows from them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ebbtide.interleave.engine.devices.device import Mark
from ebbtide.interleave.engine.runtime.plan_run import PlanRun
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload


class StepClock:
    """Notes when the phases of a step begin and end. Times are on the clock of time.perf_counter, s.

    Attributes:
        backward_mark: When the backward began; None before.
        step_mark: When the backward ended; None before.
        scalars_s: When the scalars of the step were known.
        returned_s: When the last step returned, while its late operations are not known to have ended; None: they have.
    """

    def __init__(self) -> None:
        self.backward_mark: Mark | None = None
        self.step_mark: Mark | None = None
        self.scalars_s = math.inf
        self.returned_s: float | None = None
        # How long the forward has waited for late operations since the last step.
        self._waited_s = 0.0
        # The same of the forward of this iteration, which was over when its plan began.
        self._iteration_waited_s = 0.0

    def begin_iteration(self) -> None:
        """Forget the backward of the iteration before."""
        self.backward_mark = self.step_mark = None
        self.scalars_s = math.inf

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of a block as waiting of the forward."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - begin_s

    def end_step(self, run: PlanRun, workload: Workload, returned_s: float | None) -> Schedule:
        """Return the measured schedule of a step that has ended, with its late operations.

        Args:
            run: The run of the plan.
            workload: The workload of the plan. The schedule's has the phases measured.
            returned_s: When the step returned; None: now.
        """
        assert self.step_mark is not None
        end_s = (time.perf_counter() if returned_s is None else returned_s) - run.begin_s
        step_s = self.step_mark.time_s - run.begin_s
        forward_s = max(0.0, min((self.backward_mark or self.step_mark).time_s - run.begin_s, step_s))
        job = replace(
            workload,
            other_s=0.0,
            forward_s=max(0.0, forward_s - self._iteration_waited_s),
            backward_s=max(0.0, step_s - forward_s),
        )
        # What was waited since is of the iteration that has begun.
        self._iteration_waited_s, self._waited_s = self._waited_s, 0.0
        return Schedule(
            plan=_as_performed(run, self.scalars_s),
            workload=job,
            starts=run.starts,
            ends=run.ends,
            other_s=0.0,
            forward_s=forward_s,
            backward_s=job.backward_s,
            update_s=end_s - step_s,
        )


def _as_performed(run: PlanRun, scalars_s: float) -> Plan:
    """Return the plan of a run in which updates are speculative only if they began before the scalars were known.

    The others were performed in place, or again.
    """
    if not run.plan.speculated:
        return run.plan
    known_s = scalars_s - run.begin_s
    ops = [
        op._replace(speculative=op.speculative and start < known_s)
        for op, start in zip(run.plan.ops, run.starts, strict=True)
    ]
    return replace(run.plan, ops=tuple(ops))
