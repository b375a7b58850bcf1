"""Reads messages of memory that ran out, in every wording of torch since 0.4.

The wordings are those of `c10/cuda/CUDACachingAllocator.cpp`, of the allocators of XPU
and MPS, and of `c10/core/impl/alloc_cpu.cpp`, in the history of pytorch/pytorch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from ebbtide.features.explain.pasted import PastedLine, PastedText
from ebbtide.features.explain.record import Place, Record, reader
from ebbtide.units import bytes_text

_SIZE = r"(\d[\d ,]*(?:\. ?\d[\d ]*)?) ?(bytes|[KMGT]?i?B)\b"
_OPENING = re.compile(
    r"(?P<backend>CUDA|HIP|XPU|NPU|MPS\s+backend)(\s+error:)?\s+out\s+of\s+memory"
    r"|DefaultCPUAllocator:\s+(not\s+enough|can't\s+allocate)\s+memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
    r"|Cuda failure (2 )?'out of memory'|cudaErrorMemoryAllocation"
    r"|Tried to allocate (?=.{1,40}(GPU \d|total capac))",
    re.IGNORECASE,
)
_FIELDS = {
    "requested_bytes": rf"[Tt]ried to allocate {_SIZE}",
    "capacity_bytes": rf"total capac(?:i)?ty of {_SIZE}|{_SIZE} total capacity",
    "free_bytes": rf"of which {_SIZE} is free|; {_SIZE} free",
    "used_by_this_process_bytes": rf"this process has {_SIZE} memory in use",
    "allocated_bytes": (
        rf"Of the allocated memory {_SIZE} is allocated|{_SIZE} already allocated"
        rf"|MPS allocated: {_SIZE}"
    ),
    "unallocated_bytes": rf"{_SIZE} is reserved by (?:PyTorch|NPU) but unallocated",
    "reserved_bytes": rf"{_SIZE} (?:reserved in total|cached)",
    "private_pool_bytes": rf"with {_SIZE} allocated in private pools",
    "allowed_bytes": rf"{_SIZE} allowed|max allowed: {_SIZE}",
    "other_bytes": rf"other allocations: {_SIZE}",
}
_PATTERNS = {name: re.compile(pattern) for name, pattern in _FIELDS.items()}
_PROCESS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_DEVICE = re.compile(r"\bGPU (\d+)\b")
_CALL = re.compile(
    r"error:\s+out of memory|_ALLOC_FAILED|Cuda failure|cudaErrorMemory", re.IGNORECASE
)
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_MAX_MESSAGES = 1000
# A message goes over as many lines where a terminal or a mail has broken it.
_MAX_LINES = 12
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_MAX_FRAME_LINES = 400


@dataclass(frozen=True)
class Frame:
    """A frame of a traceback."""

    file: str
    line: int
    function: str
    code: str


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryMessage(Record):
    """A message of memory that ran out; None: it does not say."""

    backend: str  # `CUDA`, `HIP`, `XPU`, `NPU`, `MPS` or `CPU`.
    message: str
    device: int | None = None
    requested_bytes: int | None = None
    capacity_bytes: int | None = None
    free_bytes: int | None = None
    used_by_this_process_bytes: int | None = None
    # By process id, as the driver counts them: a container has other ids.
    used_by_processes: tuple[tuple[int, int], ...] = ()
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    private_pool_bytes: int | None = None
    allowed_bytes: int | None = None
    other_bytes: int | None = None
    # The frames of the traceback above it, outermost first.
    frames: tuple[Frame, ...] = ()

    @property
    def title(self) -> str:
        device = "" if self.device is None else f" of GPU {self.device}"
        size = bytes_text(self.requested_bytes)
        return f"out-of-memory message{device} ({self.backend}), {size} requested"

    @property
    def is_bare(self) -> bool:
        """Return whether it has neither a size nor a call that failed."""
        sizes = (self.requested_bytes, self.capacity_bytes, self.allocated_bytes)
        return not any(sizes) and not self.is_from_a_call

    @property
    def is_from_a_call(self) -> bool:
        """Return whether a call of CUDA failed, and not torch's allocator."""
        return self.requested_bytes is None and _CALL.search(self.message) is not None

    @property
    def unallocated_bytes(self) -> int | None:
        """Return what torch had reserved, and no tensor used."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return self.reserved_bytes - self.allocated_bytes

    @property
    def missing_bytes(self) -> int | None:
        """Return by how much the request exceeded the free memory."""
        if self.requested_bytes is None or self.free_bytes is None:
            return None
        return max(self.requested_bytes - self.free_bytes, 0)


@reader
def read_messages(text: PastedText) -> Iterator[OutOfMemoryMessage]:
    messages = list(islice(_messages(text), _MAX_MESSAGES))
    # Other words about an error that is there in full tell nothing.
    are_bare = all(message.is_bare for message in messages)
    yield from (one for one in messages if are_bare or not one.is_bare)


def _messages(text: PastedText) -> Iterator[OutOfMemoryMessage]:
    lines = text.lines
    end = 0
    for index, line in enumerate(lines):
        opening = None if index < end else _OPENING.search(line.text)
        if opening is None:
            continue
        end = _end_of_message(lines, index)
        parts = [opening.string[opening.start() :]]
        parts += [one.text.strip() for one in lines[index + 1 : end]]
        place = Place(
            text_name=text.name,
            first_line=line.number,
            last_line=lines[end - 1].number,
        )
        frames = _frames_above(lines, index)
        yield parse_message(" ".join(parts), opening["backend"], place, frames)


def _end_of_message(lines: tuple[PastedLine, ...], index: int) -> int:
    """Return the index after the last line of the message that begins at `index`."""
    end = index + 1
    while end < min(index + _MAX_LINES, len(lines)) and _continues(
        lines[end - 1], lines[end]
    ):
        end += 1
    return end


def _continues(line: PastedLine, following: PastedLine) -> bool:
    """Return whether a line goes on with the message of the line before."""
    is_next = following.number - line.number <= 1
    is_other = _OPENING.search(following.text) or _FRAME.search(following.text)
    speaks = re.search(
        r"\b(Tried|reserved|allocated|PyTorch|memory|free|GPU|capac)", following.text
    )
    return is_next and not is_other and speaks is not None


def parse_message(
    message: str,
    backend: str | None,
    place: Place,
    frames: tuple[Frame, ...] = (),
) -> OutOfMemoryMessage:
    """Parse the text of a message.

    `backend`: as the message calls it; None: the CPU, or a library of CUDA.
    """
    flat = " ".join(message.split())
    sizes = {
        name: _size_of(match)
        for name, pattern in _PATTERNS.items()
        if (match := pattern.search(flat)) is not None
    }
    unallocated = sizes.pop("unallocated_bytes", None)
    if unallocated is not None and "allocated_bytes" in sizes:
        sizes["reserved_bytes"] = sizes["allocated_bytes"] + unallocated
    processes = [
        (int(match[1]), size_bytes(match[2], match[3]))
        for match in _PROCESS.finditer(flat)
    ]
    device = _DEVICE.search(flat)
    if backend is None:
        backend = "CPU" if "DefaultCPUAllocator" in flat else "CUDA"
    return OutOfMemoryMessage(
        place=place,
        backend=backend.split()[0].upper(),
        message=flat,
        device=None if device is None else int(device[1]),
        used_by_processes=tuple(processes),
        frames=frames,
        **sizes,
    )


def _size_of(match: re.Match[str]) -> int:
    number, unit = (group for group in match.groups() if group is not None)
    return size_bytes(number, unit)


def size_bytes(number: str, unit: str) -> int:
    """Return the bytes of a size as torch prints it, in powers of 1024."""
    digits = number.replace(" ", "").replace(",", "")
    letter = "" if unit.lower() in ("bytes", "b") else unit[0].upper()
    scale = 1 << 10 * _UNITS[letter]
    return round(float(digits) * scale)


def _frames_above(lines: tuple[PastedLine, ...], index: int) -> tuple[Frame, ...]:
    """Return the frames of the traceback that ends above a line."""
    frames: list[Frame] = []
    for at in range(index - 1, max(index - _MAX_FRAME_LINES, -1), -1):
        if "Traceback (most recent call last)" in lines[at].text:
            break
        if match := _FRAME.search(lines[at].text):
            code = lines[at + 1].text.strip() if at + 1 < index else ""
            line = int(match["line"])
            frames.append(Frame(match["file"], line, match["function"], code))
    else:
        return ()
    return tuple(reversed(frames))
