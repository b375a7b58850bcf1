"""A child that a test has forked ends with that test, in whatever way it leaves it."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.conftest import run_process

TESTS = """
import os
import pytest

@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, None])
def test_that_forks(error):
    child = os.fork()
    if not child:
        if error:
            raise error
        return
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 70
"""


def test_child__that_leaves_its_test_is_ended(tmp_path: Path) -> None:
    (tmp_path / "test_fork.py").write_text(TESTS)
    # Other plugins take most of the time of a start, of which each worker has one.
    plugins = [
        "--disable-plugin-autoload",
        "-p",
        "xdist.plugin",
        "-p",
        "tests.conftest",
    ]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "-n", "1"]
    command += ["--rootdir", str(tmp_path), str(tmp_path)]
    assert "3 passed" in run_process(command, timeout_s=60).stdout
