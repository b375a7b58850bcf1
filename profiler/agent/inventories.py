"""Records what parameters, gradients and optimizer state hold at some moments."""

from __future__ import annotations

import functools
import time
from typing import Any

from .inventory import list_holders
from .iteration_rule import BACKWARD
from .options import Options
from .recorder import Recorder
from .spool import PHASES

# The first iterations create gradients and optimizer state: the inventory of a later
# one is the typical one.
_SETTLED_ITERATION = 2
_MAX_FIRST = 3


class Inventories:
    """Takes inventories of the job's tensors.

    One is taken at the end of the first update, at the start of a typical update, and
    when asked to.
    """

    def __init__(self, recorder: Recorder, options: Options) -> None:
        self._recorder = recorder
        self._first = options.first
        self._settled = max(options.first, _SETTLED_ITERATION)
        self._at_first: list[dict[str, Any]] = []
        self._others: list[dict[str, Any]] = []
        self._first_updates = 0

    def enter_iteration(self, iteration: int) -> None:
        """Take an inventory at the end of the first iteration.

        If another update extends it, take it again.
        """
        if iteration == self._first + 1 and self._first_updates < _MAX_FIRST:
            self._first_updates += 1
            self._at_first = []
            self._take(self._at_first, _in_update(iteration - 1))

    def enter_update(self) -> None:
        """Take an inventory at the start of the typical iteration's first update."""
        recorder = self._recorder
        if recorder.iteration >= self._settled:
            recorder.on_update.remove(self.enter_update)
            if (
                not self._take(self._others, _in_update(recorder.iteration))
                and recorder.threads.several
            ):
                # What was read before is from one thread, and lacks what the other
                # threads hold.
                self._at_first, self._others = [], []
                recorder.job_info.set("inventories", [])

    def add_out_of_memory(self, record: dict[str, Any]) -> bool:
        """Take an inventory at an out-of-memory error.

        Return whether tensors could be read.
        """
        moment = {key: record[key] for key in ("t_ns", "iteration", "phase")}
        failed_on = record["device"] if record["phase"] == PHASES[BACKWARD] else None
        return self._take(
            self._others, {**moment, "reason": "out of memory"}, failed_on
        )

    def _take(
        self,
        inventories: list[dict[str, Any]],
        moment: dict[str, Any],
        failed_on: str | None = None,
    ) -> bool:
        holders = self._recorder.read_tensors(
            functools.partial(list_holders, failed_on=failed_on)
        )
        if holders is not None:
            inventories.append({**moment, "holders": holders})
            self._recorder.job_info.set("inventories", self._at_first + self._others)
        return holders is not None


def _in_update(iteration: int) -> dict[str, Any]:
    return {
        "t_ns": time.monotonic_ns(),
        "iteration": iteration,
        "phase": "update",
        "reason": "update",
    }
