"""Reads the settings of a job from its log, and adds its ranks to a trace.

Settings are configuration, versions, ranks and model.
"""

import base64
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ebbtide.features.importers.logs.text_log import LogLine
from ebbtide.features.importers.nvml_monitor.importer import parse_monitor
from ebbtide.features.importers.source import Source
from ebbtide.profiler.trace import RankBuilder, TraceBuilder
from ebbtide.units import runs_text

# A longer configuration is damaged.
_MAX_CONFIG_CHARS = 1 << 20
_MAX_RANKS = 1 << 20
_CONFIG = re.compile(r"(?P<launcher>.{0,100}?)\[20\d\d-.*json = (?P<json>\{.*)")
_SCALE = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# First characters of the lines of pretty-printed JSON, and the first characters of a
# log line, which also match.
_JSON = tuple('"{}[]-0123456789')
_STAMPED = re.compile(r"\[20\d\d-")
_WORLD_INFO = re.compile(r"--world_info=([\w+/=-]{1,65536})")
_NODES = re.compile(r"--nnodes[= ](\d{1,6})\b.*--nproc[-_]per[-_]node[= ](\d{1,4})\b")
# A log has data of rank 0, and monitor files of the ranks on its host: the files of
# more ranks would be empty.
_MAX_IMPORTED_RANKS = 64
# Its MB are MiB: `report_memory` in megatron/training/utils.py divides by 1024 * 1024.
_REPORT = re.compile(
    r"\[Rank (\d{1,7})\] \(after \d{1,12} iterations\) memory \(MB\) \| allocated: "
    r"[\d.]{1,32} \| "
    r"max allocated: (\d{1,9}(?:\.\d{1,20})?) \| reserved: [\d.]{1,32} \| max "
    r"reserved: (\d{1,9}\.\d{1,20})"
)


class MemoryReport(NamedTuple):
    """Peaks of memory of a rank since the start of the job, in bytes, as Megatron
    printed them."""

    peak_allocated: int
    peak_reserved: int


