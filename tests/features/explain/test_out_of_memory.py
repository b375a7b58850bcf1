"""Messages of memory that ran out: what is read, and what is concluded."""

from __future__ import annotations

import pytest

from ebbtide.features.explain.answer import Answer, explain_records
from ebbtide.features.explain.pasted import PastedText, clean_lines
from ebbtide.features.explain.readers.out_of_memory import OutOfMemoryMessage
from ebbtide.features.explain.record import Records, read_records

GIB = 1 << 30
TORCH_1_4 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 1; 11.00 GiB "
    "total capacity; 7.00 GiB already allocated; 1.50 GiB free; 9.00 GiB reserved in "
    "total by PyTorch)"
)
TORCH_2 = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 1 has "
    "a total capacity of 80.00 GiB of which 1.00 GiB is free. Including non-PyTorch "
    "memory, this process has 79.00 GiB memory in use. Of the allocated memory 70.00 "
    "GiB is allocated by PyTorch, with 20.00 GiB allocated in private pools (e.g., "
    "CUDA Graphs), and 7.00 GiB is reserved by PyTorch but unallocated."
)
MPS = (
    "RuntimeError: MPS backend out of memory (MPS allocated: 12.00 GiB, other "
    "allocations: 5.00 GiB, max allowed: 18.00 GiB). Tried to allocate 1.25 GiB on "
    "private pool."
)
CPU = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:114] . DefaultCPUAllocator: not "
    "enough memory: you tried to allocate 68719476736 bytes."
)


def text_of(content: str) -> PastedText:
    return PastedText("text", tuple(clean_lines(content)))


def message_of(content: str) -> OutOfMemoryMessage:
    (message,) = read_records(text_of(content))
    assert isinstance(message, OutOfMemoryMessage)
    return message


def answers_to(content: str) -> dict[str, Answer]:
    explanation = explain_records(Records(tuple(read_records(text_of(content)))))
    return {answer.rule: answer for answer in explanation.answers}


@pytest.mark.parametrize(
    ("content", "figures"),
    [
        (TORCH_1_4, (1, 2, 11, 1.5, 7, 9)),
        (TORCH_2, (1, 3, 80, 1, 70, 77)),
        (MPS, (None, 1.25, None, None, 12, None)),
        (CPU, (None, 64, None, None, None, None)),
    ],
)
def test_message__has_the_figures_of_each_wording(
    content: str, figures: tuple[float | None, ...]
) -> None:
    message = message_of(content)
    device, *sizes = figures
    assert message.device == device
    assert [
        message.requested_bytes,
        message.capacity_bytes,
        message.free_bytes,
        message.allocated_bytes,
        message.reserved_bytes,
    ] == [None if size is None else size * GIB for size in sizes]


def test_message__is_read_where_copying_has_broken_it() -> None:
    broken = "\n".join(
        "> " + "   ".join(part.split(" ")) for part in TORCH_2.split(". ")
    )
    whole, pasted = message_of(TORCH_2), message_of(broken)
    assert pasted.allocated_bytes == whole.allocated_bytes
    assert pasted.reserved_bytes == whole.reserved_bytes
    assert pasted.private_pool_bytes == 20 * GIB


@pytest.mark.parametrize(
    "content",
    [
        TORCH_1_4.partition("memory. ")[2],
        f"The error says CUDA out of memory.\n\n\n{TORCH_1_4.partition('memory. ')[2]}",
    ],
)
def test_message__is_read_without_its_first_words(content: str) -> None:
    message = message_of(content)
    assert message.requested_bytes == 2 * GIB
    assert message.capacity_bytes == 11 * GIB


def wording(
    requested: float,
    capacity: float,
    free: float,
    allocated: float,
    unallocated: float,
    more: str = "",
) -> str:
    return (
        f"CUDA out of memory. Tried to allocate {requested:.2f} GiB. GPU 0 has a total "
        f"capacity of {capacity:.2f} GiB of which {free:.2f} GiB is free. {more}Of the "
        f"allocated memory {allocated:.2f} GiB is allocated by PyTorch, and "
        f"{unallocated:.2f} GiB is reserved by PyTorch but unallocated."
    )


