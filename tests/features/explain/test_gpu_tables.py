"""The state of GPUs as monitors print it: what is read, and what is concluded."""

from __future__ import annotations

import pytest

from ebbtide.features.explain.readers.gpu_tables import GpuProcess, GpuTable
from tests.features.explain.asked import answers_to, records_of

MIB, GIB = 1 << 20, 1 << 30
NEW_CARD = (
    "|   {device}  NVIDIA GeForce RTX 4090        On  |   00000000:01:00.0 Off |   Off |\n"
    "| 31%   {heat}C    P2            {power}W /  450W |   {memory} |     {use}%      "
    "Default |\n"
)
OLD_TABLE = """\
+-----------------------------------------------------------------------------+
| NVIDIA-SMI 384.130                Driver Version: 384.130                   |
|   0  GeForce GTX 108...  Off  | 00000000:01:00.0  On |                  N/A |
| 29%   42C    P8    12W / 250W |  10900MiB / 11171MiB |      0%      Default |
+-------------------------------+----------------------+----------------------+
| Processes:                                                       GPU Memory |
|  GPU       PID   Type   Process name                             Usage      |
|    0      1243      G   /usr/lib/xorg/Xorg                           200MiB |
"""
MIG = """\
| NVIDIA-SMI 525.60.13    Driver Version: 525.60.13    CUDA Version: 12.0     |
|   0  NVIDIA A100-SXM...  On   | 00000000:07:00.0 Off |                   On |
| N/A   33C    P0    62W / 400W |  14400MiB / 40960MiB |     N/A      Default |
| MIG devices:                                                                |
|  0    3   0   0  |  14366MiB / 19968MiB | 28      0 |  2   0    1    0    0 |
|                  |      4MiB / 32767MiB |           |                       |
|    0    3    0      18830      C   python                          14325MiB |
"""
GB10 = """\
| NVIDIA-SMI 580.126.09             Driver Version: 580.126.09   CUDA Version: 13.0 |
|   0  NVIDIA GB10                    On  |   0000000F:01:00.0 Off |            N/A |
| N/A   36C    P8              3W /  N/A  | Not Supported          |      0%  Default |
|    0   N/A  N/A            2451      C   python                        19135MiB |
"""
NVITOP = """\
│ NVITOP 1.5.3       Driver Version: 550.54.15       CUDA Driver Version: 12.4 │
│   0  ..la V100-SXM2-16GB  Off │ 00000000:04:00.0 Off │           0 │ MEM: ██ 56.9% │
│ N/A   44C    P0    69W / 300W │   9319MiB / 16.00GiB │  48%  Default │ UTL: █ 48%  │
│   0   18830 C phungk+  9316MiB  76    53   0.0   1.2  5:39  /usr/bin/python a.py   │
"""
GPUSTAT = """\
node1                    Thu Jan 15 12:00:00 2026  550.54.15
[0] NVIDIA A100-SXM4-80GB | 65°C,  99 %, 395 / 400 W | 80000 / 81920 MB | al:python/42(60000M)
[1] NVIDIA A100-SXM4-80GB | 35'C,   0 % |     7 / 81920 MB |
"""
ROCM = """\
Device  Node  IDs            Temp        Power     Partitions    SCLK  PwrCap  VRAM%  GPU%
1       3     0x74a1, 47057  88.0°C      745.0W    NPS1, SPX, 0  1653Mhz  1300Mhz  0%   auto  750.0W  99%    100%
"""
ROCM_OLD = """\
GPU  Temp   AvgPwr  SCLK    MCLK     Fan  Perf  PwrCap  VRAM%  GPU%
0    31.0c  43.0W   800Mhz  1600Mhz  0%   auto  300.0W    7%   4%
"""
ROCM_PAIRS = """\
GPU[0]\t\t: VRAM Total Memory (B): 206141652992
GPU[0]\t\t: VRAM Total Used Memory (B): 88640910786
GPU[0]\t\t: GPU use (%): 19
"""
XPU = """\
| Device ID                   | 0                                         |
| GPU Utilization (%)         | 97                                        |
| GPU Power (W)               | 41                                        |
| GPU Memory Used (MiB)       | 16124                                     |
| GPU Memory Util (%)         | 98                                        |
"""
DCGM = """\
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
DCGM_FI_DEV_GPU_UTIL{gpu="2",UUID="GPU-6",device="nvidia2",modelName="NVIDIA A100"} 3
DCGM_FI_DEV_FB_FREE{gpu="2",UUID="GPU-6",device="nvidia2",modelName="NVIDIA A100"} 500
DCGM_FI_DEV_FB_USED{gpu="2",UUID="GPU-6",device="nvidia2",modelName="NVIDIA A100"} 40000
"""
DMON = """\
# gpu    pwr  gtemp  mtemp     sm    mem    enc    dec   mclk   pclk     fb
# Idx      W      C      C      %      %      %      %    MHz    MHz     MB
    0    350     70      -     99     60      0      0   1593   1980  79000
    1    120     60      -     20      9      0      0   1593   1980  79100
"""
PMON = """\
# gpu         pid   type     sm    mem    enc    dec     fb    command
# Idx           #    C/G      %      %      %      %     MB    name
    0       4242     C     45     23      -      -  20000    python
    1          -     -      -      -      -      -      -    -
"""
QUERY = """\
timestamp, index, name, memory.used [MiB], memory.total [MiB], utilization.gpu [%]
2026/09/14 10:02:11.101, 3, NVIDIA L40S, 1024 MiB, 46068 MiB, 94 %
"""
BARE = "NVIDIA GeForce RTX 4090 D, 100 %, {} %, 24564 MiB\n"


