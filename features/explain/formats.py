"""Which figures training programs print in a line of a step, and under which names.

A program is added by its keys: see docs/extending.md. A line is read as pairs of a key
and a number, in whatever form (`key: 1.5 | `, `key=1.5, `, `{'key': 1.5}`); a key is
compared with the patterns below, the first match counts.
"""

import re
from dataclasses import dataclass

GIB, MIB, GB = float(1 << 30), float(1 << 20), 1e9

# Columns of the steps of a log.
STEP, STEP_S, TOKENS, SAMPLES = "step", "step_s", "tokens_per_s", "samples_per_s"
TFLOPS, MFU, SHARE = "tflops", "mfu", "memory_share"
ALLOCATED, ACTIVE, RESERVED = "allocated_bytes", "active_bytes", "reserved_bytes"
HOST, RETRIES = "host_bytes", "retries"
# Followed by the name that the program has for a part of a step; in s.
PART = "part:"


@dataclass(frozen=True)
class Key:
    """A key that programs print.

    Attributes:
        pattern: Matches the whole key; a group is the name of a part.
        column: The column of its figures.
        scale: What a figure is multiplied with to be in the column's unit, where the
            line itself has no unit.
        program: Who prints it, with the version that was read and the file in it.
    """

    pattern: re.Pattern[str]
    column: str
    scale: float
    program: str


def _keys(program: str, *keys: tuple[str, str, float]) -> list[Key]:
    return [
        Key(re.compile(pattern, re.IGNORECASE), column, scale, program)
        for pattern, column, scale in keys
    ]


