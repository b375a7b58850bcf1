"""What a DeepSpeed log says of the job: configuration, versions, ranks, model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ebbtide.profiler.importers.text_log import Line

# A configuration is longer than this only if it is damaged.
_MOST_CONFIG_CHARS = 1 << 20
_MOST_RANKS = 1 << 20


@dataclass
class Facts:
    """None or empty: the log does not tell. subgroups: parameters of each, per rank that printed them."""

    config: dict[str, Any] | None = None
    config_damaged: bool = False
    world_size: int | None = None
    visible_devices: list[int] = field(default_factory=list)
    model_parallel_params: dict[str, int] = field(default_factory=dict)
    params_rounded: int | None = None
    subgroups: dict[int, dict[tuple[int, int], int]] = field(default_factory=dict)
    deepspeed: str | None = None
    torch: str | None = None
    cuda: str | None = None
    optimizer: str | None = None
    command: str | None = None
    omp_threads: int | None = None
    checkpointing: bool = False

    def params(self) -> int | None:
        """Of the whole model: each tensor and pipeline parallel part of it is printed for itself."""
        return sum(self.model_parallel_params.values()) or self.params_rounded

    def shard_params(self) -> int | None:
        """Parameters whose optimizer state rank 0 holds."""
        if self.subgroups:
            return sum(self.subgroups.get(0, next(iter(self.subgroups.values()))).values())
        params, zero = self.params(), (self.config or {}).get("zero_optimization")
        if params is None or self.world_size is None or not isinstance(zero, dict):
            return None
        return -(-params // self.world_size) if zero.get("stage") in (1, 2, 3) else None


_CONFIG = re.compile(r"(?P<launcher>.{0,100}?)\[20\d\d-.*json = (?P<json>\{.*)")
_SCALE = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# What the lines of pretty-printed JSON begin with, and what those of a log do.
_JSON = tuple('"{}[]-0123456789')
_STAMPED = re.compile(r"\[20\d\d-")


def _subgroup(facts: Facts, match: re.Match[str]) -> None:
    rank, group, number, size = map(int, match.groups())
    facts.subgroups.setdefault(rank, {})[group, number] = size


def _world(facts: Facts, match: re.Match[str]) -> None:
    size = int(match.group(1))
    if facts.world_size is None and 0 < size <= _MOST_RANKS:
        facts.world_size = size


def _params(facts: Facts, match: re.Match[str]) -> None:
    facts.model_parallel_params[match.group(1)] = int(match.group(2))


def _rounded(facts: Facts, match: re.Match[str]) -> None:
    facts.params_rounded = round(float(match.group(1)) * _SCALE[match.group(2)])


def _visible(facts: Facts, match: re.Match[str]) -> None:
    facts.visible_devices = [int(number) for number in match.group(1).split(",")]


def _omp(facts: Facts, match: re.Match[str]) -> None:
    facts.omp_threads = int(match.group(1))


def _checkpointing(facts: Facts, match: re.Match[str]) -> None:
    facts.checkpointing = True


def _first(name: str) -> Callable[[Facts, re.Match[str]], None]:
    def take(facts: Facts, match: re.Match[str]) -> None:
        if getattr(facts, name) is None:
            setattr(facts, name, match.group(1).strip())

    return take


_PATTERNS: list[tuple[str, re.Pattern[str], Callable[[Facts, re.Match[str]], None]]] = [
    (letters, re.compile(pattern), take)
    for letters, pattern, take in [
        ("numel: ", r"\[Rank (\d{1,7})\] =+ Param group (\d{1,6}), Subgroup (\d{1,6}), numel: (\d{1,13})\b", _subgroup),
        ("world_size", r"\b(?:dist_world_size=|world_size (?:\.{3,40}|=) )(\d{1,7})\b", _world),
        ("using world size", r"\busing world size: (\d{1,7})\b", _world),
        ("_VISIBLE_DEVICES=", r"Setting \w{1,32}_VISIBLE_DEVICES=(\d{1,4}(?:,\d{1,4}){0,1023})", _visible),
        ("number of parameters on", r"number of parameters on ([^:]{1,100}): (\d{1,15})\b", _params),
        ("num_elems = ", r"num_elems = (\d{1,12}(?:\.\d{1,12})?)([KMBT]?)\b", _rounded),
        ("DeepSpeed info: ", r"DeepSpeed info: version=([^,\s]{1,64})", _first("deepspeed")),
        ("torch version", r"\btorch version \.{3,40} (\S{1,64})", _first("torch")),
        ("torch cuda version", r"\btorch cuda version \.{3,40} (\S{1,64})", _first("cuda")),
        ("Basic Optimizer = ", r"DeepSpeed Basic Optimizer = (\w{1,64})", _first("optimizer")),
        ("cmd = ", r"\bcmd = (.+)", _first("command")),
        ("OMP_NUM_THREADS", r"Setting OMP_NUM_THREADS environment variable for each process to be (\d{1,4})\b", _omp),
        ("Activation Checkpointing", r"Activation Checkpointing Information", _checkpointing),
        ("checkpoint_activations", r"checkpoint_activations \.{3,40} True", _checkpointing),
    ]
]


class FactsReader:
    """Collects facts, line by line."""

    def __init__(self) -> None:
        self.facts = Facts()
        self._config: list[str] | None = None
        self._config_chars = 0
        self._launcher = ""

    def feed(self, line: Line) -> None:
        text = line.text
        facts = self.facts
        if self._config is not None and self._more_config(text):
            return
        if facts.config is None and "json = {" in text and (match := _CONFIG.match(text)):
            self._launcher, self._config, self._config_chars = match["launcher"], [], 0
            facts.config_damaged = True
            self._more_config(self._launcher + match["json"])
        else:
            # To look for a few letters first is ten times faster than to search for each pattern.
            for letters, pattern, take in _PATTERNS:
                if letters in text and (match := pattern.search(text)):
                    take(facts, match)
                    break

    def _more_config(self, text: str) -> bool:
        """Whether a line is of the configuration, which ends with a brace at the margin; other ranks' lines may stand
        between its own."""
        assert self._config is not None
        bare = text.removeprefix(self._launcher)
        if not (text.startswith(self._launcher) and bare.lstrip().startswith(_JSON)) or _STAMPED.match(bare):
            return False
        self._config.append(bare)
        self._config_chars += len(bare)
        if bare.startswith("}") or (len(self._config) == 1 and bare.rstrip().endswith("}")):
            self.facts.config = _parsed("\n".join(self._config))
            self.facts.config_damaged, self._config = self.facts.config is None, None
        elif self._config_chars > _MOST_CONFIG_CHARS:
            self._config = None
        return True


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        found, _ = json.JSONDecoder().raw_decode(text)
        # Python reads NaN and Infinity, which the trace's meta must not have.
        json.dumps(found, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
