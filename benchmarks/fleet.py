"""Measure commands on a trace of many ranks and iterations.

    python benchmarks/fleet.py FOLDER [--ranks 512] [--iterations 1000] [--commands summary,report] [--rounds 1]
    python benchmarks/fleet.py FOLDER --commands ""   # only makes the trace
    python benchmarks/fleet.py FOLDER --files --iterations 14   # of files of torch.profiler, with kernels

Makes the trace FOLDER/fleet-RANKSxITERATIONS.ebb unless it exists, and runs commands on
it, each as a process of its own. The trace is a real one (`--trace`), repeated: rank n
repeats rank n of the real trace, modulo its ranks, and eight ranks share a host. All
ranks start an iteration together, every 4 s. Phases differ by 1 % (standard deviation)
between iterations of a rank. Memory (each pool of the real trace's first rank) and link
are sampled every 20 ms, with 1 ms of jitter; memory differs by up to 64 MiB, link rates
by 5 %. Some ranks differ, as `PECULIAR_RANKS` states, and one in 64 takes 5 % longer:
`findings` must name them. With `--files`, files of torch.profiler are written instead
(`fleet_files.py`, with a tenth of the milliseconds of `PECULIAR_RANKS`), and imported
as the first command. Prints Markdown. Processor time tells what a command costs on a
machine on which other work runs, too.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from fleet_files import write_file
from tables import machine_line, spread, table

from ebbtide.profiler.trace import Trace, open_trace
from ebbtide.profiler.trace.files import new_trace, write_meta, write_rank
from ebbtide.profiler.trace.frames import frame
from ebbtide.profiler.trace.schema import TABLES

ROOT = Path(__file__).parents[1]
COMMANDS = ["summary", "iterations", "memory", "link", "windows", "findings", "report"]
PERIOD_NS = 4_000_000_000
SAMPLE_NS = 20_000_000
JITTER_NS = 1_000_000
SLOW_EVERY = 64
RANKS_PER_HOST = 8
# What sets a rank apart: a factor of its link's highest rate, bytes more of each pool,
# ms by which it begins late, ms by which its backward is longer.
PECULIAR_RANKS: dict[int, dict[str, float]] = {
    5: {"link": 0.5},
    18: {"bytes": 6 * 2**30},
    27: {"late_ms": 120.0},
    42: {"backward_ms": 150.0},
}
# A host of which all ranks take 6 % longer.
SLOW_HOST, SLOW_HOST_FACTOR = 4, 1.06
Ints = npt.NDArray[np.int64]


class Repetition:
    """Rank `rank` of a new trace: one of the real trace, with its iterations after
    warm-up over and over."""

    def __init__(self, trace: Trace, rank: int, iterations: int) -> None:
        self.trace = trace
        self.rank = rank
        self.source = trace.ranks[rank % len(trace.ranks)]
        self.random = np.random.default_rng(rank)
        self.phases = trace.phases(self.source)
        ends = self.phases.groupby("iteration")["end_ns"].max()
        starts = ends.shift(fill_value=int(self.phases["start_ns"].min()))
        steady = ends.index[2:]
        self.numbers = [
            *ends.index[:2],
            *(steady[n % len(steady)] for n in range(iterations - 2)),
        ]
        self.real_starts = starts[self.numbers].to_numpy(np.int64)
        self.real_ends = ends[self.numbers].to_numpy(np.int64)
        self.peculiarities = PECULIAR_RANKS.get(rank, {})
        slow = SLOW_HOST_FACTOR if rank // RANKS_PER_HOST == SLOW_HOST else 1.0
        slow *= 1.05 if rank % SLOW_EVERY == SLOW_EVERY - 1 else 1.0
        lengths = (
            np.clip(slow * self.random.normal(0.85, 0.0085, iterations), 0.5, 0.95)
            * PERIOD_NS
        )
        self.scales = lengths / (self.real_ends - self.real_starts)
        late_ns = int(self.peculiarities.get("late_ms", 0.0) * 1e6)
        self.starts = int(starts.iloc[0]) + late_ns + PERIOD_NS * np.arange(iterations)

    def new_phases(self) -> pd.DataFrame:
        """Return the table `phases`."""
        by_number = dict(list(self.phases.groupby("iteration")))
        rows = pd.concat(
            [
                by_number[number].assign(iteration=n)
                for n, number in enumerate(self.numbers)
            ]
        )
        index = rows["iteration"].to_numpy(np.int64)
        for column in ("start_ns", "end_ns"):
            since = rows[column].to_numpy(np.int64) - self.real_starts[index]
            rows[column] = self.starts[index] + (since * self.scales[index]).astype(
                np.int64
            )
        longer_ns = int(self.peculiarities.get("backward_ms", 0.0) * 1e6)
        after = rows["phase"].isin(["backward", "update"])
        rows.loc[rows["phase"] == "update", "start_ns"] += longer_ns
        rows.loc[after, "end_ns"] += longer_ns
        return frame("phases", rows.assign(gpu_start_ns=pd.NA, gpu_end_ns=pd.NA))

    def sample_times(self) -> tuple[Ints, Ints]:
        """Return the times of samples, ns, in the new trace and at the same positions
        in the real one."""
        count = len(self.numbers) * PERIOD_NS // SAMPLE_NS
        offsets = SAMPLE_NS * np.arange(1, count) + self.random.integers(
            -JITTER_NS, JITTER_NS, count - 1
        )
        index = offsets // PERIOD_NS
        real = self.real_starts[index] + (
            (offsets - index * PERIOD_NS) / self.scales[index]
        ).astype(np.int64)
        return self.starts[0] + offsets, np.minimum(real, self.real_ends[index])

    def memory(self) -> pd.DataFrame:
        """Return the table `memory`. Pools that the real rank lacks are those of the
        real trace's first rank."""
        device = self.trace.rank(self.source).main_device.device
        tables = []
        for pool, rank in self._pools():
            rows = self.trace.memory(rank)
            rows = rows[rows["pool"] == pool]
            times, real = self.sample_times()
            sizes = rows["bytes"].to_numpy(np.int64)[latest(rows, real)]
            sizes = (
                sizes
                + int(self.peculiarities.get("bytes", 0))
                - (self.random.integers(0, 32, len(sizes)) << 21)
            )
            tables.append(
                pd.DataFrame(
                    {
                        "t_ns": times,
                        "device": device,
                        "pool": pool,
                        "bytes": np.maximum(sizes, 0),
                    }
                )
            )
        return frame("memory", pd.concat(tables))

    def _pools(self) -> Iterator[tuple[str, int]]:
        own = set(self.trace.memory(self.source)["pool"])
        for pool in self.trace.memory(self.trace.ranks[0])["pool"].unique():
            yield pool, self.source if pool in own else self.trace.ranks[0]

    def link(self) -> pd.DataFrame:
        """Return the table `link`."""
        rows = self.trace.link(self.source)
        times, real = self.sample_times()
        samples = rows.iloc[latest(rows, real)].reset_index(drop=True)
        for column in ("h2d_bytes_per_s", "d2h_bytes_per_s"):
            rates = samples[column].to_numpy(np.float64) * self.random.uniform(
                0.95, 1.0, len(samples)
            )
            if "link" in self.peculiarities:
                rates = limited(rates, self.peculiarities["link"] * float(rates.max()))
            samples[column] = rates
        return frame("link", samples.assign(t_ns=times, window_ns=SAMPLE_NS))

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return all tables of the rank."""
        made = {
            "phases": self.new_phases(),
            "memory": self.memory(),
            "link": self.link(),
        }
        return {name: made.get(name, frame(name)) for name in TABLES}

    def meta(self) -> dict[str, Any]:
        """Return the rank's entry of meta.json."""
        entry = next(
            entry
            for entry in self.trace.raw_meta["ranks"]
            if entry["rank"] == self.source
        )
        host = f"node{self.rank // RANKS_PER_HOST:02d}"
        begin = int(self.starts[0])
        return {
            **copy.deepcopy(entry),
            "rank": self.rank,
            "host": host,
            "first_iteration_start_ns": begin,
        }


