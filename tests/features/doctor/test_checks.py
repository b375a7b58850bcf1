"""Checks of invented hosts: each fault is named, and none on a healthy host."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from ebbtide.features.doctor.check import checks_of, examine
from ebbtide.features.doctor.checks import host_memory
from tests.features.doctor.hosts import GIB, NODES, card, make_host

TORCHRUN = ("torchrun", "--nproc-per-node", "4", "train.py")
CGROUP = {"proc__self__cgroup": "0::/job"}


def faults(host: Any) -> dict[str, str]:
    """Return remedies of the warnings by name, without those of the software and the
    limits of this machine."""
    own = ("torch", "deepspeed", "storage", "locked-memory", "shared-memory")
    return {
        result.name: str(result.remedy)
        for result in checks_of(examine(host), "warning")
        if result.name not in own
    }


@pytest.mark.parametrize(
    ("command", "nodes", "cards"),
    [
        (("python", "train.py"), NODES[1], [card(0)]),
        (("python", "train.py"), NODES[1], []),
        (
            ("OMP_NUM_THREADS=4", *TORCHRUN),
            NODES[1],
            [card(number) for number in range(4)],
        ),
        (
            (
                "OMP_NUM_THREADS=8",
                "torchrun",
                "--numa-binding=node",
                "--nproc-per-node=4",
                "train.py",
            ),
            NODES[2],
            [card(number, number // 2) for number in range(4)],
        ),
    ],
)
def test_checks__find_nothing_on_a_healthy_host(
    tmp_path: Path, command: Any, nodes: Any, cards: Any
) -> None:
    assert faults(make_host(tmp_path, command, nodes, cards)) == {}


@pytest.mark.parametrize(
    ("name", "changes", "remedy"),
    [
        ("cores", {"allowed": "3"}, "--cpus"),
        ("cores", CGROUP | {"sys__fs__cgroup__job__cpu.max": "100000 100000"}, "--cpus"),
        ("cores", CGROUP | {"sys__fs__cgroup__job__cpu.max": "400000 100000"}, "--cpus"),
        ("threads", {"command": TORCHRUN, "cards": [card(0)] * 4}, "OMP_NUM_THREADS=4"),
        ("threads", {"environment": {"OMP_NUM_THREADS": "1"}}, "OMP_NUM_THREADS=16"),
        ("threads", {"command": (), "cards": [card(0)] * 4}, "OMP_NUM_THREADS=4"),
        ("threads", {"command": ("deepspeed", "--num_gpus", "4", "train.py")}, "OMP_NUM_THREADS=4"),
        ("threads", {"command": TORCHRUN, "environment": {"OMP_NUM_THREADS": "16"}}, "OMP_NUM_THREADS=4"),
        ("numa", {"nodes": NODES[2]}, 'ebbtide doctor --launch "python train.py"'),
        ("instruction-set", {"proc__cpuinfo": "flags\t: fpu sse2"}, "-cpu host"),
        ("memory", CGROUP | {"sys__fs__cgroup__job__memory.max": str(8 * GIB)}, "--memory"),
        (
            "memory",
            {"proc__meminfo": f"MemTotal: {GIB // 16} kB\nMemAvailable: {GIB // 1024} kB"},
            "less host memory",
        ),
        (
            "swap",
            {"proc__meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\nSwapTotal: 4000000 kB\nSwapFree: 1 kB"},
            "swapoff",
        ),
        ("huge-pages", {"sys__kernel__mm__transparent_hugepage__enabled": "always madvise [never]"}, "madvise"),
        ("pinned-memory", {"proc__version": "Linux version 5.15.90.1-microsoft-standard-WSL2"}, ".wslconfig"),
        ("link", {"cards": [card(0, width=4)]}, "riser"),
        (
            "unified-memory",
            {"cards": [card(0, name="NVIDIA GB10", capacity_bytes=None, width=None, link=dict.fromkeys(
                ("generation", "width", "max_generation", "max_width", "peak_bytes_per_s")
            ))]},
            "no offload_optimizer",
        ),
        ("unified-memory", {"cards": [card(0, name="NVIDIA GB10")]}, "no offload_optimizer"),
        ("gpu", {"cards": [], "environment": {"CUDA_VISIBLE_DEVICES": ""}}, "unset"),
    ],
)  # fmt: skip
def test_checks__name_one_fault(
    tmp_path: Path, name: str, changes: dict[str, Any], remedy: str
) -> None:
    warnings = faults(make_host(tmp_path, **changes))
    assert list(warnings) == [name]
    assert remedy in warnings[name]


@pytest.mark.parametrize(
    ("limit", "states"), [(64 << 10, ["warning"]), (1 << 30, ["ok"]), (-1, ["ok"])]
)
def test_locked_memory__warns_of_small_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, states: list[str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert [
        state for state, *_ in host_memory.locked_memory(make_host(tmp_path))
    ] == states


@pytest.mark.parametrize(("mebibytes", "state"), [(64, "warning"), (2048, "ok")])
def test_shared_memory__warns_of_the_default_of_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mebibytes: int, state: str
) -> None:
    size = os.statvfs_result((4096, 4096, mebibytes << 8, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: size)
    assert [answer[0] for answer in host_memory.shared_memory(make_host(tmp_path))] == [
        state
    ]


def test_checks__say_what_they_cannot_see(tmp_path: Path) -> None:
    from dataclasses import replace

    host = replace(
        make_host(tmp_path, cards=[]),
        missing_cards="no GPU can be seen (NVML: no library)",
        root=Path("/no"),
    )
    unknown = {result.name for result in checks_of(examine(host), "unknown")}
    assert unknown >= {
        "gpu",
        "link",
        "numa",
        "memory",
        "swap",
        "huge-pages",
        "instruction-set",
        "shared-memory",
    }


def test_torch__is_compared_with_driver_and_gpu(tmp_path: Path) -> None:
    from dataclasses import replace

    from ebbtide.features.doctor.checks.software import torch
    from ebbtide.features.doctor.host import Package

    host = make_host(tmp_path / "host")
    version = tmp_path / "version.py"
    for text, cuda, state, words in (
        ("cuda: Optional[str] = '13.0'", (12, 8), "warning", "for CUDA 12"),
        ("cuda: Optional[str] = '12.9'", (12, 8), "ok", "CUDA 12.9"),
        ("cuda: Optional[str] = None", (12, 8), "warning", "with CUDA"),
        (
            "cuda: Optional[str] = None\nhip: Optional[str] = '6.4'",
            (12, 8),
            "ok",
            "ROCm",
        ),
    ):
        version.write_text(text)
        asked = replace(host, driver="570", driver_cuda=cuda)
        asked.__dict__["packages"] = {
            "torch": Package("2.13.0", tmp_path / "__init__.py")
        }
        (result,) = torch(asked)
        assert result[0] == state
        assert words in " ".join(result)
