"""Settings of the simulated allocator, its streams, and segments that grow."""

from __future__ import annotations

import os
import random
from itertools import pairwise

import pytest
import torch

from ebbtide.features.dryrun.errors import DryRunError
from ebbtide.features.dryrun.memory.allocator_pools import AllocatorSettings
from ebbtide.features.dryrun.memory.caching_allocator import CachingAllocator
from ebbtide.features.dryrun.session import DryRun, DryRunOptions
from tests.features.dryrun.forked import run_forked

MIB = 1 << 20


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_settings__are_those_of_the_environment(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert AllocatorSettings.from_environment() == AllocatorSettings()
    monkeypatch.setenv(
        variable, "expandable_segments:True, max_split_size_mb:64,backend:native"
    )
    settings = AllocatorSettings.from_environment()
    assert (settings.expandable, settings.max_split_bytes, settings.ignored) == (
        True,
        64 * MIB,
        ("backend",),
    )
    assert (
        settings.description
        == "expandable_segments, max_split_size 64 MiB, backend (has no effect here)"
    )


def test_settings__are_those_that_the_job_sets_before_it_allocates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def observe() -> tuple[bool, int | None, int]:
        with DryRun(DryRunOptions(iterations=9, capacity_bytes=10**9)) as run:
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
            torch.cuda.set_per_process_memory_fraction(0.5)
            first = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
            expandable = run.memory.allocator.settings.expandable
            del first
            torch._C._accelerator_setAllocatorSettings("max_split_size_mb:32")
            torch.empty(450 * MIB, dtype=torch.uint8, device="cuda")
        allocator = run.memory.allocator
        return expandable, allocator.settings.max_split_bytes, allocator.retries

    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    # Half of the device does not hold what is cached and the second tensor.
    assert run_forked(observe) == (True, 32 * MIB, 1)


@pytest.mark.parametrize(
    "text", ["expandable_segments:yes", "max_split_size_mb:many", "nonsense", "a:1,,b"]
)
def test_settings__that_torch_refuses_end_in_one_line(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", text)
    with pytest.raises(
        DryRunError,
        match=f"PYTORCH_CUDA_ALLOC_CONF is '{text}', which torch cannot read",
    ):
        AllocatorSettings.from_environment()


@pytest.mark.parametrize(
    ("divisions", "size", "block"),
    [
        # the example of torch's documentation: 1024, 1280, 1536 and 1792
        ("4", 1200 * MIB, 1280 * MIB),
        ("4", 1024 * MIB, 1024 * MIB),
        ("1", 1200 * MIB, 1200 * MIB),
        ("[256:1,512:2,1024:4,>:8]", 100 * MIB + 1, 100 * MIB + 512),
        ("[256:1,512:2,1024:4,>:8]", 700 * MIB, 768 * MIB),
        ("[256:1,512:2,1024:4,>:8]", 1200 * MIB, 1280 * MIB),
        ("[256:1,512:2,1024:4,>:8]", 2100 * MIB, 2304 * MIB),
    ],
)
def test_allocator__rounds_by_powers_of_two(
    divisions: str, size: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"roundup_power2_divisions:{divisions}")
    assert (
        CachingAllocator(AllocatorSettings.from_environment).round_size(size) == block
    )


def test_allocator__does_not_split_large_blocks_beyond_the_limit() -> None:
    allocator = CachingAllocator(lambda: AllocatorSettings(max_split_bytes=64 * MIB))
    allocator.free(allocator.allocate(100 * MIB))
    # A small request gets no block that may not be split; a large one gets it up to 20
    # MiB above its size.
    assert allocator.allocate(30 * MIB).size == 30 * MIB
    assert allocator.allocate(70 * MIB).size == 70 * MIB
    assert allocator.allocate(90 * MIB).size == 100 * MIB
    assert allocator.reserved_bytes == 200 * MIB


def test_allocator__maps_memory_page_by_page_to_expandable_segments() -> None:
    allocator = CachingAllocator(lambda: AllocatorSettings(expandable=True))
    first = allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    # 10 MiB are mapped and free: 20 MiB more make room for 25 MiB beside them.
    second = allocator.allocate(25 * MIB)
    assert (second.address, allocator.reserved_bytes) == (
        first.address + 30 * MIB,
        60 * MIB,
    )
    allocator.allocate(MIB)
    assert allocator.reserved_bytes == 62 * MIB
    allocator.free(first)
    allocator.empty_cache()
    # Only the first page lies in free memory as a whole: the second one has the
    # beginning of the other block.
    assert allocator.reserved_bytes == 42 * MIB
    third = allocator.allocate(30 * MIB)
    assert (third.address, allocator.reserved_bytes) == (first.address, 62 * MIB)


@pytest.mark.parametrize("expandable", [False, True])
def test_allocator__never_gives_memory_twice(expandable: bool) -> None:
    random_number = random.Random(7)
    allocator = CachingAllocator(lambda: AllocatorSettings(expandable=expandable))
    blocks = {}
    for step in range(3000):
        if blocks and random_number.random() < 0.5:
            address = random_number.choice(list(blocks))
            allocator.free(blocks.pop(address))
        else:
            size = random_number.choice([700, 40_000, 3 * MIB, 17 * MIB, 33 * MIB])
            block = allocator.allocate(size, stream=random_number.randrange(2))
            assert block.size >= size
            blocks[block.address] = block
        if step % 500 == 0:
            allocator.empty_cache()
        live = sorted(
            (block.address, block.address + block.size) for block in blocks.values()
        )
        assert all(before[1] <= after[0] for before, after in pairwise(live))
        assert (
            allocator.allocated_bytes
            == sum(block.size for block in blocks.values())
            <= allocator.reserved_bytes
        )
    for block in blocks.values():
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


def test_allocator__keeps_the_memory_of_streams_apart() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(30 * MIB, stream=1)
    allocator.free(block)
    allocator.allocate(30 * MIB, stream=0)
    assert allocator.reserved_bytes == 60 * MIB
    used_elsewhere = allocator.allocate(30 * MIB, stream=1, now_ns=5)
    assert (used_elsewhere.address, allocator.reserved_bytes) == (
        block.address,
        60 * MIB,
    )
    # Another stream uses it until the time 10: a request before that gets new memory, a
    # later one does not.
    allocator.free(used_elsewhere, until_ns=10)
    early = allocator.allocate(30 * MIB, stream=1, now_ns=9)
    assert (early.address == block.address, allocator.reserved_bytes) == (
        False,
        90 * MIB,
    )
    assert allocator.allocate(30 * MIB, stream=1, now_ns=10).address == block.address


def test_allocator__gives_cached_segments_back_before_it_needs_more_than_there_is() -> (
    None
):
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert (allocator.reserved_bytes, allocator.retries) == (80 * MIB, 1)
    assert "gave cached segments back" in allocator.notes()[-1]
