"""The engine touches device memory only by copies and updates of its streams."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import examples

ROOT = Path(__file__).parents[4]

PLANS = examples(10, by_default=1)


@pytest.mark.slow
def test_engine__touches_device_memory_only_by_its_streams() -> None:
    # In a process of its own, which a stray access would end.
    command = [
        sys.executable,
        "-m",
        "tests.interleave.engine.devices.guarded",
        str(PLANS),
        "1",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
