"""Folder of the C++ extensions that DeepSpeed compiles for the benchmarks."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def use_own_extensions() -> None:
    """Direct torch in this process and its children to a directory of this environment,
    which the tests share.

    In the user's directory a `lock` file that a killed process left behind would make
    them wait without a limit. Another version of ninja than that of this environment
    would compile everything again.
    """
    os.environ["PATH"] = os.pathsep.join(
        (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
    )
    os.environ.setdefault(
        "TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions")
    )
