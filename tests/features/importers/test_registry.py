"""Discovery of importers in the sub-packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ebbtide.features import importers
from ebbtide.features.importers.load import find_importers, import_trace

NEW_IMPORTER = """
from ebbtide.features.importers.importer import Recognition, Stage


class DiaryImporter:
    format = "diary"
    recognition = Recognition.WORDS
    stage = Stage.JOB

    def matches(self, source):
        return source.head.startswith(b"Dear diary")

    def import_into(self, builder, sources, options):
        assert options.sources["diary"] == sources
        builder.rank(0, devices=[{"device": "cuda:0", "kind": "cuda"}]).phase("forward", 1, 2)
        return []


IMPORTERS = (DiaryImporter(),)
"""


def test_find_importers__asks_strict_importers_first() -> None:
    formats = list(find_importers())
    assert formats == [
        "nsys",
        "torch-snapshot",
        "kineto",
        "nvml-monitor",
        "megatron-log",
        "deepspeed-log",
        "steps",
    ]
    assert all(name == importer.format for name, importer in find_importers().items())


def test_import_trace__uses_an_importer_of_a_new_sub_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packages" / "diary").mkdir(parents=True)
    (tmp_path / "packages" / "diary" / "__init__.py").write_text(NEW_IMPORTER)
    monkeypatch.setattr(
        importers, "__path__", [*importers.__path__, str(tmp_path / "packages")]
    )
    monkeypatch.setitem(
        importers.FEATURE.seams["importers"], "diary", "diary:IMPORTERS"
    )
    (tmp_path / "today.txt").write_text("Dear diary, the loss went down.")
    find_importers.cache_clear()
    try:
        trace = import_trace([tmp_path / "today.txt"], tmp_path / "run.ebb")
    finally:
        find_importers.cache_clear()
        sys.modules.pop("ebbtide.features.importers.diary", None)
    assert trace.phases(0)["phase"].tolist() == ["forward"]
    assert [(file.format, file.file) for file in trace.meta.imported] == [
        ("diary", "today.txt")
    ]
