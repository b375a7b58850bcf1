"""Models and data that a dry run loads in place of those of a recipe that are not on this host."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebbtide.profiler.dryrun.jobs.models import WORD, find_model, write_stand_in

Recipe = dict[str, Any]


@dataclass
class Replacements:
    """Models and data that replace those of a recipe.

    Attributes:
        folder: A folder for them, which the dry run removes.
        lines: For people: what was replaced, and by what.
        real_tokens: Whether the tokenizer is that of the recipe.
    """

    folder: Path
    lines: list[str] = field(default_factory=list)
    real_tokens: bool = True

    def model(self, name: str) -> str:
        """Return the folder of a model: its own if it has weights, else one without values."""
        model = find_model(name)
        if model.is_whole:
            return name
        folder = self.folder / Path(model.name).name
        if not folder.exists():
            write_stand_in(model, folder)
            self.lines.append(f"model {name}: without its weights, configuration from {model.source}")
            self.real_tokens = self.real_tokens and model.has_tokenizer
        return str(folder)

    def needs_data(self, paths: Iterable[str | Path]) -> bool:
        """Return whether data must be replaced: files of it are missing, or the tokenizer."""
        return not (self.real_tokens and all(Path(path).exists() for path in paths))

    def data(self, tokens: int, samples: int, shares: dict[str, float]) -> Path:
        """Write samples of so many `tokens` as JSON lines, shared among columns; return their file."""
        row = {column: " ".join([WORD] * max(1, int(share * tokens))) for column, share in shares.items()}
        file = self.folder / "data" / "train.jsonl"
        file.parent.mkdir()
        file.write_text(f"{json.dumps(row)}\n" * samples, encoding="utf-8")
        self.note_data(tokens, samples)
        return file

    def note_data(self, tokens: int, samples: int) -> None:
        """Add the line about data."""
        self.lines.append(f"data: {samples} samples of {tokens:,} tokens in place of those of the recipe")
