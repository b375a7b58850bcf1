"""Plant one fault in each of 20 jobs, and count those that `findings` or `doctor`
names, and alarms on 20 healthy ones.

    python benchmarks/faults.py [--only NAME ...] [--folder FOLDER]

Kinds: `run`, a job of `fault_jobs.py` that is recorded here, or the command of a job
that doctor reads on this host; `mock`, doctor here with the NVML of tests/nvml_mock;
`dry-run`, a job for a GPU; `recorded`, a run of others on GPUs with the fault
(traces/); `edited`, such a run without the fault, into whose tables it was written as a
recording would have it. Needs gcc for the mock, and root for the job in a control group
of its own. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from tables import machine_line, table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
TRACES = ROOT / "traces"
JOB = Path(__file__).with_name("fault_jobs.py")
MIB = 2**20
MEMORY_LIMIT = 2048 * MIB
GROUPS = Path("/sys/fs/cgroup/memory")
A100 = "a100-40gb-published"
# True statements on the recorded jobs, which have these causes of slowness beside the
# planted ones.
TRUE = (
    "free-memory",
    "cpu-bound-update",
    "update-bound",
    "gradient-round-trip",
    "exposed-communication",
    "launch-bound",
)


@dataclass(frozen=True)
class Case:
    """A job, or a host.

    Attributes:
        expected: Rules of findings or checks of doctor that name the fault; none of a
            healthy job.
        kind: The origin, see above.
        findings: Returns the rules or checks that were reported, given a folder to
            write to.
        fault: The fault in words.
        true: Rules that may be reported of a healthy job.
    """

    name: str
    kind: str
    findings: Callable[[Path], set[str]]
    expected: tuple[str, ...] = ()
    fault: str = ""
    true: tuple[str, ...] = ()


def ebbtide(
    *arguments: object, prefix: Sequence[object] = (), **environment: str
) -> str:
    """Run a command and return its standard output."""
    command = [*map(str, prefix), sys.executable, "-m", "ebbtide", *map(str, arguments)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    run = subprocess.run(
        command, capture_output=True, text=True, env=variables, check=False
    )
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)}: {run.stderr[-500:]}")
    return run.stdout


def rules(trace: Path) -> set[str]:
    """Return the rules that `ebbtide findings` reports of a trace."""
    return {
        finding["rule"]
        for finding in json.loads(ebbtide("findings", trace, "--json"))["findings"]
    }


def recorded(
    fault: str,
    *options: str,
    ranks: int = 1,
    prefix: Sequence[object] = (),
    threads: int = 1,
) -> Callable[[Path], set[str]]:
    """Return a function that records a job on this host."""

    def run(folder: Path) -> set[str]:
        launch = (
            [sys.executable]
            if ranks == 1
            else [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                str(ranks),
            ]
        )
        trace = folder / "run.ebb"
        command = ["profile", "-o", trace, *options, "--", *launch, JOB, fault]
        ebbtide(*command, prefix=prefix, OMP_NUM_THREADS=str(threads))
        return rules(trace)

    return run


def predicted(fault: str) -> Callable[[Path], set[str]]:
    """Return a function that runs a job for a GPU dry."""

    def run(folder: Path) -> set[str]:
        trace = folder / "run.ebb"
        ebbtide(
            "dry-run",
            "-o",
            trace,
            "--machine",
            A100,
            "--",
            sys.executable,
            JOB,
            fault,
            "gpu",
        )
        return rules(trace)

    return run


def doctor(
    *command: str,
    prefix: Sequence[object] = (),
    card: dict[str, object] | None = None,
    **environment: str,
) -> Callable[[Path], set[str]]:
    """Return a function that runs doctor on this host. `card`: changes of an H100 that
    NVML shows."""

    def run(folder: Path) -> set[str]:
        variables = dict(environment)
        if card is not None:
            from tests.nvml_mock.build import compile_library
            from tests.nvml_mock.cards import H100, write_description

            variables["LD_LIBRARY_PATH"] = str(compile_library(folder / "nvml"))
            variables["NVML_MOCK"] = str(
                write_description(folder / "nvml.txt", [replace(H100, **card)])
            )  # type: ignore[arg-type]
        checks = json.loads(
            ebbtide("doctor", "--json", "--", *command, prefix=prefix, **variables)
        )["checks"]
        return {check["name"] for check in checks if check["state"] == "warning"}

    return run


def in_group(fault: str, limit_bytes: int) -> Callable[[Path], set[str]]:
    """Return a function that records a job in a control group with a limit of
    memory."""

    def run(folder: Path) -> set[str]:
        with memory_group(limit_bytes) as group:
            enter = f'echo $$ > {group}/cgroup.procs; exec "$@"'
            return recorded(fault, prefix=("sh", "-c", enter, "sh"))(folder)

    return run


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Make a control group (version 1) of this process, and remove it."""
    group = GROUPS / f"ebbtide-faults-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()


