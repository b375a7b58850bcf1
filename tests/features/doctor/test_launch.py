"""The launch line: masks of ranks on invented hosts, and the line itself on this
one."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import UserError
from ebbtide.features.doctor.host import this_host
from ebbtide.features.doctor.launch import launch_line, rank_bindings
from ebbtide.numa.topology import cpus_text
from tests.conftest import run_process
from tests.features.doctor.hosts import NODES, card, make_host

TORCHRUN = ("torchrun", "--nproc-per-node", "4", "train.py")


def masks(host: Any) -> list[str]:
    return [cpus_text(binding.cpus) for binding in rank_bindings(host)]


@pytest.mark.parametrize(
    ("nodes", "homes", "ranks", "expected"),
    [
        (1, [0] * 4, 4, ["0-3", "4-7", "8-11", "12-15"]),
        (2, [0, 0, 1, 1], 4, ["0-7", "8-15", "16-23", "24-31"]),
        (2, [1, 1, 0, 0], 4, ["16-23", "24-31", "0-7", "8-15"]),
        (2, [1, 0, 0, 0], 4, ["16-31", "0-4", "5-9", "10-15"]),
        (2, [None] * 4, 4, ["0-7", "8-15", "16-23", "24-31"]),
        (8, list(range(8)), 8, [f"{4 * node}-{4 * node + 3}" for node in range(8)]),
        (
            8,
            [3, 3, 1, 1, 7, 7, 5, 5],
            8,
            ["12-13", "14-15", "4-5", "6-7", "28-29", "30-31", "20-21", "22-23"],
        ),
        (1, [], 1, ["0-15"]),
    ],
)
def test_rank_bindings__are_shares_of_the_gpus_node(
    tmp_path: Path, nodes: int, homes: list[int | None], ranks: int, expected: list[str]
) -> None:
    cards = [card(number, node) for number, node in enumerate(homes)]
    host = make_host(
        tmp_path,
        ("torchrun", "--nproc-per-node", str(ranks), "train.py"),
        NODES[nodes],
        cards,
    )
    assert masks(host) == expected
    assert [binding.threads for binding in rank_bindings(host)] == [
        len(b.cpus) for b in rank_bindings(host)
    ]


def test_rank_bindings__keep_threads_of_a_core_together_and_within_the_quota(
    tmp_path: Path,
) -> None:
    files: dict[str, Any] = {
        f"sys__devices__system__cpu__cpu{cpu}__topology__thread_siblings_list": (
            f"{cpu % 8},{cpu % 8 + 8}"
        )
        for cpu in range(16)
    }
    files |= {"proc__self__cgroup": "0::/", "sys__fs__cgroup__cpu.max": "800000 100000"}
    host = make_host(tmp_path, TORCHRUN, **files)
    assert masks(host) == ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]
    assert {binding.threads for binding in rank_bindings(host)} == {1}


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (TORCHRUN, "python train.py"),
        (
            (
                "X=a b",
                "python",
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node=4",
                "-m",
                "job",
            ),
            "python -m job",
        ),
        (
            (
                "accelerate",
                "launch",
                "--multi_gpu",
                "--num_processes",
                "4",
                "train.py",
                "--lr",
                "3",
            ),
            "python train.py --lr 3",
        ),
        (("deepspeed", "--num_gpus", "4", "--no_python", "run.sh"), "run.sh"),
    ],
)
def test_launch_line__starts_the_program_by_a_shell(
    tmp_path: Path, command: Any, program: str
) -> None:
    line = launch_line(make_host(tmp_path, command))
    words = shlex.split(line)
    shell = words.index("bash")
    assert shlex.join(words[shell + 4 :]) == program
    assert words[shell + 1] == "-c"
    assert ("X=a b" in words) == ("X=a b" in command)
    assert "OMP_NUM_THREADS=4" in words


def test_launch_line__binds_a_single_rank_and_refuses_unknown_launchers(
    tmp_path: Path,
) -> None:
    cards = [card(0, 1)]
    line = launch_line(make_host(tmp_path, ("python", "train.py"), NODES[2], cards))
    assert line.startswith("OMP_NUM_THREADS=16 ")
    assert "16-31" in line
    assert line.endswith(" python train.py")
    with pytest.raises(UserError, match="starts nothing"):
        make_host(tmp_path / "b", ("A=1",))
    with pytest.raises(UserError, match="cannot be bound"):
        launch_line(
            make_host(tmp_path / "c", ("./job",), environment={"LOCAL_WORLD_SIZE": "4"})
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun --nproc-per-node 2",
        pytest.param(
            "deepspeed --num_gpus 2 --master_port 29611", marks=pytest.mark.slow
        ),
    ],
)
def test_launch_line__runs_here(tmp_path: Path, launcher: str) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    script = tmp_path / "job.py"
    script.write_text(
        "import json, os, sys\n"
        "facts = sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'], "
        "sys.argv[1:3]\n"
        f"json.dump(facts, open(r'{tmp_path}/' + os.environ['LOCAL_RANK'], 'w'))\n"
    )
    host = this_host(shlex.split(f"{launcher} {script} --name 'a b'"))
    line = launch_line(host)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run = run_process(["bash", "-c", line], env={**os.environ, "PATH": path})
    assert run.returncode == 0, run.stderr
    results = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert [cpus for cpus, *_ in results] == [
        sorted(binding.cpus) for binding in rank_bindings(host)
    ]
    assert [rest for _, *rest in results] == [
        [str(rank_bindings(host)[0].threads), ["--name", "a b"]]
    ] * 2
