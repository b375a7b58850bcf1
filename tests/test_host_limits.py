"""Limits of the host, read from invented files of /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ebbtide.host_limits import (
    cache_bytes,
    cores,
    local_ranks,
    memory_bytes,
    rank_cores,
)

GIB = 2**30


def host(root: Path, **files: str) -> Path:
    """Write the files of an invented host; names are their paths with `__` for a
    slash."""
    for name, text in files.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


MEMINFO = f"MemTotal:       {64 * GIB // 1024} kB\nMemFree: 1 kB"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc__meminfo": MEMINFO}, 64 * GIB),
        ({"proc__self__cgroup": "0::/"}, None),
        (
            {
                "proc__meminfo": MEMINFO,
                "proc__self__cgroup": "0::/a/b",
                "sys__fs__cgroup__a__memory.max": str(8 * GIB),
            }
            | {"sys__fs__cgroup__a__b__memory.max": "max"},
            8 * GIB,
        ),
        # Inside a container the path of the group is not mounted.
        (
            {
                "proc__meminfo": MEMINFO,
                "proc__self__cgroup": "0::/../x",
                "sys__fs__cgroup__memory.max": str(4 * GIB),
            },
            4 * GIB,
        ),
        (
            {
                "proc__meminfo": MEMINFO,
                "proc__self__cgroup": "5:cpu,cpuacct:/job\n4:memory:/job",
            }
            | {"sys__fs__cgroup__memory__job__memory.limit_in_bytes": str(16 * GIB)}
            | {"sys__fs__cgroup__memory__memory.limit_in_bytes": "9223372036854771712"},
            16 * GIB,
        ),
    ],
)
def test_memory_bytes__is_the_least_of_host_and_control_groups(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    assert memory_bytes(host(tmp_path, **files)) == expected


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc__self__cgroup": "0::/job",
            "sys__fs__cgroup__job__cpu.max": "150000 100000",
        },
        {
            "proc__self__cgroup": "3:cpu,cpuacct:/job",
            "sys__fs__cgroup__cpu__job__cpu.cfs_quota_us": "50000",
            "sys__fs__cgroup__cpu__job__cpu.cfs_period_us": "100000",
        },
    ],
)
def test_cores__a_quota_limits_them_but_never_below_one(
    tmp_path: Path, files: dict[str, str]
) -> None:
    assert cores(host(tmp_path, **files)) == 1


@pytest.mark.parametrize("quota", ["max 100000", "100000000 100000"])
def test_cores__are_those_of_the_affinity_without_a_lower_quota(
    tmp_path: Path, quota: str
) -> None:
    root = host(
        tmp_path, proc__self__cgroup="0::/", **{"sys__fs__cgroup__cpu.max": quota}
    )
    assert cores(root) == len(os.sched_getaffinity(0))


LAUNCHER_VARIABLES = (
    *(
        "LOCAL_WORLD_SIZE",
        "LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MPI_LOCALNRANKS",
        "SLURM_NODEID",
    ),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Variables of the environment without those of a launcher."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        # DeepSpeed's launcher.
        ({"LOCAL_SIZE": "8"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"MPI_LOCALNRANKS": "4"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "8"}, 8),
        ({"SLURM_TASKS_PER_NODE": "4(x2)"}, 4),
        ({"SLURM_TASKS_PER_NODE": "8(x2),3", "SLURM_NODEID": "2"}, 3),
        ({"SLURM_TASKS_PER_NODE": "8(x2),3", "SLURM_NODEID": "1"}, 8),
        # One task starts torchrun on each node.
        (
            {
                "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
                "SLURM_NTASKS_PER_NODE": "1",
                "LOCAL_WORLD_SIZE": "8",
            },
            8,
        ),
        # A step of one task in a job of eight.
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NTASKS_PER_NODE": "8"}, 1),
        ({"LOCAL_WORLD_SIZE": "", "LOCAL_SIZE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
    ],
)
def test_local_ranks__is_what_the_launcher_states(
    launched: pytest.MonkeyPatch, variables: dict[str, str], expected: int
) -> None:
    for name, value in variables.items():
        launched.setenv(name, value)
    assert local_ranks() == expected


@pytest.mark.parametrize(
    ("own", "launcher", "ranks", "expected"),
    [
        (64, 64, 8, 8),
        (64, 64, 1, 64),
        # Bound to cores of its own, or to a NUMA node that it shares.
        (8, 64, 8, 8),
        (32, 64, 8, 8),
        # The launcher was bound.
        (16, 16, 8, 2),
        (4, 64, 100, 1),
        (8, None, 4, 2),
    ],
)
def test_rank_cores__are_a_share_of_those_of_the_launcher(
    launched: pytest.MonkeyPatch,
    tmp_path: Path,
    own: int,
    launcher: int | None,
    ranks: int,
    expected: int,
) -> None:
    def affinity(process: int) -> set[int]:
        if process and launcher is None:
            raise PermissionError
        return set(range((launcher or 0) if process else own))

    launched.setattr(os, "sched_getaffinity", affinity)
    launched.setenv("LOCAL_SIZE", str(ranks))
    assert rank_cores(root=tmp_path) == expected
    assert rank_cores(1, tmp_path) == own
    quota = host(
        tmp_path,
        proc__self__cgroup="0::/",
        **{"sys__fs__cgroup__cpu.max": "1600000 100000"},
    )
    assert rank_cores(root=quota) == min(expected, max(1, 16 // ranks))


def test_cache_bytes__counts_each_last_level_cache_of_its_cores_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for core, shared in enumerate(("0-1", "0-1", "2-3", "2-3")):
        cache = {"index0": ("1", "48K", str(core)), "index3": ("3", "32768K", shared)}
        for index, values in cache.items():
            for name, value in zip(
                ("level", "size", "shared_cpu_list"), values, strict=True
            ):
                host(
                    tmp_path,
                    **{
                        f"sys__devices__system__cpu__cpu{core}__cache__{index}__{name}": value
                    },
                )
    for cores_of_process, caches in (({0, 1, 2, 3}, 2), ({1, 2}, 2), ({2, 3}, 1)):
        monkeypatch.setattr(
            os, "sched_getaffinity", lambda process, own=cores_of_process: own
        )
        assert cache_bytes(tmp_path) == caches * 32 << 20
    assert cache_bytes(tmp_path / "none") is None
