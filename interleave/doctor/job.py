"""Reads the command of a job: its environment, launcher, ranks and program."""

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ebbtide import host_limits
from ebbtide.errors import UserError
from ebbtide.interleave.doctor.launchers import LAUNCHERS, launcher_of

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_BINDING = re.compile(r"(--numa[-_]binding|--bind[-_]cores?[-_]to[-_]rank|numactl|taskset)\b")
_SHEBANG_BYTES = 256


@dataclass(frozen=True)
class JobCommand:
    """The command of a job."""

    words: tuple[str, ...]  # Its words, without assignments of variables before them; empty: no command was named.
    variables: tuple[tuple[str, str], ...]  # These assignments.
    environment: Mapping[str, str]  # Its environment, with them.
    launcher: str | None  # `torchrun`, `accelerate` or `deepspeed`; None: another command.
    ranks: int | None  # Ranks on this host, as the command or the environment states; None: neither does.
    python: str | None  # The interpreter that runs it; None: not known.

    @property
    def binds_ranks(self) -> bool:
        """Whether the command binds ranks to cores."""
        return any(_BINDING.match(Path(word).name) for word in self.words)

    @property
    def threads(self) -> int | None:
        """Threads of OpenMP in each rank: OMP_NUM_THREADS, or the 1 of a launcher; None: as many as there are cores."""
        text = self.environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        if text.isdigit() and int(text):
            return int(text)
        return 1 if self.launcher in ("torchrun", "accelerate") and (self.ranks or 0) > 1 else None


def read_job(command: Sequence[str], environment: Mapping[str, str]) -> JobCommand:
    """Read the command of a job, which may begin with assignments of variables, as in a shell.

    Raises UserError where nothing follows the assignments."""
    words = list(command)
    variables: dict[str, str] = {}
    if words[:1] == ["env"]:
        del words[0]
    while words and _ASSIGNMENT.fullmatch(words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    if command and not words:
        raise UserError(f"{' '.join(command)!r:.80} starts nothing: name the command of the job")
    launcher = launcher_of(words)
    ranks = LAUNCHERS[launcher].ranks(words) if launcher else host_limits.stated_local_ranks(environment)
    if ranks is None and words and launcher is None:
        ranks = 1
    return JobCommand(
        tuple(words), tuple(variables.items()), {**environment, **variables}, launcher, ranks, _python(words)
    )


def _python(words: Sequence[str]) -> str | None:
    """Return the interpreter of a command: the program, or that of the first line of a script."""
    path = shutil.which(words[0]) if words else None
    if path is None or Path(path).name.startswith("python"):
        return path
    with open(path, "rb") as file:
        first = file.readline(_SHEBANG_BYTES).decode(errors="replace")
    interpreter = first.removeprefix("#!").split()
    return interpreter[0] if first.startswith("#!") and interpreter and "python" in interpreter[0] else None
