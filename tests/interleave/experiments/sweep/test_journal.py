"""The journal of a sweep: rows survive the end of the process at any moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.errors import UserError
from ebbtide.interleave.experiments.sweep.task import Journal, journal_path


def test_journal__rows_are_on_disk_as_soon_as_they_are_added(tmp_path: Path) -> None:
    path = journal_path(tmp_path / "out.parquet")
    assert path.parent == tmp_path
    row = {"text": "a\nb [/c] ü", "number": 0.1 + 0.2, "none": None, "fits": True}
    with Journal(path) as journal:
        journal.add("a", row)
        with Journal(path) as another:
            assert another.rows() == {"a": row}
        journal.add("b", {})
    with Journal(path) as journal:
        assert journal.rows() == {"a": row, "b": {}}


@pytest.mark.parametrize("cut", range(2, 25))
def test_journal__an_incomplete_line_is_ignored_and_spoils_no_other(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "rows"
    with Journal(path) as journal:
        journal.add("a", {"n": 1})
        journal.add("b", {"n": 2})
    path.write_bytes(path.read_bytes()[:-cut])
    with Journal(path) as journal:
        assert journal.rows() == {"a": {"n": 1}}
        journal.add("c", {"n": 3})
        assert journal.rows() == {"a": {"n": 1}, "c": {"n": 3}}


def test_journal__lines_that_are_not_rows_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b'[]\n\xff\xfe\n{"key": 1}\n{"key": "a", "row": 3}\n{"row": {}}\n\n{"key": "b", "row": {}}\n')
    with Journal(path) as journal:
        assert journal.rows() == {"b": {}}


def test_journal__no_file_remains_if_it_is_deleted_or_empty(tmp_path: Path) -> None:
    with Journal(tmp_path / "rows"):
        pass
    assert list(tmp_path.iterdir()) == []
    with Journal(tmp_path / "rows") as journal:
        journal.add("a", {})
        journal.delete()
    assert list(tmp_path.iterdir()) == []


def test_journal__an_error_to_write_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*rows: No such file"), Journal(tmp_path / "nowhere" / "rows"):
        pass
