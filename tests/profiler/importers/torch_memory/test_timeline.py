"""Memory timelines of torch's profiler, compared with torch's own sums."""

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
from ebbtide.profiler.importers.torch_memory.snapshot import CATEGORIES, TimelineImporter, read_timeline
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.conftest import examples, seeded

REAL = Path(__file__).parents[5] / "shared" / "published" / "kineto" / "memory_timeline.raw.gz"
START_NS = 1_700_000_000_000_000_000


def import_files(*files: Path) -> Trace:
    builder = TraceBuilder()
    for number, file in enumerate(files):
        read_timeline(Source(file), builder, number)
    return builder.build()


def write_rows(path: Path, rows: Any) -> Path:
    path.write_text(json.dumps(rows))
    return path


def pool_changes(trace: Trace, pool: str, plotted: bool = False) -> dict[int, int]:
    """Return the bytes from each time on, at each change.

    plotted: times in us, rounded as torch does it in floats.
    """
    rows = trace.memory(0)
    rows = rows[rows["pool"] == pool]
    return changes({int(t / 1000) if plotted else t: size for t, size in zip(rows["t_ns"], rows["bytes"], strict=True)})


def changes(sizes: dict[int, int]) -> dict[int, int]:
    times = sorted(sizes)
    return {t: sizes[t] for n, t in enumerate(times) if n == 0 or sizes[t] != sizes[times[n - 1]]}


def replayed(rows: list[list[int]]) -> dict[int, list[int]]:
    """Return the bytes of each category by the time from which on they are valid."""
    sizes = [0] * len(CATEGORIES)
    first = min(t for t, *_ in rows if t >= 0)
    sizes_at = {}
    for t, _, change, category in rows:
        sizes[category] += change
        sizes_at[max(t, first)] = list(sizes)
    return sizes_at


def test_read_timeline__agrees_with_a_replay_of_a_real_file() -> None:
    if not REAL.exists():
        pytest.skip("the published measurements are not here (shared/published)")
    assert TimelineImporter().matches(Source(REAL))
    truth = replayed(json.loads(gzip.decompress(REAL.read_bytes())))
    trace = import_files(REAL)
    memory = trace.memory(0).groupby("pool")["bytes"].max()
    for number, name in enumerate(CATEGORIES):
        assert memory[f"tensors/{name}"] == max(sizes[number] for sizes in truth.values())
    assert memory["tensors"] == max(map(sum, truth.values()))
    assert trace.memory(0)["t_ns"].agg(["min", "max"]).tolist() == [min(truth), max(truth)]
    assert not any("Unix times" in note for note in trace.notes)


def test_read_timeline__gives_the_same_for_raw_and_plotted_files(tmp_path: Path) -> None:
    """torch writes both files from the same profile, the plot in microseconds."""
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
        assert TimelineImporter().matches(Source(file))
        traces.append(import_files(file))
    first, second = traces
    assert pool_changes(first, "tensors/optimizer_state", plotted=True)
    for name in ["tensors", *(f"tensors/{category}" for category in CATEGORIES)]:
        assert pool_changes(first, name, plotted=True) == pool_changes(second, name, plotted=True)


@given(data=st.data())
def test_read_timeline__gives_the_exact_sizes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
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
    rows = sorted(([t if t < 0 else START_NS + t, *fields] for t, *fields in rows), key=lambda row: (row[0], row[1]))
    trace = import_files(write_rows(tmp_path_factory.mktemp("made") / "t.raw.json", rows))
    truth = replayed(rows)
    for number, name in enumerate(CATEGORIES):
        category_sizes = pool_changes(trace, f"tensors/{name}")
        assert category_sizes == (changes({t: sizes[number] for t, sizes in truth.items()}) if category_sizes else {})
        assert category_sizes or not any(sizes[number] for sizes in truth.values())
    assert pool_changes(trace, "tensors") == changes({t: sum(sizes) for t, sizes in truth.items()})


def test_read_timeline__all_pools_begin_and_end_together(tmp_path: Path) -> None:
    rows = [[-1, 1, 512, 0], [START_NS + 5, 2, 1024, 4], [START_NS + 9, 4, -1024, 4]]
    memory = import_files(write_rows(tmp_path / "t.json", rows)).memory(0)
    for _, rows_of_pool in memory.groupby("pool"):
        assert rows_of_pool["t_ns"].agg(["min", "max"]).tolist() == [START_NS + 5, START_NS + 9]
    assert list(memory[memory["pool"] == "tensors/activation"]["bytes"]) == [1024, 0]


