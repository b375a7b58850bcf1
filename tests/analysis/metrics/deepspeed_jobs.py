"""DeepSpeed jobs as `ebbtide profile` records them: sub-steps that fill the update,
copies, settings."""

from __future__ import annotations

from typing import Any

from ebbtide.profiler.trace import TraceBuilder

MS = 10**6
GIB = 2**30
PEAK = 5e10
SIZE = 10**8
# (name, resource, ms, bytes) of a subgroup in the update.
SUBGROUP: tuple[tuple[str, str, int, int | None], ...] = (
    ("prepare", "host", 1, None),
    ("unscale", "cpu", 8, None),
    ("update", "cpu", 40, None),
    ("parameters", "host", 20, 2 * SIZE),
    ("release", "host", 1, None),
)
BEFORE = (("overflow check", 3), ("gradient norm", 2))
AFTER = (("gather", 4), ("rest", 1))
FORWARD, BACKWARD = 100, 300


def update_ms(subgroups: int) -> int:
    return sum(ms for _, _, ms, _ in SUBGROUP) * subgroups + sum(
        ms for _, ms in BEFORE + AFTER
    )


def deepspeed_job(
    iterations: int = 8,
    sizes: tuple[int, ...] = (SIZE,) * 5,
    ratio: float = 1.0,
    devices: tuple[str, ...] | None = None,
    gpu: bool = True,
    copies: bool = True,
    counters_ms: int | None = None,
    **meta: Any,
) -> TraceBuilder:
    """Make a rank with equal iterations: 100 ms forward, 300 ms backward in which
    gradients go down, up and down again, and an update of these subgroups.

    counters_ms: spacing of samples of the link; None: no samples.
    """
    offload: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    if ratio != 1:
        offload["ratio"] = ratio
    settings = {
        "version": "0.19.8",
        "stage": 3,
        "config": {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": offload,
                "sub_group_size": max(sizes),
            }
        },
        "subgroup_params": list(sizes),
        "subgroup_devices": list(devices or ("cpu",) * len(sizes)),
        "masters_pinned": False,
        "gradients_pinned": True,
        "activation_checkpointing": False,
        **meta,
    }
    builder = TraceBuilder("recorded", deepspeed=settings)
    name = "cuda:0" if gpu else "cpu"
    link = (
        {"link": {"generation": 5, "width": 16, "peak_bytes_per_s": PEAK}}
        if gpu
        else {}
    )
    device = {
        "device": name,
        "kind": "cuda" if gpu else "cpu",
        "name": "a device",
        "capacity_bytes": 80 * GIB,
        **link,
    }
    params = sum(sizes)
    state = {"torch.float32": 2 * params}
    rank = builder.rank(
        0,
        devices=[device],
        world_size=1,
        first_iteration_start_ns=0,
        threads={"torch": 16, "omp": "16"},
        model={
            "classes": ["GPT"],
            "params": params,
            "total_params": params,
            "dtypes": {"torch.bfloat16": params},
        },
        optimizers=[
            {
                "class": "DeepSpeedCPUAdam",
                "params": params,
                "state_dtypes": state,
                "state_devices": ["cpu"],
            }
        ],
    )
    builder.meta["host"] = {
        "name": "node",
        "cpu": {"device": "cpu", "kind": "cpu", "cores": 16},
    }
    pool = "device" if gpu else "heap"
    now = row = 0

    def op(
        name: str,
        ms: int,
        resource: str = "host",
        parent: int | None = None,
        **columns: Any,
    ) -> None:
        nonlocal row
        times = {"start_ns": now, "end_ns": now + ms * MS}
        rank.add(
            "ops",
            **times,
            resource=resource,
            name=name,
            iteration=number,
            parent=parent,
            **columns,
        )
        row += 1

    for number in range(iterations):
        rank.memory(now, 40 * GIB, pool, name)
        rank.phase("forward", now, now + FORWARD * MS, number)
        now += FORWARD * MS
        rank.memory(now, 70 * GIB, pool, name)
        rank.phase("backward", now, now + BACKWARD * MS, number)
        if gpu and copies:
            for direction, start, size in (
                ("d2h", 20, 2 * params),
                ("h2d", 80, 2 * params),
                ("d2h", 140, 4 * params),
            ):
                end = now + start * MS + round(size / PEAK * 1e9)
                rank.transfer(
                    direction, now + start * MS, end, size, host_memory="pinned"
                )
        op("reduce", 60)
        op("gradient down", 20, parent=row - 1, bytes=4 * params)
        now += BACKWARD * MS
        begin = now
        rank.memory(now, 20 * GIB, pool, name)
        for step, ms in BEFORE:
            op(step, ms)
            now += ms * MS
        for subgroup in range(len(sizes)):
            for step, resource, ms, size in SUBGROUP:
                op(step, ms, resource, subgroup=subgroup, bytes=size)
                if gpu and copies and step == "parameters":
                    # The CPU converts first; then a pageable copy.
                    rank.transfer(
                        "h2d", now + 5 * MS, now + ms * MS, size, host_memory="pageable"
                    )
                now += ms * MS
        for step, ms in AFTER:
            op(step, ms)
            now += ms * MS
        rank.phase("update", begin, now, number)
    if counters_ms is not None:
        for end in range(counters_ms, now // MS, counters_ms):
            rank.link(
                end * MS,
                counters_ms * MS,
                "gpm",
                h2d_bytes_per_s=1e10,
                d2h_bytes_per_s=2e9,
            )
    return builder
