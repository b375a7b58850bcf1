"""Callbacks on imports, which leave the import itself unchanged."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.profiler.agent.patches import when_imported


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make an importable module inside a package; yield its name, and forget both
    afterwards."""
    folder = tmp_path / "tidepool"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "crab.py").write_text("LEGS = 8\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield "tidepool.crab"
    assert sys.meta_path == finders
    for name in ("tidepool.crab", "tidepool"):
        sys.modules.pop(name, None)


def test_when_imported__calls_back_after_the_import(package: str) -> None:
    modules: list[Any] = []
    when_imported(package, lambda module: modules.append(module.LEGS))
    assert modules == []
    module = importlib.import_module(package)
    assert modules == [8]
    assert "exec_module" not in vars(module.__spec__.loader)
    importlib.reload(module)
    assert modules == [8]


def test_when_imported__calls_back_at_once_for_an_imported_module(package: str) -> None:
    modules: list[Any] = []
    module = importlib.import_module(package)
    when_imported(package, modules.append)
    assert modules == [module]


def test_when_imported__can_be_cancelled(package: str) -> None:
    modules: list[Any] = []
    when_imported(package, modules.append)()
    importlib.import_module(package)
    assert modules == []


def test_when_imported__isolates_a_callback_that_raises(package: str) -> None:
    modules: list[Any] = []
    when_imported(package, lambda module: 1 / 0)
    when_imported(package, modules.append)
    assert [importlib.import_module(package)] == modules
