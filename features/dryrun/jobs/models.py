"""Finds the configuration of a model, and makes models without weights and data for a
dry run to load."""

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from ebbtide.errors import UserError
from ebbtide.json_files import read_object
from ebbtide.units import count_text

_CONFIG = "config.json"
# The configuration in a folder that stands in for a model, until there is a _CONFIG.
_STAND_IN = "stand-in.json"
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# Parts of names that do not change the configuration.
_VARIANTS = re.compile(r"^meta-|-(instruct|chat|it|base|pt|hf)(?=-|$)")
_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)
# The words of a tokenizer that stands in for another; texts of the last one have a
# token for each word in both.
_TOKENS = {
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
}
WORD = "a"
_CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@dataclass(frozen=True)
class Model:
    """A model that a job trains."""

    name: str  # Its name on the hub, or its path
    config: dict[str, Any]  # The content of its config.json
    # The folder of the configuration; None: it comes with ebbtide
    folder: Path | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is a folder that has weights and a tokenizer, too."""
        weights = ("*.safetensors", "pytorch_model*.bin")
        return (
            self.name == str(self.folder)
            and self.has_tokenizer
            and any(map(self._has, weights))
        )

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder has a tokenizer."""
        return self._has("tokenizer*")

    def _has(self, files: str) -> bool:
        return (
            self.folder is not None and next(self.folder.glob(files), None) is not None
        )

    @property
    def source(self) -> str:
        """The place of the configuration, for people."""
        if self.folder is None:
            return "ebbtide's list"
        return "its folder" if self.name == str(self.folder) else "the hub"


def find_model(name: str) -> Model:
    """Return the model at a path, or of a name: in the cache of the hub, the list of
    ebbtide, or the hub."""
    path = Path(name).expanduser()
    if path.exists():
        file = path / _CONFIG if path.is_dir() else path
        if not file.is_file():
            raise UserError(f"{name} is no model: it has no {_CONFIG}")
        folder = file.absolute().parent
        return Model(str(folder), read_object(file, "model", UserError), folder)
    if not _HUB_NAME.fullmatch(name):
        raise UserError(
            f"there is no {name}: name a folder with a {_CONFIG}, or a model of the hub"
        )
    listed = known_models().get(_VARIANTS.sub("", name.lower().rpartition("/")[2]))
    stored = _hub_file(name, local_files_only=True) or (
        None if listed else _hub_file(name)
    )
    if stored is not None:
        return Model(name, read_object(stored, "model", UserError), stored.parent)
    if listed is None:
        raise UserError(
            f"{name} is not in the cache of the hub, and the hub did not give it: put "
            f"its {_CONFIG} in a folder, and "
            "name that, or log in with `hf auth login`"
        )
    return Model(name, listed)


def known_models() -> dict[str, dict[str, Any]]:
    """Return the configurations that come with ebbtide, by names in lower case."""
    text = (
        resources.files("ebbtide.features.dryrun.jobs")
        .joinpath("known_models.json")
        .read_text(encoding="utf-8")
    )
    models: dict[str, dict[str, Any]] = {}
    for name, values in json.loads(text).items():
        models[name] = {**models.get(values.pop("like", ""), {}), **values}
    return models


def _hub_file(name: str, **options: bool) -> Path | None:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import logging
    except ImportError:
        return None
    logging.set_verbosity_error()
    try:
        return Path(hf_hub_download(name, _CONFIG, **options))
    except Exception:  # of the network, of the hub, or of its name
        return None


def write_stand_in(model: Model, folder: Path) -> None:
    """Write a folder that stands in for a model once `complete_stand_ins` has run: its
    configuration and tokenizer."""
    if "quantization_config" in model.config:
        raise UserError(
            f"the weights of {model.name} are quantized, which its configuration does "
            "not show: name a folder"
        )
    folder.mkdir(parents=True)
    (folder / _STAND_IN).write_text(json.dumps(model.config), encoding="utf-8")
    if model.folder is not None and model.has_tokenizer:
        for file in (
            file for pattern in _TOKENIZER for file in model.folder.glob(pattern)
        ):
            shutil.copy(file, folder)


def complete_stand_ins(folder: Path) -> list[str]:
    """Write the header of weights and the tokenizer that models in a folder lack;
    return a line for each.

    They load in a dry run only, whose process calls this, so that transformers is
    imported once."""
    return [_complete(file.parent) for file in sorted(folder.glob(f"*/{_STAND_IN}"))]


def _complete(folder: Path) -> str:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ebbtide.features.dryrun.files.safetensors_header import header_of

    try:
        config = AutoConfig.for_model(
            **json.loads((folder / _STAND_IN).read_text(encoding="utf-8"))
        )
        with torch.device("meta"):
            made: Any = AutoModelForCausalLM.from_config(
                config, trust_remote_code=False
            )
    except Exception as error:  # of any kind: it depends on what the configuration says
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"transformers makes no language model of {folder.name}: {reason}"
        ) from None
    shared = (
        dict(made.named_parameters(remove_duplicate=False)).keys()
        - dict(made.named_parameters()).keys()
    )
    tensors = {
        name: tensor for name, tensor in made.state_dict().items() if name not in shared
    }
    (folder / "model.safetensors").write_bytes(header_of(tensors, {"format": "pt"}))
    made.config.architectures = [type(made).__name__]
    made.config.save_pretrained(folder)
    if not any(folder.glob("tokenizer*")):
        _write_tokenizer(folder)
    return (
        f"model {folder.name}: "
        f"{count_text(sum(parameter.numel() for parameter in made.parameters()))} "
        "parameters"
    )


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that makes a token of each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate([*_TOKENS.values(), WORD])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_TOKENS["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made: Any = PreTrainedTokenizerFast
    made(tokenizer_object=tokenizer, chat_template=_CHAT, **_TOKENS).save_pretrained(
        folder
    )


Recipe = dict[str, Any]


@dataclass
class Replacements:
    """Models and data that replace those of a recipe."""

    folder: Path  # A folder for them, which the dry run removes
    # For people: what was replaced, and by what
    lines: list[str] = field(default_factory=list)
    real_tokens: bool = True  # Whether the tokenizer is that of the recipe

    def model(self, name: str) -> str:
        """Return the folder of a model: its own if it has weights, else one without
        values."""
        model = find_model(name)
        if model.is_whole:
            return name
        folder = self.folder / Path(model.name).name
        if not folder.exists():
            write_stand_in(model, folder)
            self.lines.append(
                f"model {name}: without its weights, configuration from {model.source}"
            )
            self.real_tokens = self.real_tokens and model.has_tokenizer
        return str(folder)

    def needs_data(self, paths: Iterable[str | Path]) -> bool:
        """Return whether data must be replaced: files of it are missing, or the
        tokenizer."""
        return not (self.real_tokens and all(Path(path).exists() for path in paths))

    def data(self, tokens: int, samples: int, shares: dict[str, float]) -> Path:
        """Write samples of so many `tokens` as JSON lines, shared among columns; return
        their file."""
        row = {
            column: " ".join([WORD] * max(1, int(share * tokens)))
            for column, share in shares.items()
        }
        file = self.folder / "data" / "train.jsonl"
        file.parent.mkdir()
        file.write_text(f"{json.dumps(row)}\n" * samples, encoding="utf-8")
        self.note_data(tokens, samples)
        return file

    def note_data(self, tokens: int, samples: int) -> None:
        """Add the line about data."""
        self.lines.append(
            f"data: {samples} samples of {tokens:,} tokens in place of those of the "
            "recipe"
        )
