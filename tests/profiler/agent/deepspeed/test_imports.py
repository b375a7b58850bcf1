"""Being told of an import leaves the import as it is."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.profiler.agent.imports import when_imported


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module inside a package that can be imported; both are forgotten afterwards."""
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


def test_a_module_is_told_once_it_is_whole(package: str) -> None:
    told: list[Any] = []
    when_imported(package, lambda module: told.append(module.LEGS))
    assert told == []
    module = importlib.import_module(package)
    assert told == [8]
    assert "exec_module" not in vars(module.__spec__.loader)
    importlib.reload(module)
    assert told == [8]


def test_a_module_that_is_there_is_told_at_once(package: str) -> None:
    told: list[Any] = []
    module = importlib.import_module(package)
    when_imported(package, told.append)
    assert told == [module]


def test_what_was_called_off_is_not_told(package: str) -> None:
    told: list[Any] = []
    when_imported(package, told.append)()
    importlib.import_module(package)
    assert told == []


def test_two_are_told_of_one_module_and_a_fault_of_one_is_no_fault_of_the_import(package: str) -> None:
    told: list[Any] = []
    when_imported(package, lambda module: 1 / 0)
    when_imported(package, told.append)
    assert [importlib.import_module(package)] == told
