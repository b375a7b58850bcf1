"""Reads the code blocks of a page of the documentation, and compares output.

Blocks are console blocks, whose lines with `$` are commands and whose other lines are
their output; Python blocks; and blocks without a language right after a Python block,
which are what that printed. In output a line of dots stands for any lines, and blank
lines do not count. Comments in the source of a page, which readers do not see, say what
is special:

    <!-- not run: REASON -->   The next block is not run.
    <!-- slow -->              The next block is left out of quick runs.
    <!-- exit codes: 1 0 -->   The exit codes of the commands of the next block, where one is not 0.
    <!-- numbers vary -->      The output of the next block is compared without its numbers.
    <!-- file: NAME -->        The next block is saved as this file, and is not run.
    <!-- setup [slow] ... -->  Python lines, or lines with `$`, that run here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^ *```$|^<!-- "
    r"?(?P<comment>.*?) ?-->$",
    re.MULTILINE | re.DOTALL,
)
_MARK = re.compile(
    r"(not run|file|slow|exit codes|numbers vary|setup slow|setup)(?::|\b)(.*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of code on a page.

    Attributes:
        kind: What it is; `output` is what the Python block before it printed.
        code: Its lines.
        line: Number of its first line on the page, from 1.
        not_run: Why it is not run; None: it is.
        file: Name of the file that it is saved as; None: it is not.
        exit_codes: Those of its commands, in order; the rest have 0.
        slow: Whether it is left out of quick runs.
        numbers_vary: Whether output is compared without its numbers.
    """

    kind: Literal["console", "python", "output", "setup"]
    code: str
    line: int
    not_run: str | None = None
    file: str | None = None
    exit_codes: tuple[int, ...] = ()
    slow: bool = False
    numbers_vary: bool = False

    @property
    def is_run(self) -> bool:
        """Whether it is run, at least in runs that are not quick."""
        return self.not_run is None and self.file is None


def read_blocks(markdown: str) -> list[Block]:
    """Return the blocks of a page that are code or output of code.

    Raises:
        ValueError: A comment for a block is not followed by one, or a block is not run
            for no reason.
    """
    blocks: list[Block] = []
    marks: dict[str, str] = {}
    previous_end = 0
    for match in _BLOCK.finditer(markdown):
        line = markdown.count("\n", 0, match.start()) + 1
        between = markdown[previous_end : match.start()]
        previous_end = match.end()
        if match["comment"] is not None:
            mark = _MARK.fullmatch(match["comment"])
            if mark is None:
                continue
            if mark[1].startswith("setup"):
                blocks.append(
                    Block("setup", mark[2].strip("\n"), line, slow="slow" in mark[1])
                )
            else:
                marks[mark[1]] = mark[2].strip()
            continue
        if marks and between.strip():
            raise ValueError(f"line {line}: {marks} stands apart from its block")
        kind = _kind(match["language"], blocks, between)
        if kind is not None:
            indent = len(match["indent"])
            code = "\n".join(text[indent:] for text in match["code"].splitlines())
            if marks.get("not run") == "":
                raise ValueError(f"line {line}: no reason why the block is not run")
            exit_codes = tuple(map(int, marks.get("exit codes", "").split()))
            slow = "slow" in marks or (kind == "output" and blocks[-1].slow)
            flags = {"slow": slow, "numbers_vary": "numbers vary" in marks}
            blocks.append(
                Block(
                    kind,
                    code,
                    line,
                    marks.get("not run"),
                    marks.get("file"),
                    exit_codes,
                    **flags,
                )
            )
        marks = {}
    return blocks


def _kind(
    language: str, blocks: list[Block], between: str
) -> Literal["console", "python", "output"] | None:
    if language in ("console", "bash"):
        return "console"
    if language == "python":
        return "python"
    after_code = (
        blocks
        and blocks[-1].kind == "python"
        and blocks[-1].is_run
        and not between.strip()
    )
    return "output" if after_code and not language else None


def matches(expected: str, actual: str, numbers_vary: bool = False) -> bool:
    """Return whether output is as expected, where a line of dots stands for any lines
    and blank lines do not count."""
    pattern = ""
    for line in compared_lines(expected, numbers_vary):
        pattern += r"(?:.*\n)*?" if line.strip() == "..." else re.escape(line) + "\n"
    return (
        re.fullmatch(
            pattern,
            "".join(line + "\n" for line in compared_lines(actual, numbers_vary)),
        )
        is not None
    )


def compared_lines(text: str, numbers_vary: bool) -> list[str]:
    """Return the lines of an output that count, without spaces at their ends."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if numbers_vary:
        # Columns are as wide as their numbers.
        lines = [
            re.sub(r" +|─+", " ", re.sub(r"\d[\d,.]*", "0", line)).strip()
            for line in lines
        ]
    return lines