def smi(
    memory: str = "  990MiB /  24564MiB",
    use: int = 99,
    power: int = 300,
    heat: int = 54,
    processes: str | None = None,
) -> str:
    header = "| NVIDIA-SMI 580.126.09      Driver Version: 580.126.09  CUDA: 13.0  |\n"
    card = NEW_CARD.format(device=0, memory=memory, use=use, power=power, heat=heat)
    rows = "" if processes is None else processes or "| No running processes found |\n"
    return header + card + rows


def process(pid: int, size: str = "500MiB") -> str:
    return f"|    0   N/A  N/A   {pid}   C   python   {size} |\n"


def table_of(content: str) -> GpuTable:
    (table,) = records_of(content)
    assert isinstance(table, GpuTable)
    return table


@pytest.mark.parametrize(
    ("content", "device", "used_bytes", "share", "utilization", "power_w"),
    [
        (smi("22990MiB /  24564MiB", 18), 0, 22990 * MIB, 0.936, 0.18, 300),
        (OLD_TABLE, 0, 10900 * MIB, 0.976, 0, 12),
        (NVITOP, 0, 9319 * MIB, 0.569, 0.48, 69),
        (GPUSTAT, 0, 80000 * MIB, 0.977, 0.99, 395),
        (ROCM, 1, None, 0.99, 1, 745),
        (ROCM_OLD, 0, None, 0.07, 0.04, 43),
        (ROCM_PAIRS, 0, 88640910786, 0.43, 0.19, None),
        (XPU, 0, 16124 * MIB, 0.98, 0.97, 41),
        (DCGM, 2, 40000 * MIB, 0.988, 0.03, None),
        (DMON, 0, 79000 * MIB, None, 0.99, 350),
        (QUERY, 3, 1024 * MIB, 0.022, 0.94, None),
        (BARE.format(7) * 3, None, None, None, 1, None),
        (GB10, 0, None, None, 0, 3),
    ],
)
def test_reading__has_the_figures_of_each_tool(
    content: str,
    device: int | None,
    used_bytes: int | None,
    share: float | None,
    utilization: float,
    power_w: float | None,
) -> None:
    first = table_of(content).readings[0]
    assert (first.device, first.used_bytes) == (device, used_bytes)
    assert first.share == (share and pytest.approx(share, abs=1e-3))
    assert first.utilization == pytest.approx(utilization)
    assert first.power_w == power_w


def test_bare_query__tells_memory_in_use_from_the_total() -> None:
    for order in ("60000, 81920, 21000", "81920, 60000, 21000", "60000, 81920"):
        sizes = ", ".join(f"{size} MiB" for size in order.split(", "))
        (reading,) = table_of(f"0, NVIDIA A100-SXM4-80GB, 40 %, {sizes}\n").readings
        assert (reading.used_bytes, reading.total_bytes) == (60000 * MIB, 81920 * MIB)
    alone = table_of(BARE.format(7)).readings[0]
    assert (alone.used_bytes, alone.total_bytes) == (None, None)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (MIG, (0, 18830, "python", 14325 * MIB)),
        (GB10, (0, 2451, "python", 19135 * MIB)),
        (NVITOP, (0, 18830, "/usr/bin/python a.py", 9316 * MIB)),
        (GPUSTAT, (0, 42, "al:python", 60000 * MIB)),
        (PMON, (0, 4242, "python", 20000 * MIB)),
        (
            "pid, process_name, used_gpu_memory [MiB]\n114, /bin/python, 19135 MiB\n",
            (None, 114, "/bin/python", 19135 * MIB),
        ),
    ],
)
def test_processes__are_read(
    content: str, expected: tuple[int | None, int, str, int]
) -> None:
    device, pid, command, used_bytes = expected
    assert table_of(content).processes == (
        GpuProcess(device=device, pid=pid, command=command, used_bytes=used_bytes),
    )


