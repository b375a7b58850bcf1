"""Show what a change alters in the outputs of ebbtide.

    python benchmarks/same_output.py [--scope quick|whole] [--only TEXT]
    python benchmarks/same_output.py --store [--scope quick|whole]

The first makes each output (`output_cases.py`: commands as screens and as JSON, plots
as drawing commands, plans with the times of their operations, and bits of training
jobs) and compares its digest with that in `goldens/`. Where digests differ and the
values of the named commit are in `.goldens/`, it prints each path that differs: `-` it
is gone, `+` it is new, `~` its value is another one; numbers may differ by a relative
1e-12. It ends with status 1 if anything differs. The second stores digests and values
of the present code.

Values of the commit that `goldens/` names: check it out, and run the second there. Bits
of training jobs depend on the kind of CPU and the release of torch: they are compared
where both are those of the digests.
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
from collections.abc import Iterable, Iterator
from itertools import chain
from multiprocessing import Pool
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
        return [
            f"~ {name}: its digest differs, and there are no values to compare with"
        ]
    return list(differences(parsed(stored.read_text()), parsed(text), name))


def commit() -> str:
    """Return the commit that is checked out."""
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()


def make(case: Any) -> tuple[str, str]:
    """Return the name and the text of an output."""
    return case.name, case.make()


def main() -> int:
    """Compare outputs with the golden ones, or store them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scope", choices=("quick", "whole"), default="quick")
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    # Screens have the same width everywhere.
    os.environ |= {"COLUMNS": "80", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    os.chdir(ROOT)
    from output_cases import SCOPES, cases

    if options.store and options.only:
        parser.error("--store stores all outputs of a scope: leave out --only")
    file, start = GOLDENS / f"{options.scope}.json", time.perf_counter()
    golden = {"commit": commit(), "machine": machine(), "digests": {}}
    if not options.store:
        if not file.exists():
            parser.error(
                "no golden outputs of this scope are stored: run with --store --scope "
                f"{options.scope} first"
            )
        golden = json.loads(file.read_text())
    values = VALUES / golden["commit"][:12]
    chosen = [
        case for case in cases(SCOPES[options.scope]) if options.only in case.name
    ]
    if golden["machine"] != machine():
        print(
            f"bits of jobs are those of {golden['machine']}: they are left out here, "
            f"on {machine()}"
        )
        chosen = [case for case in chosen if not case.name.startswith("job-")]
    with Pool(options.processes) as pool:
        outputs = pool.imap_unordered(make, chosen)
        if options.store:
            digests = store(outputs, values)
            file.write_text(
                json.dumps(golden | {"digests": digests}, indent=0, sort_keys=True)
                + "\n"
            )
            return 0
        differing = [
            compare(name, text, golden["digests"].get(name), values)
            for name, text in outputs
        ]
    lines = sorted(chain.from_iterable(differing))
    print(
        "\n".join(
            [
                *lines,
                f"{len(chosen)} outputs, {len(lines)} differences, "
                f"{time.perf_counter() - start:.0f} s",
            ]
        )
    )
    return int(bool(lines))


def store(outputs: Iterable[tuple[str, str]], values: Path) -> dict[str, str]:
    """Write outputs to a folder, and return their digests."""
    values.mkdir(parents=True, exist_ok=True)
    digests = {}
    for name, text in outputs:
        (values / name).write_text(text)
        digests[name] = digest(text)
    return digests


if __name__ == "__main__":
    sys.exit(main())
