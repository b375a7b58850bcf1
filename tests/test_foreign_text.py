"""Text from files of others never controls a terminal."""

from __future__ import annotations

from ebbtide.foreign_text import masked, printable, printable_line

HOSTILE = "k\x1b[2J\x1b]0;owned\x07 \x9b31m\r\u2028\u202ename\n\tend é 核"


def test_printable__shows_escapes_of_control_characters() -> None:
    assert printable(HOSTILE) == "k\\x1b[2J\\x1b]0;owned\\x07 \\x9b31m\\r\\u2028\\u202ename\n\tend é 核"
    assert printable_line(HOSTILE).endswith("\\u202ename  end é 核")
    assert "\n" not in printable_line(HOSTILE)
    assert len(masked(HOSTILE)) == len(HOSTILE)
    assert not set(masked(HOSTILE)) & set("\x1b\x9b\r\x07\u202e")
