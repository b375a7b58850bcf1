"""`ebbtide profile` on the example, end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ebbtide, slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SMALL = ("--layers", "1", "--width", "32", "--context", "32", "--batch", "2")


@pytest.mark.parametrize(
    "placeholder", slow(["{hostt}", "{rank}", "{}"], but=["{hostt}"])
)
def test_profile__refuses_an_unknown_placeholder_before_the_job_starts(
    placeholder: str, tmp_path: Path
) -> None:
    run = ebbtide(
        "profile",
        "-o",
        f"run-{placeholder}.ebb",
        "--",
        "touch",
        "started",
        cwd=tmp_path,
    )
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert (
        f"unknown placeholder {placeholder} in -o run-{placeholder}.ebb; known: "
        f"{{host}}" in line
    )
    assert list(tmp_path.iterdir()) == []
