"""Rules about messages of memory that ran out."""

from collections.abc import Callable, Iterator

from ebbtide.analysis.findings.rules.spilled import SETTING
from ebbtide.features.explain import formats
from ebbtide.features.explain.answer import Answer, OpenQuestion, Result, rule
from ebbtide.features.explain.readers.out_of_memory import Frame, OutOfMemoryMessage
from ebbtide.features.explain.readers.step_logs import StepLog
from ebbtide.features.explain.record import Records
from ebbtide.units import bytes_text

# What a context of CUDA, libraries and their workspaces take beside torch.
_CONTEXT_BYTES = 3 << 30
# Sizes are printed with two digits behind the point.
_ROUNDING = 1.01
_LARGE_SHARE = 0.1
# Torch asks the driver for segments, and what is free may lie in pieces: less than
# this beside the request is as good as nothing.
_FREE_SHARE = 0.03
_LARGE_REQUEST = 0.4
_MOST_OF_IT = 0.85
_RECORD = "EBBTIDE_OOM=oom.ebb python train.py, then ebbtide memory oom.ebb --at oom"
_MAX_MESSAGES, _MANY_STEPS = 3, 50

Conclusion = Callable[[OutOfMemoryMessage], Answer | None]


@rule(10)
def explain_out_of_memory(records: Records) -> Iterator[Result]:
    messages = records.of(OutOfMemoryMessage)
    distinct = {(m.device, m.requested_bytes, m.free_bytes): m for m in messages}
    for message in [*distinct.values()][:_MAX_MESSAGES]:
        answers = [conclude(message) for conclude in _CONCLUSIONS]
        yield from (answer for answer in answers if answer is not None)
    yield from _late_error(records, messages)
    if messages:
        question = "which tensors, of which phase, held the memory"
        yield OpenQuestion(question, _RECORD)


def _late_error(
    records: Records, messages: list[OutOfMemoryMessage]
) -> Iterator[Answer]:
    """Yield an answer where a job had run for long before its memory ran out."""
    for message in messages[:1]:
        steps = [
            int(log.values(formats.STEP)[-1])
            for log in records.of(StepLog)
            if log.place.text_name == message.place.text_name
            and log.place.first_line <= message.place.first_line
            and len(log.values(formats.STEP))
        ]
        if not steps or max(steps) < _MANY_STEPS:
            continue
        yield _answer(
            message,
            "late-error",
            f"{max(steps):,} steps had run before it: something is larger now, or "
            "grows",
            "larger: a longer sequence or batch, validation, generation, a checkpoint, "
            "a rollout engine that wakes up (try the longest batch first); it grows: "
            "ebbtide profile -o run.ebb for some hundred steps, then ebbtide findings "
            "run.ebb (drift)",
        )


def _answer(
    message: OutOfMemoryMessage,
    rule_name: str,
    title: str,
    advice: str | None,
    *evidence: str,
) -> Answer:
    return Answer(
        rule=rule_name,
        title=title,
        evidence=evidence,
        advice=advice,
        places=(message.place,),
    )


def _request_above_capacity(message: OutOfMemoryMessage) -> Answer | None:
    requested, capacity = message.requested_bytes, message.capacity_bytes
    if requested is None or capacity is None or requested <= capacity:
        return None
    return _answer(
        message,
        "request-above-capacity",
        f"one tensor of {bytes_text(requested)} is larger than the whole GPU "
        f"({bytes_text(capacity)}): nothing that is freed makes it fit",
        "find the shape that gives this size: a batch, sequence or vocabulary that is "
        "far too large, or attention scores without a fused kernel",
    )


def _large_request(message: OutOfMemoryMessage) -> Answer | None:
    requested, capacity = message.requested_bytes, message.capacity_bytes
    if requested is None or capacity is None or requested > capacity:
        return None
    if requested < capacity * _LARGE_REQUEST:
        return None
    return _answer(
        message,
        "large-request",
        f"one tensor of {bytes_text(requested)} would take {requested / capacity:.0%} "
        "of the GPU: its shape is the problem, more than what is in use",
        "find the shape that gives this size: batch, sequence, resolution or "
        "vocabulary, or attention scores without a fused kernel; make it in pieces "
        "(chunks, tiles)",
    )


def _outside_of_torch(message: OutOfMemoryMessage) -> Answer | None:
    if not message.is_from_a_call or message.backend == "CPU":
        return None
    return _answer(
        message,
        "outside-of-torch",
        "a call of CUDA ran out of memory, not torch's allocator: the GPU was full "
        "when a context, a library (cuBLAS, NCCL) or another allocator (vLLM's "
        "cumem) asked the driver",
        "nvidia-smi: which processes have memory, also dead ones and servers? Leave "
        "room beside torch (set_per_process_memory_fraction, a smaller "
        "gpu_memory_utilization), or call torch.cuda.empty_cache() before",
    )


