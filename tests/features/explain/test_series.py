"""Steps of logs that are imported as iterations without phases."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.analysis.metrics.summary import summarize
from ebbtide.features.importers.load import import_trace, recognize
from ebbtide.features.importers.source import Source, SourceError
from ebbtide.profiler.trace import Trace

GIB = 2**30


def imported(folder: Path, lines: list[str]) -> Trace:
    file = folder / "train.log"
    file.write_text("\n".join(lines))
    assert recognize(Source(file)) == "steps"
    return import_trace([file], folder / "t.ebb")


def titan(second: int, step: int, gib: float = 40.0) -> str:
    clock = f"2026-03-02 11:{second // 60:02d}:{second % 60:02d},000"
    share = 100 * gib / 80
    return (
        f"[rank0]:[titan] {clock} - root - INFO - step: {step:2}  loss: 8.1  "
        f"memory: {gib:.2f}GiB({share:.2f}%)  tps: 5,201  mfu: 31.37%"
    )


def test_import__torchtitan_has_iterations_memory_and_capacity(tmp_path: Path) -> None:
    # Three steps of 2 s, then each fifth is printed, of 4 s.
    lines = [titan(2 * number, number) for number in (1, 2, 3)]
    lines += [titan(6 + 20 * more, 3 + 5 * more, 60.0) for more in range(1, 9)]
    trace = imported(tmp_path, lines)
    marks = trace.iteration_marks(0)
    assert marks["iteration"].tolist() == [2, 3, *range(8, 48, 5)]
    lengths = (marks["end_ns"] - marks["start_ns"]).tolist()
    assert lengths == [2 * 10**9] * 2 + [4 * 10**9] * 8
    # Steps that were not printed took their time, too.
    assert (marks["start_ns"].diff().dropna().tolist())[-1] == 20 * 10**9
    memory = trace.memory(0)
    assert set(memory["pool"]) == {"reserved"}
    assert memory["bytes"].tolist() == [40 * GIB] * 2 + [60 * GIB] * 8
    assert trace.rank(0).main_device.capacity_bytes == pytest.approx(80 * GIB, rel=1e-3)
    summary = summarize(trace).as_json()
    assert summary["iterations"] == 10


def test_import__verl_and_nemo_have_their_pools(tmp_path: Path) -> None:
    verl = [
        f"step:{n} - perf/max_memory_allocated_gb:60 - perf/max_memory_reserved_gb:70 "
        f"- timing_s/gen:70.5 - timing_s/step:{100 + n}"
        for n in range(1, 5)
    ]
    trace = imported(tmp_path, verl)
    memory = trace.memory(0)
    assert {*zip(memory["pool"], memory["bytes"], strict=True)} == {
        ("allocated", 60 * GIB),
        ("reserved", 70 * GIB),
    }
    marks = trace.marks(0)
    assert marks["name"].tolist()[:3] == ["step", "gen", "step"]
    (tmp_path / "nemo").mkdir()
    nemo = [
        f"Training epoch 0, iteration {n}/249 | lr: 1.9e-06 | global_step: {n} | "
        "peak_memory_usage: 64251113472 | memory_allocated: 41300000000 | "
        "train_step_timing in s: 3.13"
        for n in range(4)
    ]
    memory = imported(tmp_path / "nemo", nemo).memory(0)
    assert {*memory["bytes"]} == {64251113472, 41300000000}


def test_import__takes_the_last_run_of_a_log(tmp_path: Path) -> None:
    first = [titan(2 * number, number) for number in range(1, 6)]
    second = [titan(60 + 3 * number, number) for number in range(1, 9)]
    trace = imported(tmp_path, first + second)
    assert trace.iteration_marks(0)["iteration"].tolist() == [*range(2, 9)]
    assert any("of 2 runs run 2 is imported" in note for note in trace.notes)
    file = tmp_path / "train.log"
    trace = import_trace([file], tmp_path / "1.ebb", run=1)
    assert trace.iteration_marks(0)["iteration"].tolist() == [*range(2, 6)]
    with pytest.raises(SourceError, match="choose one with --run 1 to 2"):
        import_trace([file], tmp_path / "all.ebb", run="all")


def test_import__a_log_without_times_names_what_to_record(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    file.write_text("step:  1  loss:  8.15  memory: 33.69GiB(42.58%)  tps: 5,201\n" * 3)
    with pytest.raises(SourceError, match=r"log of torchtitan.*profiling"):
        recognize(Source(file))


STEP = (
    "(TaskRunner pid=4411) step:{step} - actor/pg_loss:0.012 - timing_s/update_actor:"
    "{update} - timing_s/gen:38.1 - timing_s/generate_sequences:35.0 - "
    "timing_s/old_log_prob:np.float64(9.6) - timing_s/step:{length} - perf/mfu:0.3"
)


def test_import__parts_of_steps_are_marks_in_the_order_of_the_program(
    tmp_path: Path,
) -> None:
    lines = [STEP.format(step=n, update=41.9, length=97.3) for n in range(4)]
    trace = imported(tmp_path, ["noise", *lines])
    marks = trace.marks(0)
    assert marks["name"].tolist()[0] == "step"
    marks = marks[marks["name"] != "step"]
    assert marks["name"].tolist()[:3] == ["gen", "old_log_prob", "update_actor"]
    lengths = (marks["end_ns"] - marks["start_ns"]) / 1e9
    assert lengths.tolist()[:3] == [38.1, 9.6, 41.9]
    assert trace.iteration_marks(0)["end_ns"].tolist()[-1] == 4 * 97_300_000_000
    assert any("lengths alone" in note for note in trace.notes)


def test_import__parts_within_parts_are_shortened_with_a_note(tmp_path: Path) -> None:
    lines = [STEP.format(step=n, update=41.9, length=44.8) for n in (1, 2)]
    trace = imported(tmp_path, lines)
    assert trace.marks(0)["end_ns"].iloc[-1] == pytest.approx(89.6e9, abs=20)
    assert any("some contain others" in note for note in trace.notes)


@pytest.mark.parametrize("length", ["0", "1e30", "abc"])
def test_import__steps_without_a_length_are_none(tmp_path: Path, length: str) -> None:
    log = tmp_path / "verl.log"
    lines = [STEP.format(step=n, update=41.9, length=length) for n in (1, 2)]
    log.write_text("\n".join(lines))
    with pytest.raises(SourceError):
        recognize(Source(log))