@dataclass
class JobSettings:
    """Settings of a job; None or empty for what the log does not state."""

    config: dict[str, Any] | None = None
    # Whether the log has a configuration that cannot be read
    config_damaged: bool = False
    world_size: int | None = None
    # Numbers of the devices on the host of rank 0, by local rank.
    visible_devices: list[int] = field(default_factory=list)
    # Ranks on each host by its name, in the order of ranks; hosts that only their
    # number tells have none.
    slots: dict[str, int] = field(default_factory=dict)
    # Parameters of each model-parallel part, by its name.
    model_parallel_params: dict[str, int] = field(default_factory=dict)
    params_rounded: int | None = None  # Parameters of the model, rounded by DeepSpeed
    # Parameters of each (parameter group, subgroup), by the rank that printed them.
    subgroups: dict[int, dict[tuple[int, int], int]] = field(default_factory=dict)
    deepspeed: str | None = None
    torch: str | None = None
    cuda: str | None = None
    optimizer: str | None = None
    command: str | None = None
    omp_threads: int | None = None
    checkpointing: bool = False
    # Memory that Megatron reports, by rank.
    reports: dict[int, MemoryReport] = field(default_factory=dict)

    def params(self) -> int | None:
        """Return the parameters of the whole model, the sum of its tensor- and
        pipeline-parallel parts."""
        return sum(self.model_parallel_params.values()) or self.params_rounded

    def hosts(self) -> list[str] | None:
        """Return the host of each rank.

        Return None if the log does not tell, or tells of other ranks.
        """
        size, local = self.world_size or 1, len(self.visible_devices)
        if not self.slots and 0 < local < size:
            # A launcher shows the ranks of one host their devices.
            return [f"host {rank // local}" for rank in range(size)]
        hosts = [host for host, slots in self.slots.items() for _ in range(slots)]
        return hosts if len(hosts) == size and len(self.slots) > 1 else None

    def accumulation(self) -> int | None:
        """Return the micro-steps of a step that the configuration states."""
        steps = (self.config or {}).get("gradient_accumulation_steps")
        return (
            steps
            if isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1
            else None
        )

    def shard_params(self) -> int | None:
        """Return the number of parameters whose optimizer state is on rank 0."""
        if self.subgroups:
            return sum(
                self.subgroups.get(0, next(iter(self.subgroups.values()))).values()
            )
        params, zero = self.params(), (self.config or {}).get("zero_optimization")
        if params is None or self.world_size is None or not isinstance(zero, dict):
            return None
        return -(-params // self.world_size) if zero.get("stage") in (1, 2, 3) else None


SetValue = Callable[[JobSettings, re.Match[str]], None]


def _set_subgroup(settings: JobSettings, match: re.Match[str]) -> None:
    rank, group, number, size = map(int, match.groups())
    settings.subgroups.setdefault(rank, {})[group, number] = size


def _set_world_size(settings: JobSettings, match: re.Match[str]) -> None:
    size = int(match.group(1))
    if settings.world_size is None and 0 < size <= _MAX_RANKS:
        settings.world_size = size


def _set_command(settings: JobSettings, match: re.Match[str]) -> None:
    """Take the command of a launcher, and the hosts that it names.

    The hosts are base64 of JSON with the devices of each host.
    """
    settings.command = settings.command or match.group(1).strip()
    if nodes := _NODES.search(match.group(1)):
        _set_nodes(settings, nodes)
    if (info := _WORLD_INFO.search(match.group(1))) and not settings.slots:
        with suppress(ValueError, RecursionError):
            devices = json.loads(
                base64.b64decode(info[1], altchars=b"-_", validate=True)
            )
            if isinstance(devices, dict) and all(
                isinstance(slots, list) for slots in devices.values()
            ):
                settings.slots = {host: len(slots) for host, slots in devices.items()}


def _set_nodes(settings: JobSettings, match: re.Match[str]) -> None:
    hosts, ranks = map(int, match.groups())
    if not settings.slots and hosts * ranks <= _MAX_RANKS:
        settings.slots = {f"host {number}": ranks for number in range(hosts)}


def _set(
    name: str, convert: Callable[..., Any] = str.strip, only_first: bool = False
) -> SetValue:
    """Return a function that sets an attribute to what `convert` returns for the groups
    of a match."""

    def set_value(settings: JobSettings, match: re.Match[str]) -> None:
        if not only_first or getattr(settings, name) is None:
            setattr(settings, name, convert(*match.groups()))

    return set_value


def _add(name: str) -> SetValue:
    """Return a function that adds a name and its number to an attribute."""
    return lambda settings, match: getattr(settings, name).update(
        {match[1]: int(match[2])}
    )


_PATTERNS: list[tuple[str, re.Pattern[str], SetValue]] = [
    (letters, re.compile(pattern), set_value)
    for letters, pattern, set_value in [
        (
            "numel: ",
            r"\[Rank (\d{1,7})\] =+ Param group (\d{1,6}), Subgroup (\d{1,6}), numel: "
            r"(\d{1,13})\b",
            _set_subgroup,
        ),
        (
            "world_size",
            r"\b(?:dist_world_size=|world_size (?:\.{3,40}|=) )(\d{1,7})\b",
            _set_world_size,
        ),
        ("using world size", r"\busing world size: (\d{1,7})\b", _set_world_size),
        (
            "_VISIBLE_DEVICES=",
            r"Setting \w{1,32}_VISIBLE_DEVICES=(\d{1,4}(?:,\d{1,4}){0,1023})",
            _set("visible_devices", lambda numbers: [*map(int, numbers.split(","))]),
        ),
        (
            "number of parameters on",
            r"number of parameters on ([^:]{1,100}): (\d{1,15})\b",
            _add("model_parallel_params"),
        ),
        (
            "num_elems = ",
            r"num_elems = (\d{1,12}(?:\.\d{1,12})?)([KMBT]?)\b",
            _set(
                "params_rounded",
                lambda number, unit: round(float(number) * _SCALE[unit]),
            ),
        ),
        (
            "DeepSpeed info: ",
            r"DeepSpeed info: version=([^,\s]{1,64})",
            _set("deepspeed", only_first=True),
        ),
        (
            "torch version",
            r"\btorch version \.{3,40} (\S{1,64})",
            _set("torch", only_first=True),
        ),
        (
            "torch cuda version",
            r"\btorch cuda version \.{3,40} (\S{1,64})",
            _set("cuda", only_first=True),
        ),
        (
            "Basic Optimizer = ",
            r"DeepSpeed Basic Optimizer = (\w{1,64})",
            _set("optimizer", only_first=True),
        ),
        ("cmd = ", r"\bcmd = (.+)", _set_command),
        (
            "num_local_procs=",
            r"\bnnodes=(\d{1,6}), num_local_procs=(\d{1,4})\b",
            _set_nodes,
        ),
        ("--nproc", _NODES.pattern, _set_nodes),
        (
            "NNODES=",
            r"\bNNODES=(\d{1,6})\b.*\bLOCAL_WORLD_SIZE=(\d{1,4})\b",
            _set_nodes,
        ),
        (" slots=", r"^\s*([\w.-]{1,253}) slots=(\d{1,4})\s*$", _add("slots")),
        (
            "OMP_NUM_THREADS",
            r"Setting OMP_NUM_THREADS environment variable for each process to be "
            r"(\d{1,4})\b",
            _set("omp_threads", int),
        ),
        (
            "Activation Checkpointing",
            r"Activation Checkpointing Information",
            _set("checkpointing", lambda: True),
        ),
        (
            "checkpoint_activations",
            r"checkpoint_activations \.{3,40} True",
            _set("checkpointing", lambda: True),
        ),
    ]
]


class SettingsReader:
    """Collects the `settings` of a job line by line."""

    def __init__(self) -> None:
        self.settings = JobSettings()
        self._config_lines: list[str] | None = None
        self._config_chars = 0
        self._launcher = ""

    def feed(self, line: LogLine) -> None:
        text = line.text
        settings = self.settings
        if self._config_lines is not None and self._continue_config(text):
            return
        if (
            settings.config is None
            and "json = {" in text
            and (match := _CONFIG.match(text))
        ):
            self._launcher, self._config_lines, self._config_chars = (
                match["launcher"],
                [],
                0,
            )
            settings.config_damaged = True
            self._continue_config(self._launcher + match["json"])
        elif "memory (MB)" in text:
            # Ranks may break into each other's lines.
            for rank, allocated, reserved in _REPORT.findall(text):
                peaks = round(float(allocated) * 2**20), round(float(reserved) * 2**20)
                settings.reports[int(rank)] = MemoryReport(*peaks)
        else:
            # The check for a few letters makes this ten times faster than a search for
            # each pattern.
            for letters, pattern, set_value in _PATTERNS:
                if letters in text and (match := pattern.search(text)):
                    set_value(settings, match)
                    break

    def _continue_config(self, text: str) -> bool:
        """Return whether a line is of the configuration, up to an unindented brace.

        Ranks may break into it.
        """
        assert self._config_lines is not None
        config_line = text.removeprefix(self._launcher)
        is_json = text.startswith(self._launcher) and config_line.lstrip().startswith(
            _JSON
        )
        if not is_json or _STAMPED.match(config_line):
            return False
        self._config_lines.append(config_line)
        self._config_chars += len(config_line)
        one_line = len(self._config_lines) == 1 and config_line.rstrip().endswith("}")
        if config_line.startswith("}") or one_line:
            self.settings.config = _parse_config("\n".join(self._config_lines))
            self.settings.config_damaged, self._config_lines = (
                self.settings.config is None,
                None,
            )
        elif self._config_chars > _MAX_CONFIG_CHARS:
            self._config_lines = None
        return True


def _parse_config(text: str) -> dict[str, Any] | None:
    try:
        config, _ = json.JSONDecoder().raw_decode(text)
        # Python reads NaN and Infinity, which the trace's metadata must not have.
        json.dumps(config, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def add_ranks(
    builder: TraceBuilder, settings: JobSettings, monitors: Sequence[Source]
) -> dict[int, RankBuilder]:
    """Add an entry for each rank, with its device; return the builders by rank.

    Where the log does not state their number, each device of the monitor files is the
    one of a rank.
    """
    devices, world_size = settings.visible_devices, settings.world_size
    if world_size is None:
        devices = devices or sorted(
            {
                device
                for source in monitors
                for device in source.parsed(parse_monitor).devices
            }
        )
        world_size = max(len(devices), 1)
        on_devices = (
            f", on the devices {runs_text(devices)}: leave out the rows of those that "
            "are not of the job"
        )
        assumed = (
            "1 is assumed"
            if world_size == 1
            else f"{world_size} are assumed{on_devices}"
        )
        builder.note(f"the log does not state the number of ranks: {assumed}")
    local_devices = devices or list(range(world_size))
    hosts = settings.hosts()
    ranks = {}
    if world_size > _MAX_IMPORTED_RANKS:
        builder.note(
            f"the job has {world_size} ranks: the trace has the first "
            f"{_MAX_IMPORTED_RANKS}"
        )
    for number in range(min(world_size, _MAX_IMPORTED_RANKS)):
        entry = builder.rank(number, world_size=settings.world_size)
        local_rank = number
        if hosts is not None:
            local_rank = number - hosts.index(hosts[number])
            entry.meta.update({"host": hosts[number], "local_rank": local_rank})
        device = f"cuda:{local_devices[local_rank % len(local_devices)]}"
        if not entry.meta["devices"]:
            entry.meta["devices"] = [
                {"device": device, "kind": "cuda", "capacity_bytes": None, "link": None}
            ]
        ranks[number] = entry
    return ranks


def monitored_ranks(
    ranks: dict[int, RankBuilder], monitors: Sequence[Source]
) -> list[int]:
    """Return the ranks whose device monitor files cover."""
    owners: dict[str, int] = {}
    for rank, entry in ranks.items():
        owners.setdefault(entry.meta["devices"][0]["device"], rank)
    covered = {
        f"cuda:{number}"
        for source in monitors
        for number in source.parsed(parse_monitor).devices
    }
    return [rank for device, rank in owners.items() if device in covered]


def add_peaks(
    ranks: dict[int, RankBuilder], reports: dict[int, MemoryReport], start_ns: int
) -> None:
    """Add the peaks that Megatron reported of ranks, from the start of the first
    iteration on."""
    for rank in reports.keys() & ranks.keys():
        entry, report = ranks[rank], reports[rank]
        device = entry.meta["devices"][0]["device"]
        entry.memory(start_ns, report.peak_allocated, "allocated", device)
        entry.memory(start_ns, report.peak_reserved, "reserved", device)
