"""Tables and messages of host memory: their records and the answers."""

from __future__ import annotations

import pytest

from ebbtide.features.explain.readers.host_tables import HostMemoryTable, HostMessage
from tests.features.explain.asked import answers_to, records_of

KIB, GIB = 1 << 10, 1 << 30
KILL = (
    "{}Killed process 19388 (python) total-vm:223537360kB, anon-rss:62073736kB, "
    "file-rss:120000kB, shmem-rss:{}kB, UID:1000 pgtables:8069kB oom_score_adj:999\n"
)
GROUP_KILL = KILL.format("[ 12.5] Memory cgroup out of memory: ", 4000000)
MACHINE_KILL = KILL.format("kernel: Out of memory: ", 0)
OLD_KILL = (
    "Out of memory: Kill process 77 (python3) score 900 or sacrifice child\n"
    "Killed process 77 (python3), UID 1000, total-vm:119640kB, anon-rss:62073736kB, "
    "file-rss:28kB\n"
)
TASKS = """\
[ 1234.5] memory: usage 67108864kB, limit 67108864kB, failcnt 1234
[ 1234.5] [  pid  ]   uid  tgid total_vm      rss pgtables_bytes swapents oom_score_adj name
[ 1234.5] [  22921]     0 22921      242        1    28672        0          -998 pause
[ 1234.5] [  19388]  1000 19388 55884340 15518434  8069120        0           999 python
"""
CONSTRAINT = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=abc,mems_allowed=0-1,"
    "oom_memcg=/docker/abc,task_memcg=/docker/abc,task=python,pid=19388,uid=1000\n"
)
FREE = """\
               total        used        free      shared  buff/cache   available
Mem:      {:>12} {:>11} {:>11} {:>11} {:>11} {:>11}
Swap:     {:>12} {:>11} {:>11}
"""
MEMINFO = """\
MemTotal:       527954732 kB
MemFree:        {} kB
MemAvailable:   {} kB
Unevictable:    {} kB
SwapTotal:      16777212 kB
SwapFree:       {} kB
"""
NUMASTAT = """\
                           node0           node1
numa_hit                {:>12}      1000000000
numa_miss               {:>12}               0
numa_foreign                   0          400000
"""


def free(
    total: object = 263778636,
    left: object = 143778636,
    available: object = 200000000,
    swap: object = 0,
) -> str:
    return FREE.format(total, 1, left, 1, 1, available, 16777212, swap, 16777212)


def meminfo(
    left: int = 127954732,
    available: int = 327954732,
    locked: int = 0,
    swap: int = 16777212,
) -> str:
    return MEMINFO.format(left, available, locked, swap)


@pytest.mark.parametrize(
    ("content", "total", "available"),
    [
        (free(), 263778636 * KIB, 200000000 * KIB),
        (free("251Gi", "137Gi", "190Gi"), 251 * GIB, 190 * GIB),
        (free("1.5Ti", "137Gi", "1.2Ti"), int(1.5 * 1024) * GIB, int(1.2 * (1 << 40))),
        (free(257596, 140408, 195312), 257596 << 20, 195312 << 20),
        (free(251, 137, 190), 251 * GIB, 190 * GIB),
        (free(270109323264, 1, 204800000000), 270109323264, 204800000000),
        (meminfo(), 527954732 * KIB, 327954732 * KIB),
    ],
)
def test_host_memory__has_the_unit_of_the_table(
    content: str, total: int, available: int
) -> None:
    (memory,) = records_of(content)
    assert isinstance(memory, HostMemoryTable)
    assert (memory.sizes["total"], memory.sizes["available"]) == (total, available)


def test_kernel_messages__have_sizes_of_kib_and_pages() -> None:
    kinds = {one.kind: one for one in records_of(TASKS) if isinstance(one, HostMessage)}
    assert kinds["limit"].size("limit") == 64 * GIB
    assert kinds["task"].size("rss") == 15518434 * 4096
    (kill,) = records_of(GROUP_KILL)
    assert isinstance(kill, HostMessage)
    assert kill.size("anon", "file", "shared") == (62073736 + 120000 + 4000000) * KIB
    assert kill.values["cgroup"] == "Memory cgroup"


