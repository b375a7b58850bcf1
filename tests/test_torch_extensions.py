"""The directory of the C++ extensions that DeepSpeed compiles for tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_FIND = """
import shutil
from tests.torch_extensions import use_own_directory
use_own_directory()
print(shutil.which("ninja"))
"""


def test_use_own_directory__finds_the_ninja_of_this_environment() -> None:
    """A shell without an active environment finds another one first, which would
    compile everything again."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    run = subprocess.run(
        [sys.executable, "-c", _FIND],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == str(Path(sys.executable).with_name("ninja"))
