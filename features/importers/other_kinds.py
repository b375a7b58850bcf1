"""Names files that people have at hand, but that hold too little for a trace."""

from __future__ import annotations

import re
from typing import NamedTuple

from ebbtide.features.importers.source import Source

_PROFILE = "`ebbtide profile -o run.ebb -- CMD` records the job"
_HF = "add ebbtide.profiler.callbacks.HuggingFaceCallback to the Trainer"
_SMI = (
    "record `nvidia-smi --query-gpu=timestamp,index,memory.used,utilization.gpu,"
    "power.draw --format=csv -l 1`"
)
_SNAPSHOT = (
    "call torch.cuda.memory._record_memory_history() at the start of the job and "
    "import what torch.cuda.memory._dump_snapshot() writes"
)


class OtherKind(NamedTuple):
    """A kind of files by what stands in them, and what to record instead."""

    name: str
    pattern: re.Pattern[str]
    remedy: str


OTHER_KINDS = tuple(
    OtherKind(name, re.compile(pattern), remedy)
    for name, pattern, remedy in (
        ("a log of ms-swift", r"'train_speed\(iter/s\)'", _HF),
        ("a log of LLaMA-Factory", r"llamafactory\.|LLaMA-?Factory", _HF),
        ("a log of Hugging Face's Trainer", r"\{'loss': .{1,200}'learning_rate'", _HF),
        (
            "a log of torchtitan",
            r"step:\s+\d+\s+loss:.{1,200}\btps:",
            "import the traces that --profiling.enable_profiling writes",
        ),
        (
            "a log of NeMo",
            r"train_step_timing in s",
            "add ebbtide.profiler.callbacks.LightningCallback to the trainer",
        ),
        ("a log of verl", r"\btiming_s/\w+:", _PROFILE),
        (
            "a log of Lightning",
            r"it/s, v_num=",
            "add ebbtide.profiler.callbacks.LightningCallback to the Trainer",
        ),
        (
            "a log of DeepSpeed's communication",
            r"\bcomm op: \w+ \| time|\bComm\. Op\s+Message Size",
            "turn on wall_clock_breakdown too",
        ),
        ("a summary of torch's memory", r"PyTorch CUDA memory summary", _SNAPSHOT),
        (
            "the message of an out-of-memory error",
            r"out of memory\. Tried to allocate",
            f"{_SNAPSHOT}; or call ebbtide.profiler.callbacks.record_out_of_memory()",
        ),
        ("the table of nvidia-smi", r"\| NVIDIA-SMI \d", _SMI),
        ("output of nvitop", r"NVITOP \d", _SMI),
        ("output of gpustat", r"^\S+ {2,}\w{3} \w{3} +\d.{0,40}\n\[0\] ", _SMI),
        (
            "output of rocm-smi",
            r"ROCm System Management Interface|ROCM-SMI",
            "import a trace of torch.profiler",
        ),
        (
            "metrics of dcgm-exporter",
            r"DCGM_FI_DEV_\w+\{",
            "record `dcgmi dmon -e 252,251,1009,1010,203,155`",
        ),
        ("a file of Weights & Biases", r'"_wandb"|wandb_version', _PROFILE),
        (
            "an execution trace of torch",
            r'"schema"\s*:\s*"\d.{0,400}"nodes"\s*:\s*\[|"rf_id"\s*:',
            "import what torch.profiler's export_chrome_trace() writes",
        ),
    )
)


def other_kind(source: Source) -> OtherKind | None:
    """Return the kind of a file that no importer reads; None if it is of none."""
    text = source.head_text
    return next((kind for kind in OTHER_KINDS if kind.pattern.search(text)), None)
