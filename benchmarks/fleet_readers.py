"""Measure readers of Parquet on a trace of many ranks: pyarrow.parquet,
pyarrow.dataset, DuckDB and Polars.

    python benchmarks/fleet_readers.py FOLDER/fleet-512x1000.ebb [--ranks 64] [--rounds 3]

Needs duckdb and polars, which ebbtide does not use. Two tasks, each reader in a process
of its own, in turn:

- `columns`: times and bytes of each memory pool, and times and rates of the link, rank
  by rank as NumPy arrays.
- `peaks`: the median, over ranks and iterations, of the peak of device memory in each
  phase; DuckDB and Polars compute it in one query of all ranks, with an as-of join for
  the sample that holds when a phase begins.

Prints Markdown.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from fleet import cost
from tables import machine_line, spread, table

READERS = ["pyarrow.parquet", "pyarrow.dataset", "duckdb", "polars"]
POOLS = ["device", "allocated", "reserved"]
RATES = ["t_ns", "window_ns", "h2d_bytes_per_s", "d2h_bytes_per_s"]
Peaks = dict[str, float]


def files(trace: Path, ranks: int, name: str) -> list[str]:
    return [str(trace / f"rank-{rank}" / f"{name}.parquet") for rank in range(ranks)]


def selections(reader: str) -> Callable[[str, list[str], str | None], list[Any]]:
    """Return a function from a file, columns and a pool (None: all rows) to arrays."""
    if reader == "pyarrow.parquet":

        def select(file: str, columns: list[str], pool: str | None) -> list[Any]:
            wanted = [*columns, *(["pool"] if pool else [])]
            rows = pq.ParquetFile(file, read_dictionary=wanted[len(columns) :]).read(
                columns=wanted
            )
            kept = np.ones(len(rows), bool)
            if pool:
                labels = rows["pool"].combine_chunks()
                kept = labels.indices.to_numpy() == labels.dictionary.to_pylist().index(
                    pool
                )
            return [rows[column].to_numpy()[kept] for column in columns]

    elif reader == "pyarrow.dataset":
        import pyarrow.dataset as ds

        def select(file: str, columns: list[str], pool: str | None) -> list[Any]:
            filters = ds.field("pool") == pool if pool else None
            rows = ds.dataset(file, format="parquet").to_table(
                columns=columns, filter=filters
            )
            return [rows[column].to_numpy() for column in columns]

    elif reader == "duckdb":
        import duckdb

        def select(file: str, columns: list[str], pool: str | None) -> list[Any]:
            where = f"where pool = '{pool}'" if pool else ""
            return list(
                duckdb.sql(f"select {', '.join(columns)} from '{file}' {where}")
                .fetchnumpy()
                .values()
            )

    else:
        import polars as pl

        def select(file: str, columns: list[str], pool: str | None) -> list[Any]:
            rows = pl.scan_parquet(file)
            rows = rows.filter(pl.col("pool") == pool) if pool else rows
            return [column.to_numpy() for column in rows.select(columns).collect()]

    return select


def read_columns(reader: str, trace: Path, ranks: int) -> Peaks:
    """Read all columns and return the largest value of each pool."""
    select, peaks = selections(reader), dict.fromkeys(POOLS, 0.0)
    for memory, link in zip(
        files(trace, ranks, "memory"), files(trace, ranks, "link"), strict=True
    ):
        for pool in POOLS:
            peaks[pool] = max(
                peaks[pool], float(select(memory, ["t_ns", "bytes"], pool)[1].max())
            )
        select(link, RATES, None)
    return peaks


def duckdb_peaks(trace: Path, ranks: int) -> Peaks:
    import duckdb

    memory, phases = files(trace, ranks, "memory"), files(trace, ranks, "phases")
    query = f"""
        with m as (select parse_dirpath(filename) f, t_ns, bytes from read_parquet({memory}, filename=true)
                   where pool = 'device'),
             p as (select parse_dirpath(filename) f, iteration, phase, start_ns, end_ns
                   from read_parquet({phases}, filename=true)),
             inside as (select m.f, iteration, phase, end_ns, t_ns, bytes from m asof join p
                        on m.f = p.f and m.t_ns >= p.start_ns),
             before as (select p.f, iteration, phase, bytes from p asof join m on p.f = m.f and p.start_ns >= m.t_ns),
             samples as (select f, iteration, phase, bytes from inside where t_ns <= end_ns
                      union all select f, iteration, phase, bytes from before),
             peaks as (select f, iteration, phase, max(bytes) peak from samples group by all)
        select phase, median(peak) from peaks group by all"""
    return {phase: float(peak) for phase, peak in duckdb.sql(query).fetchall()}


def polars_peaks(trace: Path, ranks: int) -> Peaks:
    import polars as pl

    def scan(name: str, columns: list[str]) -> Iterator[Any]:
        for rank, file in enumerate(files(trace, ranks, name)):
            rows = pl.scan_parquet(file)
            rows = rows.filter(pl.col("pool") == "device") if name == "memory" else rows
            yield rows.select(*columns, pl.lit(rank).alias("rank"))

    memory = pl.concat(scan("memory", ["t_ns", "bytes"])).sort("rank", "t_ns")
    phases = pl.concat(
        scan("phases", ["iteration", "phase", "start_ns", "end_ns"])
    ).sort("rank", "start_ns")
    keys = ["rank", "iteration", "phase"]
    inside = memory.join_asof(phases, left_on="t_ns", right_on="start_ns", by="rank")
    before = phases.join_asof(memory, left_on="start_ns", right_on="t_ns", by="rank")
    parts = [
        inside.filter(pl.col("t_ns") <= pl.col("end_ns")).select(*keys, "bytes"),
        before.select(*keys, "bytes"),
    ]
    peaks = (
        pl.concat(parts)
        .group_by(keys)
        .agg(pl.col("bytes").max())
        .group_by("phase")
        .agg(pl.col("bytes").median())
    )
    return {
        str(phase): float(peak)
        for phase, peak in peaks.collect(engine="streaming").iter_rows()
    }


def numpy_peaks(reader: str, trace: Path, ranks: int) -> Peaks:
    select, peaks = selections(reader), dict[str, list[Any]]()
    for memory, phases in zip(
        files(trace, ranks, "memory"), files(trace, ranks, "phases"), strict=True
    ):
        times, sizes = select(memory, ["t_ns", "bytes"], "device")
        rows = pq.read_table(
            phases, columns=["iteration", "phase", "start_ns", "end_ns"]
        ).to_pandas()
        first = np.maximum(
            np.searchsorted(times, rows["start_ns"], side="right") - 1, 0
        )
        bounds = np.stack(
            [first, np.searchsorted(times, rows["end_ns"], side="right")], axis=1
        ).ravel()
        rows["peak"] = np.maximum.reduceat(np.append(sizes, 0), bounds)[::2]
        for phase, group in rows.groupby("phase"):
            peaks.setdefault(str(phase), []).append(
                group.groupby("iteration")["peak"].max().to_numpy()
            )
    return {
        phase: float(np.median(np.concatenate(parts))) for phase, parts in peaks.items()
    }


def work(reader: str, task: str, trace: Path, ranks: int) -> Peaks:
    if task == "columns":
        return read_columns(reader, trace, ranks)
    if reader == "duckdb":
        return duckdb_peaks(trace, ranks)
    return (
        polars_peaks(trace, ranks)
        if reader == "polars"
        else numpy_peaks(reader, trace, ranks)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--work",
        nargs=2,
        metavar=("READER", "TASK"),
        help="Only do this, in this process.",
    )
    arguments = parser.parse_args()
    if arguments.work:
        print(sorted(work(*arguments.work, arguments.trace, arguments.ranks).items()))
        return
    print(
        f"{time.strftime('%Y-%m-%d')}, {machine_line()}, {arguments.ranks} ranks, "
        f"{arguments.rounds} rounds\n"
    )
    words = [
        sys.executable,
        __file__,
        str(arguments.trace),
        "--ranks",
        str(arguments.ranks),
        "--work",
    ]
    for task in ("columns", "peaks"):
        outputs = {
            reader: subprocess.check_output([*words, reader, task])
            for reader in READERS
        }
        if len(set(outputs.values())) > 1:
            sys.exit(f"the results differ: {outputs}")
        costs = {reader: [] for reader in READERS}
        for _ in range(arguments.rounds):
            for reader in READERS:
                costs[reader].append(cost([*words, reader, task]))
        rows = [
            [f"`{r}`", *(spread(column, 1) for column in zip(*costs[r], strict=True))]
            for r in READERS
        ]
        table(
            [f"`{task}`", "wall time, s", "processor time, s", "peak memory, GB"], rows
        )


if __name__ == "__main__":
    main()