def _overflow(message: OutOfMemoryMessage) -> Answer | None:
    if "more than 1EB" not in message.message:
        return None
    return _answer(
        message,
        "no-real-size",
        "more than 1 EB were requested: that is no size, but an error (a negative or "
        "damaged shape), and memory did not run out",
        "look for an error before it (a timeout of NCCL, a damaged checkpoint), and "
        "at the shape in the line of the traceback",
    )


def _bare(message: OutOfMemoryMessage) -> Answer | None:
    is_told = message.backend == "CPU" or "more than 1EB" in message.message
    if is_told or not message.is_bare:
        return None
    return _answer(
        message,
        "no-figures",
        "memory ran out, and the text has no figures: it does not tell why",
        "paste the whole line of the error ('Tried to allocate ...') and its traceback",
    )


def _spilled(message: OutOfMemoryMessage) -> Answer | None:
    allocated, capacity = message.allocated_bytes, message.capacity_bytes
    if allocated is None or capacity is None or allocated <= capacity * _ROUNDING:
        return None
    return _answer(
        message,
        "spilled",
        f"torch has {bytes_text(allocated)} on a GPU of {bytes_text(capacity)}: the "
        "driver has spilled memory to the host (Windows, WSL)",
        SETTING,
    )


def _limit_of_the_process(message: OutOfMemoryMessage) -> Answer | None:
    allowed, capacity = message.allowed_bytes, message.capacity_bytes
    if allowed is None or (capacity is not None and allowed >= capacity):
        return None
    if message.backend == "MPS":
        title = f"MPS lets the process have {bytes_text(allowed)}"
        advice = (
            "PYTORCH_MPS_HIGH_WATERMARK_RATIO raises the limit, at the risk of a "
            "system that swaps; a smaller batch is safer"
        )
    else:
        title = f"the process may use {bytes_text(allowed)} of the GPU's memory"
        advice = (
            "torch.cuda.set_per_process_memory_fraction sets this limit, or "
            "per_process_memory_fraction of PYTORCH_CUDA_ALLOC_CONF"
        )
    parts = []
    if message.other_bytes is not None:
        allocated, other = bytes_text(message.allocated_bytes), message.other_bytes
        parts = [f"torch has {allocated}, other allocations {bytes_text(other)}"]
    return _answer(message, "limit-of-the-process", title, advice, *parts)


def _free_memory_suffices(message: OutOfMemoryMessage) -> Answer | None:
    requested, free = message.requested_bytes, message.free_bytes
    if requested is None or free is None or message.allowed_bytes is not None:
        return None
    if free < requested + _FREE_SHARE * (message.capacity_bytes or free):
        return None
    return _answer(
        message,
        "free-memory-suffices",
        f"{bytes_text(free)} of device memory are free, and {bytes_text(requested)} "
        "failed: device memory is not what ran out",
        "look at limits of the host (ulimit -v and -l, the cgroup's memory; Windows: a "
        "larger page file), at dmesg for faults of the driver, and for another error "
        "before this one",
    )


def _other_processes(message: OutOfMemoryMessage) -> Answer | None:
    own = _own_bytes(message)
    capacity, free = message.capacity_bytes, message.free_bytes
    if own is None or capacity is None or free is None:
        return None
    others = [
        (pid, size)
        for pid, size in message.used_by_processes
        if not _is_own_process(message, size)
    ]
    unseen = capacity - free - own
    if not others and unseen < max(_CONTEXT_BYTES, capacity * _LARGE_SHARE):
        return None
    size = sum(size for _, size in others) or unseen
    names = ", ".join(f"process {pid} {bytes_text(size)}" for pid, size in others)
    missing = message.missing_bytes
    suffices = missing is not None and size >= missing
    ending = ", more than was missing" if suffices else ""
    return _answer(
        message,
        "other-processes",
        f"{bytes_text(size)} of the GPU are not this job's memory of torch{ending}",
        "nvidia-smi names processes; one that died may keep its memory (fuser -v "
        "/dev/nvidia*); a server of a rollout, NCCL and graphics count here, too",
        *([names] if names else []),
    )


def _own_bytes(message: OutOfMemoryMessage) -> int | None:
    # Inside of some containers the driver counts 0 bytes for it.
    if message.used_by_this_process_bytes:
        return message.used_by_this_process_bytes
    reserved = message.reserved_bytes
    return message.allocated_bytes if reserved is None else reserved


def _is_own_process(message: OutOfMemoryMessage, size: int) -> bool:
    """Return whether a process is the job itself, which a container calls otherwise."""
    reserved = message.reserved_bytes
    if message.used_by_this_process_bytes is not None or reserved is None:
        return False
    return reserved / _ROUNDING <= size <= reserved + _CONTEXT_BYTES


def _fragmentation(message: OutOfMemoryMessage) -> Answer | None:
    unallocated, missing = message.unallocated_bytes, message.missing_bytes
    if unallocated is None or missing is None or not missing:
        return None
    if unallocated >= missing:
        return _answer(
            message,
            "fragmentation",
            f"{bytes_text(unallocated)} are reserved by torch and in no tensor, and "
            f"{bytes_text(missing)} were missing: they were in pieces too small",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True can use them, at most "
            f"{bytes_text(unallocated)}",
        )
    return _answer(
        message,
        "no-fragmentation",
        f"fragmentation does not explain it: {bytes_text(unallocated)} are reserved "
        f"and in no tensor, {bytes_text(missing)} were missing",
        None,
    )


