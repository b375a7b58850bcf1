"""Runs the code blocks of a page of the documentation, in order, and checks their
output.

    python -m tests.docs.run_page docs/tutorial.md FOLDER [--quick]

Commands and scripts run in FOLDER, which gets links to `traces/` and `examples/`. All
Python blocks of a page share one namespace.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from ebbtide.cli import run
from tests.docs.doc_blocks import Block, compared_lines, matches, read_blocks

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
# The terminal of the pages, whose machine has no GPU.
ENVIRONMENT = {"COLUMNS": "80", "CUDA_VISIBLE_DEVICES": ""}
HINT = (
    "A block that cannot run here needs a mark with the reason above it: see "
    "tests/docs/doc_blocks.py."
)
# Commands that start processes of their own run in one: `profile` even becomes the job.
_IN_A_PROCESS = ("profile", "dry-run", "compare", "calibrate")


class BlockError(AssertionError):
    """A block of a page does not do what the page says."""


def run_page(page: Path, folder: Path, quick: bool = False) -> int:
    """Run the blocks of a page and return how many ran.

    Args:
        page: The page.
        folder: Folder for what the blocks write.
        quick: Leave out blocks that are marked as slow.

    Raises:
        BlockError: A command fails, or an output differs.
    """
    for name in ("traces", "examples"):
        (folder / name).symlink_to(ROOT / name)
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    count = 0
    blocks = read_blocks(page.read_text())
    with chdir(folder), mock.patch.dict(os.environ, ENVIRONMENT):
        for block in blocks:
            where = f"{page}, line {block.line}"
            if block.file is not None:
                Path(block.file).parent.mkdir(parents=True, exist_ok=True)
                Path(block.file).write_text(block.code + "\n")
            elif not block.is_run or (quick and block.slow):
                continue
            elif block.kind == "output":
                _compare(where, block.code, printed, block.numbers_vary)
            elif block.kind == "console" or block.code.startswith("$"):
                _run_commands(where, block)
                count += 1
            else:
                printed = _run_python(where, block, names)
                count += 1
    return count


def _run_commands(where: str, block: Block) -> None:
    exit_codes = iter(block.exit_codes)
    for command, expected in read_commands(block.code):
        status, output = _run_command(command)
        if status != next(exit_codes, 0):
            raise BlockError(
                f"{where}: exit status {status} of {command}\n{output}\n{HINT}"
            )
        if expected.strip():
            _compare(f"{where}: {command}", expected, output, block.numbers_vary)


def read_commands(code: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a console block, each with the output below it. A block
    without `$` is all commands."""
    lines = code.splitlines()
    if not any(line.startswith("$ ") for line in lines):
        lines = ["$ " + line for line in lines]
    while lines:
        command = lines.pop(0).removeprefix("$ ")
        while command.endswith("\\"):
            command = command[:-1] + lines.pop(0).strip()
        output = []
        while lines and not lines[0].startswith("$ "):
            output.append(lines.pop(0))
        yield command, "\n".join(output)


def _run_command(command: str) -> tuple[int, str]:
    """Run a command line and return its exit status and all that it printed."""
    words = shlex.split(command, comments=True)
    if (
        words[0] == "ebbtide"
        and words[1] not in _IN_A_PROCESS
        and not set("|><;&") & set(command)
    ):
        output = io.StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            status = run(words[1:])
        return status, output.getvalue()
    folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    process = subprocess.run(
        ["bash", "-c", command],
        env=os.environ | {"PATH": folders, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_S,
        text=True,
    )
    return process.returncode, process.stdout


def _run_python(where: str, block: Block, names: dict[str, Any]) -> str:
    """Run Python code and return what it printed. Values of expressions are compared
    with the comments after them."""
    output = io.StringIO()
    with redirect_stdout(output):
        for statement in ast.parse(block.code).body:
            try:
                if isinstance(statement, ast.Expr):
                    value = eval(
                        compile(ast.Expression(statement.value), where, "eval"), names
                    )
                    _compare_value(where, statement, block.code, value)
                else:
                    exec(compile(ast.Module([statement], []), where, "exec"), names)
            except Exception as error:
                error.add_note(f"{where}: {ast.unparse(statement)[:200]}\n{HINT}")
                raise
    return output.getvalue()


def _compare_value(where: str, statement: ast.Expr, code: str, value: object) -> None:
    """Compare a value with the comment behind its expression, or with the lines of
    comments below it.

    A comment behind an expression is its value if it begins with a digit, a quote or a
    bracket; words may follow.
    """
    lines = code.splitlines()
    end = statement.end_lineno or statement.lineno
    comment = lines[end - 1][statement.end_col_offset or 0 :].partition("# ")[2]
    if comment[:1].isdigit() or comment[:1] in ("'", '"', "(", "["):
        if not comment.startswith(repr(value)):
            raise BlockError(
                f"{where}: {ast.unparse(statement)} is {value!r}, not {comment}"
            )
        return
    below = []
    while end < len(lines) and lines[end].startswith("#"):
        below.append(lines[end].removeprefix("#").removeprefix(" "))
        end += 1
    if below and not comment:
        _compare(
            f"{where}: {ast.unparse(statement)}", "\n".join(below), repr(value), False
        )


def _compare(where: str, expected: str, actual: str, numbers_vary: bool) -> None:
    if not matches(expected, actual, numbers_vary):
        lines = (compared_lines(text, numbers_vary) for text in (expected, actual))
        difference = difflib.unified_diff(*lines, "page", "output", lineterm="")
        raise BlockError(f"{where}: the output differs\n" + "\n".join(difference))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    print(f"{run_page(args.page, args.folder.resolve(), args.quick)} blocks")


if __name__ == "__main__":
    main()
