"""Which figures training programs print in a line of a step, and under which names.

A program is added by its keys: see docs/extending.md. A line is read as pairs of a key
and a number, in whatever form (`key: 1.5 | `, `key=1.5, `, `{'key': 1.5}`); it is of
the program that has most of its keys.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

GIB, MIB = float(1 << 30), float(1 << 20)

# Columns of the steps of a log.
STEP, STEP_S, TOKENS, SAMPLES = "step", "step_s", "tokens_per_s", "samples_per_s"
MEAN_STEP_S = "mean_step_s"  # Of a whole run.
TFLOPS, MFU, SHARE = "tflops", "mfu", "memory_share"
ALLOCATED, ACTIVE, RESERVED = "allocated_bytes", "active_bytes", "reserved_bytes"
HOST, FREE, RETRIES = "host_bytes", "free_bytes", "retries"
SKIPPED, HOST_SHARE = "skipped", "host_share"
IGNORED = ""  # Figures that another key of the line has better.
# Sizes without a unit are GiB, MiB or bytes, by what a device can have.
BY_SIZE = 0.0
# Followed by the name that the program has for a part of a step; in s.
PART = "part:"


@dataclass(frozen=True)
class Key:
    """A key that a program prints.

    Attributes:
        pattern: Matches the whole key; a group is the name of a part.
        column: The column of its figures.
        scale: What a figure is multiplied with to be in the column's unit, where the
            line itself has no unit; None: the program prints the unit, and without it
            the key is of another one; `BY_SIZE`: see there.
    """

    pattern: re.Pattern[str]
    column: str
    scale: float | None


@dataclass(frozen=True)
class Program:
    """A program, with the version whose sources were read, and its keys."""

    name: str
    source: str  # The file that prints the line.
    keys: tuple[Key, ...]

    def key(self, text: str) -> Key | None:
        """Return the first key that a text is."""
        for key in self.keys:
            if key.pattern.fullmatch(text):
                return key
        return None


def _program(name: str, source: str, *keys: tuple[str, str, float | None]) -> Program:
    compiled = [
        Key(re.compile(pattern), column, scale) for pattern, column, scale in keys
    ]
    return Program(name, source, tuple(compiled))


PROGRAMS = (
    _program(
        "torchtitan 0.2",
        "components/metrics.py",
        ("memory", RESERVED, None),
        ("tps", TOKENS, 1),
        ("tflops", TFLOPS, 1),
        ("mfu", MFU, 0.01),
    ),
    _program(
        "Megatron-LM core 0.14",
        "training/training.py",
        (r"elapsed time per iteration \(ms\)", STEP_S, 1e-3),
        (r"throughput per GPU \(TFLOP/s/GPU\)", TFLOPS, 1),
        ("max allocated", ALLOCATED, MIB),
        ("max reserved", RESERVED, MIB),
        ("allocated|reserved", IGNORED, 1),
        ("number of skipped iterations", SKIPPED, 1),
        ("mem-allocated-bytes", ALLOCATED, 1),
        ("mem-reserved-bytes", RESERVED, 1),
    ),
    _program(
        "NeMo 2.4",
        "lightning/pytorch/callbacks/progress_printer.py",
        ("train_step_timing in s", STEP_S, 1),
        ("TFLOPS_per_GPU", TFLOPS, 1),
        ("peak_memory_usage", RESERVED, 1),
        ("memory_allocated", ALLOCATED, 1),
    ),
    _program(
        "verl 0.5",
        "workers/fsdp_workers.py, trainer/ppo/metric_utils.py",
        ("timing_s/step|perf/time_per_step", STEP_S, 1),
        ("timing_s/(.{1,60})", PART, 1),
        ("(actor/|critic/)?perf/max_memory_allocated_gb", ALLOCATED, GIB),
        ("(actor/|critic/)?perf/max_memory_reserved_gb", RESERVED, GIB),
        ("(actor/|critic/)?perf/cpu_memory_used_gb", HOST, GIB),
        ("perf/throughput", TOKENS, 1),
        ("perf/mfu/.{1,40}", MFU, 1),
    ),
    _program(
        "axolotl 0.13",
        "core/trainers/base.py",
        (r"memory/max_(mem_)?active ?\([Gg]i[Bb]\)", ACTIVE, GIB),
        (r"memory/max_(mem_)?allocated ?\([Gg]i[Bb]\)", ALLOCATED, GIB),
        (r"memory/device_(mem_)?reserved ?\([Gg]i[Bb]\)", RESERVED, GIB),
        ("(GPU|cuda) memory usage (baseline|after .{1,40})", ALLOCATED, GIB),
        ("tokens_per_second_per_gpu|tokens/train_per_sec_per_gpu", TOKENS, 1),
    ),
    _program(
        "ms-swift 3.8",
        "trainers/mixin.py",
        (r"memory\(GiB\)", RESERVED, GIB),
        (r"train_speed\(iter/s\)", STEP_S, -1),
        (r"train_speed\(s/it\)", STEP_S, 1),
    ),
    _program(
        "transformers 4.57 or trl 0.24",
        "trainer.py",
        ("step_time", STEP_S, 1),
        ("train_samples_per_second", SAMPLES, 1),
        ("train_tokens_per_second|tokens_per_second", TOKENS, 1),
        ("train_steps_per_second", MEAN_STEP_S, -1),
    ),
    _program(
        "torchtune 0.6",
        "training/memory.py",
        ("peak_memory_active", ACTIVE, GIB),
        ("peak_memory_alloc", ALLOCATED, GIB),
        ("peak_memory_reserved", RESERVED, GIB),
        ("tokens_per_second_per_gpu", TOKENS, 1),
    ),
    _program("litgpt 0.5", "pretrain.py", ("iter time", STEP_S, 1e-3)),
    _program(
        "nanoGPT",
        "train.py",
        ("time|dt", STEP_S, None),
        ("mfu", MFU, 0.01),
        ("tok/sec", TOKENS, 1),
    ),
    _program("modded-nanogpt", "train_gpt.py", ("step_avg", STEP_S, 1e-3)),
    _program(
        "prime-rl 0.3",
        "trainer/rl/train.py",
        ("Time", STEP_S, 1),
        ("Throughput", TOKENS, 1),
        ("MFU", MFU, 0.01),
        (r"Peak Mem\.", ALLOCATED, GIB),
    ),
    _program(
        "NeMo-RL 0.4",
        "algorithms/grpo.py",
        ("Total step time", STEP_S, 1),
        (
            "(generation|exposed_generation|buffer_sampling|policy_training|policy_and_reference_logprobs"
            "|prepare_for_generation/.{1,40}|logprob_inference_prep|training_prep"
            "|weight_sync|validation|checkpointing|data_processing)",
            PART,
            1,
        ),
    ),
    _program(
        "slime 0.2",
        "ray/rollout.py, utils/timer.py",
        ("perf/step_time", STEP_S, 1),
        (r"perf/(\w{1,40})_time", PART, 1),
        ("perf/tokens_per_gpu_per_sec", TOKENS, 1),
    ),
    _program(
        "fairseq 0.12",
        "logging/progress_bar.py",
        ("wps", TOKENS, 1),
        ("ups", STEP_S, -1),
        ("gb_free", FREE, GIB),
    ),
    _program(
        "torchvision 0.24",
        "references/utils.py",
        ("time", STEP_S, 1),
        ("data", f"{PART}data", 1),
        ("max mem", ALLOCATED, MIB),
    ),
    _program(
        "mmengine 0.10",
        "hooks/logger_hook.py",
        ("time", STEP_S, 1),
        ("data_time", f"{PART}data", 1),
        ("memory", ALLOCATED, MIB),
    ),
    _program(
        "Liger-Kernel 0.5",
        "examples/huggingface/callback.py",
        ("step_peak_memory_allocated_MB", ALLOCATED, MIB),
        ("step_peak_memory_reserved_MB", RESERVED, MIB),
        ("step_tokens_per_second", TOKENS, 1),
    ),
    _program(
        "nanotron 0.4",
        "trainer.py",
        ("elapsed_time_per_iteration_ms", STEP_S, 1e-3),
        ("tokens_per_sec_per_gpu", TOKENS, 1),
        ("model_tflops_per_gpu", TFLOPS, 1),
        ("cuda_memory_allocated", ALLOCATED, None),
        ("cuda_max_memory_reserved", RESERVED, None),
    ),
    _program("timm 1.0", "train.py", ("Time", STEP_S, 1), ("Data", f"{PART}data", 1)),
)
# Names that programs of one's own print.
OTHERS = _program(
    "a program that is not known",
    "names are of any case",
    (r"(?i)step[_ ]?time([_ ]?\(?(s|sec|seconds)\)?)?|iter(ation)?_time", STEP_S, 1),
    (r"(?i)step[_ ]?time[_ ]?\(?ms\)?|ms[/_](step|iter)", STEP_S, 1e-3),
    (r"(?i)(s|sec|seconds)[/_](it|iter|step)", STEP_S, 1),
    (r"(?i)(it|iter|steps)[/_](s|sec|second)", STEP_S, -1),
    (r"(?i)tok(en)?s?[/_](s|sec|second)", TOKENS, 1),
    (r"(?i)(max[_ ]?|peak[_ ]?)?(mem(ory)?_?)?alloc(ated)?", ALLOCATED, BY_SIZE),
    (r"(?i)(max[_ ]?|peak[_ ]?)?(mem(ory)?_?)?reserved", RESERVED, BY_SIZE),
    (r"(?i)(cpu|host)[_ ]?(mem(ory)?|rss)|rss", HOST, BY_SIZE),
    (r"(?i)(max_?|peak_?)?(mem(ory)?_?)?alloc(ated)?[_ (]*gi?b\)?", ALLOCATED, GIB),
    (r"(?i)(max_?|peak_?)?(mem(ory)?_?)?reserved[_ (]*gi?b\)?", RESERVED, GIB),
    (r"(?i)((cpu|host)_?(mem(ory)?_?)?|rss)[_ (]*gi?b\)?", HOST, GIB),
    (r"(?i)(max_?|peak_?)?(mem(ory)?_?)?alloc(ated)?[_ (]*mi?b\)?", ALLOCATED, MIB),
    (r"(?i)(max_?|peak_?)?(mem(ory)?_?)?reserved[_ (]*mi?b\)?", RESERVED, MIB),
    (r"(?i)((cpu|host)_?)?rss[_ (]*mi?b\)?", HOST, MIB),
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
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
}
_SIZES_OF_DEVICES = ((300, GIB), (3e5, MIB), (3e8, 0), (3e12, 1))
_COUNTS = (TOKENS, SAMPLES, TFLOPS)
_SIZES = (ALLOCATED, ACTIVE, RESERVED, HOST, FREE)


def program_of(keys: Sequence[str]) -> Program:
    """Return the program that has most of some keys; `OTHERS` if none has any."""

    def count(program: Program) -> int:
        entries = [program.key(key) for key in keys]
        return sum(entry is not None and entry.column != IGNORED for entry in entries)

    best = max(PROGRAMS, key=count)
    return best if count(best) else OTHERS


def column_of(program: Program, key: str) -> tuple[str, float | None] | None:
    """Return the column of a key and the scale of its figures; None for a key that
    means nothing here."""
    entry = program.key(key) or OTHERS.key(key)
    if entry is None:
        return None
    match = entry.pattern.fullmatch(key)
    part = match[1] if match is not None and entry.column == PART else ""
    return entry.column + part, entry.scale


def scaled(column: str, number: float, unit: str, scale: float | None) -> float | None:
    """Return a figure in the unit of its column; None where the unit does not fit.

    A negative scale is a rate of steps, whose inverse is the time of one.
    """
    unit_scale = UNITS.get(unit.lower())
    if column in _COUNTS:
        return number * (scale or 1) * (1 if unit_scale is None else unit_scale)
    is_time = column in (STEP_S, MEAN_STEP_S) or column.startswith(PART)
    is_size = column in _SIZES
    if unit and unit_scale is None:
        return None
    if scale is not None and scale < 0:
        return 1 / number if number > 0 else None
    if unit_scale is None:
        return _without_unit(number, scale)
    fits = (is_time and unit_scale <= 60) or (is_size and unit_scale >= 1000)
    return number * unit_scale if fits or column == MFU else None


def _without_unit(number: float, scale: float | None) -> float | None:
    if scale == BY_SIZE:
        scales = (of_device for top, of_device in _SIZES_OF_DEVICES if number < top)
        scale = next(scales, 0) or None
    return None if scale is None else number * scale
