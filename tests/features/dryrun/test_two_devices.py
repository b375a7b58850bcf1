"""Jobs whose process uses several devices: memory, streams and copies of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide.analysis.metrics.devices import memory_timeline
from ebbtide.analysis.tables.prediction import prediction_view
from ebbtide.features.dryrun.session import DryRun, DryRunOptions
from ebbtide.features.dryrun.trace_of_run import trace_of_run
from ebbtide.profiler.trace import Trace, open_trace
from ebbtide.units import bytes_text
from tests.features.dryrun.forked import run_forked

WIDTH, OUTPUTS, ROWS = 512, 128, 64
FIRST_BYTES, SECOND_BYTES = 4 * WIDTH * WIDTH, 4 * WIDTH * OUTPUTS
CAPACITY_BYTES = 10**9
JOB = f"""import torch
first = torch.nn.Linear({WIDTH}, {WIDTH}, bias=False).to("cuda:0")
second = torch.nn.Linear({WIDTH}, {OUTPUTS}, bias=False).to("cuda:1")
parameters = [*first.parameters(), *second.parameters()]
optimizer = torch.optim.AdamW(parameters)
for _ in range(4):
    x = first(torch.randn({ROWS}, {WIDTH}, device="cuda:0")).to("cuda:1")
    second(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def two_devices(job: Any, path: Path | None = None) -> tuple[DryRun, Any]:
    """Run a job on two devices in a dry run, and write its trace."""
    run = DryRun(DryRunOptions(2, CAPACITY_BYTES, ranks=2))
    result = None
    with run:
        result = job()
    if path is not None:
        trace_of_run(run).write(path, False)
    return run, result


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("two") / "two.ebb"
    run_forked(lambda: two_devices(lambda: exec(JOB, {}), path) and None)
    return open_trace(path)


def peak(trace: Trace, device: str, pool: str) -> int:
    return int(memory_timeline(trace, 0, pool, device)[1].max())


def test_devices__have_memory_of_their_own(trace: Trace) -> None:
    names = [device.device for device in trace.rank(0).devices]
    assert names == ["cuda:0", "cuda:1"]  # the fullest first
    blocks = trace.table(0, "allocations")
    state = blocks[blocks["category"] == "optimizer_state"]
    sizes = state[state["bytes"] > 4].groupby("device", observed=True)["bytes"].sum()
    assert dict(sizes) == {"cuda:0": 2 * FIRST_BYTES, "cuda:1": 2 * SECOND_BYTES}
    for device, size in (("cuda:0", FIRST_BYTES), ("cuda:1", SECOND_BYTES)):
        # weight, gradient, two moments; a workspace of cuBLAS each
        assert peak(trace, device, "requested") > 4 * size
        assert peak(trace, device, "reserved") >= peak(trace, device, "requested")
    smaller = peak(trace, "cuda:1", "requested")
    assert smaller < peak(trace, "cuda:0", "requested") - 2 * FIRST_BYTES


def test_copies_between_devices__use_the_link_between_them(trace: Trace) -> None:
    kernels = trace.table(0, "kernels")
    copies = kernels[kernels["name"] == "Memcpy PtoP"]
    # activations forwards, their gradients back
    assert set(copies["device"]) == {"cuda:0", "cuda:1"}
    assert set(copies["bytes"]) == {4 * ROWS * WIDTH}
    products = kernels[kernels["name"].str.contains("mm")]
    after = products[products["device"] == "cuda:1"]["start_ns"].min()
    assert after >= copies["end_ns"].min()
    # the host moves the weights alone
    assert list(trace.table(0, "transfers")["device"]) == ["cuda:0", "cuda:1"]


def test_functions_of_a_device__tell_of_that_device() -> None:
    def job() -> Any:
        x = torch.empty(1000, 512, device="cuda:1")
        here = torch.cuda.memory_allocated(), torch.cuda.memory_allocated(1)
        free = [torch.cuda.mem_get_info(device)[0] for device in ("cuda:0", "cuda:1")]
        torch.cuda.set_device(1)
        y = torch.empty(512, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream(0)):
            z = torch.empty(512, device="cuda")
        stream = torch.cuda.current_stream()
        devices = [str(each.device) for each in (x, y, z, stream)]
        model = nn.DataParallel(nn.Linear(512, 8).to("cuda:0"), output_device=1)
        return here, free[0] - free[1], devices, str(model(x.to("cuda:0")).device)

    (here, there), taken, devices, output = run_forked(lambda: two_devices(job)[1])
    assert (here, there) == (0, 2_048_000)
    assert taken >= 2_048_000
    assert devices == ["cuda:1", "cuda:1", "cuda:0", "cuda:1"]
    assert output == "cuda:1"


def test_prediction__names_the_peak_of_each_device(trace: Trace) -> None:
    lines = list(map(str, prediction_view(trace)))
    assert lines[1].startswith("memory  fits: ")
    size = bytes_text(peak(trace, "cuda:1", "reserved"))
    assert lines[2] == f"        cuda:1 {size} reserved at the peak"
