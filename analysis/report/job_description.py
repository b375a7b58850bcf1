"""The description of a job for a report: the command, the hardware, the model, and the
software."""

import shlex
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from ebbtide.analysis.metrics.framework_setup import FrameworkSetup, framework_setup
from ebbtide.profiler.trace import Trace, metadata
from ebbtide.units import NOT_KNOWN, bytes_text, count_text, rate_text


class JobDetail(NamedTuple):
    """A line of the description: its name and value."""

    name: str
    value: str


class JobDescription(NamedTuple):
    """The lines of the description that were recorded."""

    head: list[JobDetail]  # Model, cards, settings and date.
    rest: list[JobDetail]


def describe_job(trace: Trace) -> JobDescription:
    meta = trace.meta
    first = meta.ranks[0] if meta.ranks else metadata.RankInfo(rank=0)
    setup = framework_setup(trace)
    framework = [] if setup is None else [JobDetail(setup.name, setup.describe())]
    lines = [
        JobDetail("command", shlex.join(meta.command)),
        JobDetail("started", _time(meta.started_wall_ns)),
        JobDetail("first iteration", _first_iteration(meta, first)),
        JobDetail("ended", _ended(meta)),
        JobDetail("source", _source(meta)),
        JobDetail("ranks", str(len(trace.ranks))),
        JobDetail("hosts", ", ".join(str(host) for host in meta.hosts)),
        *_devices(meta),
        JobDetail("host", _host(meta.host)),
        JobDetail("model", _model(first.model)),
        *(
            JobDetail("optimizer", _optimizer(optimizer))
            for optimizer in first.optimizers
        ),
        *framework,
        JobDetail("software", _software(first, setup)),
        JobDetail(
            "clock",
            " of ".join(filter(None, (meta.clock.name, meta.clock.host)))
            if meta.clock.name
            else "",
        ),
    ]
    recorded = [line for line in lines if line.value]
    # Lines that the head of the page has: model, cards, settings, date.
    names = (
        "model",
        "device",
        "optimizer",
        *(line.name for line in framework),
        "started",
        "first iteration",
    )
    head = [line for name in names for line in recorded if line.name == name]
    return JobDescription(head, [line for line in recorded if line not in head])


def _devices(meta: metadata.TraceMeta) -> Iterator[JobDetail]:
    """Yield a line per kind of device, and count devices with the same description."""
    for text, count in Counter(
        _device(device) for entry in meta.ranks for device in entry.devices
    ).items():
        yield JobDetail("device", text if count == 1 else f"{count} × {text}")


def _device(device: metadata.DeviceInfo) -> str:
    link = device.link
    parts = [device.name or device.kind or device.device or "unnamed"]
    if device.capacity_bytes is not None:
        parts.append(bytes_text(device.capacity_bytes))
    if link.generation and link.width:
        parts.append(f"PCIe {link.generation} x{link.width}")
    if link.peak_bytes_per_s is not None:
        parts.append(f"{rate_text(link.peak_bytes_per_s)} a direction")
    return ", ".join(parts)


def _source(meta: metadata.TraceMeta) -> str:
    if meta.source == "recorded":
        return f"recorded by ebbtide {meta.ebbtide or ''}".strip()
    files = ", ".join(f"{file.file} ({file.format})" for file in meta.imported)
    return (meta.source or NOT_KNOWN) + (f" from {files}" if files else "")


def _first_iteration(meta: metadata.TraceMeta, first: metadata.RankInfo) -> str:
    """Return the date of an imported job, whose start its files do not tell."""
    offset_ns, start_ns = meta.clock.wall_offset_ns, first.first_iteration_start_ns
    if (
        meta.source != "imported"
        or meta.started_wall_ns is not None
        or offset_ns is None
        or start_ns is None
    ):
        return ""
    return _time(start_ns + offset_ns)


def _ended(meta: metadata.TraceMeta) -> str:
    if meta.state == "recording":
        return "not finished: the recording was cut off, or is still running"
    status = ""
    if meta.exit.signal is not None:
        status = f"signal {meta.exit.signal}"
    elif meta.exit.code is not None:
        status = f"exit status {meta.exit.code}"
    return ", ".join(part for part in (_time(meta.ended_wall_ns), status) if part)


def _host(host: metadata.HostInfo) -> str:
    cpu = host.cpu
    cores = f"{cpu.cores} cores" if cpu.cores else ""
    memory = (
        f"{bytes_text(cpu.capacity_bytes)} memory"
        if cpu.capacity_bytes is not None
        else ""
    )
    return ", ".join(
        part for part in (host.name, cpu.name, cores, memory, host.kernel) if part
    )


def _model(model: metadata.ModelInfo) -> str:
    if model.params is None:
        return ""
    total = (
        f" of {count_text(model.total_params)}"
        if model.total_params is not None
        else ""
    )
    dtypes = f" ({', '.join(model.dtypes)})" if model.dtypes else ""
    text = f"{count_text(model.params)} parameters{total} on a rank{dtypes}"
    return f"{', '.join(model.classes)}: {text}" if model.classes else text


def _optimizer(optimizer: metadata.OptimizerInfo) -> str:
    parts = [optimizer.class_name or NOT_KNOWN]
    if optimizer.params is not None:
        parts.append(f"{count_text(optimizer.params)} parameters")
    if optimizer.state_bytes is not None:
        devices = " and ".join(optimizer.state_devices)
        parts.append(
            f"{bytes_text(optimizer.state_bytes)} of state"
            + (f" on {devices}" if devices else "")
        )
    return ", ".join(parts)


def _software(first: metadata.RankInfo, setup: FrameworkSetup | None) -> str:
    versions = [("torch", first.torch), ("cuda", first.cuda), ("python", first.python)]
    if setup is not None:
        versions.append((setup.name, setup.version))
    parts = [f"{name} {version}" for name, version in versions if version]
    if first.threads.torch:
        parts.append(f"{first.threads.torch} threads for torch")
    return ", ".join(parts)


def _time(wall_ns: int | None) -> str:
    return (
        ""
        if wall_ns is None
        else datetime.fromtimestamp(wall_ns / 1e9, UTC).strftime(
            "%Y-%m-%d %H:%M:%S UTC"
        )
    )
