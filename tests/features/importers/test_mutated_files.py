"""Damaged files of every format: a trace that readers call sound, or one line."""

from __future__ import annotations

import gzip
import pickle
import random
from pathlib import Path

import pytest

from tests.conftest import examples
from tests.features.importers.kineto.made_kineto import (
    iteration,
    launched,
    memory_event,
    write_trace,
)
from tests.features.importers.megatron.test_importer import (
    REPORTS,
    SETUP,
    TIMERS,
    iteration_line,
    minmax,
)
from tests.features.importers.mutated_files import mutate, problems
from tests.features.importers.nsys.made_exports import training
from tests.features.importers.nvml_monitor.test_importer import QUERY
from tests.features.importers.torch_memory.made_snapshots import job

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files of every format, those of DeepSpeed from real runs."""
    folder = tmp_path_factory.mktemp("files")
    events = [
        event
        for number in range(4)
        for event in (
            *iteration(number, 100.0 * number),
            *launched(100 * number + 12, 100 * number + 14, 100 * number + 25, number),
            memory_event(100 * number + 20, 512 * number, 4096),
        )
    ]
    kineto = write_trace(folder / "kineto.json", events)
    packed = folder / "packed.json.gz"
    packed.write_bytes(gzip.compress(kineto.read_bytes()))
    snapshot = folder / "snapshot.pickle"
    acts = [(0, 512 << number % 9, False, False) for number in range(20)]
    snapshot.write_bytes(pickle.dumps(job(acts).snapshot(0)))
    monitor = folder / "monitor.csv"
    monitor.write_text(QUERY)
    megatron = folder / "megatron.log"
    steps = [[iteration_line(n), *minmax(TIMERS), *REPORTS] for n in range(1, 9)]
    megatron.write_text("\n".join([*SETUP, *(line for step in steps for line in step)]))
    nsys = training(folder / "nsys.sqlite").write()
    return [
        kineto,
        packed,
        snapshot,
        monitor,
        megatron,
        nsys,
        *sorted(DATA.glob("*.log")),
    ]


def test_mutate__changes_most_files(files: list[Path]) -> None:
    contents = [file.read_bytes() for file in files]
    changed = [
        mutate(data, random.Random(f"{seed}")) != data
        for seed, data in enumerate(contents * 4)
    ]
    assert sum(changed) > 0.9 * len(changed)


def test_import__of_damaged_files_is_sound_or_one_line(files: list[Path]) -> None:
    assert problems(files, examples(27), seed=1) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_import__of_3000_damaged_files_is_sound_or_one_line(
    files: list[Path], seed: int
) -> None:
    assert problems(files, 500, seed) == []
