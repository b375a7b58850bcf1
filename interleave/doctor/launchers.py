"""Launchers of several ranks: their options for ranks, and for a program that is not Python."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ebbtide.errors import UserError

_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")


@dataclass(frozen=True)
class Launcher:
    """A launcher that gives each rank LOCAL_RANK; options are written with `-` or `_`."""

    rank_option: str  # The option for the ranks on a host.
    own_words: int  # Number of words before its options.
    flags: str  # Options without a value, beside those of all launchers.
    added: tuple[str, ...]  # Options with which it starts any program, with the words that follow alone.
    last_argument: str = ""  # Further argument of the program, as a shell writes it: one that these options leave out.

    def ranks(self, words: Sequence[str]) -> int | None:
        """Return the ranks on this host that a command states as a number; None where it does not."""
        for word, following in zip(words, [*words[1:], ""], strict=True):
            name, equals, value = word.partition("=")
            if _plain(name) == self.rank_option:
                text = value if equals else following
                return int(text) if text.isdigit() else None
        return None

    def split(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the launcher with its options, and the program with its arguments, as words that start each.

        Raises UserError where the command has no program."""
        is_module = launcher_of(words) != Path(words[0]).name  # python -m torch.distributed.run
        number = 3 if is_module else self.own_words
        options, start = list(words[:number]), ["python"]
        while number < len(words) and words[number].startswith("-"):
            name = _plain(words[number].partition("=")[0])
            width = 1 if "=" in words[number] or name in (*_COMMON_FLAGS, *self.flags.split()) else 2
            if name in ("m", "module"):
                start = ["python", "-m"]
            elif name == "no_python":
                start = []
            else:
                options += words[number : number + width]
            number += width
        if number >= len(words):
            raise UserError(f"{' '.join(words)!r:.80} starts no program: name the script of the job")
        return [*options, *self.added], [*start, *words[number:]]


def _plain(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


_COMMON_FLAGS = ("m", "module", "no_python")
LAUNCHERS = {
    "torchrun": Launcher("nproc_per_node", 1, "standalone run_path virtual_local_rank use_env", ("--no-python",)),
    "accelerate": Launcher(
        "num_processes",
        2,
        "multi_gpu cpu tpu quiet q debug same_network use_deepspeed use_fsdp use_megatron_lm use_xpu ipex "
        "enable_cpu_affinity use_parallelism_config dynamo_use_fullgraph dynamo_use_dynamic",
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
    if name.startswith("python") and len(words) > 2 and words[1] == "-m" and words[2] in _TORCHRUN_MODULES:
        return "torchrun"
    return name if name in LAUNCHERS else None
