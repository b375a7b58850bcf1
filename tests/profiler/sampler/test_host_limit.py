"""Host memory against the limit of its control group, read from invented files of /proc
and /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ebbtide.analysis.findings.finding import Finding
from ebbtide.analysis.findings.rules.host import host_memory_limit
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.host_limits import memory_group
from ebbtide.profiler.recording.spools.recovery import recover
from ebbtide.profiler.sampler.sampler import HostLimitWatch, Sampler
from ebbtide.profiler.trace import TraceBuilder
from tests.profiler.sampler.test_sampler import write_agent_files

GIB = 1 << 30


def write(root: Path, name: str, text: object) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


@pytest.fixture(params=["version 2", "version 1"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A host with a group of 8 GiB around a job's group without a limit; 7 GiB are in
    use, 1 GiB of them cached."""
    root = tmp_path / "host"
    unified = request.param == "version 2"
    write(
        root,
        "proc/42/cgroup",
        "0::/pod/job" if unified else "5:cpu:/pod/job\n4:memory:/pod/job",
    )
    top = "sys/fs/cgroup/pod" if unified else "sys/fs/cgroup/memory/pod"
    limit, usage = (
        ("memory.max", "memory.current")
        if unified
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    write(root, f"{top}/job/{limit}", "max" if unified else 9223372036854771712)
    write(root, f"{top}/{limit}", 8 * GIB)
    write(root, f"{top}/{usage}", 7 * GIB)
    prefix = "" if unified else "total_"
    cached = (
        f"{prefix}active_file {GIB // 4}\n{prefix}inactive_file "
        f"{3 * GIB // 4}\n{prefix}anon {6 * GIB}"
    )
    write(root, f"{top}/memory.stat", cached)
    return root


def usage_file(host: Path) -> Path:
    return next(
        path
        for path in host.rglob("memory.*")
        if path.name in ("memory.current", "memory.usage_in_bytes")
    )


def test_memory_group__is_the_nearest_with_a_limit(host: Path) -> None:
    group = memory_group(42, host)
    assert group is not None
    assert (group.folder.name, group.limit_bytes) == ("pod", 8 * GIB)
    assert (group.total_bytes(), group.used_bytes()) == (7 * GIB, 6 * GIB)
    assert memory_group(43, host) is None


def test_watch__warns_once_and_not_for_cached_files(host: Path) -> None:
    watch = HostLimitWatch(host)
    assert list(watch.read([42, 43], True)) == [(42, 6 * GIB)]
    assert list(watch.read([42, 43], False)) == []
    usage_file(host).write_text(f"{int(8.2 * GIB)}\n")
    assert list(watch.read([42], False)) == [(42, int(8.2 * GIB) - GIB)]
    assert watch.new_warnings() == []
    usage_file(host).write_text(f"{int(8.5 * GIB)}\n")
    for _ in range(2):
        assert list(watch.read([42], False)) == [(42, int(8.5 * GIB) - GIB)]
    (warning,) = watch.new_warnings()
    assert "7.50 GiB of the 8.00 GiB" in warning
    assert "(94%, pinned memory included)" in warning
    assert watch.new_warnings() == []
    assert watch.description is not None
    assert watch.description["bytes"] == 8 * GIB
    assert watch.description["control_group"].endswith("/pod")


def test_sampler__records_the_use_of_the_group_and_passes_the_warning_on(
    host: Path, tmp_path: Path
) -> None:
    pid = os.getpid()
    (host / "proc/42").rename(host / f"proc/{pid}")
    usage_file(host).write_text(f"{int(8.5 * GIB)}\n")
    spools, warnings = tmp_path / "spool", list[str]()
    spools.mkdir()
    sampler = Sampler(spools, root=host, warn=warnings.append)
    write_agent_files(spools, sampler.host["name"], "GPU-0", pid)
    sampler.start()
    sampler.stop()
    assert len(warnings) == 1
    assert warnings[0] in sampler.notes
    assert sampler.host["memory_limit"]["bytes"] == 8 * GIB
    (training,) = recover(spools, {"host": sampler.host})
    memory = training.ranks[0].tables["memory"]
    used = memory[memory["pool"] == "cgroup"]
    assert set(used["bytes"]) == {int(8.5 * GIB) - GIB}
    assert set(used["device"]) == {"cpu"}


@pytest.mark.parametrize(("used", "signal"), [(7.5, None), (7.5, 9), (7.1, None)])
def test_host_memory_limit__is_found_from_nine_tenths_on(
    used: float, signal: int | None
) -> None:
    exit_status = {} if signal is None else {"exit": {"signal": signal}}
    builder = TraceBuilder(
        "recorded", host={"memory_limit": {"bytes": 8 * GIB}}, **exit_status
    )
    builder.rank(0, devices=[{"device": "cpu", "kind": "cpu"}]).memory(
        0, int(used * GIB), "cgroup", "cpu"
    )
    finding = host_memory_limit(JobMetrics(builder.build()))
    if used < 7.2:
        assert finding is None
        return
    assert isinstance(finding, Finding)
    assert "up to 7.50 GiB of 8.00 GiB were in use (94%)" in finding.evidence[0]
    assert any("signal 9" in line for line in finding.evidence) == (signal == 9)
