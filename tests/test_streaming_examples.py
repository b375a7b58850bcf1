"""The streaming examples: results of torch in memory, device memory within its limit,
valid plans, ordered streams."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import UserError
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.runtime.arena import worst_case
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from ebbtide.profiler import Tracer
from examples.streaming import command, nmf, svd
from examples.streaming.replay import measure_rates, predict_pass
from examples.streaming.tile_plan import (
    TileLayout,
    fit_layout,
    pass_plan,
    pass_workload,
)
from examples.streaming.tile_stream import TileFunction, TileStream
from tests.interleave.engine.devices.fake_cuda import install, open_fake

ROWS, COLUMNS, RANK = 150, 48, 5
WIDTH = RANK + svd.OVERSAMPLING
MACHINE = Machine(
    h2d_bytes_per_s=2e9,
    d2h_bytes_per_s=1e9,
    gpu_update_params_per_s=5e6,
    host_memory_bytes_per_s=1e14,
    operation_s=2e-5,
)
# Rows of a tile, slots, and tiles that stay on the device.
LAYOUTS = [(32, 1, 0), (32, 3, 1), (20, 2, 4), (200, 2, 1)]
layouts = st.builds(
    lambda rows, tile_rows, slots, resident: fit_layout(
        rows, 6, 2, tile_rows, slots, (slots + resident) * 32 * min(rows, tile_rows)
    ),
    *(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4), st.integers(0, 30)),
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch cost more than they save on matrices of these sizes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def memory_of(
    tile_rows: int, slots: int, resident: int, factor_columns: int, others: int
) -> float:
    """Return the device memory for so many resident tiles."""
    return 4 * (
        others + (slots + resident) * min(tile_rows, ROWS) * (COLUMNS + factor_columns)
    )


def decompose(
    tile_rows: int, slots: int, resident: int, plain: bool, matrix: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    others = svd.other_elements(COLUMNS, WIDTH)
    memory = memory_of(tile_rows, slots, resident, WIDTH, others)
    device = EmulatedDevice(memory)
    with TileStream(device, matrix, WIDTH, tile_rows, slots, memory, others) as stream:
        result = svd.randomized_svd(stream, RANK, 2, plain)
    assert device.peak_bytes <= memory
    assert device.used_bytes == 0
    device.close()
    return result


def factorize(
    tile_rows: int, slots: int, resident: int, tracer: Tracer | None = None
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return the factors by streaming, and in memory."""
    matrix = torch.empty(ROWS, COLUMNS)
    left, right = nmf.make_problem(matrix, RANK, torch.Generator().manual_seed(3))
    others = nmf.other_elements(COLUMNS, RANK, min(tile_rows, ROWS))
    memory = memory_of(tile_rows, slots, resident, RANK, others)
    device = EmulatedDevice(memory)
    with TileStream(
        device, matrix, RANK, tile_rows, slots, memory, others, tracer=tracer
    ) as stream:
        result = nmf.nmf(stream, left, right, 4)
    assert device.peak_bytes <= memory
    assert device.used_bytes == 0
    device.close()
    return result, nmf.nmf_in_memory(matrix, left, right, 4)


@pytest.mark.parametrize(
    ("layout", "plain"), [*((layout, False) for layout in LAYOUTS), (LAYOUTS[2], True)]
)
def test_svd__is_that_of_the_matrix_in_memory(
    layout: tuple[int, int, int], plain: bool
) -> None:
    matrix = torch.empty(ROWS, COLUMNS)
    svd.fill_matrix(matrix, RANK, torch.Generator().manual_seed(2))
    left, values, right = decompose(*layout, plain, matrix)
    expected_left, expected, expected_right = torch.linalg.svd(
        matrix.double(), full_matrices=False
    )
    torch.testing.assert_close(
        values.double(), expected[:RANK], rtol=svd.TOLERANCE, atol=0
    )
    nearest = (expected_left[:, :RANK] * expected[:RANK]) @ expected_right[:RANK]
    distance = torch.linalg.norm(
        (left * values) @ right.T - nearest
    ) / torch.linalg.norm(nearest)
    assert distance < svd.TOLERANCE
    torch.testing.assert_close(left.T @ left, torch.eye(RANK), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("smallest_exponent", "power", "plain"),
    [(-3, 1, False), (-4, 2, False), (-4, 1, True), (-4, 0, True)],
)
def test_svd__keeps_four_digits_of_small_singular_values(
    smallest_exponent: int, power: int, plain: bool
) -> None:
    generator = torch.Generator().manual_seed(5)
    left, right = (
        torch.linalg.qr(
            torch.randn(size, 20, generator=generator, dtype=torch.float64)
        )[0]
        for size in (400, 100)
    )
    expected = torch.logspace(0, smallest_exponent, 20, dtype=torch.float64)
    device = EmulatedDevice()
    with TileStream(device, ((left * expected) @ right.T).float(), 28, 64, 2) as stream:
        _, values, _ = svd.randomized_svd(stream, 20, power, plain)
    device.close()
    torch.testing.assert_close(values.double(), expected, rtol=svd.TOLERANCE, atol=0)


def test_svd__refuses_fused_passes_of_a_random_projection_alone() -> None:
    device = EmulatedDevice()
    with (
        TileStream(device, torch.ones(8, 8), 4, 4, 2) as stream,
        pytest.raises(UserError, match="or --plain"),
    ):
        svd.randomized_svd(stream, 2, 0)
    device.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nmf__is_that_of_torch_in_memory(layout: tuple[int, int, int]) -> None:
    (w, h), (expected_w, expected_h) = factorize(*layout)
    torch.testing.assert_close(w, expected_w, rtol=nmf.TOLERANCE, atol=1e-7)
    torch.testing.assert_close(h, expected_h, rtol=nmf.TOLERANCE, atol=1e-7)


