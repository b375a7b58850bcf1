"""Times of a dry run: work of kernels, queues of host and device, ranges, and what a
trace has of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ebbtide.analysis.metrics.activity.activity import gpu_activity
from ebbtide.analysis.metrics.iterations import median_ms
from ebbtide.analysis.metrics.prediction import (
    TimeRange,
    predicted_range,
    prediction_line,
)
from ebbtide.analysis.metrics.substeps.operations import without_gradients_ms
from ebbtide.analysis.metrics.summary import summarize
from ebbtide.features.dryrun.session import DryRun, DryRunOptions
from ebbtide.features.dryrun.trace_of_run import trace_of_run
from ebbtide.machines.kernels.rates import GpuRates, KernelWork
from ebbtide.machines.kernels.time_priors import WorkClass
from ebbtide.machines.machine import GpuCompute, Machine
from tests.features.dryrun.forked import run_forked

WIDTH, BATCH = 512, 32
PEAK, MEMORY_RATE = 100e12, 1e12
MACHINE = Machine(
    name="a machine",
    h2d_bytes_per_s=20e9,
    d2h_bytes_per_s=20e9,
    gpu=GpuCompute(
        compute_capability="8.0",
        flops_per_s={
            "float32": 10e12,
            "tf32": 50e12,
            "bfloat16": PEAK,
            "float16": PEAK,
        },
        memory_bytes_per_s=MEMORY_RATE,
    ),
)


def observe(
    job: Callable[[], Any], look: Callable[[DryRun], Any], iterations: int = 2
) -> Any:
    """Return what `look` sees of the dry run of a job, in a process of its own."""

    def run_job() -> Any:
        with DryRun(DryRunOptions(iterations=iterations, machine=MACHINE)) as run:
            job()
        return look(run)

    return run_forked(run_job)


def kernels_of(job: Callable[[], Any]) -> list[Any]:
    """Return (name, kind, FLOPs, bytes, type) of each kernel of a job."""
    return observe(
        job,
        lambda run: [
            (
                k.work.name.removeprefix("aten::"),
                k.work.kind,
                k.work.flops,
                k.work.bytes,
                k.work.precision,
            )
            for k in run.clock.kernels
        ],
    )


def train(layers: int, width: int, batch: int, steps: int = 5) -> None:
    """Train a chain of layers in half precision, with a named range per step, and read
    the loss."""
    model = (
        nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        .cuda()
        .bfloat16()
    )
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(steps):
        with torch.cuda.nvtx.range("step"):
            loss = (
                model(torch.randn(batch, width, device="cuda", dtype=torch.bfloat16))
                .float()
                .square()
                .mean()
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        loss.item()


def test_kernel_work__has_the_flops_and_bytes_of_forward_and_backward() -> None:
    def job() -> None:
        weight = torch.empty(
            WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        x = torch.empty(
            BATCH, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        (x @ weight).backward(
            torch.empty(BATCH, WIDTH, device="cuda", dtype=torch.bfloat16)
        )

    flops, small, large = (
        2 * BATCH * WIDTH * WIDTH,
        2 * BATCH * WIDTH,
        2 * WIDTH * WIDTH,
    )
    product = ("mm", "compute", flops, 2 * small + large, "bfloat16")
    # Neither `empty` nor the transposed views have kernels.
    assert kernels_of(job) == [product] * 3


def test_kernel_work__counts_only_what_is_read_and_written() -> None:
    def job() -> None:
        table = torch.empty(100_000, 8, device="cuda")
        rows = F.embedding(torch.empty(64, dtype=torch.int64, device="cuda"), table)
        rows.zero_()
        rows.add_(1)
        rows + rows[:1].expand(64, 8)
        torch._foreach_mul_([rows, rows], 2.0)

    size = 64 * 8 * 4
    assert [(name, kind, moved) for name, kind, _, moved, _ in kernels_of(job)] == [
        ("embedding", "compute", size + 64 * 8 + size),
        ("zero_", "memset", size),
        ("add_", "compute", 2 * size),
        ("add", "compute", 2 * size + 8 * 4),
        ("_foreach_mul_", "compute", 4 * size),
    ]


@pytest.mark.parametrize(("allow", "precision"), [(False, "float32"), (True, "tf32")])
def test_kernel_work__of_float32_products_runs_in_tf32_where_it_is_allowed(
    allow: bool, precision: str
) -> None:
    def job() -> None:
        torch.backends.cuda.matmul.allow_tf32 = allow
        torch.empty(8, 8, device="cuda") @ torch.empty(8, 8, device="cuda")

    assert kernels_of(job)[0][4] == precision


def test_kernel_work__of_products_in_half_precision_sees_rows_that_are_not_aligned() -> (
    None
):
    """Logits of 257 classes, their two gradients, and products whose odd dimension
    counts rows alone or is float32."""

    def job() -> None:
        for classes, tokens, dtype in (
            (257, 64, torch.bfloat16),
            (264, 61, torch.bfloat16),
            (257, 64, torch.float32),
        ):
            weight = torch.empty(
                classes, WIDTH, device="cuda", dtype=dtype, requires_grad=True
            )
            x = torch.empty(
                tokens, WIDTH, device="cuda", dtype=dtype, requires_grad=True
            )
            logits = F.linear(x, weight)
            logits.backward(torch.empty_like(logits))

    aligned = observe(
        job,
        lambda run: [
            k.work.size.alignment_bytes
            for k in run.clock.kernels
            if "mm" in k.work.name
        ],
    )
    assert aligned == [2] * 3 + [16] * 6


def test_kernel_work__of_attention_halves_a_causal_mask_and_covers_convolutions() -> (
    None
):
    def job(causal: bool) -> None:
        q, k, v = (
            torch.empty(
                2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True
            )
            for _ in "qkv"
        )
        F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()
        image = torch.empty(2, 3, 32, 32, device="cuda", dtype=torch.bfloat16)
        F.conv2d(
            image,
            torch.empty(
                8, 3, 3, 3, device="cuda", dtype=torch.bfloat16, requires_grad=True
            ),
        ).sum().backward()

    full, causal = (
        {
            name: flops
            for name, _, flops, _, _ in kernels_of(lambda causal=causal: job(causal))
            if flops
        }
        for causal in (False, True)
    )
    attention = 4 * 2 * 4 * 256 * 256 * 64
    assert full["_scaled_dot_product_flash_attention"] == attention
    assert full["_scaled_dot_product_flash_attention_backward"] == 2.5 * attention
    assert full["convolution"] == 2 * 2 * 8 * 30 * 30 * 3 * 9
    assert full["convolution_backward"] == full["convolution"]  # of the weight alone
    assert {
        name: full[name] / causal[name] for name in full if "attention" in name
    } == dict.fromkeys((name for name in full if "attention" in name), 2.0)


def works_of(job: Callable[[], Any]) -> list[KernelWork]:
    """Return the work of each kernel of a job."""
    return observe(job, lambda run: [kernel.work for kernel in run.clock.kernels])


def half(*shape: int, gradient: bool = True) -> torch.Tensor:
    """Return a tensor of the device in half precision."""
    return torch.empty(
        shape, device="cuda", dtype=torch.bfloat16, requires_grad=gradient
    )


CONVOLUTIONS: list[tuple[Any, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    (F.conv1d, (8, 64, 1000), (128, 64, 5), {}),
    (F.conv2d, (8, 64, 32, 32), (128, 64, 3, 3), {"stride": 2}),
    (F.conv2d, (8, 64, 32, 32), (128, 16, 3, 3), {"groups": 4}),
    (F.conv2d, (8, 64, 32, 32), (64, 1, 7, 7), {"groups": 64, "padding": 3}),
    (F.conv3d, (2, 16, 8, 16, 16), (32, 16, 3, 3, 3), {}),
    (F.conv_transpose2d, (2, 64, 16, 16), (64, 32, 4, 4), {"stride": 2}),
]


def test_kernel_work__of_both_gradients_is_twice_that_of_a_convolution() -> None:
    """A convolution takes two operations for each element of the weight at each place
    that it is applied to; so does each of its gradients, whatever the groups."""

    def job() -> None:
        for operation, source, weight, options in CONVOLUTIONS:
            operation(half(*source), half(*weight), **options).sum().backward()

    works = [work for work in works_of(job) if "conv" in work.name]
    for number, (operation, source, weight, options) in enumerate(CONVOLUTIONS):
        shape = operation(torch.empty(source), torch.empty(weight), **options).shape
        is_transposed = operation is F.conv_transpose2d
        places = math.prod(source if is_transposed else shape) // weight[0]
        forward, backward = works[2 * number : 2 * number + 2]
        assert forward.flops == 2 * places * math.prod(weight), weight
        assert backward.flops == 2 * forward.flops
        assert (forward.work_class is WorkClass.DEPTHWISE) == (weight[1] == 1)


def test_kernel_work__of_a_convolution_knows_where_winograds_algorithm_applies() -> (
    None
):
    """It has 16 multiplications for each 2 x 2 results of a filter of 3 x 3, whole
    tiles, and no other filters, steps, dilations and layouts."""

    def reduction(filters: int, side: int, **options: Any) -> float:
        def job() -> None:
            x = torch.randn(8, 64, side, side, device="cuda", requires_grad=True)
            weight = torch.randn(64, 64, filters, filters, device="cuda")
            if options.pop("nhwc", False):
                x, weight = (
                    t.to(memory_format=torch.channels_last) for t in (x, weight)
                )
            F.conv2d(x, weight, **options).sum().backward()

        works = [work for work in works_of(job) if "conv" in work.name]
        sizes = {work.size.reduction for work in works}  # type: ignore[union-attr]
        assert len(works) == 2
        return sizes.pop() if len(sizes) == 1 else math.nan

    assert reduction(3, 32, padding=1) == 2.25
    assert reduction(3, 7, padding=1) == pytest.approx(49 * 9 / (16 * 16))
    others = [{"stride": 2}, {"dilation": 2}, {"nhwc": True}]
    assert {reduction(3, 32, padding=1, **other) for other in others} == {1.0}
    assert reduction(1, 32) == reduction(5, 32) == 1.0


def test_kernel_work__of_a_convolution_copies_what_is_not_channels_last() -> None:
    def job() -> None:
        x = half(8, 64, 32, 32, gradient=False)
        for layout in (torch.channels_last, torch.contiguous_format):
            F.conv2d(x.contiguous(memory_format=layout), half(128, 64, 3, 3))

    last, first = (work for work in works_of(job) if "conv" in work.name)
    assert last.copied_bytes == 0
    assert first.copied_bytes == 2 * first.bytes


def test_kernel_work__of_packed_weights_has_the_flops_of_their_product() -> None:
    """`gemm_4bit` of bitsandbytes: two weights a byte, which it unpacks for many
    rows."""
    rows, inner, columns = 2048, 4096, 1024

    def job() -> None:
        library = torch.library.Library("packed", "DEF")
        library.define("gemm_4bit(Tensor A, Tensor B, int[] shapeB) -> Tensor")
        torch.library.register_fake(
            "packed::gemm_4bit",
            lambda a, b, shape: a.new_empty(*a.shape[:-1], shape[0]),
            lib=library,
        )
        packed = torch.empty(inner * columns // 2, 1, device="cuda", dtype=torch.uint8)
        for count in (rows, 16):
            a = half(1, count, inner, gradient=False)
            torch.ops.packed.gemm_4bit(a, packed, [columns, inner])

    many, few = works_of(job)
    assert many.flops == 2 * rows * inner * columns
    assert many.work_class is WorkClass.MATRIX
    assert many.copied_bytes == inner * columns // 2 + 2 * 2 * inner * columns
    assert few.copied_bytes == 0


def test_kernel_work__of_vectors_and_bags_is_limited_by_bytes() -> None:
    """Products with a vector move their matrix, and a bag gathers a row for each
    index."""
    width, bags, length = 64, 512, 20

    def job() -> None:
        vector = torch.empty(1 << 24, device="cuda")
        torch.dot(vector, vector)
        half(4096, 4096) @ half(4096)
        half(8, 1, 4096) @ half(8, 4096, 512)
        bag = nn.EmbeddingBag(100_000, width, mode="sum", device="cuda")
        indices = torch.empty(bags, length, dtype=torch.int64, device="cuda")
        bag(indices).sum().backward()

    works = works_of(job)
    for work in works[:3]:
        memory_ns = 1e9 * work.bytes / MEMORY_RATE
        assert memory_ns < GpuRates(MACHINE).kernel_ns(work)[1] < 1.5 * memory_ns + 5e3
    gathered = bags * length * width * 4
    forward, backward = (work for work in works if "bag" in work.name)
    assert gathered < forward.bytes < 2 * gathered
    assert backward.bytes > 100_000 * width * 4 + 2 * gathered


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_compiled_code__moves_what_chains_read_and_others_use(backend: str) -> None:
    """A chain reads its input, and the product that uses its result makes it write
    that; the backward reads the gradient, the result and the input. The update makes it
    write the gradient. Each chain is one launch."""
    size = 2 * 1024 * 1024

    def job() -> None:
        x, weight = (
            torch.empty(1024, 1024, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )

        @torch.compile(backend=backend)
        def run(x: Any) -> Any:
            return (2 * x.sin()).exp() @ weight

        optimizer = torch.optim.SGD([x.requires_grad_()])
        while True:
            run(x).backward(torch.empty_like(x))
            optimizer.step()
            x.grad = None

    def look(run: DryRun) -> Any:
        works = [kernel.work for kernel in run.clock.kernels]
        elementwise = [w for w in works if w.work_class is WorkClass.ELEMENTWISE]
        return (
            [sum(work.bytes for work in elementwise) / size / 2],
            [sum(work.launches for work in elementwise) / 2],
            [work.copied_bytes / size for work in works if work.copied_bytes],
        )

    moved, launches, written = observe(job, look)
    if backend == "eager":
        # Forward: three operations; backward: four, of which two take two tensors.
        assert (moved, launches, written) == ([3 * 2 + 4 * 2 + 2], [7], [])
    else:
        assert (moved, launches, written) == ([1 + 3], [2], [1, 1, 1, 1])


def test_compiled_code__with_cuda_graphs_takes_no_time_of_the_host() -> None:
    def host_ns(mode: str | None) -> int:
        def job() -> None:
            layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(50))).cuda()
            run: Any = layers if mode is None else torch.compile(layers, mode=mode)
            with torch.no_grad():
                run(torch.empty(8, 8, device="cuda"))

        def look(run: DryRun) -> int:
            products = [k for k in run.clock.kernels if k.work.flops]
            return int(products[-1].launch_ns - products[0].launch_ns)

        return int(observe(job, look))

    eager, compiled, graphed = map(host_ns, (None, "default", "reduce-overhead"))
    assert graphed < compiled / 100 < compiled < eager


def test_host__never_updates_faster_than_its_memory() -> None:
    """AdamW on the CPU moves 28 B a parameter in one pass, and 80 B in torch's loops,
    whatever the case; bf16 parameters and moments take half of it."""
    elements, rate = 1 << 24, 10e9
    kinds = [
        (True, False, torch.float32, 28),
        (False, True, torch.float32, 80),
        (False, False, torch.float32, 80),
        (True, False, torch.bfloat16, 14),
    ]

    def measure() -> list[tuple[float, float]]:
        shares = []
        machine = replace(MACHINE, host_memory_bytes_per_s=rate)
        with DryRun(DryRunOptions(iterations=20, machine=machine)) as run:
            run.clock.in_job = True
            for fused, foreach, dtype, bytes_per_param in kinds:
                weight = nn.Parameter(torch.zeros(elements, dtype=dtype))
                weight.grad = torch.zeros(elements, dtype=dtype)
                optimizer = torch.optim.AdamW([weight], fused=fused, foreach=foreach)
                optimizer.step()  # makes the state
                before = [case.host_ns for case in run.clock._cases]
                optimizer.step()
                least_ns = 1e9 * bytes_per_param * elements / rate
                ends = [case.host_ns for case in run.clock._cases]
                ratios = [(b - a) / least_ns for a, b in zip(before, ends, strict=True)]
                shares.append((ratios[0], ratios[1]))
        return shares

    for fast, typical in run_forked(measure):
        assert fast >= 1
        assert 1 < typical < 2


def test_rms_norm_and_silu__are_one_kernel_in_each_direction() -> None:
    def job() -> None:
        x = torch.empty(
            BATCH, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        weight = torch.empty(
            WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        F.rms_norm(x, (WIDTH,), weight).backward(torch.empty_like(x))
        gate = x.detach().requires_grad_()
        F.silu(gate).backward(torch.empty_like(gate))

    assert [kernel[0] for kernel in kernels_of(job)] == [
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        "silu",
        "silu_backward",
    ]


def test_clock__of_large_kernels_is_a_roofline_within_its_priors() -> None:
    size = 8192

    def job() -> None:
        a, b = (
            torch.empty(size, size, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )
        a @ b
        a + b

    def look(run: DryRun) -> Any:
        return [run.clock.rates.kernel_ns(kernel.work) for kernel in run.clock.kernels]

    for times, best_ns in zip(
        observe(job, look),
        (1e9 * 2 * size**3 / PEAK, 1e9 * 3 * 2 * size**2 / MEMORY_RATE),
        strict=True,
    ):
        assert times == sorted(times)
        assert best_ns < times[0]
        assert times[2] < 2 * best_ns


def test_host__waits_for_what_synchronizes_and_for_nothing_else() -> None:
    def job() -> list[float]:
        a = torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16)
        pinned = torch.empty(1 << 26).pin_memory()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        clock = run_of_job[0].clock
        waits = []
        for call in (
            lambda: a @ a,
            lambda: pinned.to("cuda", non_blocking=True),
            lambda: torch.cuda.synchronize(),
            lambda: (events[0].record(), a @ a, events[1].record()),
            lambda: events[1].synchronize(),
            lambda: a @ a,
            lambda: a[0, 0].item(),
        ):
            before = clock.now_ns
            call()
            waits.append((clock.now_ns - before) / 1e6)
        return [*waits, events[0].elapsed_time(events[1])]

    run_of_job: list[Any] = []

    def measure() -> Any:
        with DryRun(DryRunOptions(machine=MACHINE)) as run:
            run_of_job.append(run)
            return job()
        raise AssertionError

    product, copy, synchronize, second, event, third, item, elapsed = run_forked(
        measure
    )
    assert max(product, copy, second, third) < 0.1
    # The copy of 0.27 GB is queued after the product, in the order of their stream.
    assert synchronize == pytest.approx(elapsed + 1e3 * (4 << 26) / 20e9, rel=0.01)
    assert event == pytest.approx(elapsed, rel=0.01)
    assert item == pytest.approx(elapsed, rel=0.01)


def test_streams__run_beside_each_other_until_one_waits() -> None:
    def job() -> None:
        a = torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            a @ a
            assert torch.cuda.current_stream() == side
        a @ a
        torch.cuda.current_stream().wait_stream(side)
        a @ a
        assert torch.cuda.current_stream() == torch.cuda.default_stream() != side

    def look(run: DryRun) -> Any:
        return [(k.stream, k.start_ns, k.end_ns) for k in run.clock.kernels]

    (side, start, end), (main, second_start, second_end), (_, third_start, _) = observe(
        job, look
    )
    assert (side, main) == (1, 0)
    assert start < second_start < end
    assert third_start == max(end, second_end)


def test_host__stops_at_a_full_queue_of_launches() -> None:
    def job() -> None:
        a = torch.empty(1 << 26, device="cuda")
        for _ in range(1200):
            a.add_(1)

    def look(run: DryRun) -> Any:
        return [(k.launch_ns, k.start_ns, k.end_ns) for k in run.clock.kernels]

    rows = observe(job, look)
    assert rows[1000][0] < rows[50][1]
    assert all(rows[n][0] >= rows[n - 1026][2] for n in range(1100, 1200))
    assert all(before[2] <= after[1] for before, after in pairwise(rows))


@pytest.mark.parametrize(
    ("width", "batch", "is_launch_bound"), [(64, 8, True), (4096, 4096, False)]
)
def test_trace__shows_idle_time_of_launch_bound_jobs_only(
    width: int, batch: int, is_launch_bound: bool
) -> None:
    def look(run: DryRun) -> Any:
        trace = trace_of_run(run, ["job"]).build()
        activity = gpu_activity(trace)
        backward = activity.phases[1]
        ranges = {
            part: predicted_range(trace, part)
            for part in ("iteration", "forward", "backward", "update", "other")
        }
        medians = {part: median_ms(trace, part) for part in ranges}
        summary = summarize(trace).as_json()
        return (
            backward.idle_ms / (backward.idle_ms + backward.compute_ms),
            ranges,
            medians,
            prediction_line(trace),
            (
                summary["predicted"],
                summary["iteration_low_ms"],
                summary["phases"][0]["high_ms"],
            ),
            trace.kernels(0)[["flops", "bytes", "launch_ns", "operator"]]
            .isna()
            .any()
            .any(),
        )

    idle_share, ranges, medians, line, printed, has_gaps = observe(
        lambda: train(8, width, batch), look
    )
    assert (idle_share > 0.5) == is_launch_bound
    for part, median in medians.items():
        assert isinstance(ranges[part], TimeRange)
        assert ranges[part].low_ms <= median <= ranges[part].high_ms, part
    # No project has such jobs.
    assert ranges["iteration"].is_guess
    assert line == "predicted by a dry run, not measured (machine a machine)"
    assert printed == (True, ranges["iteration"].low_ms, ranges["forward"].high_ms)
    assert not has_gaps


def test_dry_run__names_forwards_without_gradients() -> None:
    def job() -> None:
        model, reference = (nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            x = torch.randn(BATCH, WIDTH, device="cuda")
            with torch.no_grad():
                reference(x)
            model(x).sum().backward()
            optimizer.step()
            with torch.inference_mode():
                nn.Sequential(model, reference)(x)

    def look(run: DryRun) -> Any:
        trace = trace_of_run(run).build()
        ops, phases = trace.ops(0), trace.phases(0)
        overlap = [
            bool(
                ((phases["gpu_start_ns"] < end) & (phases["gpu_end_ns"] > start)).any()
            )
            for start, end in zip(ops["start_ns"], ops["end_ns"], strict=True)
        ]
        lengths = (ops["end_ns"] - ops["start_ns"]).min()
        other_ms = median_ms(trace, "other") or 0.0
        return (
            list(phases["phase"]),
            ops["iteration"].tolist(),
            any(overlap),
            lengths,
            without_gradients_ms(trace),
            other_ms,
        )

    phases, iterations, overlap, shortest_ns, named_ms, other_ms = observe(
        job, look, iterations=3
    )
    assert phases == ["forward", "backward", "update"] * 3
    assert iterations == [0, 1, 1, 2, 2]
    assert not overlap
    assert shortest_ns > 0
    assert 0 < named_ms <= other_ms
