"""Show what a change alters in the output of the commands that read traces.

    python benchmarks/same_output.py -o FOLDER [TRACE...]
    python benchmarks/same_output.py --compare BEFORE AFTER

The first runs each command with `--json` on each trace (those of `traces/` unless some are named) and writes a file
per command and trace: its JSON with sorted keys, or the line of its error. The second prints each path that differs:
`-` it is gone, `+` it is new, `~` its value is another one. Floats may differ by a relative 1e-9. It ends with status 1
if a path is gone or has another value.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

from ebbtide.cli import run

ROOT = Path(__file__).parents[1]
MACHINE = "h100-80gb-sxm-published"
# Name of the output -> words of the command, where T is the trace and NEXT the trace after it.
COMMANDS = {
    "summary": "summary T",
    "windows": "windows T",
    "windows-4GiB": "windows T --min-bytes 4GiB",
    "memory": "memory T",
    "memory-peak": "memory T --at peak",
    "link": "link T",
    "steps": "steps T --subgroups",
    "iterations": "iterations T",
    "iterations-by-rank": "iterations T --by-rank",
    "activity": "activity T",
    "findings": "findings T",
    "diff": "diff T NEXT",
    "replay": f"replay T --machine {MACHINE} --explain",
    "recommend-own-machine": "replay T --recommend",
    "recommend": f"replay T --machine {MACHINE} --recommend",
    "plan": "plan T --machine h100-80gb a100-40gb-pcie",
}
TOLERANCE = 1e-9


def output_of(words: list[str]) -> str:
    """Return the JSON of a command with sorted keys, or its status and the last line of its error."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr):
        status = run([*words, "--json"])
    if status:
        return json.dumps({"status": status, "error": stderr.getvalue().strip().rpartition("\n")[2]}, indent=1)
    return json.dumps(json.loads(stdout.getvalue()), indent=1, sort_keys=True)


def write_outputs(traces: list[str], folder: Path) -> None:
    """Write the output of each command for each trace to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for trace, after in pairwise([*traces, traces[0]]):
        start = time.perf_counter()
        for name, command in COMMANDS.items():
            words = [{"T": trace, "NEXT": after}.get(word, word) for word in command.split()]
            (folder / f"{Path(trace).stem}.{name}.json").write_text(output_of(words) + "\n")
        print(f"{trace}: {time.perf_counter() - start:.1f} s", flush=True)


def differences(before: Any, after: Any, path: str) -> Iterator[str]:
    """Yield a line for each path whose value differs."""
    if isinstance(before, list) and isinstance(after, list):
        before, after = dict(enumerate(before)), dict(enumerate(after))
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            if key not in before or key not in after:
                yield f"{'-' if key in before else '+'} {path}.{key}"
            else:
                yield from differences(before[key], after[key], f"{path}.{key}")
    elif isinstance(before, float) and isinstance(after, int | float):
        if not math.isclose(before, after, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            yield f"~ {path}: {before!r} -> {after!r}"
    elif before != after:
        yield f"~ {path}: {before!r} -> {after!r}"


def compare(before: Path, after: Path) -> int:
    """Print the differences of two folders; return 1 if a path of the first is gone or has another value."""
    folders = [
        {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")} for folder in (before, after)
    ]
    lines = list(differences(*folders, ""))
    print("\n".join([*lines, f"{len(lines)} paths differ in {len(folders[0])} outputs"]))
    return int(any(not line.startswith("+") for line in lines))


def main() -> int:
    """Write outputs, or compare two folders of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    arguments = parser.parse_args()
    if arguments.compare is not None:
        return compare(*arguments.compare)
    if arguments.output is None:
        parser.error("name a folder with -o, or two with --compare")
    output = arguments.output.absolute()
    # Outputs name their traces: relative, so that folders of two checkouts can be compared.
    os.chdir(ROOT)
    write_outputs(arguments.traces or sorted(f"traces/{path.name}" for path in Path("traces").glob("*.ebb")), output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