@given(layouts, st.booleans(), st.booleans())
def test_pass_plan__is_valid_and_stays_within_the_memory_of_its_layout(
    layout: TileLayout, fetch_factor: bool, flush_factor: bool
) -> None:
    plan = pass_plan(layout, fetch_factor, flush_factor)
    updates = [op for op in plan.ops if op.kind == "update"]
    assert [op.subgroup for op in updates] == list(range(len(layout.tiles)))
    assert sum(op.params for op in updates) == layout.rows
    for schedule in (
        simulate(plan, pass_workload(layout), MACHINE),
        worst_case(plan, pass_workload(layout)),
    ):
        assert schedule.device_memory_line()[1].max() <= layout.device_bytes
    columns = layout.columns + layout.factor_columns * fetch_factor
    assert schedule.moved_bytes("h2d") == pytest.approx(
        4 * layout.rows * columns * (1 - layout.resident_share)
    )


@given(layouts, st.booleans(), st.booleans())
def test_measure_rates__are_those_of_the_schedule_and_predict_its_time(
    layout: TileLayout, fetch_factor: bool, flush_factor: bool
) -> None:
    machine = replace(MACHINE, operation_s=0.0)
    schedule = simulate(
        pass_plan(layout, fetch_factor, flush_factor), pass_workload(layout), machine
    )
    measured = measure_rates([schedule])
    assert measured.gpu_update_params_per_s == pytest.approx(
        machine.gpu_update_params_per_s
    )
    prediction = predict_pass(layout, fetch_factor, flush_factor, measured)
    assert prediction.pass_s == pytest.approx(schedule.update_s)
    assert prediction.bound_s <= prediction.pass_s * (1 + 1e-9)


def test_predict_pass__a_second_slot_overlaps_copies_and_a_third_the_write_back() -> (
    None
):
    """With copies and computation of the same length."""
    machine = replace(
        MACHINE,
        h2d_bytes_per_s=4e8,
        d2h_bytes_per_s=4e8,
        gpu_update_params_per_s=1e6,
        operation_s=0.0,
    )
    reads = [
        predict_pass(TileLayout(4000, 80, 20, 40, slots), True, False, machine).pass_s
        for slots in (1, 2, 3)
    ]
    assert reads == pytest.approx([8e-3, 4.04e-3, 4.04e-3])
    # Write-back is 0.2 of a fetch: two slots wait for it.
    writes = [
        predict_pass(TileLayout(4000, 80, 20, 40, slots), True, True, machine).pass_s
        for slots in (1, 2, 3)
    ]
    assert writes == pytest.approx([8.8e-3, 4.44e-3, 4.048e-3])


def test_streams__of_a_gpu_order_every_access(monkeypatch: pytest.MonkeyPatch) -> None:
    """By CudaDevice's own code; a race is seen if a stream does not wait."""
    cuda = install(monkeypatch)

    def races(dropped_wait: int | None) -> list[str]:
        cuda.dropped_wait, cuda.waits = dropped_wait, 0
        cuda.order.races.clear()
        device = open_fake(cuda)
        matrix = device.allocate_host((ROWS, COLUMNS), torch.float32)
        matrix.fill_(0.5)

        def watched(function: TileFunction) -> TileFunction:
            def call(tile: torch.Tensor, factor: torch.Tensor) -> None:
                cuda.order.access(
                    "computation", device.stream_name("gpu"), [tile, factor], [factor]
                )
                function(tile, factor)

            return call

        with TileStream(device, matrix, RANK, 20, 2, 4e4, 4000) as stream:
            assert 0 < stream.layout.resident_count < len(stream.layout.tiles)
            stream.load()
            stream.replace_factor(torch.ones(ROWS, RANK))
            for _ in range(2):
                stream.run_pass(
                    watched(lambda tile, factor: factor.mul_(2)), True, True
                )
            assert dropped_wait is not None or (stream.collect() == 4).all()
        return list(cuda.order.races)

    assert races(None) == []
    assert any(races(number) for number in range(20, 60))


def test_tracer__each_pass_is_an_iteration_with_its_operations(tmp_path: Path) -> None:
    with Tracer(tmp_path / "run.ebb") as tracer:
        factorize(30, 2, 2, tracer)
    assert tracer.trace is not None
    phases = tracer.trace.phases(0)
    assert (phases["phase"] == "update").sum() == 4
    ops = tracer.trace.ops(0)
    kinds = ops.groupby(["name", "resource"], observed=True).size().to_dict()
    assert kinds == {("fetch", "h2d"): 12, ("update", "gpu"): 20, ("flush", "d2h"): 12}


@pytest.mark.parametrize("main", [svd.main, nmf.main])
def test_commands__print_times_and_refuse_what_does_not_fit(
    main: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ["--rows", "600", "--columns", "64", "--rank", "4", "--tile-rows", "64"]
    monkeypatch.setattr(sys, "argv", ["job", *small, "--memory", "100kB", "--replay"])
    command.run_command(main)
    text = capsys.readouterr().out
    assert "slots" in text
    assert "differs by" in text
    monkeypatch.setattr(sys, "argv", ["job", *small, "--memory", "20kB"])
    with pytest.raises(SystemExit) as exit_status:
        command.run_command(main)
    assert exit_status.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "more --memory" in error
    monkeypatch.setattr(
        sys, "argv", ["job", "--device", "cuda", "--compute-seconds", "1"]
    )
    with pytest.raises(UserError, match="are for the emulated device"):
        main()
