"""Rules about configurations: what they mean, and what contradicts."""

import re
from collections.abc import Iterator

from ebbtide.features.explain.answer import Answer, OpenQuestion, Result, rule
from ebbtide.features.explain.line_formats import file_content
from ebbtide.features.explain.readers.configurations import (
    Configuration,
    fitting_values,
    setting,
)
from ebbtide.features.explain.record import Records
from ebbtide.features.explain.rule_tables import entry_answer
from ebbtide.units import counted

# Of a name of a model, as in Qwen2.5-14B.
_SIZE_OF_NAME = re.compile(
    r"(?<![\d.])(\d{1,4}(?:\.\d{1,3})?[BM])(?![a-z\d])", re.IGNORECASE
)
_BATCHES = (
    "per_device_train_batch_size",
    "micro_batch_size",
    "train_micro_batch_size_per_gpu",
    "local_batch_size",
)
_LENGTHS = ("cutoff_len", "sequence_len", "seq_length", "seq_len", "max_length")
_MODELS = ("model_name_or_path", "base_model", "model", "model.flavor")
_NOT_STATED = {
    "sharding": "no sharding named",
    "offload": "no offload named",
    "checkpointing": "no checkpointing named",
    "precision": "no precision named",
}


@rule(50)
def explain_contradictions(records: Records) -> Iterator[Result]:
    for one in records.of(Configuration):
        names = set()
        for entry in file_content("rules/contradictions.toml")["rule"]:
            values = fitting_values(one.settings, entry["where"])
            if values is None or entry["name"] in names:
                continue
            names.add(entry["name"])
            words = {f"value_{at}": value for at, value in enumerate(values)}
            source = entry["source"].split(": ")[0]
            with_source = {**entry, "evidence": [f"source: {source}"]}
            yield entry_answer(with_source, words, one.place)


@rule(51)
def explain_auto(records: Records) -> Iterator[Result]:
    every = records.of(Configuration)
    is_filled = any(one.program != "DeepSpeed" for one in every)
    for one in every:
        names = [name for name, value in one.settings.items() if value == "auto"]
        if names and not is_filled:
            yield Answer(
                rule="auto-values",
                title=f"{counted(len(names), 'setting')} of DeepSpeed are 'auto': the "
                "Trainer of transformers fills them in, deepspeed.initialize does not",
                evidence=(", ".join(names[:4]),),
                advice="without it batch sizes of 'auto' fail, and others get their "
                "defaults: fp16 and bf16 are off then",
                places=(one.place,),
            )


@rule(52)
def explain_settings(records: Records) -> Iterator[Result]:
    for one in records.of(Configuration):
        texts = [
            ", ".join(dict.fromkeys(one.facts.get(kind, [missing])))
            for kind, missing in _NOT_STATED.items()
        ]
        yield Answer(
            rule="settings",
            title=f"{one.program}: {'; '.join(texts[:2])}",
            evidence=("; ".join([*one.facts.get("method", []), *texts[2:]]),),
            places=(one.place,),
        )
    if records.of(Configuration):
        yield OpenQuestion("whether it fits, and how long a step takes", _plan(records))


def _plan(records: Records) -> str:
    """Return the command that tells whether a job fits."""
    settings: dict[str, str] = {}
    for one in records.of(Configuration):
        settings |= one.settings
    model, batch, length = (
        next(filter(None, (setting(settings, name) for name in names)), "")
        for names in (_MODELS, _BATCHES, _LENGTHS)
    )
    gpu = records.gpu or "NAME"
    is_adapter = any(one.facts.get("method") for one in records.of(Configuration))
    size = _SIZE_OF_NAME.search(model)
    params = records.params or ("N" if size is None else size[1].upper())
    command, micro = f"plan --params {params} --machine {gpu}", "--micro-batch"
    if is_adapter and model.count("/") == 1:
        command = f"dry-run --gpu {gpu} --model {model} --method lora"
        micro = "--batch"
    for option, number in ((micro, batch), ("--sequence", length)):
        command += f" {option} {number}" if number.isdigit() else ""
    return f"ebbtide {command}"
