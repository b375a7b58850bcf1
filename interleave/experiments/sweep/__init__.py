"""Many workloads on many machines, under many policies, at many sizes."""

from __future__ import annotations

from ebbtide.interleave.experiments.sweep.best import BASELINE, Best, best_of
from ebbtide.interleave.experiments.sweep.inputs import find_pairs
from ebbtide.interleave.experiments.sweep.journal import Journal, journal_path
from ebbtide.interleave.experiments.sweep.run import Workers, combinations, rows_of
from ebbtide.interleave.experiments.sweep.scenario import Scenario
from ebbtide.interleave.experiments.sweep.table import SCHEMA, write_rows
from ebbtide.interleave.experiments.sweep.task import Row, Task, question
from ebbtide.interleave.experiments.sweep.workers import on_cluster, on_this_machine

__all__ = [
    "BASELINE",
    "SCHEMA",
    "Best",
    "Journal",
    "Row",
    "Scenario",
    "Task",
    "Workers",
    "best_of",
    "combinations",
    "find_pairs",
    "journal_path",
    "on_cluster",
    "on_this_machine",
    "question",
    "rows_of",
    "write_rows",
]
