"""Metrics of recordings as Prometheus gets them: real spools, through HTTP."""

from __future__ import annotations

import json
import re
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ebbtide.errors import UserError
from ebbtide.features.live.prometheus.server import (
    FAMILIES,
    MAX_RANKS,
    SUFFIXES,
    Address,
    MetricsServer,
    parse_address,
)
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.agent.spool import POOLS
from ebbtide.profiler.trace import open_trace
from tests.conftest import ebbtide_in_process, running_process
from tests.features.live.recording.growing import (
    BACKWARD_MS,
    CAPACITY,
    OTHER_MS,
    PEAK,
    GrowingRecording,
)
from tests.profiler.agent.jobs import PRELUDE

ROOT = Path(__file__).parents[4]
# Name that queries use -> the name of its metric.
SERVED = {
    name + suffix: name
    for name, family in FAMILIES.items()
    for suffix in SUFFIXES[family.kind]
}
Values = dict[tuple[str, frozenset[tuple[str, str]]], float]
# Label -> its values, whatever the job does.
BOUNDED = {
    "phase": set(ITERATION_PARTS),
    "pool": {*POOLS, "cuda", "host", "tensors"},
    "direction": {"h2d", "d2h"},
    "quantile": {"0.5"},
    "rank": {str(rank) for rank in range(MAX_RANKS)},
}


