"""Memory timelines of torch's profiler, as torch itself adds them up."""

from __future__ import annotations

import gzip
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.importers.torch_memory import timeline as memory_timeline
from ebbtide.profiler.importers.torch_memory.timeline import CATEGORIES
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.conftest import examples, seeded

REAL = Path(__file__).parents[5] / "shared" / "published" / "kineto" / "memory_timeline.raw.gz"
START_NS = 1_700_000_000_000_000_000


def imported(*files: Path) -> Trace:
    builder = TraceBuilder()
    for number, file in enumerate(files):
        memory_timeline.read(Source(file), builder, number)
    return builder.build()


def written(path: Path, rows: Any) -> Path:
    path.write_text(json.dumps(rows))
    return path


def line(trace: Trace, pool: str, plotted: bool = False) -> dict[int, int]:
    """The bytes from each time on, where they change. plotted: by us, rounded as torch does it, in floats."""
    rows = trace.memory(0)
    rows = rows[rows["pool"] == pool]
    return changes({int(t / 1000) if plotted else t: size for t, size in zip(rows["t_ns"], rows["bytes"], strict=True)})


def changes(sizes: dict[int, int]) -> dict[int, int]:
    times = sorted(sizes)
    return {t: sizes[t] for n, t in enumerate(times) if n == 0 or sizes[t] != sizes[times[n - 1]]}


def replayed(rows: list[list[int]]) -> dict[int, list[int]]:
    """Time: bytes of each category from then on."""
    sizes = [0] * len(CATEGORIES)
    first = min(t for t, *_ in rows if t >= 0)
    found = {}
    for t, _, change, category in rows:
        sizes[category] += change
        found[max(t, first)] = list(sizes)
    return found


def test_the_real_timeline_agrees_with_a_replay_of_it() -> None:
    if not REAL.exists():
        pytest.skip("the published measurements are not beside this checkout")
    assert memory_timeline.matches(Source(REAL))
    truth = replayed(json.loads(gzip.decompress(REAL.read_bytes())))
    trace = imported(REAL)
    memory = trace.memory(0).groupby("pool")["bytes"].max()
    for number, name in enumerate(CATEGORIES):
        assert memory[f"tensors/{name}"] == max(sizes[number] for sizes in truth.values())
    assert memory["tensors"] == max(map(sum, truth.values()))
    assert trace.memory(0)["t_ns"].agg(["min", "max"]).tolist() == [min(truth), max(truth)]
    assert not any("clock" in note for note in trace.notes)


