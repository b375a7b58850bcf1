"""The backends of versions of torch, and the sink that knows none of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ebbtide.features.dryrun
from ebbtide.features.dryrun.backends import BACKENDS

FOLDER = Path(ebbtide.features.dryrun.__file__).parent


def modules_without_torch() -> list[str]:
    """Return the names of all modules of the feature but those of the backends."""
    files = [path.relative_to(FOLDER) for path in FOLDER.rglob("*.py")]
    return [
        ".".join(("ebbtide.features.dryrun", *path.with_suffix("").parts))
        for path in files
        if path.parts[0] not in BACKENDS.values() and path.name != "__main__.py"
    ]


def test_modules_beside_the_backends__need_no_torch() -> None:
    program = (
        "import sys, importlib\n"
        "sys.modules['torch'] = None\n"
        f"for name in {modules_without_torch()}: importlib.import_module(name)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
