"""Replays many workloads on many machines under many policies, at many sizes."""

from __future__ import annotations

from ebbtide.interleave.experiments.sweep.best import BASELINE, BestPolicy, find_best
from ebbtide.interleave.experiments.sweep.inputs import find_pairs
from ebbtide.interleave.experiments.sweep.journal import Journal, journal_path
from ebbtide.interleave.experiments.sweep.run import TaskRunner, combinations, compute_rows
from ebbtide.interleave.experiments.sweep.scenario import Scenario
from ebbtide.interleave.experiments.sweep.table import SCHEMA, write_rows
from ebbtide.interleave.experiments.sweep.task import Row, Task, scenario_columns
from ebbtide.workers import run_locally, run_on_cluster

__all__ = [
    "BASELINE",
    "SCHEMA",
    "BestPolicy",
    "Journal",
    "Row",
    "Scenario",
    "Task",
    "TaskRunner",
    "combinations",
    "compute_rows",
    "find_best",
    "find_pairs",
    "journal_path",
    "run_locally",
    "run_on_cluster",
    "scenario_columns",
    "write_rows",
]
