"""Imports modules of `benchmarks/gpu`, and looks whether processes have ended."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "gpu"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return a function that imports a module of benchmarks/gpu or of its steps."""
    monkeypatch.syspath_prepend(GPU / "steps")
    monkeypatch.syspath_prepend(GPU)
    return importlib.import_module


def ended(pid: int) -> bool:
    """Return whether a process has ended within two seconds, collected by its parent or
    not."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False