PROCESS = "Process 99 has {} GiB memory in use. "
OWN = "Including non-PyTorch memory, this process has {} GiB memory in use. "
FRAME = 'Traceback (most recent call last):\n  File "a.py", line 3, in {}\n    {}\n'
RULES = {
    "request-above-capacity": (
        (
            wording(100, 80, 70, 5, 1),
            wording(30, 24, 1, 20, 1),
            TORCH_1_4.replace("2.00", "200.00"),
        ),
        (wording(70, 80, 1, 70, 1), TORCH_1_4, TORCH_2),
    ),
    "spilled": (
        (wording(1, 8, 0, 22, 1), wording(1, 24, 0, 25, 0), wording(0.1, 12, 0, 13, 1)),
        (wording(1, 8, 0, 7.9, 0), TORCH_1_4, TORCH_2),
    ),
    "free-memory-suffices": (
        (
            wording(0.1, 80, 20, 50, 5),
            wording(1, 24, 2, 20, 1),
            wording(2, 288, 203, 68, 15),
        ),
        (
            wording(3, 80, 1, 70, 7),
            TORCH_1_4,
            wording(1, 80, 20, 5, 1, "10.00 GiB allowed; "),
            # Segments are larger than requests, and what is free may be in pieces.
            wording(0.09, 24, 0.26, 8, 1, PROCESS.format(15)),
            wording(0.016, 32, 0.017, 31, 0.1),
        ),
    ),
    "large-request": (
        (
            wording(22.8, 31.5, 12.7, 9.1, 9.4),
            wording(12, 16, 9.5, 5.8, 0.3).replace("CUDA", "HIP"),
            TORCH_1_4.replace("2.00", "9.00"),
        ),
        (wording(100, 80, 70, 5, 1), TORCH_1_4, TORCH_2),
    ),
    "outside-of-torch": (
        (
            "RuntimeError: CUDA Error: out of memory at /w/cumem_allocator.cpp:62",
            "n1:9:9 [3] include/alloc.h:178 NCCL WARN Cuda failure 2 'out of memory'",
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x",
        ),
        (TORCH_1_4, CPU, "I get CUDA out of memory as soon as it starts"),
    ),
    "late-error": (
        (
            f"Epoch 80:  87%|##| 750/858 [04:56<00:42,  2.53it/s, loss=0.2]\n{TORCH_2}",
            f"step 5206: loss=2.6\nstep 5214: loss=1.8\n{MPS}",
            f"iter 200: loss 3.1, time 123.45ms, mfu 33%\n{TORCH_1_4}",
        ),
        (
            f"  0%|#| 1/858 [00:04<00:42,  2.53s/it]\n{TORCH_2}",
            f"{TORCH_2}\n  80%|#| 750/858 [04:56<00:42,  2.53it/s]",
            TORCH_1_4,
        ),
    ),
    "no-real-size": (
        (
            "CUDA out of memory. Tried to allocate more than 1EB memory.",
            "HIP out of memory. Tried to allocate more than 1EB memory.",
            "RuntimeError: CUDA out of memory. Tried to allocate more than 1EB memory.",
        ),
        (TORCH_1_4, CPU, "CUDA out of memory"),
    ),
    "no-figures": (
        (
            "I get CUDA out of memory as soon as it starts",
            "HIP out of memory",
            "torch.cuda.OutOfMemoryError: CUDA out of memory.",
        ),
        (TORCH_2, f"I get CUDA out of memory:\n\n{TORCH_1_4}", CPU),
    ),
    "other-processes": (
        (
            wording(1, 24, 0.1, 10, 1, PROCESS.format(12)),
            wording(1, 80, 0, 30, 2),
            wording(1, 80, 0, 30, 2, OWN.format(33)),
        ),
        (
            wording(1, 80, 0.1, 74, 4, PROCESS.format(79)),
            wording(1, 80, 0, 74, 4, OWN.format(79)),
            wording(0.02, 80, 66, 9, 1, OWN.format(0)),
            TORCH_2,
        ),
    ),
    "fragmentation": (
        (wording(3, 80, 1, 70, 7), TORCH_1_4, TORCH_2),
        (wording(3, 80, 1, 77, 1), wording(0.1, 80, 1, 70, 7), MPS),
    ),
    "tensors-fill-it": (
        (wording(1, 80, 0, 78, 1), wording(3, 80, 1, 70, 7), TORCH_2),
        (TORCH_1_4, wording(1, 8, 0, 22, 0), wording(1, 80, 0, 30, 2)),
    ),
    "private-pools": (
        (
            TORCH_2,
            TORCH_2.replace("20.00 GiB alloc", "9.00 GiB alloc"),
            TORCH_2.replace("20.00 GiB alloc", "60.00 GiB alloc"),
        ),
        (TORCH_2.replace("20.00 GiB alloc", "20.00 MiB alloc"), TORCH_1_4, CPU),
    ),
    "limit-of-the-process": (
        (
            MPS,
            wording(1, 80, 20, 5, 1, "10.00 GiB allowed; "),
            TORCH_1_4.replace("9.00 GiB res", "8.00 GiB allowed; 9.00 GiB res"),
        ),
        (TORCH_1_4, TORCH_2, CPU),
    ),
    "host-memory": (
        (
            CPU,
            CPU.replace("not enough", "can't allocate").replace(
                "can't allocate memory", "can't allocate memory"
            ),
            CPU.replace("68719476736", "12"),
        ),
        (TORCH_1_4, TORCH_2, MPS),
    ),
    "site": (
        (
            FRAME.format("backward", "torch.autograd.backward(") + TORCH_2,
            FRAME.format("f", "loss = F.cross_entropy(x, y)") + TORCH_2,
            FRAME.format("step", "state['exp_avg'] = torch.zeros_like(p)") + TORCH_2,
        ),
        (TORCH_2, FRAME.format("main", "main()") + TORCH_2, TORCH_1_4),
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule__speaks_where_its_figures_say_so_and_nowhere_else(rule: str) -> None:
    speaking, silent = RULES[rule]
    for content in speaking:
        assert rule in answers_to(content), content
    for content in silent:
        assert rule not in answers_to(content), content


def test_fragmentation__says_how_much_expandable_segments_can_help_at_most() -> None:
    answer = answers_to(TORCH_2)["fragmentation"]
    assert "7.00 GiB" in (answer.advice or "")
    assert "2.00 GiB were missing" in answer.title


def test_limit_of_mps__says_what_others_have_of_it() -> None:
    evidence = answers_to(MPS)["limit-of-the-process"].evidence
    assert evidence == ("torch has 12.00 GiB, other allocations 5.00 GiB",)
