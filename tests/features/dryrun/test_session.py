"""Small jobs in a dry run: bytes, categories, phases, copies, and torch as it was
afterwards."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide.features.dryrun.session import DryRun, DryRunOptions
from tests.features.dryrun.forked import run_forked

WIDTH, BATCH = 512, 32
# Parameters of the layer of WIDTH x WIDTH with its bias, and their bytes in fp32.
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def dry_run(
    job: Callable[[], Any], iterations: int = 2, **options: Any
) -> tuple[Any, Any]:
    """Return the finished dry run of a job, and what the job returned (None if it was
    ended)."""
    result = None
    with DryRun(DryRunOptions(iterations=iterations, **options)) as run:
        result = job()
    return run, result


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5, **autocast: Any
) -> None:
    """Train on squares of random outputs."""
    for _ in range(steps):
        with torch.autocast("cuda", enabled=bool(autocast), **autocast):
            loss = model(torch.randn(BATCH, WIDTH).to("cuda")).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def held_bytes(run: Any, category: str) -> int:
    """Return the bytes that blocks of a category hold at the end."""
    return sum(
        block.size
        for block in run.memory.blocks
        if block.category == category and block.end_ns is None
    )


def test_call_stacks__have_no_frames_of_ebbtide() -> None:
    def job() -> None:
        model = nn.Linear(WIDTH, WIDTH).to("cuda")
        train(model, torch.optim.AdamW(model.parameters()))

    texts = run_forked(lambda: dry_run(job)[0].stacks.texts)
    assert any(f"({__file__}:" in text for text in texts)
    assert len(set(texts)) == len(texts)
    assert not [
        text
        for text in texts
        if "/profiler/agent/" in text or "/profiler/dryrun/device/" in text
    ]


def test_dry_run__counts_parameters_gradients_and_state_by_category_and_module() -> (
    None
):
    def job() -> None:
        model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
        ).to("cuda")
        train(model, torch.optim.AdamW(model.parameters()))

    def observe() -> Any:
        run, _ = dry_run(job)
        modules = Counter[str]()
        for block in run.memory.blocks:
            if block.category == "optimizer_state" and block.end_ns is None:
                modules[block.module] += block.size
        held_now = {
            category: held_bytes(run, category)
            for category in ("parameter", "gradient", "optimizer_state")
        }
        return held_now, dict(modules), run.finished, run.model["params"]

    held_now, modules, finished, params = run_forked(observe)
    assert held_now == {
        "parameter": 2 * LAYER_BYTES,
        "gradient": 2 * LAYER_BYTES,
        "optimizer_state": 4 * LAYER_BYTES,
    }
    assert modules == {"0": 2 * LAYER_BYTES, "2": 2 * LAYER_BYTES}
    assert (finished, params) == (True, 2 * LAYER_BYTES // 4)


def test_dry_run__ends_the_job_after_its_iterations_and_numbers_phases() -> None:
    def job() -> None:
        model = nn.Linear(WIDTH, WIDTH).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(9):
            for _ in range(2):
                model(torch.randn(BATCH, WIDTH, device="cuda")).sum().backward()
            optimizer.step()

    def observe() -> Any:
        run, _ = dry_run(job, iterations=3)
        times = [
            time
            for phase in run.tracker.phases
            for time in (phase.start_ns, phase.end_ns)
        ]
        assert all(before < after for before, after in pairwise(times))
        return [(phase.phase, phase.iteration) for phase in run.tracker.phases]

    phases = run_forked(observe)
    micro_steps = ["forward", "backward"] * 2 + ["update"]
    assert phases == [
        (phase, iteration) for iteration in range(3) for phase in micro_steps
    ]


def test_dry_run__restores_torch() -> None:
    def observe() -> Any:
        before = (
            torch.load,
            torch.nn.Module._apply,
            torch.Tensor.data,
            torch.Generator,
            torch.compile,
        )
        dry_run(lambda: torch.ones(8, device="cuda").sum().item())
        after = (
            torch.load,
            torch.nn.Module._apply,
            torch.Tensor.data,
            torch.Generator,
            torch.compile,
        )
        with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
            torch.ones(8, device="cuda")
        model = nn.Linear(3, 3).double()
        model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        return (
            before == after,
            torch.cuda.is_available(),
            torch.cuda.device_count(),
            model.weight.grad.sum().item(),
        )

    assert run_forked(observe) == (True, False, 0, 18.0)


def test_dry_run__keeps_the_identity_of_moved_parameters_and_their_attributes() -> None:
    def job() -> Any:
        model = nn.Module()
        model.embedding, model.head = (
            nn.Embedding(1000, WIDTH),
            nn.Linear(WIDTH, 1000, bias=False),
        )
        model.head.weight = model.embedding.weight
        model.embedding.weight.no_decay = True
        before = model.embedding.weight
        optimizer = torch.optim.SGD(model.parameters())
        model.to("cuda", torch.bfloat16)
        weight = model.head.weight
        return (
            weight
            is before
            is model.embedding.weight
            is optimizer.param_groups[0]["params"][0],
            isinstance(weight, nn.Parameter)
            and weight.is_leaf
            and weight.requires_grad,
            weight.no_decay,
            weight.device.type,
            str(weight.dtype),
            torch.cuda.memory_allocated(),
        )

    result = run_forked(lambda: dry_run(job)[1])
    assert result == (True, True, True, "cuda", "torch.bfloat16", 2 * 1000 * WIDTH)


def test_dry_run__counts_copies_and_which_are_pinned() -> None:
    def job() -> None:
        pinned = torch.randn(1000).pin_memory()
        on_device = pinned.to("cuda", non_blocking=True)
        torch.zeros(300).to("cuda", torch.float16)
        on_device.cpu()
        on_device.sum().item()
        on_device.add(1).clone()

    copies = run_forked(
        lambda: [
            (c.direction, c.size, c.host_memory) for c in dry_run(job)[0].clock.copies
        ]
    )
    assert copies == [
        ("h2d", 4000, "pinned"),
        ("h2d", 600, "pageable"),
        ("d2h", 4000, "pageable"),
        ("d2h", 4, "pageable"),
    ]


def test_dry_run__knows_values_that_do_not_depend_on_weights() -> None:
    def job() -> Any:
        mask = torch.ones(4, 6, dtype=torch.bool, device="cuda")
        before = bool(mask.all())
        mask[1, 2] = False
        positions = torch.arange(10, device="cuda")[::3]
        kept = positions[positions > 4]
        unknown = torch.randn(5, device="cuda")
        flags = unknown > 0
        followed = (
            bool(mask.all()),
            mask.sum().item(),
            kept.tolist(),
            positions.cpu().numpy().tolist(),
        )
        assert torch.bincount(unknown.long(), minlength=6).shape == (6,)
        large = torch.randn(300, 300, device="cuda").cpu().numpy().sum()
        return (
            before,
            *followed,
            f"{unknown.sum():.2f}",
            unknown[flags].shape,
            unknown.cpu().numpy().tolist(),
            large,
        )

    def observe() -> Any:
        run, values = dry_run(job)
        return values, run.notes()

    values, notes = run_forked(observe)
    assert values == (
        True,
        False,
        23,
        [6, 9],
        [0, 3, 6, 9],
        "1.00",
        (5,),
        [1.0] * 5,
        90_000,
    )
    assert any("largest possible size: nonzero (1)" in note for note in notes)
    assert any("the job read 90,006 values" in note for note in notes)


def test_dry_run__knows_the_end_of_a_generation_whose_tokens_it_does_not_know() -> None:
    def job() -> int:
        unfinished, length = torch.ones(2, dtype=torch.int64, device="cuda"), 0
        while unfinished.max() and length < 9:
            length += 1
            tokens = torch.multinomial(torch.rand(2, 8, device="cuda"), 1)[:, 0]
            ended = torch.isin(tokens, torch.tensor([7], device="cuda"))
            ended |= torch.full((2,), length >= 3, device="cuda")
            unfinished = unfinished & ~ended
        return length

    assert run_forked(lambda: dry_run(job)[1]) == 3


def test_data_loader__with_workers_loads_in_the_process() -> None:
    def job() -> int:
        data = torch.utils.data.TensorDataset(torch.randn(64, 3000), torch.arange(64))
        loader = torch.utils.data.DataLoader(
            data, 16, shuffle=True, num_workers=4, pin_memory=True
        )
        return len({label for _, labels in loader for label in labels.tolist()})

    assert run_forked(lambda: dry_run(job)[1]) == 64


def test_threads__share_the_device() -> None:
    def job() -> int:
        tensors: list[torch.Tensor] = []

        def work() -> None:
            for _ in range(20):
                tensors.append(torch.ones(1000, device="cuda") + 1)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    assert run_forked(lambda: dry_run(job)[1]) == 4 * 20 * 4000


def test_storage__that_is_resized_is_released() -> None:
    def job() -> list[int]:
        tensor = torch.empty(1 << 20, device="cuda")
        sizes = [torch.cuda.memory_allocated()]
        for size in (0, 4 << 20):
            tensor.untyped_storage().resize_(size)
            sizes.append(torch.cuda.memory_allocated())
        return sizes

    assert run_forked(lambda: dry_run(job)[1]) == [4 << 20, 0, 4 << 20]


def test_dry_run__ends_with_the_longest_batch_where_batches_vary() -> None:
    def observe(lengths: list[int]) -> tuple[list[int], object, tuple[int, int], int]:
        given = []
        with DryRun(DryRunOptions(iterations=2)) as run:
            model = torch.nn.Linear(256, 4096).to("cuda")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for (batch,) in torch.utils.data.DataLoader(
                [(torch.ones(n, 256),) for n in lengths]
            ):
                given.append(batch.shape[1])
                model(batch.to("cuda")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return (
            given,
            run.batches.seen,
            run.reserved_range(),
            run.memory.most_reserved_bytes,
        )

    def observe_both() -> tuple[object, object]:
        return observe([1000, 2000, 1500, 8000, 500, 700]), observe([1000] * 6)

    (given, seen, (least, most), reserved), constant = run_forked(observe_both)
    assert given == [1000, 2000, 8000, 8000]
    assert seen == ((1, 500, 256), (1, 8000, 256))
    assert least < most == reserved
    assert constant[:2] == ([1000, 1000], None)


def test_evaluation_between_iterations__ends_where_its_batches_vary() -> None:
    def observe() -> int:
        evaluated = 0
        with DryRun(DryRunOptions(iterations=2)):
            model = torch.nn.Linear(256, 64).to("cuda")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            batches = [(torch.ones(n, 256),) for n in (30, 20, 10, 40)]
            for (batch,) in torch.utils.data.DataLoader(batches):
                model(batch.to("cuda")).sum().backward()
                optimizer.step()
                for _ in torch.utils.data.DataLoader(batches):
                    evaluated += 1
                    assert evaluated < 50
        return evaluated

    assert run_forked(observe) == 12
