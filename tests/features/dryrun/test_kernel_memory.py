"""Memory that kernels of CUDA take, and operations that write in place on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide.features.dryrun.memory.caching_allocator import context_bytes
from ebbtide.features.dryrun.memory.kernel_buffers import (
    Multiprocessors,
    multiprocessors,
    workspace_bytes,
)
from ebbtide.features.dryrun.session import DryRun, DryRunOptions
from ebbtide.features.dryrun.torch_2_13.operations.convolutions import convolution_bytes
from ebbtide.features.dryrun.torch_2_13.operations.workspaces import reduction_buffers
from tests.features.dryrun.forked import run_forked

aten = torch.ops.aten
H100 = Multiprocessors(132, 2048)


def buffers(func: Any, source: torch.Tensor, *args: Any, **kwargs: Any) -> list[int]:
    return reduction_buffers(
        func, (source, *args), kwargs, func(source, *args, **kwargs), H100
    )


def meta(*shape: int, **options: Any) -> torch.Tensor:
    return torch.empty(*shape, device="meta", **options)


def test_reduction_buffers__are_those_of_recordings_on_an_h100() -> None:
    # From the public snapshots cs336-*: the classes of the logits are not the innermost
    # dimension in memory.
    logits = meta(10_000, 512).t()
    assert buffers(aten.max.dim, logits, -1, True) == [164_626_432, 16]
    assert buffers(aten.sum.dim_IntList, logits, [-1]) == [41_156_608, 16]
    assert buffers(aten.sum.dim_IntList, meta(4, 1024, 1024), [0, 1]) == [
        33_554_432,
        32,
    ]
    assert buffers(aten.sum.dim_IntList, meta(2560, 512).t(), [1], True) == [
        10_485_760,
        16,
    ]


@pytest.mark.parametrize(
    ("source", "dims"),
    [
        (meta(512, 10_000), [-1]),
        (meta(64, 64, 128), [2]),
        (meta(4, 128, 2560), [0, 1]),
        (meta(1), [0]),
    ],
)
def test_reduction_buffers__are_none_where_a_block_has_a_result_of_its_own(
    source: torch.Tensor, dims: list[int]
) -> None:
    assert buffers(aten.sum.dim_IntList, source, dims) == []


def test_reduction_buffers__count_converted_integers_and_half_precision() -> None:
    assert buffers(aten.sum.default, meta(100, dtype=torch.bool)) == [800]
    half, full = (
        buffers(aten.sum.dim_IntList, meta(10_000, 512, dtype=t).t(), [1])
        for t in (torch.half, torch.float)
    )
    assert half == full


def test_workspace_bytes__follow_the_capability_and_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = [
        workspace_bytes(capability)
        for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
    ]
    assert sizes == [8_519_680, 8_519_680, 33_554_432, 33_554_432, 33_554_432]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert workspace_bytes((9, 0)) == 8_519_680
    assert multiprocessors("a100-80gb-sxm", (8, 0)) == Multiprocessors(108, 2048)
    assert multiprocessors("NVIDIA GeForce RTX 4090", (8, 9)) == Multiprocessors(
        128, 1536
    )
    assert [
        multiprocessors(f"NVIDIA H100{form}", (9, 0)).count
        for form in (" PCIe", " 80GB HBM3")
    ] == [114, 132]


def test_convolution_bytes__count_copies_for_tensor_cores() -> None:
    x, w, y = meta(2, 8, 4, 4), meta(6, 8, 1, 1), meta(2, 6, 4, 4)
    sizes = {
        name: 4 * tensor.numel() for name, tensor in (("x", x), ("w", w), ("y", y))
    }
    call = [[0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1]
    forward, backward = (x, w, None, *call[1:]), (y, x, w, *call, [True, True, False])
    most = sum(sizes.values())
    assert convolution_bytes(aten.convolution, forward, (8, 6)) == [
        (0, sizes["x"] + sizes["w"])
    ]
    assert (
        convolution_bytes(aten.convolution_backward, backward, (8, 6))
        == [(sizes["y"] + sizes["w"], most)] * 2
    )
    assert convolution_bytes(aten.convolution_backward, backward, (7, 0)) == []
    channels_last = (x.to(memory_format=torch.channels_last), *forward[1:])
    depthwise = (meta(2, 6, 4, 4), meta(6, 1, 3, 3), *forward[2:-1], 6)
    assert [
        convolution_bytes(aten.convolution, args, (9, 0))
        for args in (channels_last, depthwise)
    ] == [[], []]


@pytest.mark.parametrize(("groups", "size"), [(1, 1), (1, 3), (8, 3)])
def test_dry_run__convolutions_keep_the_layout_of_their_input_as_cudnn_does(
    groups: int, size: int
) -> None:
    def observe() -> list[bool]:
        with DryRun(DryRunOptions(iterations=9)):
            layer = nn.Conv2d(8, 8, size, padding=size // 2, groups=groups).to("cuda")
            kept = []
            for layout, enabled in (
                (torch.channels_last, True),
                (torch.channels_last, False),
                (torch.contiguous_format, True),
            ):
                images = torch.randn(4, 8, 6, 6, device="cuda").to(memory_format=layout)
                images.requires_grad_()
                gradients: list[torch.Tensor] = []
                scaled = images * 2
                scaled.register_hook(gradients.append)
                with torch.backends.cudnn.flags(enabled=enabled):
                    output = layer(scaled)
                    output.sum().backward()
                kept += [
                    tensor.is_contiguous(memory_format=torch.channels_last)
                    for tensor in (output, gradients[0])
                ]
            return kept

    assert run_forked(observe) == [True, True, False, False, False, False]


def test_dry_run__takes_workspaces_of_convolutions_only_where_they_fit() -> None:
    def observe(capacity: int | None) -> tuple[int, tuple[int, int], int]:
        with DryRun(DryRunOptions(iterations=1, capacity_bytes=capacity)) as run:
            model = nn.Conv2d(64, 64, 3, padding=1).to("cuda")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            images = torch.randn(64, 64, 64, 64, device="cuda", requires_grad=True)
            model(images).sum().backward()
            optimizer.step()
        workspaces = [
            block.size for block in run.memory.blocks if block.most is not None
        ]
        return run.memory.most_reserved_bytes, run.reserved_range(), len(workspaces)

    image_bytes = 4 * 64**4
    roomy, (least, most), taken = run_forked(lambda: observe(None))
    assert taken == 2
    assert least < roomy <= most
    assert roomy - least == pytest.approx(image_bytes, rel=0.05)
    context = context_bytes(132)
    tight, limits, taken = run_forked(lambda: observe(least + context))
    assert (tight, limits, taken) == (least, (least, least), 0)


def sizes_in_backward(job: Callable[[], torch.Tensor]) -> list[int]:
    """Return the bytes of each allocation of a backward, the workspaces of cuBLAS left
    out."""
    with DryRun(DryRunOptions(iterations=9)) as run:
        loss = job()
        before = len(run.memory.blocks)
        loss.backward()
        return [
            block.size
            for block in run.memory.blocks[before:]
            if block.size != 33_554_432
        ]


def test_dry_run__names_the_node_of_what_autograd_allocates() -> None:
    def observe() -> list[str]:
        with DryRun(DryRunOptions(iterations=9)) as run:
            scores = torch.randn(64, 1000, device="cuda", requires_grad=True)
            nn.functional.cross_entropy(
                scores, torch.zeros(64, dtype=torch.long, device="cuda")
            ).backward()
            return [run.stacks.texts[block.stack] for block in run.memory.blocks]

    assert "autograd engine\nLogSoftmaxBackward0" in run_forked(observe)


def test_dry_run__adds_gradients_in_place() -> None:
    def residual() -> torch.Tensor:
        x = torch.randn(64, 64, device="cuda", requires_grad=True) * 2
        return (x.sin() * x.cos()).square().sum()

    # Three of square, two of the product, two of sin, three of cos, and one of the
    # factor; their sum takes none.
    sizes = run_forked(lambda: sizes_in_backward(residual))
    assert sizes.count(64 * 64 * 4) == 11


def test_dry_run__writes_gradients_of_indexing_in_place() -> None:
    def embedding() -> torch.Tensor:
        table = torch.randn(5000, 64, device="cuda", requires_grad=True)
        return table[torch.arange(100, device="cuda")].sum()

    sizes = run_forked(lambda: sizes_in_backward(embedding))
    assert sizes.count(5000 * 64 * 4) == 1
    # The sorted indices and the order of them.
    assert sizes.count(800) >= 4


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "AdamW"])
def test_dry_run__runs_fused_optimizers(name: str) -> None:
    def observe() -> tuple[int, int]:
        with DryRun(DryRunOptions(iterations=2)) as run:
            model = nn.Linear(512, 512).to("cuda")
            optimizer = getattr(torch.optim, name)(
                model.parameters(), lr=0.1, fused=True
            )
            for _ in range(2):
                model(torch.randn(4, 512).to("cuda")).sum().backward()
                before = len(run.memory.blocks)
                optimizer.step()
        live = sum(
            block.size
            for block in run.memory.blocks
            if block.category == "optimizer_state"
        )
        return live, sum(
            block.size for block in run.memory.blocks[before:] if block.size > 4
        )

    state, temporaries = run_forked(observe)
    parameters = 4 * (512 * 512 + 512)
    assert (
        state
        == {"SGD": 0, "Adagrad": parameters + 8, "AdamW": 2 * parameters + 8}[name]
    )
    assert temporaries == 0


def test_dry_run__gives_ctc_loss_and_old_tensor_types_shapes() -> None:
    def observe() -> tuple[list[int], bool, bool]:
        with DryRun(DryRunOptions(iterations=9)) as run:
            scores = torch.cuda.FloatTensor(50, 16, 20).requires_grad_()
            lengths = torch.full((16,), 50), torch.full((16,), 30)
            targets = torch.ones(16, 30, dtype=torch.int64).type(torch.cuda.LongTensor)
            nn.functional.ctc_loss(scores.log_softmax(2), targets, *lengths).backward()
            is_long = isinstance(targets, torch.cuda.LongTensor)
            return (
                [block.size for block in run.memory.blocks],
                is_long,
                isinstance(targets, torch.cuda.FloatTensor),
            )

    sizes, is_long, is_float = run_forked(observe)
    # The table has a row for each target, the blanks around it, and each time.
    assert 16 * 50 * 61 * 4 in sizes
    assert (is_long, is_float) == (True, False)


def test_dry_run__runs_attention_in_inference_mode_by_its_parts() -> None:
    def observe() -> tuple[dict[str, int], int]:
        with DryRun(DryRunOptions(iterations=9)) as run, torch.inference_mode():
            x = torch.randn(2, 4, 128, 32, device="cuda", dtype=torch.half)
            nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
            torch.matmul(x, x.transpose(-1, -2))
        return dict(run.attention.counts), run.memory.most_bytes

    counts, most_bytes = run_forked(observe)
    assert counts == {"flash": 1}
    assert most_bytes > 33_554_432  # the workspace of cuBLAS