def test_read_timeline__notes_an_assumed_device(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "t.json", [[START_NS, 2, 512, 0]])
    trace = import_files(file)
    assert [device.device for device in trace.rank(0).devices] == ["cuda:0"]
    assert any("t.json does not state its device: cuda:0 is assumed" in note for note in trace.notes)
    builder = TraceBuilder()
    builder.rank(0, devices=[{"device": "cuda:3", "kind": "cuda"}])
    read_timeline(Source(file), builder, 0)
    assert set(builder.build().memory(0)["device"]) == {"cuda:3"}
    assert builder.meta["notes"] == []


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("timeline_cuda1.raw.json", "cuda:1"),
        ("rank-0.cuda-2.json", "cuda:2"),
        ("CUDA:3.json", "cuda:3"),
        ("torch2.9-cuda12.4.json", "cuda:0"),
        ("cuda0-or-cuda1.json", "cuda:0"),
    ],
)
def test_read_timeline__takes_the_device_from_the_name_of_the_file(tmp_path: Path, name: str, device: str) -> None:
    trace = import_files(write_rows(tmp_path / name, [[START_NS, 2, 512, 0]]))
    assert [entry.device for entry in trace.rank(0).devices] == [device]
    assert set(trace.memory(0)["device"]) == {device}
    assert any("cuda:0 is assumed" in note for note in trace.notes) == (device == "cuda:0")


def test_read_timeline__notes_times_of_another_clock(tmp_path: Path) -> None:
    trace = import_files(write_rows(tmp_path / "t.json", [[17, 2, 512, 0], [19, 4, -512, 0]]))
    assert any("are not Unix times" in note for note in trace.notes)


def test_read_timeline__refuses_two_files_of_one_rank(tmp_path: Path) -> None:
    files = [write_rows(tmp_path / name, [[START_NS, 2, 512, 0]]) for name in ("rank0.a.json", "rank0.b.json")]
    with pytest.raises(SourceError, match="are both of rank 0"):
        import_files(*files)


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
def test_matches__decides_by_content(tmp_path: Path, text: str, theirs: bool) -> None:
    (tmp_path / "t.json").write_text(text)
    assert TimelineImporter().matches(Source(tmp_path / "t.json")) is theirs


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
def test_read_timeline__raises_one_error_for_other_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(SourceError) as refusal:
        import_files(tmp_path / "t.json")
    assert "\n" not in str(refusal.value)


def test_read_timeline__refuses_a_file_that_unpacks_without_end(tmp_path: Path) -> None:
    row = b"[1700000000000000000, 2, 512, 4], "
    (tmp_path / "bomb.raw.json.gz").write_bytes(gzip.compress(b"[" + row * 2_000_000))
    (tmp_path / "large.json").write_bytes(b"[" + row * 4_000_000)
    for name, why in (("bomb.raw.json.gz", "is damaged"), ("large.json", "is too large")):
        with pytest.raises(SourceError, match=why):
            import_files(tmp_path / name)


def test_read_timeline__reads_or_refuses_damaged_files(tmp_path: Path) -> None:
    if not REAL.exists():
        pytest.skip("the published measurements are not here (shared/published)")
    packed = REAL.read_bytes()
    unpacked = gzip.decompress(packed)
    refusals = []
    cases = examples(40, by_default=10)
    for number in range(cases):
        data = bytearray(packed if number % 3 == 0 else unpacked)
        with seeded(number) as drawn:
            for _ in range(drawn.choice([1, 3, 30])):
                data[drawn.randrange(len(data))] = drawn.choice(b"0123456789-[], ]\xff")
            if drawn.random() < 0.2:
                del data[drawn.randrange(1, len(data)) :]
            (tmp_path / "t.json").write_bytes(data)
            try:
                assert np.all(import_files(tmp_path / "t.json").memory(0)["bytes"] >= 0)
            except SourceError as refusal:
                refusals.append(str(refusal))
    assert 0 < len(refusals) < cases
    assert all(refusal.isprintable() for refusal in refusals)


def test_read_timeline__says_that_a_page_holds_a_picture_only(tmp_path: Path) -> None:
    page = tmp_path / "timeline.html"
    page.write_text(
        "<html>\n<head><meta charset='utf-8' /><title>GPU Memory Timeline HTML</title></head>\n<body>\n"
        "<img src='data:image/png;base64,iVBORw0KGgo='>\n</body>\n</html>"
    )
    assert TimelineImporter().matches(Source(page))
    with pytest.raises(SourceError, match=r"a picture, without figures: export the timeline to \.raw\.json\.gz"):
        import_files(page)