def stored(
    name: str, edit: Callable[[Path], None] | None = None
) -> Callable[[Path], set[str]]:
    """Return a function that reads a trace of traces/, or a copy of it with changed
    tables."""

    def run(folder: Path) -> set[str]:
        trace = TRACES / f"{name}.ebb"
        if edit is not None:
            trace = Path(shutil.copytree(trace, folder / "edited.ebb"))
            edit(trace)
        return rules(trace)

    return run


def change_table(
    name: str, change: Callable[[pd.DataFrame], pd.DataFrame]
) -> Callable[[Path], None]:
    """Return an edit of a table of every rank."""

    def edit(trace: Path) -> None:
        for file in trace.glob(f"rank-*/{name}.parquet"):
            change(pd.read_parquet(file)).to_parquet(file, index=False)

    return edit


def pageable(rows: pd.DataFrame) -> pd.DataFrame:
    """Copy to the device from pageable memory: at 2.8 GB/s, as others measured, one
    after the other."""
    down = rows["direction"] == "h2d"
    longer = (
        (rows["bytes"] / 2.8)
        .where(down, rows["end_ns"] - rows["start_ns"])
        .astype("int64")
    )
    return rows.assign(
        host_memory=rows["host_memory"].mask(down, "pageable"),
        end_ns=rows["start_ns"] + longer,
    )


