"""Jobs in dry runs, with the results of equal calls computed once and computed anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide.features.dryrun.session import DryRun, DryRunOptions
from ebbtide.features.dryrun.torch_2_13.device.known_calls import KnownCalls
from tests.conftest import slow_case
from tests.features.dryrun.forked import run_forked

ROWS, WIDTH = 8, 64
_SIZES: list[int] = []


def ones(*shape: int) -> Any:
    return torch.ones(*shape, device="cuda")


def described(*tensors: Any) -> list[Any]:
    """Return what a job sees of tensors, and which of them share memory."""
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    return [
        (
            tuple(t.shape),
            t.stride(),
            t.storage_offset(),
            t.dtype,
            t.device,
            t.requires_grad,
            storages.index(storage),
        )
        for t, storage in zip(tensors, storages, strict=True)
    ]


def digest(
    job: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, is_anew: bool
) -> dict[str, Any]:
    """Return all that a dry run counts, and what the job returns."""

    def run_job() -> dict[str, Any]:
        torch.manual_seed(1)
        result = None
        calls: list[Any] = []
        find = KnownCalls.find
        replacement = (
            (lambda *_: None)
            if is_anew
            else lambda self, key: calls.append(find(self, key)) or calls[-1]
        )
        with (
            monkeypatch.context() as patches,
            DryRun(DryRunOptions(iterations=2)) as run,
        ):
            patches.setattr(KnownCalls, "find", replacement)
            result = job()
        memory, blocks = run.memory, run.memory.blocks
        return {
            "kernels": run.clock.kernels,
            "host": [case.host_ns for case in run.clock._cases],
            "blocks": [
                (b.start_ns, b.size, b.module, b.category, run.stacks.texts[b.stack])
                for b in blocks
            ],
            "ends": sorted(b.end_ns or 0 for b in blocks),
            "peaks": (
                memory.most_bytes,
                memory.most_reserved_bytes,
                run.host_memory.most_bytes,
            ),
            "copies": [(row.direction, row.size) for row in run.clock.copies],
            "unknown": (
                run.mode.values.placeholders,
                run.mode.shapes.bounds,
                run.mode.shapes.least,
            ),
            "result": result,
            "known": sum(call is not None for call in calls),
        }

    return run_forked(run_job)


def train() -> None:
    with torch.device("cuda"):
        layer = nn.TransformerEncoderLayer(WIDTH, 4, dropout=0.1, batch_first=True)
        model = nn.ModuleList(
            [
                nn.Embedding(100, WIDTH),
                layer,
                nn.Conv1d(WIDTH, WIDTH, 3),
                nn.Linear(WIDTH, 100),
            ]
        )
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        tokens = torch.randint(0, 100, (ROWS, 32)).to("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            hidden = model[1](model[0](tokens))
            scores = model[3](model[2](hidden.transpose(1, 2)).transpose(1, 2))
            loss = nn.functional.cross_entropy(
                scores.float().flatten(0, 1), tokens[:, :30].flatten()
            )
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def view() -> list[Any]:
    base, results = ones(ROWS, WIDTH), []
    for _ in range(2):
        halves = base.split(WIDTH // 2, 1)
        rows = base.t()[1:].unbind(0)
        results += described(
            base,
            *halves,
            rows[2],
            base.detach(),
            base.expand(3, ROWS, WIDTH),
            base.reshape(-1)[3:],
        )
        results += described(
            base, base.contiguous(), base.to(torch.float32), base.t().contiguous()
        )
    return results


def infer() -> list[Any]:
    base, results = ones(ROWS, WIDTH), []
    for _ in range(3):
        with torch.inference_mode():
            tensors = (
                base * 2,
                (base * 2).t(),
                base[1:],
                base.t(),
                base.detach(),
                base[1:].add_(1),
            )
        results += [
            *described(*tensors),
            *(tensor.is_inference() for tensor in tensors),
        ]
    return results


def write() -> list[Any]:
    one, other, results = ones(ROWS, WIDTH), ones(ROWS, WIDTH), []
    for factor in (other, one, other, one):
        results += described(one, factor, one.mul_(factor), one.view(-1).add_(1))
    for rows in (0, ROWS, 0):
        sum_of_both = ones(rows, WIDTH)
        results += described(one, torch.add(one, other, out=sum_of_both), sum_of_both)
    for _ in range(2):
        results += described(
            ones(1, ROWS).squeeze_(0), ones(ROWS).resize_(2), ones(2, 3).t_()
        )
    return results


def select() -> list[Any]:
    results = []
    for mask in ([1, 0, 1, 1], [0, 0, 1, 0], [1, 1, 1, 1]):
        flags = torch.tensor(mask).to("cuda")
        results += described(
            flags.nonzero(),
            ones(4)[flags.bool()],
            ones(4).masked_select(flags.bool()),
            flags.unique(),
        )
    return results


def grow() -> list[Any]:
    _SIZES[:] = [3, 5, 7]
    return described(*(torch.ops.known_calls_test.grow(ones(4)) for _ in range(3)))


def ask() -> list[Any]:
    return described(*(torch.ops.known_calls_test.ask(ones(4)) for _ in range(3)))


@pytest.fixture
def _operations() -> Iterator[None]:
    with torch.library._scoped_library("known_calls_test", "DEF") as library:
        for name, fake in {
            "grow": lambda x: x.new_empty(_SIZES.pop()),
            "ask": lambda x: x.new_empty(
                torch.library.get_ctx().new_dynamic_size(min=1, max=x.numel())
            ),
        }.items():
            library.define(f"{name}(Tensor x) -> Tensor")
            torch.library.register_fake(f"known_calls_test::{name}", fake, lib=library)
        yield


@pytest.mark.usefixtures("_operations")
@pytest.mark.parametrize(
    "job", [train, view, infer, write, *map(slow_case, (select, grow)), ask]
)
def test_dry_run__counts_the_same_with_known_calls(
    job: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reused, anew = (digest(job, monkeypatch, is_anew) for is_anew in (False, True))
    assert reused.pop("known") > 0 == anew.pop("known")
    for name, expected in anew.items():
        assert reused[name] == expected, name


def test_precision__of_a_known_product_follows_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def multiply() -> None:
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            ones(ROWS, WIDTH) @ ones(WIDTH, ROWS)

    kernels = digest(multiply, monkeypatch, is_anew=False)["kernels"]
    assert [kernel.work.precision for kernel in kernels if kernel.work.flops] == [
        "float32",
        "tf32",
    ]


def test_known_calls__have_positions_of_a_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look_up() -> list[Any]:
        table, positions = (
            ones(16),
            torch.zeros(ROWS, WIDTH, dtype=torch.long, device="cuda"),
        )
        return described(*(table[positions] for _ in range(3)))

    results = digest(look_up, monkeypatch, is_anew=False)
    assert results["known"] == 2
    assert [shape for shape, *_ in results["result"]] == [(ROWS, WIDTH)] * 3