def test_table__has_instances_and_repeated_readings_of_its_own() -> None:
    assert set(table_of(MIG).by_card()) == {(0, None), (0, 3)}
    twice = smi(use=10, processes=process(7)) + smi(use=20, processes="")
    table = table_of(twice)
    assert [one.utilization for one in table.readings] == [0.1, 0.2]
    assert table.processes == ()


FULL, PART = "22990MiB /  24564MiB", "12990MiB /  24564MiB"
DMON_ROW = "    0    {}     {}      -     {}    {}      0      0   1593   1980  100\n"


def dmon(*uses: int, memory: int = 40, heat: int = 60) -> str:
    header = "".join(DMON.splitlines(keepends=True)[:2])
    return header + "".join(DMON_ROW.format(100, heat, use, memory) for use in uses)


AMD = """\
| AMD-SMI 26.0.0+37d158ab      amdgpu version: 6.14.14  ROCm version: 7.0.1    |
| BDF                        GPU-Name | Mem-Uti   Temp   UEC       Power-Usage |
| GPU  HIP-ID  OAM-ID  Partition-Mode | GFX-Uti    Fan               Mem-Usage |
|=====================================+========================================|
| 0000:05:00.0    AMD Instinct MI300X | 7 %      41 °C   0           400/750 W |
|   3       0       2        SPX/NPS1 | 90 %       N/A        180000/196592 MB |
+-------------------------------------+----------------------------------------+
| Processes:                                                                   |
|  GPU        PID  Process Name          GTT_MEM  VRAM_MEM  MEM_USAGE     CU % |
|==============================================================================|
|    3      18830  python                 2.0 MB  175.0 GB   175.7 GB      0.0 |
"""
AMD_MONITOR = (
    "GPU  XCP  POWER   PWR_CAP   GPU_T   MEM_T   GFX_CLK   GFX%   MEM%   ENC%   DEC%"
    "      VRAM_USAGE\n"
    "  3    0  400 W   750 W   41 °C   36 °C  2132 MHz   90 %    7 %"
    "    N/A    0 %   175.8/192.0 GB\n"
)
AMD_METRIC = """\
GPU: 3
    USAGE:
        GFX_ACTIVITY: 90 %
        UMC_ACTIVITY: 7 %
    POWER:
        SOCKET_POWER: 400 W
    TEMPERATURE:
        HOTSPOT: 41 °C
    MEM_USAGE:
        TOTAL_VRAM: 196592 MB
        USED_VRAM: 180000 MB
"""
LONG_QUERY = """\
==============NVSMI LOG==============
GPU 00000000:01:00.0
    Product Name                          : NVIDIA RTX A6000
    FB Memory Usage
        Total                             : 49140 MiB
        Used                              : 45000 MiB
    BAR1 Memory Usage
        Total                             : 256 MiB
        Used                              : 5 MiB
    Utilization
        Gpu                               : 90 %
        Memory                            : 7 %
    GPU Power Readings
        Power Draw                        : 250.00 W
"""


@pytest.mark.parametrize("content", [AMD, AMD_MONITOR, AMD_METRIC])
def test_amd_smi__is_read_in_each_of_its_forms(content: str) -> None:
    (reading,) = table_of(content).readings
    assert (reading.device, reading.utilization) == (3, 0.9)
    assert (reading.memory_activity, reading.temperature_c) == (0.07, 41)
    assert reading.power_w == 400
    assert reading.used_bytes == pytest.approx(180000 * MIB, rel=1e-3)
    assert reading.total_bytes == pytest.approx(196592 * MIB, rel=1e-3)


def test_amd_smi__has_the_processes_of_its_list() -> None:
    (process,) = table_of(AMD).processes or ()
    assert (process.device, process.pid, process.command) == (3, 18830, "python")
    assert process.used_bytes == 175 << 30
    assert table_of(AMD_METRIC).processes is None


def test_long_query__has_the_memory_of_frames() -> None:
    (reading,) = table_of(LONG_QUERY).readings
    assert (reading.used_bytes, reading.total_bytes) == (45000 * MIB, 49140 * MIB)
    assert (reading.utilization, reading.power_w) == (0.9, 250)
    assert reading.name == "NVIDIA RTX A6000"


