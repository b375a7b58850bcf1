"""Fine-tune BERT on pairs of sentences in a loop of one's own with Accelerate, as its
example does."""

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    get_linear_schedule_with_warmup,
)

NAME = "google-bert/bert-base-cased"
accelerator = Accelerator()
tokenizer = AutoTokenizer.from_pretrained(NAME)
dataset = load_dataset("nyu-mll/glue/mrpc", split="train")
dataset = dataset.map(
    lambda rows: tokenizer(
        rows["sentence1"], rows["sentence2"], truncation=True, max_length=128
    ),
    batched=True,
    remove_columns=["idx", "sentence1", "sentence2"],
).rename_column("label", "labels")


def collate(rows):
    return tokenizer.pad(
        rows, padding="max_length", max_length=128, return_tensors="pt"
    )


loader = DataLoader(
    dataset, shuffle=True, collate_fn=collate, batch_size=16, drop_last=True
)
model = AutoModelForSequenceClassification.from_pretrained(NAME)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
schedule = get_linear_schedule_with_warmup(
    optimizer, num_warmup_steps=100, num_training_steps=len(loader) * 3
)
model, optimizer, loader, schedule = accelerator.prepare(
    model, optimizer, loader, schedule
)
for epoch in range(3):
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: {loss}")
