"""The figures in the texts of out-of-memory errors, in the words of torch's
versions."""

from __future__ import annotations

import pytest
import torch

from ebbtide.profiler.recording.spools.out_of_memory_text import with_stated_figures

MIB, GIB = 1 << 20, 1 << 30
ADVICE = (
    "If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
# name: (the text, then requested, capacity, free, allocated and reserved bytes)
TEXTS = {
    "torch 2.8": (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity "
        "of 8.00 GiB of which 0 bytes is "
        "free. Including non-PyTorch memory, this process has 17179869184.00 GiB "
        "memory in use. Of the allocated "
        "memory 6.50 GiB is allocated by PyTorch, and 512.00 MiB is reserved by "
        "PyTorch but unallocated. " + ADVICE,
        (20 * MIB, 8 * GIB, 0, 6.5 * GIB, 7 * GIB),
    ),
    "private pools": (
        "CUDA out of memory. Tried to allocate 1.25 GiB. GPU 1 has a total capacity of "
        "93.00 GiB of which 1.00 GiB is "
        "free. Process 2752205 has 91.82 GiB memory in use. Of the allocated memory "
        "90.50 GiB is allocated by PyTorch, "
        "with 2.00 GiB allocated in private pools (e.g., CUDA Graphs), and 120.00 MiB "
        "is reserved by PyTorch but "
        "unallocated. "
        + ADVICE.replace("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        (1.25 * GIB, 93 * GIB, GIB, 90.5 * GIB, 90.5 * GIB + 120 * MIB),
    ),
    "a limit of the process": (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "79.00 GiB of which 60.00 GiB is "
        "free. 20.00 GiB allowed; Of the allocated memory 19.00 GiB is allocated by "
        "PyTorch, and 1.00 GiB is reserved "
        "by PyTorch but unallocated. " + ADVICE,
        (2 * GIB, 79 * GIB, 60 * GIB, 19 * GIB, 20 * GIB),
    ),
    "the driver": ("CUDA error: out of memory", (None,) * 5),
}
KEYS = (
    "requested_bytes",
    "capacity_bytes",
    "free_bytes",
    "allocated_bytes",
    "reserved_bytes",
)


@pytest.mark.parametrize("name", TEXTS)
def test_stated_figures__are_those_of_the_text(name: str) -> None:
    text, expected = TEXTS[name]
    (record,) = with_stated_figures({"out_of_memory": [{"t_ns": 1, "message": text}]})[
        "out_of_memory"
    ]
    assert tuple(record[key] for key in KEYS) == expected


def test_stated_figures__of_the_cpu_allocator_of_this_torch() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 50)
    (record,) = with_stated_figures(
        {"out_of_memory": [{"t_ns": 1, "message": str(raised.value)}]}
    )["out_of_memory"]
    assert [record[key] for key in KEYS] == [4 << 50, None, None, None, None]


def test_stated_figures__do_not_replace_what_the_allocator_itself_gave() -> None:
    error = {
        "t_ns": 1,
        "message": TEXTS["torch 2.8"][0],
        "requested_bytes": 20_000_001,
        "free_bytes": 7,
    }
    (record,) = with_stated_figures({"out_of_memory": [error]})["out_of_memory"]
    assert [record[key] for key in KEYS[:3]] == [20_000_001, 8 * GIB, 7]
    assert with_stated_figures({"rank": 0}) == {"rank": 0}
