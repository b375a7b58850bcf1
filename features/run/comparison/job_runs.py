"""Runs a job once, recorded and logged, in a process group of its own."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ebbtide.analysis.metrics.iterations import rank_durations
from ebbtide.errors import UserError
from ebbtide.features.run.agent.hooks import RUN
from ebbtide.features.run.comparison.job_folder import private_copy
from ebbtide.features.run.launch import variables_set
from ebbtide.features.run.options import WINDOW_STEPS, RunOptions
from ebbtide.features.run.results import ProcessLog, read_logs
from ebbtide.phases import OTHER, PHASES
from ebbtide.profiler.agent.options import Options
from ebbtide.profiler.recording.collector import RecordedCommand
from ebbtide.profiler.recording.launch import BackgroundJob
from ebbtide.profiler.trace import open_trace

_POLL_S = 0.1
# The first iterations under a policy do not count.
_WARM_UP = 2
_LAST_LINES = 8
# In names of files.
_UNUSUAL = re.compile(r"[^\w.]+")
# Services that record experiments keep them to themselves, and waiting threads of torch
# leave the cores to updates.
_SWITCHES = {
    "OMP_WAIT_POLICY": "passive",
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "file:mlruns",
}


@dataclass(frozen=True)
class JobRun:
    """A run of the job that has ended.

    Attributes:
        name: The policy, as the user named it, or what else the run is.
        logs: The logs of its processes, by rank.
        trace: Its trace; None where nothing was recorded.
        output: The file with its output.
    """

    name: str
    logs: list[ProcessLog]
    trace: Path | None
    output: Path

    @cached_property
    def times_ms(self) -> dict[str, float]:
        """Median times in ms of iterations and phases; empty where not recorded.

        `other` is what an iteration has beside these phases.
        """
        if self.trace is None:
            return {}
        trace = open_trace(self.trace)
        table = rank_durations(trace, trace.ranks[0])
        count = len(table.numbers)
        first = WINDOW_STEPS + _WARM_UP
        of_plans = [end["counted"] for end in self.ends if "counted" in end]
        if of_plans:
            # Those that the figures of the engine are of.
            first = max(0, count - min(of_plans))
        counted = slice(first if count > first else min(1, count - 1), None)
        medians = {}
        for part in ("iteration", *PHASES):
            values = table.columns[part][counted]
            values = values[~np.isnan(values)]
            if len(values):
                medians[part] = float(median(values))
        phases_ms = sum(medians.get(phase, 0.0) for phase in PHASES)
        if "iteration" in medians:
            medians[OTHER] = max(0.0, medians["iteration"] - phases_ms)
        return medians

    @property
    def ends(self) -> list[dict[str, Any]]:
        """The figures of each optimizer of the first rank at the end."""
        return self.logs[0].of_kind("end") if self.logs else []

    @property
    def policy(self) -> str:
        """The policy that ran, which `static` has chosen."""
        texts = {end["policy"] for end in self.ends if end["policy"]}
        return ", ".join(sorted(texts)) or self.name

    @property
    def plans(self) -> list[Any]:
        """The counts of each optimizer's last plan, of all ranks."""
        ends = [end for log in self.logs for end in log.of_kind("end")]
        return [end.get("plan") for end in ends]

    def bits(self, kind: str) -> list[str]:
        """Return the bits of the events of a kind, of all ranks."""
        return [str(bits) for log in self.logs for bits in log.values(kind)]

    @property
    def failures(self) -> list[str]:
        """Why policies have no plan."""
        return [
            str(text) for log in self.logs for text in log.values("failed", "reason")
        ]

    def last_output(self) -> str:
        """Return the last lines that the job has printed."""
        lines = self.output.read_text(errors="replace").splitlines()
        lines = [line for line in lines if line.strip()]
        return "\n".join(lines[-_LAST_LINES:])


class JobRuns:
    """Runs a job several times, each in a copy of its folder.

    Attributes:
        is_in_place: Whether the folder was too large to copy.
    """

    def __init__(self, words: Sequence[str], folder: Path, options: RunOptions) -> None:
        self.words = list(words)
        self.folder = folder
        self.options = options
        self.is_in_place = False

    def run(self, name: str, **options: Any) -> JobRun:
        """Run the job once.

        Raises UserError if it fails, KeyboardInterrupt if an interrupt has ended it.
        """
        trace = self.folder / f"{_UNUSUAL.sub('-', name)}.ebb"
        logs = trace.with_suffix(".logs")
        logs.mkdir()
        own = replace(self.options, folder=str(logs), **options)
        home = Path.cwd()
        job = RecordedCommand(self.words, trace, Options())
        variables = {RUN: own.text(), **_SWITCHES}
        with private_copy(home) as copy, chdir(copy or home), variables_set(variables):
            self.is_in_place = copy is None
            code = _wait(BackgroundJob(job))
        if code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        run = JobRun(
            name,
            read_logs(logs),
            trace if trace.exists() else None,
            trace.with_suffix(".log"),
        )
        if code:
            raise UserError(
                f"the job failed under {name} (exit code {code}); its last lines:\n"
                f"{run.last_output()}"
            )
        return run


def _wait(job: BackgroundJob) -> int:
    while not job.is_finished():
        time.sleep(_POLL_S)
    return job.exit_code()
