"""Show what a change alters in the outputs of ebbtide.

    python benchmarks/same_output.py [--scope quick|whole] [--only TEXT] [--part I/N]
    python benchmarks/same_output.py --store [--scope quick|whole]

The first makes each output (`output_cases.py`: commands as screens and as JSON, plots as drawing commands, plans with
the times of their operations, and bits of training jobs) and compares its digest with that in `goldens/`. Where
digests differ and the values of the named commit are in `.goldens/`, it prints each path that differs: `-` it is gone,
`+` it is new, `~` its value is another one; numbers may differ by a relative 1e-12. It ends with status 1 if anything
differs. The second stores digests and values of the present code.

Values of the commit that `goldens/` names: check it out, and run the second there. Bits of training jobs depend on
the kind of CPU and the release of torch: they are compared where both are those of the digests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GOLDENS, VALUES = ROOT / "benchmarks" / "goldens", ROOT / ".goldens"
TOLERANCE = 1e-12


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


def parsed(text: str) -> Any:
    """Return the value of an output: JSON, or the lines of a picture."""
    return text.splitlines() if text.startswith("<") else json.loads(text)


def digest(text: str) -> str:
    """Return the digest of an output."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def machine() -> str:
    """Return what bits of training jobs depend on."""
    import torch

    return f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def compare(name: str, text: str, golden: str | None, values: Path) -> list[str]:
    """Return a line for each difference of an output from its golden one."""
    if golden is None:
        return [f"+ {name}"]
    if digest(text) == golden:
        return []
    stored = values / name
    if not stored.exists():
        return [f"~ {name}: its digest differs, and there are no values to compare with"]
    return list(differences(parsed(stored.read_text()), parsed(text), name))


def commit() -> str:
    """Return the commit that is checked out."""
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Compare outputs with the golden ones, or store them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scope", choices=("quick", "whole"), default="quick")
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--part", default="1/1")
    options = parser.parse_args()
    # Screens have the same width everywhere, and pictures the same names of their elements.
    os.environ |= {"COLUMNS": "80", "NO_COLOR": "1"}
    os.chdir(ROOT)
    from output_cases import SCOPES, cases

    part, parts = map(int, options.part.split("/"))
    chosen = (case for case in cases(SCOPES[options.scope]) if options.only in case.name)
    file = GOLDENS / f"{options.scope}.json"
    golden = json.loads(file.read_text()) if file.exists() else {"commit": commit(), "machine": machine(), "digests": {}}
    values = VALUES / golden["commit"][:12]
    if options.store:
        golden = {"commit": commit(), "machine": machine(), "digests": {}}
        values = VALUES / golden["commit"][:12]
        values.mkdir(parents=True, exist_ok=True)
    is_comparable = golden["machine"] == machine()
    count, lines, start = 0, [], time.perf_counter()
    for case in islice(chosen, part - 1, None, parts):
        if case.name.startswith("job-") and not is_comparable:
            continue
        text, count = case.make(), count + 1
        if options.store:
            golden["digests"][case.name] = digest(text)
            (values / case.name).write_text(text)
            continue
        for line in compare(case.name, text, golden["digests"].get(case.name), values):
            print(line, flush=True)
            lines.append(line)
    if options.store:
        file.write_text(json.dumps(golden, indent=0) + "\n")
    print(f"{count} outputs, {len(lines)} differences, {time.perf_counter() - start:.0f} s")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