def limited(rates: npt.NDArray[np.float64], limit: float) -> npt.NDArray[np.float64]:
    """Return rates of a link that carries no more than `limit`: what is beyond it
    follows later."""
    excess = np.cumsum(rates - limit)
    waiting = excess - np.minimum(np.minimum.accumulate(excess), 0.0)
    return rates - np.diff(waiting, prepend=0.0)


def latest(rows: pd.DataFrame, times: Ints) -> Ints:
    """Return the row of the latest sample at each time, or of the first one."""
    index = np.searchsorted(rows["t_ns"].to_numpy(np.int64), times, side="right") - 1
    return np.maximum(index, 0).astype(np.int64)


def make_rank(real: Path, path: Path, rank: int, iterations: int) -> dict[str, Any]:
    """Write the tables of one rank and return its entry of meta.json."""
    made = Repetition(open_trace(real), rank, iterations)
    write_rank(path, rank, made.tables())
    return made.meta()


def make_trace(real: Path, path: Path, ranks: int, iterations: int) -> None:
    """Write a trace of many ranks and iterations."""
    meta = dict(open_trace(real).raw_meta)
    with (
        new_trace(path),
        multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool,
    ):
        tasks = [(real, path, rank, iterations) for rank in range(ranks)]
        write_meta(path, {**meta, "ranks": pool.starmap(make_rank, tasks, chunksize=4)})


