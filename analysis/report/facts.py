"""What is known of the job: which one it was, on what it ran, who recorded it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from ebbtide.analysis.metrics.deepspeed import deepspeed_of
from ebbtide.profiler.trace import Trace
from ebbtide.units import bytes_text, count_text, rate_text

Fact = tuple[str, str]


def facts(trace: Trace) -> list[Fact]:
    """(what, its value), without those that the trace does not tell."""
    meta = trace.meta
    entry = _dict(next(iter(meta["ranks"]), None))
    found = [
        ("command", shlex.join(str(word) for word in _list(meta.get("command")))),
        ("started", _when(meta.get("started_wall_ns"))),
        ("ended", _ended(meta)),
        ("source", _source(meta)),
        ("ranks", str(len(trace.ranks))),
        ("hosts", ", ".join(str(host) for host in _list(meta.get("hosts")))),
        *_devices(trace),
        ("host", _host(_dict(meta.get("host")))),
        ("model", _model(_dict(entry.get("model")))),
        *(("optimizer", _optimizer(_dict(optimizer))) for optimizer in _list(entry.get("optimizers"))),
        ("DeepSpeed", _deepspeed(trace)),
        ("software", _software(meta, entry)),
        ("clock", _clock(_dict(meta.get("clock")))),
    ]
    return [(name, value) for name, value in found if value]


def _devices(trace: Trace) -> Iterator[Fact]:
    """Devices that are alike count as one."""
    described: dict[str, int] = {}
    for entry in trace.meta["ranks"]:
        for device in entry.get("devices") or []:
            link = _dict(device.get("link"))
            parts = [
                str(device.get("name") or device.get("kind") or device.get("device") or "unnamed"),
                *([bytes_text(device["capacity_bytes"])] if device.get("capacity_bytes") is not None else []),
                *(
                    [f"PCIe {link['generation']} x{link['width']}"]
                    if link.get("generation") and link.get("width")
                    else []
                ),
                *([f"{_rate(link['peak_bytes_per_s'])} a direction"] if _rate(link.get("peak_bytes_per_s")) else []),
            ]
            text = ", ".join(parts)
            described[text] = described.get(text, 0) + 1
    for text, count in described.items():
        yield "device", text if count == 1 else f"{count} × {text}"


def _rate(value: Any) -> str:
    return rate_text(value) if isinstance(value, int | float) else ""


def _source(meta: dict[str, Any]) -> str:
    if meta.get("source") == "recorded":
        return f"recorded by ebbtide {meta.get('ebbtide', '')}".strip()
    files = [f"{file.get('file')} ({file.get('format')})" for file in map(_dict, _list(meta.get("imported"))) if file]
    return f"{meta.get('source', 'not told')}" + (f" from {', '.join(files)}" if files else "")


def _ended(meta: dict[str, Any]) -> str:
    if meta.get("state") == "recording":
        return "not finished: the recording was cut off, or still goes on"
    status = _dict(meta.get("exit"))
    how = (
        f"signal {status['signal']}"
        if "signal" in status
        else f"exit status {status['code']}"
        if "code" in status
        else ""
    )
    return ", ".join(part for part in (_when(meta.get("ended_wall_ns")), how) if part)


def _host(host: dict[str, Any]) -> str:
    cpu = _dict(host.get("cpu"))
    cores = f"{cpu['cores']} cores" if cpu.get("cores") else ""
    memory = f"{bytes_text(cpu['capacity_bytes'])} memory" if isinstance(cpu.get("capacity_bytes"), int) else ""
    return ", ".join(
        str(part) for part in (host.get("name"), cpu.get("name"), cores, memory, host.get("kernel")) if part
    )


def _model(model: dict[str, Any]) -> str:
    if not isinstance(model.get("params"), int):
        return ""
    names = ", ".join(str(name) for name in _list(model.get("classes")))
    kinds = ", ".join(str(kind) for kind in _dict(model.get("dtypes")))
    whole = f" of {count_text(model['total_params'])}" if isinstance(model.get("total_params"), int) else ""
    text = f"{count_text(model['params'])} parameters{whole} on a rank" + (f" ({kinds})" if kinds else "")
    return f"{names}: {text}" if names else text


def _optimizer(optimizer: dict[str, Any]) -> str:
    parts = [str(optimizer.get("class") or "not told")]
    if isinstance(optimizer.get("params"), int):
        parts.append(f"{count_text(optimizer['params'])} parameters")
    if isinstance(optimizer.get("state_bytes"), int):
        places = " and ".join(str(place) for place in _list(optimizer.get("state_devices")))
        parts.append(f"{bytes_text(optimizer['state_bytes'])} of state" + (f" on {places}" if places else ""))
    return ", ".join(parts)


def _deepspeed(trace: Trace) -> str:
    """Where DeepSpeed, or ebbtide's engine in its place, keeps its state; its version stands with the software."""
    job = deepspeed_of(trace)
    if job is None or not (job.config or job.subgroups or job.stage is not None):
        return ""
    parts = [f"ZeRO-{job.stage}" if job.stage is not None else ""]
    if job.policy:
        parts.append(f"updated by ebbtide under {job.policy}")
    if job.offload:
        parts.append(f"optimizer offloaded to the {job.offload.get('device')}")
    if job.ratio is not None:
        real = f" asked for, {job.real_ratio:.2f} in fact" if job.real_ratio not in (None, job.ratio) else ""
        parts.append(f"a share of {job.ratio:g}{real} on the CPU")
    if job.subgroups:
        least, most = count_text(min(job.subgroups)), count_text(max(job.subgroups))
        of = f"of {most}" if least == most else f"of {least} to {most}"
        parts.append(f"{len(job.subgroups)} subgroup{'s' if len(job.subgroups) > 1 else ''} {of} parameters")
    if job.on_cpu:
        parts.append(f"{sum(job.on_cpu)} of them on the CPU")
    for what, pinned in (("masters", job.masters_pinned), ("gradients", job.gradients_pinned)):
        if pinned is not None:
            parts.append(f"{what} {'pinned' if pinned else 'pageable'}")
    return ", ".join(part for part in parts if part)


def _software(meta: dict[str, Any], entry: dict[str, Any]) -> str:
    named = [(name, entry.get(name)) for name in ("torch", "cuda", "python")]
    named.append(("DeepSpeed", _dict(meta.get("deepspeed")).get("version")))
    threads = _dict(entry.get("threads")).get("torch")
    parts = [f"{name} {version}" for name, version in named if version]
    return ", ".join([*parts, *([f"{threads} threads for torch"] if threads else [])])


def _clock(clock: dict[str, Any]) -> str:
    host = f" of {clock['host']}" if clock.get("host") else ""
    return f"{clock['name']}{host}" if clock.get("name") else ""


def _when(wall_ns: Any) -> str:
    try:
        return datetime.fromtimestamp(wall_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def _dict(value: Any) -> dict[str, Any]:
    """What a meta says is checked only as far as readers rely on it: anything may stand in the rest."""
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
