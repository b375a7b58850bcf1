"""Groups the processes of a recording into trainings.

The ranks of one job belong together, other processes do not.
"""

from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from ebbtide.phases import BACKWARD, FORWARD

_STOP_NOTES = {
    "cut off": (
        "its recording has no end: the process was killed, left by os._exit, or no "
        "space was left on the device"
    ),
    "exec": "its recording ends where the process executed another program (exec)",
    "max-size": "its recording stopped at --max-size",
    "fault": "its recording ended by a fault of the recorder",
}


@dataclass
class RankData:
    """The data of one process. `stepped`: whether an optimizer ended an iteration."""

    meta: dict[str, Any]
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    stepped: bool = False

    @property
    def training_level(self) -> int:
        """2 if an optimizer stepped, 1 if a backward ran, 0 for forwards alone."""
        return (
            2 if self.stepped else int(self.tables["phases"]["phase"].ne(FORWARD).any())
        )


@dataclass
class Training:
    """One training: its ranks' data, sorted by rank, and notes on incomplete data."""

    ranks: list[RankData]
    notes: list[str] = field(default_factory=list)


def group_trainings(processes: list[RankData]) -> list[Training]:
    """Group processes into trainings, in the order in which these began. Those with a
    world size above 1 that were launched together are ranks of one; two of the same
    rank belong to two, as after a restart. Every other process is one of its own."""
    trainings: dict[tuple[Any, ...], list[RankData]] = {}
    processes = sorted(processes, key=lambda data: int(data.meta["started_ns"]))
    last_of_process = {data.meta["pid"]: data for data in processes}
    for data in processes:
        if (
            data.meta["stopped"] == "cut off"
            and last_of_process[data.meta["pid"]] is not data
        ):
            data.meta["stopped"] = "exec"
        world_size, launch = data.meta["world_size"], data.meta.get("launch")
        turn = 0
        if world_size > 1:
            while any(
                data.meta["rank"] == other.meta["rank"]
                for other in trainings.get((world_size, launch, turn), ())
            ):
                turn += 1
            key: tuple[Any, ...] = world_size, launch, turn
        else:
            key = 1, data.meta["pid"], data.meta["started_ns"]
        trainings.setdefault(key, []).append(data)
    # Beside a training, a process that loads data or evaluates a model may run forwards
    # and backwards.
    groups = list(trainings.values())
    levels = [max(data.training_level for data in ranks) for ranks in groups]
    kept = [
        _training(ranks)
        for ranks, level in zip(groups, levels, strict=True)
        if level == max(levels)
    ]
    if kept:
        left_out = [
            ranks
            for ranks, level in zip(groups, levels, strict=True)
            if 0 < level < max(levels)
        ]
        kept[0].notes += [_left_out(data) for ranks in left_out for data in ranks]
    return kept


def _left_out(data: RankData) -> str:
    program = " ".join(data.meta.get("argv", [])[:1])
    backwards = int(data.tables["phases"]["phase"].eq(BACKWARD).sum())
    return (
        f"left out: process {data.meta['pid']} ({program or 'not known'}) ran "
        f"{backwards} backwards, and no optimizer "
        "of torch stepped in it; if it trains, record it on its own"
    )


def _training(ranks: list[RankData]) -> Training:
    ranks = sorted(ranks, key=lambda data: int(data.meta["rank"]))
    notes = []
    for data in ranks:
        stop_note = _STOP_NOTES.get(data.meta["stopped"])
        notes += [
            f"rank {data.meta['rank']}: {note}"
            for note in ([stop_note] if stop_note else []) + data.notes
        ]
    return Training(ranks, notes)


def note_other_trainings(trainings: list[Training], names: list[str]) -> None:
    """Add to each of several trainings a note on the traces of the others."""
    if len(trainings) < 2:
        return
    executed = any(
        data.meta["stopped"] == "exec"
        for training in trainings
        for data in training.ranks
    )
    for number, training in enumerate(trainings):
        others = [name for position, name in enumerate(names) if position != number]
        reason = (
            "a process trained, then executed another program (exec)"
            if executed
            else "the command ran several"
        )
        training.notes.insert(
            0,
            f"training {number + 1} of {len(trainings)}: {reason}; see also "
            f"{', '.join(others)}",
        )
