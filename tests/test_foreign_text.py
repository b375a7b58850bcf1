"""Text from files of others never controls a terminal."""

from __future__ import annotations

import re
from pathlib import Path

from ebbtide.foreign_text import masked, printable, printable_line
from tests.conftest import ebbtide_in_process
from tests.features.importers.kineto.made_kineto import (
    iteration,
    launched,
    span,
    write_trace,
)

# All control characters but line breaks, and those that separate lines or reorder text.
UNSAFE = re.compile("[^\n -~\xa0-\u2027\u202f-\uffff]")
HOSTILE = "k\x1b[2J\x1b]0;owned\x07 \x9b31m\r\u2028\u202ename\n\tend é 核"


def test_printable__shows_escapes_of_control_characters() -> None:
    assert (
        printable(HOSTILE)
        == "k\\x1b[2J\\x1b]0;owned\\x07 \\x9b31m\\r\\u2028\\u202ename\n\tend é 核"
    )
    assert printable_line(HOSTILE).endswith("\\u202ename  end é 核")
    assert "\n" not in printable_line(HOSTILE)
    assert len(masked(HOSTILE)) == len(HOSTILE)
    assert not set(masked(HOSTILE)) & set("\x1b\x9b\r\x07\u202e")


def test_commands__print_no_control_characters_of_imported_names(
    tmp_path: Path,
) -> None:
    operator = span(HOSTILE, 11, 19, "cpu_op")
    work = [
        *launched(12, 20, 29, 1, name=HOSTILE),
        *launched(41, 42, 49, 2, name="ncclKernel" + HOSTILE),
    ]
    source = write_trace(
        tmp_path / "two\nlines\x1b[2J.json", [*iteration(1, 0), operator, *work]
    )
    for name in ("a", "b"):
        run = ebbtide_in_process("import", source, "-o", tmp_path / f"{name}.ebb")
        assert run.returncode == 0
        assert all(line.startswith("ebbtide: ") for line in run.stderr.splitlines())
    a, b = tmp_path / "a.ebb", tmp_path / "b.ebb"
    activity = ("summary", a, "--by", "activity")
    others = (
        ("summary", a),
        ("findings", a),
        ("diff", a, b, "-v"),
        ("diff", a, b, "--by", "operator"),
    )
    for command in (activity, (*activity, "--critical-path"), *others):
        run = ebbtide_in_process(*command)
        assert run.returncode == 0
        assert not UNSAFE.search(run.stdout + run.stderr)
    assert r"\x1b]0;owned" in ebbtide_in_process(*activity).stdout
