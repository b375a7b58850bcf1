"""Import as a whole: combinations of files, and fuzzing that gives either a trace or
one clear error."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbtide.analysis.metrics.summary import summarize
from ebbtide.analysis.metrics.windows import find_windows
from ebbtide.errors import TraceError
from ebbtide.features.importers.importer import Hardware
from ebbtide.features.importers.load import find_importers, import_trace, recognize
from ebbtide.features.importers.source import Source, SourceError
from ebbtide.profiler.trace import Trace, open_trace
from tests.conftest import examples, seeded, slow_case

DATA = Path(__file__).parent / "data"
PUBLISHED = Path(__file__).parents[4] / "shared" / "published" / "deep-optimizer-states"
TODAY = sorted(DATA.glob("*.log"))
published = pytest.mark.skipif(
    not PUBLISHED.exists(),
    reason="the published measurements are not here (shared/published)",
)
MONITOR = "timestamp,gpu,mem_used,mem_free,rxpci,txpci\n" + "".join(
    f"{1_713_142_360_000_000_000 + n * 10**9},{gpu},{n * 10**9},{(80 - n) * 10**9},{n},0\n"
    for n in range(9)
    for gpu in (0, 1)
)


def assert_valid(trace: Trace) -> None:
    """Assert the properties of every imported trace."""
    opened = open_trace(trace.path)
    for rank in opened.ranks:
        phases = opened.phases(rank)
        times = phases[["start_ns", "end_ns"]].to_numpy().ravel()
        assert (np.diff(times) >= 0).all()
        assert set(phases["phase"]) <= {"forward", "backward", "update"}
        assert (opened.memory(rank)["bytes"] >= 0).all()
        rates = opened.link(rank)[["h2d_bytes_per_s", "d2h_bytes_per_s"]].to_numpy()
        assert (rates[~np.isnan(rates)] >= 0).all()
        assert opened.ops(rank)["start_ns"].le(opened.ops(rank)["end_ns"]).all()
        assert opened.rank(rank).devices
    json.dumps(opened.raw_meta, allow_nan=False)
    json.dumps(summarize(opened).as_json(), allow_nan=False)
    with contextlib.suppress(TraceError):
        # `find_windows` refuses traces without memory or without a capacity.
        json.dumps(find_windows(opened, 2**30).as_json(), allow_nan=False)


def import_outcome(files: list[Path], folder: Path, **options: Any) -> str:
    """Import files and return "trace" or "error".

    A trace must be valid, an error must be one line, and no other files may be left.
    """
    before = sorted(folder.iterdir())
    try:
        trace = import_trace(files, folder / "out.ebb", **options)
    except (SourceError, TraceError) as error:
        lines = str(error).splitlines()
    else:
        assert sorted(folder.iterdir()) == sorted([*before, folder / "out.ebb"])
        assert_valid(trace)
        return "trace"
    assert len(lines) == 1
    assert sorted(folder.iterdir()) == before
    return "error"


CHANGES: dict[str, Callable[[random.Random, bytes], bytes]] = {}


def change(
    function: Callable[[random.Random, bytes], bytes],
) -> Callable[[random.Random, bytes], bytes]:
    CHANGES[function.__name__] = function
    return function


@change
def flipped(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 30, 3000])):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


@change
def cut(rng: random.Random, data: bytes) -> bytes:
    return (
        data[rng.randrange(len(data)) :]
        if rng.random() < 0.3
        else data[: rng.randrange(1, len(data))]
    )


@change
def swapped(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    for _ in range(rng.choice([1, 10, len(lines)])):
        one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


@change
def doubled(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    start = rng.randrange(len(lines))
    return b"".join(
        lines[: rng.randrange(len(lines))]
        + lines[start : start + 300] * rng.choice([1, 3])
        + lines
    )


@change
def digits(rng: random.Random, data: bytes) -> bytes:
    """Make numbers huge, small or invalid."""
    text_bytes = list(data)
    positions = [n for n, byte in enumerate(text_bytes) if 48 <= byte <= 57]
    for position in rng.sample(positions, min(len(positions), rng.choice([20, 2000]))):
        text_bytes[position] = rng.choice(b"0123456789999.-e")
    out = bytearray(text_bytes)
    for _ in range(20):
        position = rng.randrange(len(out))
        if 48 <= out[position] <= 57:
            out[position:position] = b"9" * rng.choice([3, 15, 300])
    return bytes(out)


@change
def spliced(rng: random.Random, data: bytes) -> bytes:
    """Insert unusual bytes in the middle."""
    insertions = [
        b"\0" * 500,
        b"\x1b[",
        b'"',
        b"{" * 2000,
        b"\r",
        b",",
        b"#" * 10,
        bytes(range(256)),
        b" " * 3000,
        b"[2024-",
    ]
    out = data
    for _ in range(rng.choice([1, 5])):
        position = rng.randrange(len(out))
        out = out[:position] + rng.choice(insertions) + out[position:]
    return out


def shortened(log: Path) -> bytes:
    """Return the parts of a log that the importer reads, without the reports of
    installed operators."""
    lines = log.read_bytes().splitlines(keepends=True)
    return b"".join(
        line[:1000]
        for line in lines
        if b"...." not in line or b"version" in line or b"world" in line
    )


def fuzz(
    tmp_path: Path, contents: list[tuple[str, bytes]], seeds: range
) -> dict[str, int]:
    """Apply every change to one of the files for each seed, and count the traces and
    errors."""
    counts = {"trace": 0, "error": 0}
    for seed in seeds:
        for number, (name, function) in enumerate(CHANGES.items()):
            folder = tmp_path / f"{seed}-{name}"
            folder.mkdir()
            victim = (seed + number) % len(contents)
            files = []
            with seeded(f"{seed} {name}") as rng:
                for position, (file, data) in enumerate(contents):
                    files.append(folder / file)
                    files[-1].write_bytes(
                        function(rng, data) if position == victim else data
                    )
                result = import_outcome(
                    files, folder, hardware=Hardware(80 * 10**9, (5, 16))
                )
                counts[result] += 1
                if result == "error":
                    # With a given format the importer reads further into the file.
                    names = {".log": "deepspeed-log", ".csv": "nvml-monitor"}
                    import_outcome(
                        [files[victim]], folder, format=names[files[victim].suffix]
                    )
    return counts


@pytest.mark.slow
@published
def test_import_trace__gives_a_trace_or_one_error_for_changed_published_files(
    tmp_path: Path,
) -> None:
    counts = fuzz(tmp_path, h100_files(), range(examples(2, by_default=1)))
    assert min(counts.values()) > 0


def h100_files() -> list[tuple[str, bytes]]:
    log = next(PUBLISHED.glob("h100-20B/*ratio1.0*prefetch0-flush_async1*.log"))
    rows = (
        log.with_name(f"{log.stem}-monitor.csv").read_bytes().splitlines(keepends=True)
    )
    return [("run.log", shortened(log)), ("m.csv", b"".join([rows[0], *rows[1::20]]))]


@pytest.mark.parametrize(
    "log", [TODAY[0], *map(slow_case, TODAY[1:])], ids=lambda log: log.stem
)
def test_import_trace__gives_a_trace_or_one_error_for_changed_logs(
    tmp_path: Path, log: Path
) -> None:
    assert (
        fuzz(
            tmp_path, [("run.log", log.read_bytes())], range(examples(2, by_default=1))
        )["trace"]
        > 0
    )


QUERY = "timestamp, index, memory.used [MiB], memory.total [MiB]\n" + "".join(
    f"2024/04/15 00:52:{n:02}.000, {gpu}, {n} MiB, 81559 MiB\n"
    for n in range(9)
    for gpu in (0, 1)
)
DMON = "#Time  gpu  fb  rxpci  txpci\n#HH:MM:SS  Idx  MB  MB/s  MB/s\n" + "".join(
    f" 23:59:{n:02}  0  {n}  -  5\n" for n in range(9)
)


@pytest.mark.parametrize(
    "text",
    [slow_case(MONITOR), QUERY, slow_case(DMON)],
    ids=["script", "query", "dmon"],
)
def test_import_trace__gives_a_trace_or_one_error_for_changed_monitor_files(
    tmp_path: Path, text: str
) -> None:
    assert (
        fuzz(tmp_path, [("m.csv", text.encode())], range(examples(2, by_default=1)))[
            "trace"
        ]
        > 0
    )


def test_recognize__refuses_noise(tmp_path: Path) -> None:
    rng = random.Random(1)
    file = tmp_path / "x"
    for data in (
        rng.randbytes(200_000),
        b"\0" * 100_000,
        b"x",
        b"\n" * 10_000,
        b"{" * 100_000,
        b"#",
        b",,,\n" * 9,
    ):
        for contents in (data, gzip.compress(data)):
            file.write_bytes(contents)
            with pytest.raises(
                SourceError, match="has no format that ebbtide recognizes"
            ) as error:
                recognize(Source(file))
            assert all(name in str(error.value) for name in find_importers())
            for name in ("deepspeed-log", "nvml-monitor"):
                assert import_outcome([file], tmp_path, format=name) == "error"


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_import_trace__applies_hardware_to_every_device_or_notes_that_it_is_missing(
    tmp_path: Path,
) -> None:
    file = write(tmp_path / "m.csv", MONITOR.replace(",mem_free", ",other"))
    notes = import_trace([file], tmp_path / "a.ebb").notes
    assert [note for note in notes if "import with --capacity 80GB" in note]
    assert [note for note in notes if "import with --link 5x16" in note]
    trace = import_trace(
        [file], tmp_path / "b.ebb", hardware=Hardware(80 * 10**9, (4, 16))
    )
    for rank in (0, 1):
        (device,) = trace.rank(rank).devices
        assert device.capacity_bytes == 80 * 10**9
        assert (device.link.generation, device.link.width) == (4, 16)
        assert device.link.peak_bytes_per_s == pytest.approx(31.5e9, rel=1e-3)
    assert not [note for note in trace.notes if "--" in note]
    # A trace without link samples needs no peak rate.
    memory = import_trace([write(tmp_path / "q.csv", QUERY)], tmp_path / "c.ebb")
    assert not [note for note in memory.notes if "--" in note]


def test_import_trace__replaces_an_output_only_with_force(tmp_path: Path) -> None:
    file = write(tmp_path / "m.csv", MONITOR)
    import_trace([file], tmp_path / "x.ebb")
    before = (tmp_path / "x.ebb" / "meta.json").read_bytes()
    with pytest.raises(TraceError, match="exists already"):
        import_trace([file], tmp_path / "x.ebb")
    write(tmp_path / "bad.csv", "timestamp,gpu,mem_used\nnever,0,1\n")
    with pytest.raises(SourceError):
        import_trace([tmp_path / "bad.csv"], tmp_path / "x.ebb", force=True)
    assert (tmp_path / "x.ebb" / "meta.json").read_bytes() == before
    assert import_trace([file], tmp_path / "x.ebb", force=True).notes
