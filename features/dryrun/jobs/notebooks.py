"""Runs the code of a notebook as a script."""

import json
from pathlib import Path
from typing import Any

from ebbtide.errors import TraceError
from ebbtide.terminal_lines import print_note

SUFFIX = ".ipynb"
# Magics of cells whose code runs as without them.
_TRANSPARENT = ("%%time", "%%capture", "%%timeit")
_MAGICS = ("%", "!", "?")


def notebook_source(path: Path) -> str:
    """Return the code of a notebook, in which magics and commands of the shell do
    nothing.

    Raises:
        TraceError: It cannot be read as one.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if _is_code(cell)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path} cannot be read as a notebook") from error
    lines = [line for source in sources for line in _plain_lines(source)]
    left_out = [line for line in lines if line.lstrip().startswith("pass  # ")]
    if left_out:
        print_note(f"{len(left_out)} lines of {path} are magics, which are left out")
    return "\n".join(lines)


def run_notebook(path: Path) -> None:
    """Run a notebook."""
    code = compile(notebook_source(path), str(path), "exec")
    exec(code, {"__name__": "__main__", "display": print})


def _is_code(cell: Any) -> bool:
    return bool(cell["cell_type"] == "code")


def _plain_lines(source: str) -> list[str]:
    """Return the lines of a cell without magics."""
    lines = source.splitlines()
    first = lines[0].split()[0] if source.strip() and lines[0].strip() else ""
    if first.startswith("%%") and first not in _TRANSPARENT:
        return [f"pass  # {first}"]
    return [_plain_line(line) for line in lines]


def _plain_line(line: str) -> str:
    text = line.lstrip()
    if not text.startswith(_MAGICS):
        return line
    return f"{line[: len(line) - len(text)]}pass  # {text}"