def scrape(url: str) -> Values:
    """Return the values of all samples by name and labels; check names, types and
    labels against `FAMILIES`."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        text = answer.read().decode()
    values: Values = {}
    for metric in text_string_to_metric_families(text):
        family = FAMILIES[metric.name.removesuffix("_info")]
        assert metric.type == ("gauge" if family.kind == "info" else family.kind)
        for name, labels, value, *_ in metric.samples:
            assert SERVED[name] == metric.name.removesuffix("_info")
            assert set(labels) - {"quantile"} == set(family.labels)
            for label, value_of_label in labels.items():
                assert value_of_label in BOUNDED.get(label, {value_of_label})
            key = name, frozenset(labels.items())
            assert key not in values
            values[key] = value
    return values


def get(values: Values, name: str, **labels: str) -> float | None:
    return values.get((name, frozenset(labels.items())))


@pytest.fixture
def recording(tmp_path: Path) -> GrowingRecording:
    recording = GrowingRecording(tmp_path / "run.ebb")
    recording.begin()
    for rank in range(2):
        recording.add_rank(rank, 40)
    recording.add_sampler(1600)
    return recording


@pytest.fixture
def server(recording: GrowingRecording) -> Iterator[MetricsServer]:
    with MetricsServer(Address("127.0.0.1", 0)) as server:
        server.start(recording.path)
        yield server


def test_server__serves_every_metric_of_a_recording_that_grows(
    recording: GrowingRecording, server: MetricsServer
) -> None:
    empty = scrape(server.url)
    assert get(empty, "ebbtide_ranks") == 0
    recording.grow_to(0.5)
    half = scrape(server.url)
    recording.grow_to(1.0)
    whole = scrape(server.url)
    assert {name for name, _ in whole} == set(SERVED) - {
        # The recording has no such samples.
        *(
            "ebbtide_gpu_power_watts",
            "ebbtide_gpu_temperature_celsius",
            "ebbtide_gpu_sm_clock_hertz",
        )
    }
    asked = scrape(
        f"{server.url}?name[]=ebbtide_ranks&name[]=ebbtide_phase_seconds_sum"
    )
    assert {name for name, _ in asked} == {"ebbtide_ranks", "ebbtide_phase_seconds_sum"}
    for key, value in half.items():
        if key[0].endswith(("_total", "_sum", "_count")):
            assert value <= whole[key]
    one = {"rank": "1"}
    assert get(whole, "ebbtide_iterations_total", **one) == 40
    assert get(whole, "ebbtide_phase_seconds_count", phase="backward", **one) == 40
    assert get(
        whole, "ebbtide_phase_seconds_sum", phase="backward", **one
    ) == pytest.approx(40 * BACKWARD_MS / 1e3)
    assert get(
        whole, "ebbtide_phase_seconds", phase="other", quantile="0.5", **one
    ) == pytest.approx(OTHER_MS / 1e3)
    device = {"rank": "1", "device": "cuda:0"}
    assert get(whole, "ebbtide_memory_capacity_bytes", **device) == CAPACITY
    assert get(whole, "ebbtide_link_peak_bytes_per_second", **device) == PEAK
    used = get(whole, "ebbtide_memory_bytes", pool="device", **device)
    assert used is not None
    assert get(whole, "ebbtide_free_bytes", **device) == CAPACITY - used
    moved = [
        get(whole, "ebbtide_link_bytes_total", direction=direction, **device)
        for direction in ("h2d", "d2h")
    ]
    assert moved[0]
    assert moved[1] == pytest.approx(2 * moved[0])
    assert get(whole, "ebbtide_gpu_utilization_ratio", **device) == pytest.approx(
        0.01 * (1590 % 101)
    )


def test_server__names_the_trace_where_it_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text("{")
    with MetricsServer(Address("127.0.0.1", 0)) as server:
        server.start(tmp_path)
        ((name, labels),) = scrape(server.url)
    assert name == "ebbtide_recording_info"
    assert dict(labels)["trace"] == tmp_path.name


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9400", ("127.0.0.1", 9400)),
        ("0", ("127.0.0.1", 0)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:9400", ("::1", 9400)),
        ("node-3.cluster:1", ("node-3.cluster", 1)),
    ],
)
def test_parse_address__takes_a_port_or_a_host_with_one(
    text: str, address: tuple[str, int]
) -> None:
    assert parse_address(text) == address


def test_parse_address__refuses_others() -> None:
    for text in ["", "web", "70000", "-1", ":80", "::1:80", "host:", "1.5", "[]:80"]:
        with pytest.raises(ValueError, match="is not a port"):
            parse_address(text)


def test_metrics_server__listens_on_ipv6() -> None:
    try:
        server = MetricsServer(Address("::1", 0))
    except UserError as error:
        pytest.skip(str(error))
    assert re.fullmatch(r"http://\[::1\]:\d+/metrics", server.url)
    server.close()


def test_profile__refuses_a_port_in_use_before_the_job_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        run = ebbtide_in_process(
            "profile", "--metrics", str(port), "--", "touch", "started", cwd=tmp_path
        )
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert f"cannot serve metrics on 127.0.0.1:{port}: Address already in use" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--no-view"], "--no-view is for --metrics"),
        (["--metrics", "0"], "is not a trace"),
    ],
)
def test_watch__refuses_what_it_cannot_serve(
    options: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    run = ebbtide_in_process("watch", tmp_path, *options)
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert message in line


def test_dashboard__names_only_metrics_that_are_served() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())
    queries = [
        target["expr"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]
    assert len(queries) > 8
    used = set(
        re.findall(
            r"ebbtide_\w+", " ".join([*queries, json.dumps(dashboard["templating"])])
        )
    )
    assert used <= set(SERVED)
    for query in queries:
        for name, matchers in re.findall(r"(ebbtide_\w+)\{([^}]*)\}", query):
            labels = set(re.findall(r"(\w+)=~?\"", matchers)) - {
                "instance",
                "job",
                "quantile",
            }
            assert labels <= set(FAMILIES[SERVED[name]].labels)


@pytest.mark.slow
def test_profile__serves_a_running_job_of_two_ranks(tmp_path: Path) -> None:
    # The job ends when the file `done` exists, which rank 0 tells the other.
    job = tmp_path / "job.py"
    loop = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(model)
done = torch.zeros(1)
while not done.item():
    time.sleep(0.01)
    F.mse_loss(model(batch()[0]), torch.zeros(8, 4)).backward()
    optimizer.step()
    optimizer.zero_grad()
    done = torch.tensor([float(os.path.exists("done"))])
    dist.broadcast(done, 0)
"""
    job.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{PRELUDE}{loop}")
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    )
    path = tmp_path / "run.ebb"
    command = (
        sys.executable,
        "-m",
        "ebbtide",
        "profile",
        "-o",
        path,
        "--metrics",
        "0",
        "--",
        *torchrun,
        job,
    )
    log = tmp_path / "log"
    with running_process(["bash", "-c", 'exec "$@" 2>"$0"', log, *command]) as process:
        while not (
            url := re.search(r"http://\S+", log.read_text() if log.exists() else "")
        ):
            assert process.poll() is None, log.read_text()
        values = scrape(url[0])
        while (get(values, "ebbtide_iterations_total", rank="1") or 0) < 20:
            assert process.poll() is None, log.read_text()
            values = scrape(url[0])
        (tmp_path / "done").touch()
        assert process.wait() == 0, log.read_text()
    for rank in ("0", "1"):
        for phase in ITERATION_PARTS:
            assert get(
                values, "ebbtide_phase_seconds", rank=rank, phase=phase, quantile="0.5"
            )
            assert get(values, "ebbtide_phase_seconds_sum", rank=rank, phase=phase)
        assert get(values, "ebbtide_free_bytes", rank=rank, device="cpu")
        assert get(values, "ebbtide_rank_recording", rank=rank) == 1
    # Waits for the collector, which served.
    assert open_trace(path).ranks == [0, 1]
