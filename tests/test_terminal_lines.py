"""Lines of a terminal's width, and notes on stderr."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.cli.printing import on_stderr, output_width
from ebbtide.terminal_lines import print_note, wrapped

NOTE = (
    "the log has no times of day: phases are placed one after another, and gaps are "
    "not known"
)
END = "end of what was printed"
PATH = f"trace: /{'long/' * 20}run.ebb"


@pytest.fixture
def terminal() -> Iterator[TextIO]:
    """Return a stream to a terminal of 60 columns, which can be read with
    `printed_on`."""
    primary, secondary = os.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with os.fdopen(primary, "rb"), os.fdopen(secondary, "w") as stream:
        stream.primary = primary  # type: ignore[attr-defined]
        yield stream


def printed_on(terminal: TextIO) -> list[str]:
    """Read all lines that were printed: a read returns only what has come through the
    terminal by then."""
    print(END, file=terminal, flush=True)
    printed = ""
    while END not in printed:
        printed += os.read(terminal.primary, 65536).decode()  # type: ignore[attr-defined]
    return printed.split("\r\n")[:-2]


@given(
    st.lists(
        st.sampled_from(
            ["3,812 ms", "58 GiB", "of", "the", "--recommend", "7 %", "iteration"]
        ),
        min_size=1,
    )
)
def test_wrapped__keeps_words_and_numbers_with_units(words: list[str]) -> None:
    printed = wrapped("  - " + " ".join(words), 24)
    assert all(len(line) <= 24 for line in printed)
    assert " ".join(line.strip() for line in printed) == "- " + " ".join(words)
    assert not any(line.endswith(("3,812", "58", "7")) for line in printed)
    assert all(line.startswith("    ") for line in printed[1:])


def test_print_note__is_as_wide_as_the_terminal(
    terminal: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    print_note(NOTE)
    lines = printed_on(terminal)
    assert len(lines) == 2
    assert max(map(len, lines)) <= 60
    assert lines[1].startswith(" " * len("ebbtide: "))
    assert " ".join(line.strip() for line in lines) == f"ebbtide: {NOTE}"


def test_print_note__keeps_paths_whole(
    terminal: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    print_note(PATH)
    assert PATH.split()[1] in "\n".join(printed_on(terminal))


def test_print_note__is_one_line_in_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_note(NOTE)
    assert capsys.readouterr().err == f"ebbtide: {NOTE}\n"
    monkeypatch.setenv("COLUMNS", "80")
    print_note(NOTE)
    assert capsys.readouterr().err.count("\n") == 2


def test_print_note__takes_a_closed_or_replaced_stderr(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Log:
        text = ""

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

    log = Log()
    monkeypatch.setattr(sys, "stderr", log)
    print_note(NOTE)
    assert log.text == f"ebbtide: {NOTE}\n"
    monkeypatch.setattr(sys, "stderr", None)
    print_note(NOTE)


def test_output_width__is_that_of_the_stream(
    terminal: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    with on_stderr():
        assert output_width() == 60
    monkeypatch.setattr(sys, "stdout", terminal)
    assert output_width() == 60
