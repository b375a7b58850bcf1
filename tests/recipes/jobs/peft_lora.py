"""Train adapters of PEFT on mt0-large, as its quick tour does, in a loop of one's
own."""

import torch
from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    get_linear_schedule_with_warmup,
)

NAME = "bigscience/mt0-large"
tokenizer = AutoTokenizer.from_pretrained(NAME)
model = AutoModelForSeq2SeqLM.from_pretrained(NAME)
adapters = LoraConfig(
    task_type=TaskType.SEQ_2_SEQ_LM,
    inference_mode=False,
    r=8,
    lora_alpha=32,
    lora_dropout=0.1,
)
model = get_peft_model(model, adapters).to("cuda")
dataset = load_dataset("tatsu-lab/alpaca", split="train")


def tokenize(row):
    inputs = tokenizer(
        row["instruction"] + " " + row["input"], max_length=128, truncation=True
    )
    inputs["labels"] = tokenizer(row["output"], max_length=128, truncation=True)[
        "input_ids"
    ]
    return inputs


dataset = dataset.map(tokenize, remove_columns=dataset.column_names)
collator = DataCollatorForSeq2Seq(
    tokenizer, model=model, padding="max_length", max_length=128
)
loader = DataLoader(
    dataset, shuffle=True, batch_size=8, collate_fn=collator, pin_memory=True
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 0, len(loader) * 3)
for epoch in range(3):
    total = 0
    for batch in loader:
        outputs = model(**{key: value.to("cuda") for key, value in batch.items()})
        total += outputs.loss.detach().float()
        outputs.loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: {total / len(loader)}")