def test_raw_and_plotted_timelines_of_one_job_are_one(tmp_path: Path) -> None:
    """torch writes both from the same profile; it plots microseconds."""
    torch = pytest.importorskip("torch")
    from torch.profiler._memory_profiler import MemoryProfileTimeline

    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        warnings.catch_warnings(action="ignore"),
        torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True) as profile,
    ):
        for _ in range(2):
            model(torch.randn(64, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    timeline = MemoryProfileTimeline(profile._memory_profile())
    raw, plot = tmp_path / "t.raw.json", tmp_path / "t.json"
    timeline.export_memory_timeline_raw(str(raw), "cpu")
    timeline.export_memory_timeline(str(plot), "cpu")
    traces = []
    for file in (raw, plot):
        assert memory_timeline.matches(Source(file))
        traces.append(imported(file))
    first, second = traces
    assert line(first, "tensors/optimizer_state", plotted=True)
    for name in ["tensors", *(f"tensors/{category}" for category in CATEGORIES)]:
        assert line(first, name, plotted=True) == line(second, name, plotted=True)


@given(data=st.data())
def test_any_timeline_gives_its_true_lines(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    tensors = data.draw(
        st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(1, 1 << 40)), min_size=1, max_size=20)
    )
    rows = []
    for category, later, size in tensors:
        born = data.draw(st.integers(-1, 30))
        times = sorted(data.draw(st.tuples(st.integers(0, 30), st.integers(0, 30))))
        rows.append([born, 1 if born < 0 else 2, size, category])
        rows += [[born + times[0] + 1, 3, -size, category], [born + times[0] + 1, 3, size, later]]
        rows.append([born + times[1] + 1, 4, -size, later])
    rows = sorted(([t if t < 0 else START_NS + t, *rest] for t, *rest in rows), key=lambda row: (row[0], row[1]))
    trace = imported(written(tmp_path_factory.mktemp("made") / "t.raw.json", rows))
    truth = replayed(rows)
    for number, name in enumerate(CATEGORIES):
        found = line(trace, f"tensors/{name}")
        assert found == (changes({t: sizes[number] for t, sizes in truth.items()}) if found else {})
        assert found or not any(sizes[number] for sizes in truth.values())
    assert line(trace, "tensors") == changes({t: sum(sizes) for t, sizes in truth.items()})


def test_lines_begin_and_end_together(tmp_path: Path) -> None:
    rows = [[-1, 1, 512, 0], [START_NS + 5, 2, 1024, 4], [START_NS + 9, 4, -1024, 4]]
    memory = imported(written(tmp_path / "t.json", rows)).memory(0)
    for _, found in memory.groupby("pool"):
        assert found["t_ns"].agg(["min", "max"]).tolist() == [START_NS + 5, START_NS + 9]
    assert list(memory[memory["pool"] == "tensors/activation"]["bytes"]) == [1024, 0]


def test_the_device_is_said_to_be_a_guess_unless_another_file_tells_it(tmp_path: Path) -> None:
    file = written(tmp_path / "t.json", [[START_NS, 2, 512, 0]])
    trace = imported(file)
    assert [device["device"] for device in trace.rank(0)["devices"]] == ["cuda:0"]
    assert "t.json does not say which device it is of: it is taken for cuda:0" in trace.notes
    builder = TraceBuilder()
    builder.rank(0, devices=[{"device": "cuda:3", "kind": "cuda"}])
    memory_timeline.read(Source(file), builder, 0)
    assert set(builder.build().memory(0)["device"]) == {"cuda:3"}
    assert builder.meta["notes"] == []


def test_times_of_another_clock_are_noted(tmp_path: Path) -> None:
    trace = imported(written(tmp_path / "t.json", [[17, 2, 512, 0], [19, 4, -512, 0]]))
    assert any("of no known clock" in note for note in trace.notes)


def test_two_timelines_of_one_rank_are_refused(tmp_path: Path) -> None:
    files = [written(tmp_path / name, [[START_NS, 2, 512, 0]]) for name in ("rank0.a.json", "rank0.b.json")]
    with pytest.raises(SourceError, match="are both of rank 0"):
        imported(*files)


PLOTTED = [[START_NS // 1000] * 10_000, [[0] * 9] * 10_000]


@pytest.mark.parametrize(
    ("text", "theirs"),
    [
        ("[[-1, 1, 512, 7], ", True),
        (" [ [ 1700000000000000000 ,2 , 512 , 0 ] ]", True),
        (json.dumps(PLOTTED), True),
        ("[[1700000000000000], [[0, 1, 2, 3, 4, 5, 6, 7, 8]]]", True),
        ("[[1, 2, 3], [4, 5, 6]]", False),
        ("[[-1, 5, 512, 7]]", False),
        ("[[1700000000000000, 1700000000000001], [1, 2]]", False),
        ('{"traceEvents": []}', False),
        ("[]", False),
    ],
)
def test_it_is_known_by_its_content(tmp_path: Path, text: str, theirs: bool) -> None:
    (tmp_path / "t.json").write_text(text)
    assert memory_timeline.matches(Source(tmp_path / "t.json")) is theirs


@pytest.mark.parametrize(
    "text",
    [
        "[[-1, 1, 512, 7], ",
        "[[-1, 1, NaN, 7]]",
        "[[-1, 1, 512.5, 7]]",
        "[[-1, 1, 512, 8]]",
        "[[-1, 1, 512, 7, 0]]",
        "[[-2, 1, 512, 7]]",
        "[[0, 4, -512, 7]]",
        "[[0, 2, " + "9" * 100_000 + ", 7]]",
        "[[0, 2, 1" + "0" * 18 + ", 7]]",
        json.dumps([[n, 2, (1 << 48) - 1, 0] for n in range(1 << 15)]),
        "[" * 1_000_000,
        '[[{"a":' * 100_000,
        "[[1700000000000000], [[0, 1, 2]]]",
        "[[1700000000000000], [[0, 1, 2, 3, 4, 5, 6, 7, -8]]]",
        "[[1700000000000000, 1700000000000001], [[0, 1, 2, 3, 4, 5, 6, 7, 8]]]",
        "[[-1, 1, 512, 7]]",
        "[[], []]",
        "[]",
        "\x00",
    ],
)
def test_what_is_no_timeline_is_one_clean_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(SourceError) as refusal:
        imported(tmp_path / "t.json")
    assert "\n" not in str(refusal.value)


def test_a_file_that_unpacks_without_end_is_refused(tmp_path: Path) -> None:
    row = b"[1700000000000000000, 2, 512, 4], "
    (tmp_path / "bomb.raw.json.gz").write_bytes(gzip.compress(b"[" + row * 2_000_000))
    (tmp_path / "large.json").write_bytes(b"[" + row * 4_000_000)
    for name, why in (("bomb.raw.json.gz", "is damaged"), ("large.json", "is too large")):
        with pytest.raises(SourceError, match=why):
            imported(tmp_path / name)


def test_damaged_timelines_are_read_or_refused(tmp_path: Path) -> None:
    if not REAL.exists():
        pytest.skip("the published measurements are not beside this checkout")
    packed = REAL.read_bytes()
    whole = gzip.decompress(packed)
    refusals = []
    cases = examples(40)
    for number in range(cases):
        data = bytearray(packed if number % 3 == 0 else whole)
        with seeded(number) as drawn:
            for _ in range(drawn.choice([1, 3, 30])):
                data[drawn.randrange(len(data))] = drawn.choice(b"0123456789-[], ]\xff")
            if drawn.random() < 0.2:
                del data[drawn.randrange(1, len(data)) :]
            (tmp_path / "t.json").write_bytes(data)
            try:
                assert np.all(imported(tmp_path / "t.json").memory(0)["bytes"] >= 0)
            except SourceError as refusal:
                refusals.append(str(refusal))
    assert 0 < len(refusals) < cases
    assert all(refusal.isprintable() for refusal in refusals)
