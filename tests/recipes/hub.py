"""A folder that stands in for a hub: models at their published shapes with sparse
files, tokenizers, and data sets.

Programs name a model or a data set as their documentation does,
`meta-llama/Llama-3.1-8B`, and run in this folder: libraries take a name that is a
folder as a path.
"""

from __future__ import annotations

import base64
import json
import random
import shutil
import sys
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from tests.recipes.models import DATA, MODELS, Data, Model

_CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif "
    "%}"
)
_SPECIAL = (
    "<unk>",
    "<s>",
    "</s>",
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "[CLS]",
    "[SEP]",
    "[MASK]",
)
_ROLES = ("system", "user", "assistant")
# Data types of the tensors that quantized weights consist of, and bytes of a value.
_QUANTIZED_TYPES = {
    "qweight": ("I32", 4),
    "qzeros": ("I32", 4),
    "g_idx": ("I32", 4),
    "scales": ("F16", 2),
}
# Tokens of the vocabulary that texts consist of.
_WORDS = 400


def make(name: str, folder: Path) -> None:
    """Make a model or a data set in `folder/name`, whole or not at all."""
    unfinished = folder / f"{name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    if name in MODELS:
        _write_model(unfinished, MODELS[name])
    else:
        _write_data(unfinished, DATA[name])
    unfinished.rename(folder / name)


def _write_model(target: Path, model: Model) -> None:
    """Write configuration, tokenizer and sparse weights of a model."""
    config = _write_config(target, model)
    words = getattr(config and config.get_text_config(), "vocab_size", None)
    if words is not None:
        write_tokenizer(target, words, model.positions)
    if model.tiktoken_tokens:
        (target / "original").mkdir()
        (target / "original" / "tokenizer.model").write_text(
            tiktoken_ranks(model.tiktoken_tokens), encoding="utf-8"
        )
    _write_files(target, model.files)


def _write_files(target: Path, files: dict[str, Any]) -> None:
    for relative, content in files.items():
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (target / relative).write_text(text, encoding="utf-8")


def _write_config(target: Path, model: Model) -> Any:
    import torch
    import transformers

    if model.kind is None:
        return None
    config = transformers.AutoConfig.for_model(model.kind, **model.config)
    config.architectures = [model.architecture]
    config.save_pretrained(target)
    with torch.device("meta"):
        module = getattr(transformers, model.architecture)(config)
    tied = (
        set(getattr(module, "_tied_weights_keys", None) or ())
        if getattr(config, "tie_word_embeddings", False)
        else set()
    )
    tensors = {
        name: tuple(tensor.shape)
        for name, tensor in module.state_dict().items()
        if name not in tied
    }
    _write_weights(
        target,
        _quantized(tensors, model.config.get("quantization_config")),
        model.shards,
    )
    transformers.GenerationConfig(
        bos_token_id=1, eos_token_id=2, pad_token_id=3
    ).save_pretrained(target)
    return config


def _quantized(
    tensors: dict[str, tuple[int, ...]], settings: dict[str, Any] | None
) -> dict[str, tuple[int, ...]]:
    """Return the tensors with those of GPTQ or AWQ in place of the weights of the
    layers' linear modules."""
    if settings is None:
        return tensors
    quantized = {}
    for name, shape in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or len(shape) != 2 or ".layers." not in name:
            quantized[name] = shape
            continue
        outputs, inputs = shape
        packed, groups = 32 // settings["bits"], inputs // settings["group_size"]
        is_awq = settings["quant_method"] == "awq"
        quantized |= {
            f"{module}.qweight": (inputs, outputs // packed)
            if is_awq
            else (inputs // packed, outputs),
            f"{module}.qzeros": (groups, outputs // packed),
            f"{module}.scales": (groups, outputs),
        }
        if not is_awq:
            quantized[f"{module}.g_idx"] = (inputs,)
    return quantized


def _write_weights(
    target: Path, tensors: dict[str, tuple[int, ...]], shards: int
) -> None:
    """Write weights to one file, or to several with their index."""
    if shards == 1:
        write_sparse_safetensors(target / "model.safetensors", tensors)
        return
    names, files = list(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        own = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        write_sparse_safetensors(target / file, {name: tensors[name] for name in own})
        files |= dict.fromkeys(own, file)
    size = 2 * sum(prod(shape) for shape in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (target / "model.safetensors.index.json").write_text(
        json.dumps(index), encoding="utf-8"
    )


def write_sparse_safetensors(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """Write a safetensors file of zeros, which takes no room on most file systems:
    bfloat16, or as GPTQ has them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        dtype, width = _QUANTIZED_TYPES.get(name.rpartition(".")[2], ("BF16", 2))
        start, end = end, end + width * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def write_tokenizer(target: Path, size: int, positions: int) -> None:
    """Write a tokenizer of `size` tokens, each a word, with special tokens of several
    models and a chat template."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = [
        *_SPECIAL,
        *_ROLES,
        *(f"w{number}" for number in range(size - len(_SPECIAL) - len(_ROLES))),
    ]
    tokenizer = Tokenizer(
        models.WordLevel(
            {word: number for number, word in enumerate(words)}, unk_token="<unk>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A </s> $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    names = {
        "bos": "<s>",
        "eos": "</s>",
        "unk": "<unk>",
        "pad": "<pad>",
        "cls": "[CLS]",
        "sep": "[SEP]",
    }
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=positions,
        chat_template=_CHAT,
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        mask_token="[MASK]",
        **{f"{key}_token": value for key, value in names.items()},
    )
    fast.save_pretrained(target)


def tiktoken_ranks(size: int) -> str:
    """Return a file of `size` byte strings with their ranks, as tiktoken reads them."""
    tokens = (
        bytes(parts)
        for length in (1, 2, 3)
        for parts in product(range(256), repeat=length)
    )
    return "\n".join(
        f"{base64.b64encode(token).decode()} {rank}"
        for rank, token in zip(range(size), tokens, strict=False)
    )


def _write_data(target: Path, data: Data) -> None:
    """Write the splits of a data set as JSON lines."""
    _write_files(target, data.files)
    numbers = random.Random(0)
    for split in data.splits:
        with (target / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(data.rows):
                file.write(
                    json.dumps(
                        {
                            key: _value(kind, numbers)
                            for key, kind in data.columns.items()
                        }
                    )
                    + "\n"
                )


def _value(kind: Any, numbers: random.Random) -> Any:
    """Return a value of a column: a text of about so many words, a label below a number
    (a tuple), or messages."""
    if isinstance(kind, int):
        return _text(kind, numbers)
    if isinstance(kind, tuple):
        return numbers.randrange(kind[0])
    if isinstance(kind, list):
        return [_value(part, numbers) for part in kind]
    if isinstance(kind, dict):
        return {key: _value(part, numbers) for key, part in kind.items()}
    return kind


def _text(words: int, numbers: random.Random) -> str:
    count = numbers.randint(max(1, words // 2), words + words // 2)
    return " ".join(f"w{numbers.randrange(_WORDS)}" for _ in range(count))


def main(arguments: list[str]) -> None:
    """Make models and data sets, by their names, in a folder."""
    folder, *names = arguments
    for name in names:
        make(name, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
