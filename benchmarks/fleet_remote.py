"""Measure the bytes that commands move of a trace of many ranks on an S3 server.

    PYTHONPATH=. python benchmarks/fleet_remote.py FOLDER [--ranks 512] [--layers 320]

Makes FOLDER/remote-RANKS.ebb unless it exists: the torch.profiler file of
`fleet_files.py` with `--layers` layers and 14 iterations, imported once; on each rank
the times of kernels, calls and copies differ by up to 2 us. The server is moto's; bytes
are counted between it and the commands, with the headers of answers. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import fleet_files
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fleet import RANKS_PER_HOST, cost, disk_bytes
from pyarrow import fs
from tables import machine_line, table

from ebbtide.features.importers.load import import_trace
from ebbtide.profiler.trace.files import new_trace, write_meta, write_table
from ebbtide.profiler.trace.schema import TABLES
from tests.features.remote.servers import BUCKET, Connection, environment, s3_server

COMMANDS = ("summary", "findings")
ITERATIONS = 14
JITTER_NS = 2000
JITTERED = ("kernels", "calls", "transfers")


def jittered(rows: pa.Table, rank: int) -> pa.Table:
    """Return rows whose times differ from those of other ranks."""
    random = np.random.default_rng(rank)
    for position, name in enumerate(rows.column_names):
        times = rows.column(name)
        if name.endswith("_ns") and not times.null_count:
            low = JITTER_NS if name == "end_ns" else 0
            moved = times.to_numpy() + random.integers(low, low + JITTER_NS, len(times))
            rows = rows.set_column(position, rows.schema.field(name), pa.array(moved))
    return rows


def make_trace(folder: Path, path: Path, ranks: int, layers: int) -> None:
    """Write a trace of many ranks."""
    fleet_files.LAYERS = layers
    file, one = folder / "one.json", folder / "one.ebb"
    peculiarities = {"slow": 1.0, "late_us": 0.0, "backward_us": 0.0, "link": 1.0}
    fleet_files.write_file(file, 0, ranks, ITERATIONS, RANKS_PER_HOST, **peculiarities)
    import_trace([file], one, force=True)
    meta: dict[str, Any] = json.loads((one / "meta.json").read_bytes())
    files = {name: one / "rank-0" / f"{name}.parquet" for name in TABLES}
    tables = {name: pq.read_table(f) for name, f in files.items() if f.exists()}
    with new_trace(path):
        for rank in range(ranks):
            for name, rows in tables.items():
                own = jittered(rows, rank) if name in JITTERED else rows
                write_table(path, rank, name, [own.cast(rows.schema)])
        entries = [
            {**meta["ranks"][0], "rank": rank, "host": f"node{rank // RANKS_PER_HOST}"}
            for rank in range(ranks)
        ]
        write_meta(path, {**meta, "ranks": entries})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--layers", type=int, default=320)
    arguments = parser.parse_args()
    path = arguments.folder / f"remote-{arguments.ranks}.ebb"
    if not path.exists():
        make_trace(arguments.folder, path, arguments.ranks, arguments.layers)
    stored = disk_bytes(path)
    print(
        f"{time.strftime('%Y-%m-%d')}, {machine_line()}, {arguments.ranks} ranks, "
        f"{stored / 1e6:.1f} MB\n"
    )
    rows = []
    with s3_server() as port:
        os.environ |= environment(port)
        store = fs.S3FileSystem(
            endpoint_override=os.environ["AWS_ENDPOINT_URL"], allow_delayed_open=True
        )
        fs.copy_files(str(path), f"{BUCKET}/run.ebb", destination_filesystem=store)
        connection = Connection(port)
        os.environ |= environment(connection.port)
        for command in COMMANDS:
            sent, requests = connection.sent_bytes, connection.requests
            words = ["python", "-m", "ebbtide", command, f"s3://{BUCKET}/run.ebb"]
            _, cpu_s, memory_gb = cost([*words, "--jobs", "1"])
            moved = connection.sent_bytes - sent
            rows.append(
                [
                    f"`ebbtide {command}`",
                    f"{moved / 1e6:.1f}",
                    f"{100 * moved / stored:.1f}",
                    f"{connection.requests - requests:,}",
                    f"{cpu_s:.1f}",
                    f"{memory_gb:.2f}",
                ]
            )
    header = ["command", "MB moved", "% of the trace", "requests", "CPU s", "GB"]
    table(header, rows)


if __name__ == "__main__":
    main()