NODES = """\
Per-node system memory usage (in MBs):
                          Node 0          Node 1           Total
                 --------------- --------------- ---------------
MemTotal               {0}.00       257000.30       {1}.30
MemFree                {2}.58       200000.51       300000.09
MemUsed                2235.25         2499.79         4735.04
FilePages              {3}.59         1231.61         1293.20
"""
COMPACT = """\
                 Node 0 Node 1 Node 2
                 ------ ------ ------
MemTotal         490303  97280      0
MemFree          {}  {}      0
"""


def falling(*available: int) -> str:
    return "\n".join(free(available=size) for size in available)


RULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "killed-by-the-kernel": (
        (
            GROUP_KILL,
            MACHINE_KILL,
            OLD_KILL,
            # A terminal that was copied breaks words with blanks.
            MACHINE_KILL.replace("223537360kB", "2235" + " " * 90 + "37360kB"),
            MACHINE_KILL.replace("anon-rss", "anon" + " " * 40 + "-rss"),
        ),
        (TASKS, free(), "the process was killed by me"),
    ),
    "killed": (
        (
            "  exitcode  : -9 (pid: 14750)\n",
            "[ERROR] [launch.py:434:sigkill_handler] exits with return code = -9\n",
            "train.sh: line 3: 12345 Killed                  python train.py\n",
            "subprocess.CalledProcessError: Command '['python', 'train.py']' died with "
            "<Signals.SIGKILL: 9>.\n",
            "Command '['bash', 'run.sh']' returned non-zero exit status 137.\n",
            "Killed",
            "**Killed**",
            "已杀死",
            "    reason: OOMKilled\n    exitCode: 137\n",
            "slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch.\n",
            "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. \n",
            "  traceback : Signal 9 (SIGKILL) received by PID 14750\n",
        ),
        (
            "  exitcode  : 1 (pid: 14750)\n",
            "Killed the old server, all is well",
            "exit code: 1370\n",
            "the update has exit code = -90",
            MACHINE_KILL + "  exitcode  : -9 (pid: 14750)\n",
        ),
    ),
    "ended-by-the-launcher": (
        (
            "[INFO] [launch.py:318:sigkill_handler] Killing subprocess 143917\n",
            "[launch.py:428:sigkill_handler] Killing subprocess 1\nsome words\n",
            "Killing subprocess 8\nKilling subprocess 9\n",
        ),
        (
            "Killing subprocess 8\n['python'] exits with return code = -9\n",
            "Killing subprocess 8\n" + MACHINE_KILL,
            "a subprocess was started\n",
        ),
    ),
    "full-node": (
        (
            NODES.format(256000, 513000, 100, 60),
            NODES.format(256000, 513000, 5000, 60),
            COMPACT.format(1993, 97272),
        ),
        (
            NODES.format(256000, 513000, 100, 90000),
            NODES.format(256000, 513000, 100000, 60),
            COMPACT.format(161993, 97272),
        ),
    ),
    "host-shrinks": (
        (
            falling(200000000, 180000000, 160000000),
            falling(200000000, 200000000, 190000000, 150000000),
            falling(90000000, 60000000, 40000000),
        ),
        (
            falling(200000000, 180000000),
            falling(200000000, 210000000, 150000000),
            falling(200000000, 199000000, 198000000),
        ),
    ),
    "bus-error": (
        (
            "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible "
            "that dataloader's workers are out of shared memory.\n",
            "ERROR: Unexpected bus error encountered in worker. This might be caused "
            "by insufficient shared memory (shm).\n",
            "unable to allocate shared memory(shm) for file </torch_9_1>: No space "
            "left on device (28)\n",
            "  exitcode  : -7 (pid: 14750)\n",
        ),
        ("  exitcode  : -9 (pid: 7)\n", "No space left on device\n", "exitcode: -70"),
    ),
    "pin-error": (
        (
            "cudaHostAlloc failed: out of memory\n",
            "ibv_reg_mr_iova2 failed with error Cannot allocate memory\n",
            "pin_memory thread: Cannot allocate memory\n",
        ),
        ("pin_memory=True", "cudaHostAlloc is called", "Cannot allocate memory"),
    ),
    "swap-in-use": (
        (free(swap=9000000), meminfo(swap=1000), free("251Gi", "1Gi", "2Gi", "12Gi")),
        (free(), meminfo(), free("251Gi", "1Gi", "2Gi", "0B")),
    ),
    "host-memory-full": (
        (free(available=1000000), meminfo(1000, 2000), free("62Gi", "1Gi", "2Gi")),
        (free(), meminfo(), free("62Gi", "1Gi", "40Gi")),
    ),
    "locked-memory": (
        (
            meminfo(locked=200000000),
            meminfo(locked=427954732),
            meminfo(1, 2, 110000000),
        ),
        (meminfo(), meminfo(locked=1000000), free()),
    ),
    "page-cache": (
        (free(left=1000000), meminfo(1000000), free("62Gi", "1Gi", "40Gi")),
        (free(), meminfo(), free("62Gi", "1Gi", "2Gi")),
    ),
    "lock-limit": (
        tuple(
            f"max locked memory           (kbytes, -l) {size}\n"
            for size in (64, 8192, 65536)
        ),
        (
            "max locked memory           (kbytes, -l) unlimited\n",
            "max locked memory           (kbytes, -l) 16777216\n",
            "max memory size             (kbytes, -m) 64\n",
        ),
    ),
    "other-node": (
        tuple(NUMASTAT.format(hits, 500000000) for hits in (10, 500000000, 4000000000)),
        (
            NUMASTAT.format(4000000000, 400000),
            NUMASTAT.format(10, 0),
            "numa_hit 100\nnuma_miss 900\n",
        ),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_rule__speaks_where_it_must_and_nowhere_else(name: str) -> None:
    speaking, silent = RULES[name]
    assert min(len(speaking), len(silent)) >= 3
    for content in speaking:
        assert name in answers_to(content), content
    for content in silent:
        assert name not in answers_to(content), content


def test_kill__names_process_sizes_and_whose_limit_it_was() -> None:
    answer = answers_to(TASKS + CONSTRAINT + GROUP_KILL)["killed-by-the-kernel"]
    assert answer.title == (
        "the kernel killed python (19388) with 63.13 GiB of host memory: the limit of "
        "its control group ran out"
    )
    assert answer.evidence[:3] == (
        "its control group may have 64.00 GiB, and had 64.00 GiB",
        "the kernel's table (pages of 4 KiB): python 59.20 GiB, pause 4.00 KiB; all "
        "59.20 GiB",
        "3.81 GiB of it are shared: pinned buffers, /dev/shm, workers",
    )
    machine = answers_to(MACHINE_KILL)["killed-by-the-kernel"]
    assert machine.title.endswith("the machine's memory ran out")


def test_kill__says_that_the_gpu_was_not_full() -> None:
    gpu = "[0] NVIDIA A100 | 65'C,  99 % | 41000 / 81920 MB |\n"
    answer = answers_to(gpu, "exits with return code = -9\n")["killed"]
    assert "its GPU had 50% of its memory in use" in answer.evidence


def test_killed__says_what_the_host_had_when_it_was_last_printed() -> None:
    usage = "CPU Virtual Memory:  used = 30.14 GB, percent = 8.3%\n"
    answer = answers_to(usage + "  exitcode  : -9 (pid: 14750)\n")["killed"]
    assert any("30.14 GiB, 8% of the machine" in line for line in answer.evidence)
