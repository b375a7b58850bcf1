"""Measure reads and writes of state against plain O_DIRECT, and steps with storage
against DeepSpeed's ZeRO-Infinity.

    PYTHONPATH=. python benchmarks/storage.py --folder /scratch [--rounds 5] [--steps 6] [--blocks 12] [--io-only]

Everything takes turns in changing order, and ratios are within a round, since drives
that others use drift. Bytes are those of /proc/self/io. DeepSpeed runs on its CPU
accelerator and needs libaio; the device of both is host memory, and forward and
backward are waits. ebbtide has the host memory of DeepSpeed's best configuration.
Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from extensions import use_own_extensions
from storage_jobs import BEST, DEEPSPEED, NAMES, host_bytes, measure
from tables import machine_line, spread, table

_BLOCK_BYTES, _THREADS = 8 << 20, 2
# Of a state file, before the states.
_HEADERS_BYTES = 3 * 4096


class PlainFile:
    """The bytes of `States` in the same file and memory, of which two threads move
    every other block with O_DIRECT.

    Another file may be elsewhere on the drive, and pages of other memory may be
    smaller.
    """

    def __init__(self, states: States, size: int) -> None:
        self._file = os.open(states.path, os.O_RDWR | os.O_DIRECT)
        self._size = size
        self._pages = states.pages

    def read(self) -> None:
        self._move(os.preadv)

    def write(self) -> None:
        self._move(os.pwritev)

    def _move(self, move: Callable[..., int]) -> None:
        def move_part(number: int) -> None:
            for offset in range(
                number * _BLOCK_BYTES, self._size, _THREADS * _BLOCK_BYTES
            ):
                begin = offset % len(self._pages)
                if (
                    move(
                        self._file,
                        [memory[begin : begin + _BLOCK_BYTES]],
                        _HEADERS_BYTES + offset,
                    )
                    != _BLOCK_BYTES
                ):
                    raise OSError("short read or write")

        with memoryview(self._pages) as memory:
            together([partial(move_part, number) for number in range(_THREADS)])


class States:
    """A state file of ebbtide's that is read or written subgroup by subgroup, through
    buffers of its own."""

    def __init__(self, path: Path, size: int, subgroups: int) -> None:
        from ebbtide.features.storage.engine.state_file import StateFile

        self.path = path
        self._sizes = [size // subgroups] * subgroups
        self._file = StateFile(path, self._sizes, os.urandom(16))
        self.pages = mmap.mmap(-1, self._sizes[0])
        self.pages.write(os.urandom(self._sizes[0]))
        for subgroup in range(subgroups):
            self._file.reserve([subgroup])

    def read(self) -> None:
        self._move(self._file.read)

    def write(self) -> None:
        self._move(self._file.write)

    def close(self) -> None:
        self._file.close()

    def _move(self, move: Callable[[int, memoryview], None]) -> None:
        with memoryview(self.pages) as memory:
            for subgroup in range(len(self._sizes)):
                move(subgroup, memory)


def together(works: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def compare_io(args: argparse.Namespace) -> None:
    """Print the bandwidth of plain O_DIRECT and of state files, and their ratio within
    each round."""
    size = (
        args.io_mb
        * 10**6
        // (_BLOCK_BYTES * args.io_subgroups)
        * _BLOCK_BYTES
        * args.io_subgroups
    )
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        states = [
            States(folder / f"states-{number}", size, args.io_subgroups)
            for number in range(2)
        ]
        plain = [PlainFile(each, size) for each in states]
        # First writes are slower.
        for file in states:
            file.write()
        works: dict[str, tuple[Callable[[], None], Callable[[], None], int]] = {
            "read": (plain[0].read, states[0].read, size),
            "write": (plain[1].write, states[1].write, size),
            "both at once": (
                lambda: together([plain[0].read, plain[1].write]),
                lambda: together([states[0].read, states[1].write]),
                2 * size,
            ),
        }
        rates: dict[str, tuple[list[float], list[float]]] = {
            key: ([], []) for key in works
        }
        for number in range(args.io_rounds):
            for key, (*pair, nbytes) in works.items():
                for which in (0, 1) if number % 2 else (1, 0):
                    begin_s = time.perf_counter()
                    pair[which]()
                    rates[key][which].append(
                        nbytes / (time.perf_counter() - begin_s) / 1e9
                    )
        for state in states:
            state.close()
    print(
        f"Files of {size / 1e9:.2f} GB, {args.io_subgroups} subgroups, "
        f"{args.io_rounds} rounds\n"
    )
    rows = []
    for key, (direct, ours) in rates.items():
        ratios = [our / of for our, of in zip(ours, direct, strict=True)]
        rows.append([key, spread(direct, 2), spread(ours, 2), spread(ratios, 2)])
    table(["", "plain O_DIRECT, GB/s", "state files, GB/s", "ratio"], rows)


def run(name: str, args: argparse.Namespace) -> dict[str, Any] | str:
    """Run a job in another process; return its results, or an error message."""
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", name]
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it failed"])[-1]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"  load {os.getloadavg()[0]:.1f}: {name} {result['step']:.0f} ms",
        file=sys.stderr,
        flush=True,
    )
    return result


def compare_steps(args: argparse.Namespace) -> None:
    """Print times, bytes and memory of each job, and ratios to DeepSpeed's within each
    round."""
    names = args.job or list(NAMES)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    errors: dict[str, str] = {}
    for number in range(args.rounds):
        for name in names if number % 2 else reversed(names):
            result = run(name, args) if name not in errors else errors[name]
            if isinstance(result, str):
                errors[name] = result
            else:
                results[name].append(result)
    rows = []
    for name, runs in results.items():
        if name in errors:
            rows.append([name, f"not measured: {errors[name]}", *[""] * 6])
            continue
        ratios = [
            _ratios(results, runs, base, "step")
            for base in (next(iter(DEEPSPEED)), BEST)
        ]
        gigabytes = [
            statistics.median(run[key] for run in runs) / 1e9
            for key in ("read", "written", "peak_bytes")
        ]
        rows.append(
            [
                name,
                *(
                    spread([run[key] for run in runs], 0)
                    for key in ("step", "iteration")
                ),
                *ratios,
                _ratios(results, runs, BEST, "iteration"),
                f"{gigabytes[0]:.2f} + {gigabytes[1]:.2f}",
                f"{gigabytes[2]:.2f}",
            ]
        )
    head = [
        "job",
        "step, ms",
        "iteration, ms",
        "step of defaults / step",
        "step of best / step",
    ]
    table(
        [
            *head,
            "iteration of best / iteration",
            "read + written per step, GB",
            "peak resident memory, GB",
        ],
        rows,
    )


def _ratios(
    results: dict[str, list[dict[str, Any]]],
    runs: list[dict[str, Any]],
    base: str,
    key: str,
) -> str:
    others = results.get(base, [])
    if len(others) != len(runs) or not runs:
        return ""
    return spread(
        [other[key] / own[key] for other, own in zip(others, runs, strict=True)], 2
    )


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument(
        "--folder",
        type=Path,
        default=Path.cwd(),
        help="a folder on the drive; default: this one",
    )
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument(
        "--steps",
        type=int,
        default=6,
        help="steps of each process, without those for warm-up",
    )
    flags.add_argument("--width", type=int, default=1024)
    flags.add_argument(
        "--blocks", type=int, default=12, help="each has 8 * width^2 parameters"
    )
    flags.add_argument(
        "--subgroup",
        type=float,
        default=2.1,
        help="parameters of ebbtide's subgroups, in millions",
    )
    flags.add_argument("--forward-ms", type=float, default=200)
    flags.add_argument("--backward-ms", type=float, default=400)
    flags.add_argument(
        "--host-bytes",
        type=float,
        help="of ebbtide; default: those of DeepSpeed's best configuration",
    )
    flags.add_argument("--job", action="append", choices=NAMES)
    flags.add_argument("--io-mb", type=int, default=1200)
    flags.add_argument("--io-subgroups", type=int, default=12)
    flags.add_argument("--io-rounds", type=int, default=9)
    flags.add_argument("--io-only", action="store_true")
    flags.add_argument("--measure", choices=NAMES, help=argparse.SUPPRESS)
    args = flags.parse_args()
    use_own_extensions()
    args.host_bytes = args.host_bytes or host_bytes(args.width, args.blocks)
    if args.measure:
        print(json.dumps(measure(args.measure, args)))
        return
    print(
        f"{time.strftime('%Y-%m-%d')}, {machine_line()}, load "
        f"{os.getloadavg()[0]:.1f}\n"
    )
    compare_io(args)
    if not args.io_only:
        print(
            f"{args.blocks} blocks of width {args.width}, {args.host_bytes / 1e9:.2f} "
            "GB of host memory for ebbtide\n"
        )
        compare_steps(args)


if __name__ == "__main__":
    main()
