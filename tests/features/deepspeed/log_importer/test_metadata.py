"""Ranks and devices in the metadata of an imported log."""

from __future__ import annotations

from pathlib import Path

from tests.features.deepspeed.log_importer.made_logs import (
    import_log,
    log_line,
    stamp_ns,
    step_lines,
    write_monitor,
)


def test_add_metadata__ranks_get_the_visible_devices_of_their_host(
    tmp_path: Path,
) -> None:
    start = stamp_ns(log_line(0, ""))
    lines = [
        log_line(0, "dist_world_size=4"),
        log_line(0, "Setting CUDA_VISIBLE_DEVICES=6,7"),
        *step_lines(60),
    ]
    trace = import_log(
        tmp_path, lines, write_monitor(tmp_path / "m.csv", start, 61, devices=[5, 6, 7])
    )
    assert [trace.rank(rank).devices[0].device for rank in range(4)] == [
        "cuda:6",
        "cuda:7",
        "cuda:6",
        "cuda:7",
    ]
    # A monitor file is of one host; which of two it is of nothing tells, so it goes to
    # the first ranks.
    assert [len(trace.link(rank)) > 0 for rank in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    assert [len(trace.phases(rank)) for rank in range(4)] == [180, 180, 0, 0]
    assert (
        "m.csv: device 5 left out, because no rank of the other files is on it"
        in trace.notes
    )


def test_add_metadata__log_without_ranks_has_one_on_each_monitored_device(
    tmp_path: Path,
) -> None:
    start = stamp_ns(log_line(0, ""))
    trace = import_log(
        tmp_path,
        step_lines(60),
        write_monitor(tmp_path / "m.csv", start, 61, devices=[1, 4]),
    )
    assert [trace.rank(rank).devices[0].device for rank in trace.ranks] == [
        "cuda:1",
        "cuda:4",
    ]
    assert [len(trace.phases(rank)) for rank in trace.ranks] == [180, 180]
    assert not any("left out, because" in note for note in trace.notes)
    assert (
        "the log does not state the number of ranks: 2 are assumed, on the devices 1, "
        "4: leave out the rows of those "
        "that are not of the job"
    ) in trace.notes


def test_add_metadata__limits_the_number_of_ranks(tmp_path: Path) -> None:
    for world, entries in ((4096, 64), (99_999_999, 1)):
        trace = import_log(
            tmp_path, [log_line(0, f"dist_world_size={world}"), *step_lines()]
        )
        assert len(trace.ranks) == entries
        assert trace.rank(0).world_size == (world if world <= 1 << 20 else None)
        assert any("the trace has the first 64" in note for note in trace.notes) == (
            world == 4096
        )
