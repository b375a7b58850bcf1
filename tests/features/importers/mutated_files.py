"""Imports damaged copies of files: each gives a trace that readers call sound, or one
line, in bounded time and memory.

    python -m tests.features.importers.mutated_files COUNT SEED FILE...
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ebbtide.errors import UserError
from ebbtide.features.importers.load import import_trace
from ebbtide.profiler.sampler.sampler import read_rss_bytes
from ebbtide.profiler.trace import open_trace
from ebbtide.profiler.trace.schema import TABLES

MAX_SECONDS = 10
MAX_BYTES = 10**9
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_NUMBERS = (
    b"-1",
    b"0",
    b"1e308",
    b"-1e400",
    b"nan",
    b"9223372036854775807",
    b"-9223372036854775808",
    b"18446744073709551616",
    b"1" + b"0" * 40,
    b"0.1" * 20,
    b"4294967296",
)
_TEXTS = (b"\0" * 16, b"\xff\xfe", b"\x1b[2J", b"\r", b"\n\n", b'"', b"{", b"]", b",")


class Outcome(NamedTuple):
    """The result of the import of a damaged file."""

    problem: str  # Empty: a sound trace, or one line.
    imported: bool
    seconds: float
    peak_bytes: int


def mutate(data: bytes, generator: random.Random) -> bytes:
    """Return a damaged copy of the contents of a file."""
    for _ in range(generator.choice((1, 1, 1, 2, 4))):
        data = generator.choice(_MUTATIONS)(data, generator) if data else data
    return data


def _bits(data: bytes, generator: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(generator.randrange(1, 20)):
        changed[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def _cut(data: bytes, generator: random.Random) -> bytes:
    begin = generator.randrange(len(data))
    length = generator.choice((1, 100, len(data)))
    return data[:begin] + data[begin + generator.randrange(1, length + 1) :]


def _double(data: bytes, generator: random.Random) -> bytes:
    begin = generator.randrange(len(data))
    part = data[begin : begin + generator.choice((10, 1000, len(data)))]
    place = generator.choice((begin, generator.randrange(len(data))))
    return data[:place] + part * generator.choice((1, 1, 5)) + data[place:]


def _number(data: bytes, generator: random.Random) -> bytes:
    begin = generator.randrange(len(data))
    match = _NUMBER.search(data, begin) or _NUMBER.search(data)
    if match is None:
        return _bits(data, generator)
    return data[: match.start()] + generator.choice(_NUMBERS) + data[match.end() :]


def _text(data: bytes, generator: random.Random) -> bytes:
    place = generator.randrange(len(data))
    return data[:place] + generator.choice(_TEXTS) + data[place:]


def _lines(data: bytes, generator: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    first, second = (generator.randrange(len(lines)) for _ in range(2))
    lines[first], lines[second] = lines[second], lines[first]
    return b"".join(lines)


_MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _bits,
    _cut,
    _double,
    _number,
    _number,
    _text,
    _lines,
)


def import_damaged(file: Path, data: bytes, folder: Path) -> Outcome:
    """Import contents under the name of a file, in a process of its own."""
    damaged = folder / file.name
    damaged.write_bytes(data)
    output = folder / "run.ebb"
    shutil.rmtree(output, ignore_errors=True)
    read, write = os.pipe()
    begin = time.monotonic()
    # A child begins with the memory of its parent.
    own_bytes = read_rss_bytes(os.getpid()) or 0
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(3 * MAX_SECONDS)
        os.write(write, json.dumps(_problem(damaged, output)).encode()[:4000])
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        answer = pipe.read()
    _, status, usage = os.wait4(child, 0)
    seconds, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 - own_bytes
    if status:
        wall = time.monotonic() - begin
        problem = f"ended by status {status} after {wall:.0f} s"
        return Outcome(problem, False, seconds, peak)
    problem, imported = json.loads(answer)
    if not problem and seconds > MAX_SECONDS:
        problem = f"took {seconds:.1f} s of processor time"
    if not problem and peak > MAX_BYTES:
        problem = f"took {peak / 1e9:.2f} GB"
    return Outcome(problem, imported, seconds, peak)


def _problem(file: Path, output: Path) -> tuple[str, bool]:
    """Return why an import is wrong, empty if it is not, and whether it gave a
    trace."""
    try:
        import_trace([file], output)
    except UserError as error:
        if "\n" in str(error):
            return f"several lines: {error}", False
        return ("it left a trace behind" if output.exists() else ""), False
    except BaseException:
        lines = traceback.format_exc().splitlines()
        return " | ".join(lines[-6:])[-900:], False
    try:
        trace = open_trace(output)
        for rank in trace.ranks:
            for table in TABLES:
                trace.columns(rank, table)
    except Exception as error:
        return f"readers refuse it: {error!r}"[:900], True
    return "", True


def problems(
    files: Sequence[Path], count: int, seed: int
) -> list[tuple[str, str, Outcome]]:
    """Return (file, seed of the case, outcome) of damaged copies that were wrong."""
    wrong = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(count):
            file = files[number % len(files)]
            case = f"{seed}-{number}"
            data = mutate(file.read_bytes(), random.Random(case))
            outcome = import_damaged(file, data, Path(name))
            if outcome.problem:
                wrong.append((file.name, case, outcome))
    return wrong


def main() -> None:
    count, seed, *names = sys.argv[1:]
    for file, case, outcome in problems([*map(Path, names)], int(count), int(seed)):
        print(f"{file} {case}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