def hot(rows: pd.DataFrame) -> pd.DataFrame:
    """Lower the clock by a sixth in every other second, for the temperature."""
    hot_second = (rows["t_ns"] // 10**9) % 2 == 0
    clock = pd.Series(1980.0, rows.index).mask(hot_second, 1650.0)
    reasons = pd.Series(0, rows.index, dtype="Int64").mask(hot_second, 0x40)
    return rows.assign(sm_clock_mhz=clock, throttle_reasons=reasons)


def swap(rows: pd.DataFrame) -> pd.DataFrame:
    """Have 6 GiB of each rank in swap."""
    first = rows["t_ns"].min(), rows["t_ns"].max()
    added = pd.DataFrame(
        {"t_ns": first, "device": "cpu", "pool": "swap", "bytes": 6 << 30}
    )
    return pd.concat([rows, added]).sort_values("t_ns", kind="stable")


def remote_node(trace: Path) -> None:
    """Run each rank on the cores of the other of two NUMA nodes, with its memory
    there."""
    file = trace / "meta.json"
    meta = json.loads(file.read_text())
    meta.setdefault("host", {})["numa_nodes"] = [
        {
            "node": node,
            "cpus": f"{32 * node}-{32 * node + 31}",
            "memory_bytes": 256 << 30,
        }
        for node in range(2)
    ]
    for rank in meta["ranks"]:
        rank["numa"] = {"cpu_nodes": [1], "memory_bytes": {"1": 60 << 30}}
        for device in rank["devices"]:
            if device["kind"] == "cuda":
                device["numa_node"] = 0
    file.write_text(json.dumps(meta))


TRAIN = ("python", "train.py")
ALLOCATOR = ("--allocator-iterations", "3")
FAULTS = (
    Case("data loading", "run", recorded("data-loading"), ("between-phases",), "each batch takes 0.1 s in the main process"),
    Case("checkpoint stalls", "run", recorded("checkpoint-stall"), ("between-phases", "drift"), "every third iteration writes 260 MB and waits"),
    Case("leak", "run", recorded("leak", *ALLOCATOR), ("memory-growth",), "losses are kept with their graphs"),
    Case("slow rank", "run", recorded("slow-rank", ranks=2), ("slow-rank",), "rank 1 of 2 takes 40 ms longer"),
    Case("slowdown", "run", recorded("slowdown"), ("drift",), "40 ms more from the 30th iteration on"),
    Case("one thread", "run", recorded("update"), ("too-few-threads",), "OMP_NUM_THREADS=1 on two cores, AdamW on the CPU"),
    Case("full control group", "run", in_group("memory-limit", MEMORY_LIMIT), ("host-memory-limit",), "the job fills 95 % of a limit of 2 GiB"),
    Case("too many threads", "run", doctor("OMP_NUM_THREADS=64", "torchrun", "--nproc-per-node", "2", "train.py"), ("threads",), "OMP_NUM_THREADS=64 for two ranks on two cores"),
    Case("one core", "run", doctor(*TRAIN, prefix=("taskset", "-c", "0")), ("cores",), "an affinity of one of two cores"),
    Case("many ranks", "run", doctor("torchrun", "--nproc-per-node", "8", "train.py"), ("cores",), "eight ranks on two cores"),
    Case("locked memory", "run", doctor(*TRAIN, prefix=("prlimit", "--memlock=65536")), ("locked-memory",), "`ulimit -l 64`"),
    Case("half the lanes", "mock", doctor(*TRAIN, card={"width": 8}), ("link",), "8 of 16 lanes"),
    Case("no GPU left", "mock", doctor(*TRAIN, card={}, CUDA_VISIBLE_DEVICES="3"), ("gpu",), "CUDA_VISIBLE_DEVICES names a GPU that the host has not"),
    Case("too large a batch", "dry-run", predicted("too-large-batch"), ("does-not-fit",), "four times the batch that fits"),
    Case("needless recomputation", "dry-run", predicted("needless-recomputation"), ("free-memory",), "every layer is checkpointed, and half of the GPU is free"),
    Case("blocking copies", "recorded", stored("h100-20b-blocking"), ("blocking-gradients",), "the backward waits for each gradient copy"),
    Case("pageable copies", "edited", stored("a100-torch-profiler", change_table("transfers", pageable)), ("pageable-copies",), "inputs from pageable memory, 2.8 GB/s"),
    Case("hot GPU", "edited", stored("h100-20b-async", change_table("gpu", hot)), ("throttled-clocks",), "1,650 instead of 1,980 MHz half of the time"),
    Case("swap", "edited", stored("h100-20b-async", change_table("memory", swap)), ("swapping",), "6 GiB of each rank are in swap"),
    Case("remote NUMA node", "edited", stored("h100-20b-async", remote_node), ("remote-numa-node",), "cores and memory on the other node"),
)  # fmt: skip
HEALTHY = (
    Case("job", "run", recorded("none")),
    Case("job, again", "run", recorded("none")),
    Case("job with recorded allocations", "run", recorded("none", *ALLOCATOR)),
    Case("job, 60 iterations", "run", recorded("none-long")),
    Case("two ranks", "run", recorded("none", ranks=2)),
    Case("large update", "run", recorded("update-none", threads=2)),
    Case("control group with room", "run", in_group("none", 4 * MEMORY_LIMIT)),
    Case("host", "run", doctor(*TRAIN)),
    Case("two threads", "run", doctor("OMP_NUM_THREADS=2", *TRAIN)),
    Case("H100", "mock", doctor(*TRAIN, card={})),
    Case("H100, first GPU visible", "mock", doctor(*TRAIN, card={}, CUDA_VISIBLE_DEVICES="0")),
    Case("H100, link at rest", "mock", doctor(*TRAIN, card={"generation": 1})),
    Case("card made for 8 lanes", "mock", doctor(*TRAIN, card={"width": 8, "max_width": 8})),
    Case("batch that fits", "dry-run", predicted("none")),
    Case("batch that fits, again", "dry-run", predicted("none")),
    *(Case(name, "recorded", stored(name), true=TRUE) for name in (
        "h100-20b-async", "a100-13b-async", "a100-13b-interleaved-4", "a100-ranks2-async", "a100-torch-profiler",
    )),
)  # fmt: skip


def report(case: Case) -> set[str]:
    """Return what was reported of a case, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return case.findings(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="Names of cases")
    only = parser.parse_args().only
    print(machine_line(), flush=True)
    # One thread on two cores would be a fault of its own.
    os.environ.pop("OMP_NUM_THREADS", None)
    rows, named, alarms = [], 0, 0
    faults, healthy = (
        [case for case in cases if not only or case.name in only]
        for cases in (FAULTS, HEALTHY)
    )
    for case in faults:
        reported = report(case)
        hit = [rule for rule in case.expected if rule in reported]
        named += bool(hit)
        rows.append(
            (
                case.name,
                case.kind,
                case.fault,
                f"`{hit[0]}`" if hit else "**missed**",
                ", ".join(sorted(reported - {*hit})),
            )
        )
        print("...", *rows[-1], file=sys.stderr, flush=True)
    table(("fault", "kind", "planted", "named by", "also reported"), rows)
    for case in healthy:
        false = report(case) - {*case.true}
        alarms += len(false)
        print("...", case.name, *sorted(false), file=sys.stderr, flush=True)
        if false:
            print(f"- {case.name}: {', '.join(sorted(false))}")
    print(
        f"\n{named} of {len(faults)} faults named, {alarms} false alarms on "
        f"{len(healthy)} healthy jobs"
    )


if __name__ == "__main__":
    main()
