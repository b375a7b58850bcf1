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
_MODELS = ("model_name_or_path", "base_model", "model", "model.flavor")
_NOT_STATED = {
    "sharding": "nothing is sharded",
    "offload": "nothing is offloaded",
    "checkpointing": "checkpointing not stated",
    "precision": "precision not stated",
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
    model = next(filter(None, (setting(settings, name) for name in _MODELS)), "")
    batch = setting(settings, "per_device_train_batch_size") or setting(
        settings, "micro_batch_size"
    )
    length = setting(settings, "cutoff_len") or setting(settings, "sequence_len")
    numbers = f"{f' --sequence {length}' if length.isdigit() else ''}"
    is_adapter = any(one.facts.get("method") for one in records.of(Configuration))
    if is_adapter and model.count("/") == 1:
        micro = f" --batch {batch}" if batch.isdigit() else ""
        return (
            f"ebbtide dry-run --gpu NAME --model {model} --method lora{micro}{numbers}"
        )
    size = _SIZE_OF_NAME.search(model)
    micro = f" --micro-batch {batch}" if batch.isdigit() else ""
    params = "N" if size is None else size[1].upper()
    return f"ebbtide plan --params {params} --machine NAME{micro}{numbers}"