def make_file(folder: Path, rank: int, ranks: int, iterations: int) -> None:
    """Write the file of torch.profiler of one rank."""
    own = PECULIAR_RANKS.get(rank, {})
    slow = SLOW_HOST_FACTOR if rank // RANKS_PER_HOST == SLOW_HOST else 1.0
    slow *= 1.05 if rank % SLOW_EVERY == SLOW_EVERY - 1 else 1.0
    times = {
        "late_us": 100 * own.get("late_ms", 0.0),
        "backward_us": 100 * own.get("backward_ms", 0.0),
    }
    path = folder / f"rank-{rank}.json"
    write_file(
        path,
        rank,
        ranks,
        iterations,
        RANKS_PER_HOST,
        slow=slow,
        link=own.get("link", 1.0),
        **times,
    )


def make_files(folder: Path, ranks: int, iterations: int) -> None:
    """Write the files of torch.profiler of all ranks."""
    folder.mkdir(parents=True)
    with multiprocessing.get_context("spawn").Pool(
        len(os.sched_getaffinity(0))
    ) as pool:
        pool.starmap(
            make_file,
            [(folder, rank, ranks, iterations) for rank in range(ranks)],
            chunksize=4,
        )


def cost(command: list[str]) -> tuple[float, float, float]:
    """Return the wall time and the processor time in s, and the peak resident memory in
    GB of one process."""
    begin = time.perf_counter()
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(command, stdout=output, stderr=output) as process,
    ):
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            text = output.read().decode(errors="replace")[-2000:]
            sys.exit(f"{' '.join(command)} ended with {process.returncode}: {text}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9


def disk_bytes(path: Path) -> int:
    """Return the size of a file, or of all files of a folder."""
    return sum(
        file.stat().st_size
        for file in ([path] if path.is_file() else path.rglob("*"))
        if file.is_file()
    )


def measure(name: str, path: Path, rounds: int) -> list[str]:
    """Run a command some times, and return its row of the table."""
    output = path.parent / "report.html"
    words = [
        *name.split(),
        str(path),
        *(["--force", "-o", str(output)] if name == "report" else []),
    ]
    if name == "import":
        words = [name, str(path.with_suffix("")), "--force", "-o", str(path)]
    costs = [cost([sys.executable, "-m", "ebbtide", *words]) for _ in range(rounds)]
    written = f"{disk_bytes(output) / 1e6:.1f} MB" if name == "report" else ""
    return [
        f"`ebbtide {name}`",
        *(spread(column, 1) for column in zip(*costs, strict=True)),
        written,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--trace", type=Path, default=ROOT / "traces" / "h100-20b-async.ebb"
    )
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument(
        "--commands",
        type=lambda text: text.split(",") if text else [],
        default=COMMANDS,
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--files", action="store_true", help="Import files of torch.profiler."
    )
    arguments = parser.parse_args()
    kind = "files" if arguments.files else "fleet"
    path = arguments.folder / f"{kind}-{arguments.ranks}x{arguments.iterations}.ebb"
    first = []
    if arguments.files:
        if not path.with_suffix("").exists():
            make_files(path.with_suffix(""), arguments.ranks, arguments.iterations)
        first = [measure("import", path, 1)]
    elif not path.exists():
        make_trace(arguments.trace, path, arguments.ranks, arguments.iterations)
    if not arguments.commands:
        return
    size = (
        f"{arguments.ranks} ranks, {arguments.iterations} iterations, "
        f"{disk_bytes(path) / 1e9:.2f} GB on disk"
    )
    print(
        f"{time.strftime('%Y-%m-%d')}, {machine_line()}, {size}, {arguments.rounds} "
        "rounds: median (least to most)\n"
    )
    table(
        [
            "command",
            "wall time, s",
            "processor time, s",
            "peak memory, GB",
            "output file",
        ],
        [
            *first,
            *(measure(name, path, arguments.rounds) for name in arguments.commands),
        ],
    )


if __name__ == "__main__":
    main()
