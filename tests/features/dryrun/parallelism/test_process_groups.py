"""Process groups without other ranks: what the job is told, and what collectives
return, cost and record."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

from ebbtide.features.dryrun.failures import explain_failure
from ebbtide.features.dryrun.session import DryRun, DryRunOptions
from ebbtide.features.dryrun.time.clock import COMMUNICATION_STREAM
from ebbtide.features.dryrun.torch_2_13.frameworks.process_groups import ProcessGroups
from ebbtide.machines.catalog import preset
from ebbtide.machines.kernels.time_priors import COLLECTIVE_EFFICIENCY
from ebbtide.machines.machine import Box
from tests.features.dryrun.forked import run_forked
from tests.features.dryrun.parallelism.jobs import JOBS, PARAMS

RANKS = 4
ROW = 4 * 1000  # bytes of the tensors below


def run_in(
    job: Any, ranks: int | None = RANKS, backend: str | None = "nccl"
) -> tuple[Any, Any]:
    """Return the dry run of a job with a group, and what the job returned."""
    with DryRun(DryRunOptions(ranks=ranks)) as run:
        dist.init_process_group(backend)
        result = job()
    return run, result


@pytest.mark.parametrize("backend", ["nccl", "gloo", "cpu:gloo,cuda:nccl", None])
def test_group__is_as_the_job_asked_for_it(backend: str | None) -> None:
    def job() -> Any:
        pairs = dist.new_group([0, 1])
        dist.barrier()
        dist.monitored_barrier()
        mesh = dist.device_mesh.init_device_mesh(
            "cuda", (2, 2), mesh_dim_names=("a", "b")
        )
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        return (
            dist.get_rank(),
            dist.get_world_size(),
            pairs.size(),
            mesh["b"].size(),
            [os.environ[name] for name in names],
            torch.cuda.device_count(),
            dist.get_backend(),
        )

    def observe() -> Any:
        before = dict(os.environ)
        run, result = run_in(job, backend=backend)
        assert not dist.is_initialized()
        assert {
            key: value for key, value in os.environ.items() if key in before
        } == before
        return result, run.notes()

    (*facts, name), notes = run_forked(observe)
    assert facts == [0, RANKS, 2, 2, ["0", "0", "4", "4"], RANKS]
    assert name == (backend or "undefined")
    assert any("rank 0 of 4 was predicted" in note for note in notes)


def test_group__has_one_rank_where_none_are_stated() -> None:
    run, size = run_forked(
        lambda: (lambda run, size: (run.notes(), size))(
            *run_in(dist.get_world_size, None)
        )
    )
    assert size == 1
    assert any("--ranks" in note for note in run)


def test_collectives__return_what_ranks_with_the_same_values_would_give() -> None:
    def job() -> Any:
        mine = torch.arange(8, device="cuda")
        total = mine.clone()
        dist.all_reduce(total)
        parts = [torch.empty(8, dtype=torch.int64, device="cuda") for _ in range(RANKS)]
        dist.all_gather(parts, mine)
        count = torch.tensor([3])
        dist.all_reduce(count)
        objects = [None] * RANKS
        dist.all_gather_object(objects, {"a": 1})
        sent = [{"b": 2}]
        dist.broadcast_object_list(sent, 0)
        unknown = torch.zeros(8, device="cuda")
        dist.recv(unknown, 1)
        return (
            total.tolist(),
            [part.tolist() for part in parts],
            count.item(),
            objects,
            sent,
            unknown[0].item(),
        )

    row = list(range(8))
    assert run_forked(lambda: run_in(job)[1]) == (
        [RANKS * value for value in row],
        [row] * RANKS,
        3 * RANKS,
        [{"a": 1}] * RANKS,
        [{"b": 2}],
        1.0,
    )


def test_collectives__are_recorded_with_their_bytes_and_groups() -> None:
    def job() -> list[tuple[int, ...]]:
        group = dist.new_group([0, 1])
        row, all_rows = (
            torch.randn(1000, device="cuda"),
            torch.empty(RANKS * 1000, device="cuda"),
        )
        dist.all_reduce(row)
        dist.all_reduce(row, group=group)
        dist.all_gather_into_tensor(all_rows, row)
        dist.reduce_scatter_tensor(row, all_rows)
        dist.all_to_all_single(torch.empty_like(row), row)
        dist.broadcast(row, 0)
        dist.gather(row, [torch.empty_like(row) for _ in range(RANKS)])
        dist.send(row, 1)
        dist.all_reduce_coalesced([row, row])
        with torch.no_grad():
            shapes = [
                functional.all_reduce(row, "sum", dist.group.WORLD).shape,
                functional.all_gather_tensor(row, 0, dist.group.WORLD).shape,
                functional.reduce_scatter_tensor(
                    all_rows, "sum", 0, dist.group.WORLD
                ).shape,
            ]
        return [tuple(shape) for shape in shapes]

    def observe() -> Any:
        run, shapes = run_in(job)
        kernels = [
            kernel.work
            for kernel in run.clock.kernels
            if kernel.work.kind == "communication"
        ]
        return shapes, [(work.name, work.bytes, work.group) for work in kernels]

    shapes, kernels = run_forked(observe)
    assert shapes == [(1000,), (RANKS * 1000,), (1000,)]
    world = "default_pg, 4 ranks"
    part = (RANKS - 1) * ROW
    assert [kernel for kernel in kernels if kernel[2] != world] == [
        ("all_reduce", ROW, "undefined, 2 ranks"),
        ("send", ROW, None),
    ]
    assert [kernel[:2] for kernel in kernels if kernel[2] == world] == [
        ("all_reduce", 2 * part // RANKS),
        ("all_gather", part),
        ("reduce_scatter", part),
        ("all_to_all", part // RANKS),
        ("broadcast", ROW),
        ("gather", part),
        ("all_reduce", 4 * part // RANKS),
        ("all_reduce", 2 * part // RANKS),
        ("all_gather", part),
        ("reduce_scatter", part),
    ]


def test_collectives__of_several_hosts_share_their_links() -> None:
    """Two hosts of two ranks with links of 50 GB/s, for both ranks or one of them."""
    machine = replace(preset("h100-80gb"), box=Box(2, network_bytes_per_s=50e9))
    size = 4 * 10**8

    def observe() -> Any:
        options = DryRunOptions(ranks=RANKS, ranks_per_node=2, machine=machine)
        with DryRun(options) as run:
            dist.init_process_group("nccl")
            row = torch.randn(size // 4, device="cuda")
            for ranks in ([0, 1, 2, 3], [0, 2], [0, 1]):
                dist.broadcast(row, 0, group=dist.new_group(ranks))
        kernels = [
            kernel
            for kernel in run.clock.kernels
            if kernel.work.kind == "communication"
        ]
        return [(kernel.end_ns - kernel.start_ns) / 1e9 for kernel in kernels]

    share = COLLECTIVE_EFFICIENCY.typical
    expected = [size / rate / share for rate in (50e9, 25e9, 450e9)]
    assert run_forked(observe) == pytest.approx(expected, rel=0.05)


def test_collectives__overlap_with_the_backward_and_delay_what_waits() -> None:
    def job() -> Any:
        big = torch.randn(100_000_000, device="cuda")
        torch.cuda.synchronize()
        start, launched, waited = (torch.cuda.Event() for _ in range(3))
        start.record()
        work = dist.all_reduce(big, async_op=True)
        launched.record()
        work.wait()
        waited.record()
        return start.elapsed_time(launched), start.elapsed_time(waited)

    def observe() -> Any:
        _, times = run_in(job)
        with DryRun(DryRunOptions(ranks=8)) as run:
            dist.init_process_group("nccl")
            JOBS["ddp"]("cuda")
        backward = next(
            phase
            for phase in run.tracker.phases
            if phase.phase == "backward" and phase.iteration == 1
        )
        kernels = [
            kernel
            for kernel in run.clock.kernels
            if backward.start_ns <= kernel.launch_ns <= backward.end_ns
        ]
        reductions = [
            kernel for kernel in kernels if kernel.stream == COMMUNICATION_STREAM
        ]
        return (
            times,
            sum(kernel.work.bytes for kernel in reductions),
            len(kernels) > len(reductions),
        )

    (launch_ms, wait_ms), size, has_others = run_forked(observe)
    assert launch_ms < 1 < wait_ms
    assert size == 2 * 7 * 4 * PARAMS // 8
    assert has_others


def test_object_of_another_rank__is_refused_in_one_line() -> None:
    def observe() -> list[str | None]:
        lines = []
        for job in (
            lambda: dist.recv_object_list([None], src=1),
            lambda: dist.distributed_c10d._get_default_store().get("of another rank"),
        ):
            try:
                run_in(job)
            except Exception as error:
                lines.append(explain_failure(error))
        return lines

    received, waited = run_forked(observe)
    assert (
        "cannot dry-run torch.distributed.recv_object_list: the object is another "
        "rank's" in received
    )
    assert "another rank sets" in waited


def test_spawn__runs_the_first_process_in_the_job() -> None:
    def job(rank: int, ranks: int) -> None:
        dist.init_process_group("nccl", rank=rank, world_size=ranks)
        seen.append((rank, dist.get_world_size()))

    seen: list[tuple[int, int]] = []

    def observe() -> Any:
        with DryRun(DryRunOptions(ranks=2)):
            torch.multiprocessing.spawn(
                job, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count()
            )
        return seen

    assert run_forked(observe) == [(0, 2)]


def test_nodes__divide_the_ranks() -> None:
    groups = ProcessGroups(16, 8)
    assert (groups.ranks, groups.ranks_per_node) == (16, 8)
    assert ProcessGroups(2, 8).ranks_per_node == 2


def test_synchronized_batch_norm__has_the_memory_of_a_local_one() -> None:
    def most_bytes(synchronized: bool) -> int:
        def job() -> None:
            layers = [
                nn.Conv2d(3, 64, 3),
                nn.BatchNorm2d(64),
                nn.ReLU(),
                nn.Conv2d(64, 8, 3),
                nn.BatchNorm2d(8),
            ]
            model = nn.Sequential(*layers).cuda()
            if synchronized:
                model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with torch.autocast("cuda"):
                loss = model(torch.randn(4, 3, 64, 64, device="cuda")).sum()
            loss.backward()
            optimizer.step()

        return int(run_in(job)[0].memory.most_bytes)

    local, synchronized = run_forked(lambda: (most_bytes(False), most_bytes(True)))
    assert abs(synchronized - local) < 0.01 * local


def test_device_mesh__makes_its_group_by_itself() -> None:
    def observe() -> Any:
        with DryRun(DryRunOptions(ranks=RANKS)):
            mesh = dist.device_mesh.init_device_mesh("cuda", (RANKS,))
            # waits for the other ranks, where it is torch's own
            store = dist.TCPStore("localhost", 29500, RANKS, is_master=True)
            store.set("key", "value")
            return mesh.size(), dist.get_world_size(), store.get("key")

    assert run_forked(observe) == (RANKS, RANKS, b"value")
