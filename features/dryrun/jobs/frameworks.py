"""Frameworks whose recipe files a dry run takes; torchtune's program loads
`make_tokenizer` and `make_data` by name."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ebbtide.errors import UserError
from ebbtide.features.dryrun.jobs.models import Recipe, Replacements

_TEXT, _PAIR = {"text": 1.0}, {"prompt": 0.25, "chosen": 0.75, "rejected": 0.75}
_ANSWER = {"prompt": 0.25, "response": 0.75}
_STAGES = {"pt": _TEXT, "sft": _ANSWER, "rm": _PAIR, "dpo": _PAIR}
_EVALUATION = (
    "do_eval",
    "eval_on_start",
    "eval_steps",
    "eval_strategy",
    "evals_per_epoch",
    "eval_sample_packing",
)
_DEFAULT_TOKENS = 2048
_TUNE_RUN = re.compile(r"tune run (?:--nproc_per_node (\d+) )?(\w+) ")


class RecipeFramework:
    """A framework: `key` is in each of its recipes, and in none of those that come
    before it in `FRAMEWORKS`."""

    name: str
    package: str
    key: str
    words: tuple[str, ...]
    batch_key, default_batch = "per_device_train_batch_size", 8

    def matches(self, recipe: Recipe) -> bool:
        """Return whether a recipe is one of this framework."""
        return self.key in recipe

    def samples(self, recipe: Recipe) -> int:
        """Return the samples of an iteration on a rank."""
        batch = recipe.get(self.batch_key) or self.default_batch
        return int(batch) * int(recipe.get("gradient_accumulation_steps") or 1)

    def command(self, path: Path, text: str, recipe: Recipe, ranks: int) -> list[str]:
        """Return the words that train by a recipe, without the file, which follows
        them."""
        return list(self.words)

    def adapt(
        self, path: Path, recipe: Recipe, replacements: Replacements, samples: int
    ) -> None:
        """Name what replaces model and data where a recipe names them."""
        raise NotImplementedError


class Trl(RecipeFramework):
    name, package, key = "TRL", "trl", "model_name_or_path"

    def command(self, path: Path, text: str, recipe: Recipe, ranks: int) -> list[str]:
        return ["trl", self._trainer(path, recipe), "--config"]

    def _trainer(self, path: Path, recipe: Recipe) -> str:
        return (
            "dpo"
            if "dpo" in path.stem.lower()
            or {"beta", "precompute_ref_log_probs"} & recipe.keys()
            else "sft"
        )

    def adapt(
        self, path: Path, recipe: Recipe, replacements: Replacements, samples: int
    ) -> None:
        recipe[self.key] = replacements.model(recipe[self.key])
        names = [data.get("path", "") for data in recipe.get("datasets") or []] or [
            recipe.get("dataset_name", "")
        ]
        if replacements.needs_data(names):
            shares = _PAIR if self._trainer(path, recipe) == "dpo" else _TEXT
            file = replacements.data(recipe.get("max_length") or 1024, samples, shares)
            _remove(
                recipe,
                *_EVALUATION,
                "datasets",
                "dataset_config",
                "dataset_train_split",
                "dataset_text_field",
            )
            recipe["dataset_name"] = str(file.parent)


class Axolotl(RecipeFramework):
    name, package, key = "Axolotl", "axolotl", "base_model"
    words = ("axolotl", "train")
    batch_key, default_batch = "micro_batch_size", 1

    def adapt(
        self, path: Path, recipe: Recipe, replacements: Replacements, samples: int
    ) -> None:
        recipe[self.key] = replacements.model(recipe[self.key])
        if replacements.needs_data(
            data.get("path", "") for data in recipe.get("datasets") or [{}]
        ):
            if recipe.get("rl"):
                raise UserError(
                    f"the data of a recipe with rl: {recipe['rl']} is not replaced: "
                    "name files of your own"
                )
            file = replacements.data(
                recipe.get("sequence_len") or _DEFAULT_TOKENS, samples, _TEXT
            )
            _remove(
                recipe,
                *_EVALUATION,
                "pretraining_dataset",
                "test_datasets",
                "val_set_size",
            )
            recipe["datasets"] = [
                {"path": str(file), "ds_type": "json", "type": "completion"}
            ]
            recipe["dataset_prepared_path"] = str(replacements.folder / "prepared")


class LlamaFactory(RecipeFramework):
    name, package, key = "LLaMA-Factory", "llamafactory", "stage"
    words = ("llamafactory-cli", "train")

    def adapt(
        self, path: Path, recipe: Recipe, replacements: Replacements, samples: int
    ) -> None:
        recipe["model_name_or_path"] = replacements.model(
            recipe.get("model_name_or_path", "")
        )
        if replacements.needs_data(
            [Path(recipe.get("dataset_dir", "data")) / "dataset_info.json"]
        ):
            shares = _STAGES.get(recipe[self.key])
            if shares is None:
                raise UserError(
                    f"the data of stage {recipe[self.key]} is not replaced: name a "
                    "dataset_dir of your own"
                )
            file = replacements.data(
                recipe.get("cutoff_len") or _DEFAULT_TOKENS, samples, shares
            )
            columns = (
                {"prompt": "text"}
                if shares is _TEXT
                else {name: name for name in shares}
            )
            entry = {
                "file_name": file.name,
                "ranking": shares is _PAIR,
                "columns": columns,
            }
            file.with_name("dataset_info.json").write_text(
                json.dumps({"synthetic": entry}), encoding="utf-8"
            )
            _remove(
                recipe,
                *_EVALUATION,
                "eval_dataset",
                "val_size",
                "streaming",
                "tokenized_path",
                "max_samples",
            )
            recipe |= {"dataset": "synthetic", "dataset_dir": str(file.parent)}


class Torchtune(RecipeFramework):
    name, package, key = "torchtune", "torchtune", "_component_"
    batch_key, default_batch = "batch_size", 1

    def matches(self, recipe: Recipe) -> bool:
        return any(
            isinstance(part, dict) and self.key in part for part in recipe.values()
        )

    def command(self, path: Path, text: str, recipe: Recipe, ranks: int) -> list[str]:
        """Return the command with the program that the recipe's comment names, else the
        one for its model and loss."""
        comment = _TUNE_RUN.search(text)
        stated, program = comment.groups() if comment else (None, "")
        ranks = ranks if ranks > 1 else int(stated or 1)
        if not program or (ranks > 1 and program.endswith("single_device")):
            kind = "lora" if "lora" in str(recipe.get("model", "")) else "full"
            task = "dpo" if _is_preference(recipe) else "finetune"
            program = f"{kind}_{task}_{'distributed' if ranks > 1 else 'single_device'}"
        return [
            "tune",
            "run",
            *(["--nproc_per_node", str(ranks)] if ranks > 1 else []),
            program,
            "--config",
        ]

    def adapt(
        self, path: Path, recipe: Recipe, replacements: Replacements, samples: int
    ) -> None:
        for part in (
            recipe[name]
            for name in ("checkpointer", "ref_checkpointer")
            if name in recipe
        ):
            folder = Path(part["checkpoint_dir"])
            if not folder.exists():
                name = folder.parent.name if folder.name == "original" else folder.name
                part["checkpoint_dir"], part["checkpoint_files"] = (
                    replacements.model(name),
                    ["model.safetensors"],
                )
                part[self.key] = "torchtune.training.FullModelHFCheckpointer"
        tokenizer, data = recipe["tokenizer"], recipe["dataset"]
        if replacements.needs_data(
            [tokenizer.get("path", ""), data.get("data_files", "")]
        ):
            tokens = tokenizer.get("max_seq_len") or _DEFAULT_TOKENS
            module = "ebbtide.features.dryrun.jobs.frameworks"
            recipe["tokenizer"] = {
                self.key: f"{module}.make_tokenizer",
                "max_seq_len": tokens,
            }
            packed = bool(data.get("packed"))
            recipe["dataset"] = {
                self.key: f"{module}.make_data",
                "packed": packed,
                "samples": samples,
            }
            recipe["dataset"]["pairs"] = _is_preference(recipe)
            replacements.note_data(tokens, samples)


FRAMEWORKS = (Torchtune(), LlamaFactory(), Axolotl(), Trl())


def _is_preference(recipe: Recipe) -> bool:
    return "DPO" in str(recipe.get("loss", ""))


def _remove(recipe: Recipe, *keys: str) -> None:
    for key in keys:
        recipe.pop(key, None)


def make_tokenizer(max_seq_len: int) -> Any:
    """Return what recipes read of a tokenizer."""
    return SimpleNamespace(
        max_seq_len=max_seq_len, pad_id=0, eos_id=0, bos_id=0, stop_tokens=[0]
    )


def make_data(tokenizer: Any, samples: int, packed: bool, pairs: bool) -> Any:
    """Return samples of `max_seq_len` tokens; `pairs`: a chosen and a rejected one in
    each."""
    from torch.utils.data import Dataset
    from torchtune.datasets import PackedDataset

    tokens = [1] * tokenizer.max_seq_len
    sample = {"tokens": tokens, "labels": tokens}
    if pairs:
        kinds = [
            f"{kind}_{part}"
            for kind in ("chosen", "rejected")
            for part in ("input_ids", "labels")
        ]
        sample = dict.fromkeys(kinds, tokens)

    class Samples(Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return samples

        def __getitem__(self, index: int) -> dict[str, list[int]]:
            return {name: list(values) for name, values in sample.items()}

    return (
        PackedDataset(Samples(), max_seq_len=tokenizer.max_seq_len)
        if packed
        else Samples()
    )
