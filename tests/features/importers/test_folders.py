"""Folders of files to import."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.features.importers.load import import_trace
from ebbtide.features.importers.source import SourceError
from tests.features.importers.test_alignment import START, kineto

MONITOR = f"timestamp,gpu,mem_used\n{START},0,1000000000\n"


def profiles(folder: Path, *names: str) -> Path:
    """Write a torch.profiler trace for each name."""
    folder.mkdir(exist_ok=True)
    for name in names:
        kineto(folder / name, START)
    return folder


@pytest.mark.slow
def test_expand_folders__imports_the_files_of_all_ranks(tmp_path: Path) -> None:
    names = [f"trace-rank-{rank}.json" for rank in range(11)]
    folder = profiles(tmp_path / "run", *names)
    (folder / ".hidden.json").write_text("not read")
    trace = import_trace([folder], tmp_path / "run.ebb")
    assert trace.ranks == list(range(11))
    assert [file.file for file in trace.meta.imported] == names
    assert not [note for note in trace.notes if "name others" in note]


def test_expand_folders__notes_files_of_other_formats(tmp_path: Path) -> None:
    folder = profiles(tmp_path / "run", "rank-0.json", "rank-1.json")
    (folder / "monitor.csv").write_text(MONITOR)
    (folder / "notes.txt").write_text("lr was too high\n")
    (folder / "checkpoints").mkdir()
    (folder / "empty.log").touch()
    trace = import_trace([folder], tmp_path / "run.ebb")
    assert trace.ranks == [0, 1]
    (note,) = [note for note in trace.notes if "name others" in note]
    assert note.startswith(
        "run: the 2 files of the format kineto are imported; name others"
    )
    for name in ("monitor.csv", "notes.txt", "checkpoints", "empty.log"):
        assert name in note
    both = import_trace([folder, folder / "monitor.csv"], tmp_path / "both.ebb")
    assert set(both.memory(0)["pool"]) == {"device"}
    assert len(both.transfers(0)) == 1
    chosen = import_trace([folder], tmp_path / "chosen.ebb", format="nvml-monitor")
    assert [file.file for file in chosen.meta.imported] == ["monitor.csv"]


def test_expand_folders__refuses_folders_without_files(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".hidden").touch()
    with pytest.raises(
        SourceError, match="empty has no file to import: it contains nothing"
    ):
        import_trace([tmp_path / "empty"], tmp_path / "x.ebb")
    (tmp_path / "empty" / "notes.txt").write_text("lr was too high\n")
    with pytest.raises(
        SourceError, match=r"empty has no file to import: it contains notes\.txt"
    ):
        import_trace([tmp_path / "empty"], tmp_path / "x.ebb")
    with pytest.raises(SourceError, match="has no file of the format nsys to import"):
        import_trace(
            [profiles(tmp_path / "run", "a.json")], tmp_path / "x.ebb", format="nsys"
        )
    import_trace([tmp_path / "run"], tmp_path / "run.ebb")
    with pytest.raises(SourceError, match=r"run\.ebb is a trace already"):
        import_trace([tmp_path / "run.ebb"], tmp_path / "x.ebb")
    assert not (tmp_path / "x.ebb").exists()


def test_expand_folders__refuses_several_steps_of_one_process(tmp_path: Path) -> None:
    names = [
        f"node-1_77.{1_700_000_000_000_000_000 + n}.pt.trace.json" for n in range(3)
    ]
    folder = tmp_path / "traces"
    folder.mkdir()
    for name in [*names, "node-1_78.1700000000000000000.pt.trace.json"]:
        (folder / name).write_text('{"schemaVersion": 1, "traceEvents": []}')
    with pytest.raises(
        SourceError, match="has 3 files of the process node-1_77, one per cycle"
    ) as error:
        import_trace([folder], tmp_path / "x.ebb")
    assert all(name in str(error.value) for name in names)
    assert "\n" not in str(error.value)
