"""Traces of the published logs, each imported once per module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ebbtide.features.importers.importer import Hardware
from ebbtide.features.importers.load import import_trace
from ebbtide.profiler.trace import Trace
from tests.features.deepspeed.log_importer.published_logs import monitor_of


@pytest.fixture(scope="module")
def import_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Trace]:
    """Return a function that imports a log by itself."""
    return _cached(tmp_path_factory.mktemp("alone"), lambda log: [log])


@pytest.fixture(scope="module")
def import_with_monitor(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Path], Trace]:
    """Return a function that imports a log with its monitor file."""
    return _cached(
        tmp_path_factory.mktemp("monitored"), lambda log: [monitor_of(log), log]
    )


def _cached(
    folder: Path, files: Callable[[Path], list[Path]]
) -> Callable[[Path], Trace]:
    traces: dict[Path, Trace] = {}

    def get(log: Path) -> Trace:
        if log not in traces:
            traces[log] = import_trace(
                files(log),
                folder / f"{len(traces)}.ebb",
                hardware=Hardware(link=(5, 16)),
            )
        return traces[log]

    return get