KEYS = (
    *_keys(
        "torchtitan 0.2 components/metrics.py",
        ("memory", RESERVED, GIB),
        ("tps", TOKENS, 1),
        ("tflops", TFLOPS, 1),
        ("mfu", MFU, 0.01),
    ),
    *_keys(
        "Megatron-LM core 0.14 training/training.py",
        (r"elapsed time per iteration \(ms\)", STEP_S, 1e-3),
        (r"throughput per GPU \(TFLOP/s/GPU\)", TFLOPS, 1),
        (r"mem-allocated-bytes", ALLOCATED, 1),
        (r"mem-reserved-bytes", RESERVED, 1),
    ),
    *_keys(
        "NeMo 2.4 lightning/pytorch/callbacks/progress_printer.py",
        (r"train_step_timing in s", STEP_S, 1),
        (r"TFLOPS_per_GPU", TFLOPS, 1),
    ),
    *_keys(
        "verl 0.5 trainer/ppo/metric_utils.py",
        (r"timing_s/step", STEP_S, 1),
        (r"timing_s/(.{1,60})", PART, 1),
        (r"perf/max_memory_allocated_gb", ALLOCATED, GIB),
        (r"perf/max_memory_reserved_gb", RESERVED, GIB),
        (r"perf/cpu_memory_used_gb", HOST, GIB),
        (r"perf/throughput", TOKENS, 1),
        (r"perf/mfu/.{1,40}", MFU, 1),
        (r"perf/time_per_step", STEP_S, 1),
    ),
    *_keys(
        "axolotl 0.13 utils/callbacks/profiler and memory",
        (r"memory/max_(mem_)?active ?\(gib\)", ACTIVE, GIB),
        (r"memory/max_(mem_)?allocated ?\(gib\)", ALLOCATED, GIB),
        (r"memory/device_(mem_)?reserved ?\(gib\)", RESERVED, GIB),
        (r"tokens_per_second_per_gpu|tokens/train_per_sec_per_gpu", TOKENS, 1),
    ),
    *_keys(
        "ms-swift 3.8 trainers/callback.py",
        (r"memory\(GiB\)", RESERVED, GIB),
        (r"train_speed\(iter/s\)", STEP_S, -1),
        (r"train_speed\(s/it\)", STEP_S, 1),
    ),
    *_keys(
        "transformers 4.57 trainer.py, trl 0.24",
        (r"step_time", STEP_S, 1),
        (r"train_samples_per_second", SAMPLES, 1),
        (r"train_tokens_per_second|tokens_per_second", TOKENS, 1),
        (r"train_steps_per_second", STEP_S, -1),
    ),
    *_keys(
        "torchtune 0.6 training/metric_logging.py",
        (r"peak_memory_active", ACTIVE, GIB),
        (r"peak_memory_alloc", ALLOCATED, GIB),
        (r"peak_memory_reserved", RESERVED, GIB),
    ),
    *_keys("litgpt 0.5 pretrain.py", (r"iter time", STEP_S, 1e-3)),
    *_keys(
        "nanoGPT train.py, modded-nanogpt train_gpt.py",
        (r"time", STEP_S, 1e-3),
        (r"step_avg", STEP_S, 1e-3),
        (r"dt", STEP_S, 1e-3),
        (r"tok/sec|tokens/s(ec)?", TOKENS, 1),
    ),
    *_keys(
        "prime-rl 0.3 trainer/rl/train.py",
        (r"step time|Time", STEP_S, 1),
        (r"Throughput", TOKENS, 1),
        (r"Peak Mem\.?", ACTIVE, GIB),
    ),
    *_keys(
        "NeMo-RL 0.4 algorithms/grpo.py",
        (r"Total step time", STEP_S, 1),
        (
            r"(generation|policy_training|policy_and_reference_logprobs"
            r"|prepare_for_generation/.{1,40}|logprob_inference_prep|training_prep"
            r"|weight_sync|validation|checkpointing|data_processing)",
            PART,
            1,
        ),
    ),
    *_keys(
        "slime 0.2 utils/timer.py",
        (r"perf/step_time", STEP_S, 1),
        (r"perf/(\w{1,40})_time", PART, 1),
        (r"perf/tokens_per_gpu_per_sec", TOKENS, 1),
    ),
    *_keys(
        "fairseq 0.12 logging/progress_bar.py",
        (r"wps", TOKENS, 1),
        (r"ups", STEP_S, -1),
        (r"gb_free", "free_bytes", GB),
    ),
    *_keys(
        "timm 1.0 train.py, torchvision references/utils.py",
        (r"Time|batch_time", STEP_S, 1),
        (r"max mem", ALLOCATED, MIB),
        (r"data", f"{PART}data", 1),
    ),
    *_keys(
        "other programs",
        (r"step[_ ]?time([_ ]?\(?(s|sec|seconds)\)?)?|iter(ation)?_time", STEP_S, 1),
        (r"step[_ ]?time[_ ]?\(?ms\)?|ms[/_]step", STEP_S, 1e-3),
        (r"(s|sec|seconds)[/_](it|iter|step)", STEP_S, 1),
        (r"(it|iter|steps)[/_](s|sec|second)", STEP_S, -1),
        (r"(max_?|peak_?)?(mem(ory)?_?)?alloc(ated)?(_?gi?b)?", ALLOCATED, GIB),
        (r"(max_?|peak_?)?(mem(ory)?_?)?reserved(_?gi?b)?", RESERVED, GIB),
        (r"(cpu|host)_?(mem(ory)?|rss)(_?gi?b)?|rss(_?gi?b)?", HOST, GIB),
    ),
)
# Units behind a figure, and what they mean: of a time in s, of a size in bytes.
UNITS = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "sec": 1.0,
    "secs": 1.0,
    "seconds": 1.0,
    "min": 60.0,
    "kb": 1024.0,
    "kib": 1024.0,
    "mb": MIB,
    "mib": MIB,
    "gb": GIB,
    "gib": GIB,
    "tb": 1024 * GIB,
    "tib": 1024 * GIB,
    "%": 0.01,
}
_TIMES = (STEP_S, PART)
_SIZES = (ALLOCATED, ACTIVE, RESERVED, HOST, "free_bytes")


def column_of(key: str) -> tuple[str, float, str] | None:
    """Return the column of a key, the scale of its figures, and the program; None for a
    key that no program is known to print."""
    for entry in KEYS:
        match = entry.pattern.fullmatch(key)
        if match is not None:
            part = match[1] if entry.column == PART else ""
            return entry.column + part, entry.scale, entry.program
    return None


def scaled(column: str, number: float, unit: str, scale: float) -> float | None:
    """Return a figure in the unit of its column; None where the unit does not fit.

    A negative scale is a rate of steps, whose inverse is the time of one.
    """
    unit_scale = UNITS.get(unit.lower())
    is_time = column == STEP_S or column.startswith(PART)
    is_size = column in _SIZES
    if unit and unit_scale is None:
        return None
    if scale < 0:
        return 1 / number if number > 0 else None
    if unit_scale is None:
        return number * scale
    fits = (is_time and unit_scale <= 60) or (is_size and unit_scale >= 1024)
    return number * unit_scale if fits or column == MFU else None