def _tensors_fill_it(message: OutOfMemoryMessage) -> Answer | None:
    allocated, capacity = message.allocated_bytes, message.capacity_bytes
    if allocated is None or capacity is None:
        return None
    if not capacity * _MOST_OF_IT <= allocated <= capacity * _ROUNDING:
        return None
    return _answer(
        message,
        "tensors-fill-it",
        f"tensors take {bytes_text(allocated)} of {bytes_text(capacity)}: the job "
        "needs more memory than the GPU has",
        "ebbtide dry-run --gpu NAME -- python train.py shows, without a GPU, what "
        "holds it; ebbtide plan compares offload, sharding and checkpointing",
    )


def _private_pools(message: OutOfMemoryMessage) -> Answer | None:
    size, capacity = message.private_pool_bytes, message.capacity_bytes
    if size is None or capacity is None or size < capacity * _LARGE_SHARE:
        return None
    return _answer(
        message,
        "private-pools",
        f"graphs of CUDA keep {bytes_text(size)} in pools of their own, which nothing "
        "else can use",
        "capture fewer shapes, or share one pool (graph_pool_handle); torch.compile: "
        "mode without cudagraphs",
    )


# Words of a line or a function, and what is allocated there.
_SITES = (
    (
        ("cross_entropy", "logits", "lm_head", "log_softmax"),
        "logits: batch x sequence x vocabulary, in fp32 twice; a fused or chunked "
        "loss, or a shorter sequence, avoids them",
    ),
    (
        ("softmax", "attn_weights", "scores", "attention_mask"),
        "attention scores: batch x heads x sequence x sequence; scaled_dot_product_"
        "attention with a fused kernel avoids them",
    ),
    (
        ("flatten_dense", "_flatten", "flat_param", "initialize_optimizer_states"),
        "a flattened copy of parameters or gradients, as large as all of a group",
    ),
    (
        ("init_group", "_init_state", "exp_avg", "zeros_like"),
        "state of the optimizer, which is made at the first step: 8 B a parameter for "
        "Adam in fp32; offload, 8-bit state or sharding makes it smaller",
    ),
    (
        (".to(", ".cuda(", "load_state_dict", "_apply", "convert"),
        "the model while it is loaded or moved: make it on the device once, in its "
        "final precision",
    ),
    (
        ("all_gather", "allgather", "unshard"),
        "parameters that are gathered from other ranks",
    ),
)
_PHASES = (
    ("backward", "in the backward: activations are largest there, gradients grow"),
    ("step", "in the update: its state and temporaries come to activations' place"),
    ("forward", "in the forward: activations grow with batch and sequence"),
    ("generate", "in generation: the cache of keys and values grows with its length"),
)


def _site(message: OutOfMemoryMessage) -> Answer | None:
    if not message.frames:
        return None
    phase = _phase_of(message.frames)
    purpose = _purpose_of(message.frames[-6:])
    if phase is None and purpose is None:
        return None
    own = _own_frame(message.frames)
    line = f"{own.file}:{own.line}, in {own.function}: {own.code}"
    size = bytes_text(message.requested_bytes)
    title = f"{size} were requested {phase or 'by this line'}"
    return _answer(message, "site", title, purpose and f"likely {purpose}", line)


def _phase_of(frames: tuple[Frame, ...]) -> str | None:
    for frame in reversed(frames):
        for function, phase in _PHASES:
            if frame.function == function or f".{function}(" in frame.code:
                return phase
    return None


def _purpose_of(frames: tuple[Frame, ...]) -> str | None:
    for frame in reversed(frames):
        text = f"{frame.function} {frame.code}"
        for words, purpose in _SITES:
            if any(word in text for word in words):
                return purpose
    return None


def _own_frame(frames: tuple[Frame, ...]) -> Frame:
    """Return the innermost frame that is not in an installed package."""
    own = [frame for frame in frames if "-packages" not in frame.file]
    return own[-1] if own else frames[-1]


def _host_memory(message: OutOfMemoryMessage) -> Answer | None:
    if message.backend != "CPU":
        return None
    return _answer(
        message,
        "host-memory",
        f"host memory ran out, not the GPU's: {bytes_text(message.requested_bytes)} "
        "requested by the CPU's allocator",
        "ebbtide doctor shows the host's memory and limits; state that is offloaded, "
        "each worker of a data loader and each rank that loads the model need it",
    )


_CONCLUSIONS: tuple[Conclusion, ...] = (
    _host_memory,
    _outside_of_torch,
    _overflow,
    _bare,
    _request_above_capacity,
    _large_request,
    _spilled,
    _limit_of_the_process,
    _free_memory_suffices,
    _other_processes,
    _fragmentation,
    _tensors_fill_it,
    _private_pools,
    _site,
)