def test_query_without_units__has_the_columns_of_its_command() -> None:
    rows = "0, 45000, 49140, 90\n1, 10, 49140, 0\n"
    command = (
        "$ nvidia-smi --query-gpu=index,memory.used,memory.total,utilization.gpu "
        "--format=csv,noheader,nounits\n"
    )
    header = "index, memory.used [MiB], memory.total [MiB], utilization.gpu [%]\n"
    for head in (command, header):
        first, second = table_of(head + rows).readings
        assert (first.device, first.used_bytes, first.utilization) == (
            0,
            45000 * MIB,
            0.9,
        )
        assert second.share == pytest.approx(10 / 49140)
    assert records_of(rows) == ()


def test_list_of_processes__is_empty_below_its_head() -> None:
    head = "|  GPU       PID   Type   Process name                             Usage      |"
    table = table_of(smi(FULL, processes=head))
    assert table.processes == ()
    assert table_of(smi(FULL, processes=head + "\n" + process(7))).processes != ()


IDLE = "300MiB /  24564MiB"
RULES = {
    "gpu-idle": (
        (smi(IDLE, use=0), smi(IDLE, use=2), smi(IDLE, use=0, processes=process(7))),
        (smi(IDLE, use=40), smi(PART, use=0), smi(FULL, use=0)),
    ),
    "gpu-memory-full": (
        (smi(FULL), ROCM, GPUSTAT),
        (smi(PART), ROCM_OLD, MIG),
    ),
    "shared-memory": (
        (
            GB10,
            GB10.replace("GB10", "Jetson Orin"),
            "index, name, memory.used [MiB], utilization.gpu [%]\n"
            "0, NVIDIA GB10, [N/A], 94 %\n",
        ),
        (smi(), GB10.replace("GB10", "RTX 5090"), QUERY),
    ),
    "uncounted-memory": (
        (
            GB10.replace("GB10", "RTX 5090"),
            "index, name, memory.used [MiB], utilization.gpu [%]\n"
            "0, GRID V100D-32Q, [N/A], 94 %\n",
            GB10.replace("GB10", "A40-8Q").replace("Not Supported", "N/A / N/A"),
        ),
        (GB10, smi(), QUERY),
    ),
    "memory-without-a-process": (
        (OLD_TABLE, smi(FULL, processes=""), smi(PART, processes=process(7))),
        (
            smi(FULL),
            smi(FULL, processes=process(7, "22000MiB")),
            smi(FULL, processes=process(7, "N/A")),
        ),
    ),
    "gpu-waits": (
        (smi(FULL, use=18), dmon(45, 40, 30), smi(FULL, use=0)),
        (smi(FULL, use=90), smi(use=0), dmon(45, 99, 99)),
    ),
    "little-memory-activity": (
        (BARE.format(7) * 3, dmon(99, 98, memory=5), dmon(100, memory=1)),
        (BARE.format(40) * 3, dmon(50, 40, 45, memory=5), smi()),
    ),
    "heat": (
        (
            smi(heat=91),
            ROCM,
            "index, clocks_event_reasons.active, utilization.gpu [%]\n"
            "0, 0x0000000000000040, 94 %\n",
        ),
        (
            smi(heat=80),
            dmon(99, 98),
            "index, clocks_event_reasons.active, utilization.gpu [%]\n"
            "0, 0x0000000000000004, 94 %\n",
        ),
    ),
    "power-limit": (
        (smi(power=449), ROCM, GPUSTAT),
        (smi(power=300), ROCM_OLD, NVITOP),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_rule__speaks_where_it_must_and_nowhere_else(name: str) -> None:
    speaking, silent = RULES[name]
    assert len(speaking) == len(silent) == 3
    for content in speaking:
        assert name in answers_to(content), content
    for content in silent:
        assert name not in answers_to(content), content


def test_answers__name_the_gpus_the_bytes_and_the_processes() -> None:
    processes = process(7, "300MiB") + process(8, "22000MiB")
    answers = answers_to(smi(FULL, use=18, power=141, processes=processes))
    full = answers["gpu-memory-full"]
    assert full.title == "memory of GPU 0 is full: 22.45 GiB of 23.99 GiB in use (94%)"
    assert full.evidence == (
        "largest of its processes: python (8) 21.48 GiB, python (7) 300.00 MiB",
    )
    assert answers["gpu-waits"].evidence == ("141 W of 450 W",)
    assert answers_to(GPUSTAT)["power-limit"].title.startswith("GPU 0 runs at")


def test_lines_of_other_texts__are_no_tables() -> None:
    for content in (
        "| a | table | of markdown |\n| 1 | 2 | 3 |",
        "loss, 1.5, 100 %",
        "step 3 (12M) of train.py(30M)",
        "time, gpu\nwaits, long",
        '[0] "a string" | 3 | 4',
    ):
        assert records_of(content) == (), content
