"""Files that hold too little for a trace, and notes that many files have."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.features.importers.load import import_trace, joined_notes, recognize
from ebbtide.features.importers.source import Source, SourceError
from tests.features.importers.kineto.made_kineto import iteration, write_trace

FILES = {
    "Hugging Face": "{'loss': 3.2, 'grad_norm': 1.2, 'learning_rate': 4e-05}\n",
    "ms-swift": "{'loss': 1.2, 'learning_rate': 1e-05, 'train_speed(iter/s)': 0.02}\n",
    "torchtitan": "step:  1  loss:  8.15  memory: 33.69GiB(42.58%)  tps: 5,201\n",
    "NeMo": "iteration 0/249 | global_step: 0 | train_step_timing in s: 7.126\n",
    "verl": "step:1 - perf/mfu/actor:0.419 - timing_s/gen:699.88\n",
    "communication": "comm op: all_gather | time (ms): 1.23 | msg size: 2.0 MB\n",
    "torch's memory": "|        PyTorch CUDA memory summary, device ID 0        |\n",
    "out-of-memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB\n",
    "table of nvidia-smi": "| NVIDIA-SMI 580.95.05     Driver Version: 580.95.05 |\n",
    "rocm-smi": "==== ROCm System Management Interface ====\n",
    "dcgm-exporter": 'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 97\n',
    "execution trace": '{"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": []}',
}


@pytest.mark.parametrize("kind", FILES)
def test_recognize__names_files_that_hold_too_little(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "x"
    file.write_text(FILES[kind] * 3)
    with pytest.raises(SourceError, match=f"is .*{kind}.*too little.*: ") as error:
        recognize(Source(file))
    assert "\n" not in str(error.value)


def test_joined_notes__have_each_text_once_with_a_count() -> None:
    notes = [
        "a.json: it has no memory",
        "a.json: 5 events",
        "b.json: it has no memory",
        "c.csv has no dates",
        "d.csv has no dates",
        "c.json: it has no memory",
        "the link is not known",
    ]
    names = {"a.json", "b.json", "c.json", "c.csv", "d.csv"}
    assert joined_notes(notes, names) == [
        "a.json and 2 more files: it has no memory",
        "a.json: 5 events",
        "c.csv and 1 more file has no dates",
        "the link is not known",
    ]


def test_import__notes_once_what_all_files_lack(tmp_path: Path) -> None:
    files = [
        write_trace(
            tmp_path / f"rank-{rank}.json", iteration(0, 0.0) + iteration(1, 100.0)
        )
        for rank in range(4)
    ]
    notes = import_trace(files, tmp_path / "t.ebb").notes
    assert sum("no memory events" in line for line in notes) == 1
    assert any(line.startswith("rank-0.json and 3 more files: ") for line in notes)
