"""Reads the command of a job: its environment, launcher, ranks and program.

Also the options of launchers.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ebbtide import host_limits
from ebbtide.errors import UserError

_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")


@dataclass(frozen=True)
class Launcher:
    """A launcher that gives each rank LOCAL_RANK.

    Options are written with `-` or `_`.
    """

    rank_option: str  # The option for the ranks on a host.
    own_words: int  # Number of words before its options.
    flags: str  # Options without a value, beside the options of all launchers.
    # Options with which it starts any program, with the words that follow alone.
    added: tuple[str, ...]
    # Further argument of the program, as a shell writes it: one that these options
    # leave out.
    last_argument: str = ""

    def ranks(self, words: Sequence[str]) -> int | None:
        """Return the number of ranks on this host that a command states; None where it
        states none."""
        for word, following in zip(words, [*words[1:], ""], strict=True):
            name, equals, value = word.partition("=")
            if _plain(name) == self.rank_option:
                text = value if equals else following
                return int(text) if text.isdigit() else None
        return None

    def split(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the words of the launcher with its options, and of the program with
        its arguments.

        Raises UserError where the command has no program.
        """
        # python -m torch.distributed.run
        is_module = launcher_of(words) != Path(words[0]).name
        number = 3 if is_module else self.own_words
        options, start = list(words[:number]), ["python"]
        while number < len(words) and words[number].startswith("-"):
            name = _plain(words[number].partition("=")[0])
            width = (
                1
                if "=" in words[number] or name in (*_COMMON_FLAGS, *self.flags.split())
                else 2
            )
            if name in ("m", "module"):
                start = ["python", "-m"]
            elif name == "no_python":
                start = []
            else:
                options += words[number : number + width]
            number += width
        if number >= len(words):
            raise UserError(
                f"{' '.join(words)!r:.80} starts no program: name the script of the job"
            )
        return [*options, *self.added], [*start, *words[number:]]


def _plain(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


_COMMON_FLAGS = ("m", "module", "no_python")
LAUNCHERS = {
    "torchrun": Launcher(
        "nproc_per_node",
        1,
        "standalone run_path virtual_local_rank use_env",
        ("--no-python",),
    ),
    "accelerate": Launcher(
        "num_processes",
        2,
        "multi_gpu cpu tpu quiet q debug same_network use_deepspeed use_fsdp "
        "use_megatron_lm use_xpu ipex "
        "enable_cpu_affinity use_parallelism_config dynamo_use_fullgraph "
        "dynamo_use_dynamic",
        ("--no_python",),
    ),
    # It would put --local_rank between the shell and its script.
    "deepspeed": Launcher(
        "num_gpus",
        1,
        "no_local_rank no_ssh no_ssh_check force_multi save_pid bind_cores_to_rank q",
        ("--no_python", "--no_local_rank"),
        ' --local_rank="$LOCAL_RANK"',
    ),
}


def launcher_of(words: Sequence[str]) -> str | None:
    """Return the name of the launcher of a command; None where it is none of these."""
    if not words:
        return None
    name = Path(words[0]).name
    if (
        name.startswith("python")
        and len(words) > 2
        and words[1] == "-m"
        and words[2] in _TORCHRUN_MODULES
    ):
        return "torchrun"
    return name if name in LAUNCHERS else None


_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_BINDING = re.compile(
    r"(--numa[-_]binding|--bind[-_]cores?[-_]to[-_]rank|numactl|taskset)\b"
)
_SHEBANG_BYTES = 256


@dataclass(frozen=True)
class JobCommand:
    """The command of a job."""

    # Its words, without assignments of variables before them; empty: no command was
    # named.
    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]  # These assignments.
    environment: Mapping[str, str]  # Its environment, with them.
    # `torchrun`, `accelerate` or `deepspeed`; None: another command.
    launcher: str | None
    # Ranks on this host, as the command or the environment states; None: neither does.
    ranks: int | None
    python: str | None  # The interpreter that runs it; None: not known.

    @property
    def binds_ranks(self) -> bool:
        """Whether the command binds ranks to cores."""
        return any(_BINDING.match(Path(word).name) for word in self.words)

    @property
    def threads(self) -> int | None:
        """Threads of OpenMP in each rank, by OMP_NUM_THREADS, or the 1 of a launcher;
        None: as many as there are cores."""
        text = self.environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        if text.isdigit() and int(text):
            return int(text)
        return (
            1
            if self.launcher in ("torchrun", "accelerate") and (self.ranks or 0) > 1
            else None
        )


def read_job(command: Sequence[str], environment: Mapping[str, str]) -> JobCommand:
    """Read the command of a job, which may begin with assignments of variables, as in a
    shell.

    Raises UserError where nothing follows the assignments.
    """
    words = list(command)
    variables: dict[str, str] = {}
    if words[:1] == ["env"]:
        del words[0]
    while words and _ASSIGNMENT.fullmatch(words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    if command and not words:
        raise UserError(
            f"{' '.join(command)!r:.80} starts nothing: name the command of the job"
        )
    launcher = launcher_of(words)
    ranks = (
        LAUNCHERS[launcher].ranks(words)
        if launcher
        else host_limits.stated_local_ranks(environment)
    )
    if ranks is None and words and launcher is None:
        ranks = 1
    return JobCommand(
        tuple(words),
        tuple(variables.items()),
        {**environment, **variables},
        launcher,
        ranks,
        _python(words),
    )


def _python(words: Sequence[str]) -> str | None:
    """Return the interpreter of a command: the program, or the one in the first line of
    a script."""
    path = shutil.which(words[0]) if words else None
    if path is None or Path(path).name.startswith("python"):
        return path
    with open(path, "rb") as file:
        first = file.readline(_SHEBANG_BYTES).decode(errors="replace")
    interpreter = first.removeprefix("#!").split()
    return (
        interpreter[0]
        if first.startswith("#!") and interpreter and "python" in interpreter[0]
        else None
    )
