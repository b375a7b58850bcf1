"""Drives torch's optimizers in the process of the tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.features.run.driver.install import install_driver
from ebbtide.features.run.options import RunOptions

Drive = Callable[..., list[str]]


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    """Return a function that drives optimizers from now on, and returns their notes.

    What it drove before is driven no more.
    """
    ends: list[Callable[[], None]] = []

    def start(policy: str = "zero-offload", **options: Any) -> list[str]:
        while ends:
            ends.pop()()
        notes: list[str] = []
        run = RunOptions(folder=str(tmp_path), policy=policy, **options)
        ends.append(install_driver(run, notes.append))
        return notes

    yield start
    while ends:
        ends.pop()()


@pytest.fixture
def events(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that reads the events that were logged."""

    def read() -> list[dict[str, Any]]:
        paths = sorted(tmp_path.glob("*.jsonl"))
        lines = [line for path in paths for line in path.read_text().splitlines()]
        return [json.loads(line) for line in lines]

    return read
