"""`ebbtide doctor`."""

from __future__ import annotations

import json
import resource
import sys

import pytest

from tests.conftest import ebbtide_in_process, run_process


def test_doctor__answers_first_and_has_the_rest_behind_v() -> None:
    short, whole = ebbtide_in_process("doctor"), ebbtide_in_process("doctor", "-v")
    assert (short.returncode, whole.returncode) == (0, 0)
    assert short.stdout.splitlines()[0].startswith(
        ("nothing here would slow", "this host would slow")
    )
    assert "logical cores for 1 rank" in whole.stdout


def test_doctor__names_faults_of_the_environment_of_a_job() -> None:
    limit = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, "
        "65536)); "
    )
    script = f"{limit}from ebbtide.cli import run; sys.exit(run(sys.argv[1:]))"
    job = ["OMP_NUM_THREADS=500", "python", "x.py"]
    run = run_process(
        [sys.executable, "-c", script, "doctor", "--strict", "--json", "--", *job]
    )
    checks = {check["name"]: check for check in json.loads(run.stdout)["checks"]}
    assert run.returncode == 1
    assert {name for name, check in checks.items() if check["state"] == "warning"} >= {
        "threads",
        "locked-memory",
    }
    assert "memlock=-1" in checks["locked-memory"]["remedy"]
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) != (65536, 65536)


def test_doctor__prints_a_launch_line_and_refuses_what_it_cannot_bind() -> None:
    printed = ebbtide_in_process(
        "doctor", "--launch", "torchrun --nproc-per-node 2 train.py"
    )
    assert printed.stdout.startswith("OMP_NUM_THREADS=")
    assert printed.stdout.rstrip().endswith("rank python train.py")
    for launch in ("", "A=1", "torchrun --nproc-per-node 2"):
        refused = ebbtide_in_process("doctor", "--launch", launch)
        assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (
            2,
            "",
            1,
        ), launch


def test_doctor__imports_no_torch() -> None:
    script = (
        "import sys; from ebbtide.cli import run; run(['doctor']); print('torch' in "
        "sys.modules, file=sys.stderr)"
    )
    assert run_process([sys.executable, "-c", script]).stderr.strip() == "False"


@pytest.mark.slow
def test_doctor__measures_here() -> None:
    run = ebbtide_in_process("doctor", "--measure", "--json")
    names = [check["name"] for check in json.loads(run.stdout)["checks"]]
    assert names[-1] in ("measured-update", "measured-copies")
